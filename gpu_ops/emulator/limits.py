"""What a launch may ask for, whatever the kernel is: a driver refuses more."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.emulator.errors import EmulatorError
from gpu_ops.emulator.program import Program
from gpu_ops.errors import OptionError
from gpu_ops.presets import PRESETS, Arch, DevicePreset, select_preset

__all__ = ["card", "check", "chosen", "text", "triple"]

_GRID = (2**31 - 1, 65535, 65535)
_BLOCK = (1024, 1024, 64)
_THREADS = 1024


def triple(what: str, size: int | Iterable[int]) -> tuple[int, int, int]:
    """A grid or a block as three numbers, each at least 1."""
    try:
        given = [operator.index(n) for n in (size if isinstance(size, Iterable) else (size,))]
    except TypeError:
        given = []
    if not 1 <= len(given) <= 3 or min(given) < 1:
        raise EmulatorError(f"{what} is {size!r}; pass 1 to 3 ints, each at least 1, such as 4 or (4, 2)")
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


def text(what: str, given: Any, wanted: str) -> None:
    if not isinstance(given, str):
        raise EmulatorError(f"{what} is {type(given).__name__}; pass {wanted}")


def chosen(sample: Iterable[int] | None, count: int) -> npt.NDArray[np.int64]:
    """The linear ids of the blocks that run."""
    if sample is None:
        return np.arange(count)
    try:
        ids = sorted({operator.index(i) for i in sample})
    except TypeError as error:
        raise EmulatorError(f"sample is {sample!r}; pass linear ids of blocks, such as [0, 17]") from error
    if ids and not 0 <= ids[0] <= ids[-1] < count:
        raise EmulatorError(f"sample names blocks outside the grid of {count}")
    return np.array(ids, np.int64)


def card(arch: str) -> tuple[str, DevicePreset]:
    """(what to compile for, the card to stand for) of an architecture or a card's name."""
    text("arch", arch, "an architecture such as 'sm_90', or a card's name")
    real = re.fullmatch(r"sm_\d{2,3}[af]?", arch)
    try:
        preset = select_preset(arch)
    except OptionError as error:
        if not real:
            cards = ", ".join(name for name, preset in PRESETS.items() if not preset.generic)
            raise EmulatorError(
                f"arch is {arch!r}; pass an architecture such as 'sm_90', or one of: {cards}"
            ) from error
        preset = PRESETS["sm_80"]  # of no preset, such as sm_52 of hand-written PTX
    return arch if real else preset.arch.name, preset


def check(
    program: Program, arch: Arch, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int
) -> None:
    """Refuse what no card of the architecture takes."""
    title, static = program.title, program.shared_bytes
    if _beyond(grid, _GRID):
        raise EmulatorError(f"{title}: a grid of {grid} blocks; at most {_GRID}")
    if math.prod(block) > _THREADS:
        raise EmulatorError(f"{title}: a block of {block} threads; a block has 1 to {_THREADS}")
    if _beyond(block, _BLOCK):
        raise EmulatorError(f"{title}: a block of {block} threads; at most {_BLOCK}")
    if not isinstance(shared, int | np.integer) or shared < 0:
        raise EmulatorError(f"{title}: shared is {shared!r}; pass a number of bytes, 0 or more")
    if static + shared > arch.smem_per_block_optin:
        raise EmulatorError(
            f"{title}: {shared} bytes of dynamic and {static} of static shared memory; "
            f"a block of {arch.name} may have {arch.smem_per_block_optin}"
        )


def _beyond(size: tuple[int, int, int], most: tuple[int, int, int]) -> bool:
    return any(n > limit for n, limit in zip(size, most, strict=True))
