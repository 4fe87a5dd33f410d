"""What a launch may ask for: a driver refuses more, whatever the kernel is."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import numpy as np

from gpu_ops.emulator.errors import EmulatorError
from gpu_ops.emulator.program import Program
from gpu_ops.kernels.cubin import smem_per_block_optin

__all__ = ["check", "triple"]

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


def check(program: Program, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int) -> None:
    """Refuse what no card of the program's architecture takes."""
    title, arch, static = program.title, program.module.target or "sm_80", program.shared_bytes
    if _beyond(grid, _GRID):
        raise EmulatorError(f"{title}: a grid of {grid} blocks; at most {_GRID}")
    if math.prod(block) > _THREADS:
        raise EmulatorError(f"{title}: a block of {block} threads; a block has 1 to {_THREADS}")
    if _beyond(block, _BLOCK):
        raise EmulatorError(f"{title}: a block of {block} threads; at most {_BLOCK}")
    if not isinstance(shared, int | np.integer) or shared < 0:
        raise EmulatorError(f"{title}: shared is {shared!r}; pass a number of bytes, 0 or more")
    most = smem_per_block_optin(arch)
    if static + shared > most:
        raise EmulatorError(
            f"{title}: {shared} bytes of dynamic and {static} of static shared memory; "
            f"a block of {arch} may have {most}"
        )


def _beyond(size: tuple[int, int, int], most: tuple[int, int, int]) -> bool:
    return any(n > limit for n, limit in zip(size, most, strict=True))
