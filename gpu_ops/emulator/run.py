"""Launch a kernel on the emulator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np

from gpu_ops.emulator import arguments
from gpu_ops.emulator.errors import EmulatorError
from gpu_ops.emulator.machine import WARP, Machine
from gpu_ops.emulator.memory import Memory
from gpu_ops.emulator.parser import parse
from gpu_ops.emulator.profile import Profile
from gpu_ops.emulator.profiler import Profiler
from gpu_ops.emulator.program import Program, link
from gpu_ops.emulator.sanitizer import Sanitizer
from gpu_ops.kernels.progress import visible

__all__ = ["launch", "profile", "record"]

_THREADS = 32_768  # run at a time: their registers stay in the CPU's caches
_SHARED_BYTES = 1 << 24  # of a batch; the sanitizer keeps 16 times as much about them

_recording: ContextVar[list[Profile] | None] = ContextVar("recording", default=None)


def launch(
    source: str,
    name: str,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Any],
    *,
    shared: int = 0,
    arch: str = "sm_80",
    sanitize: bool = True,
    sample: Iterable[int] | None = None,
) -> None:
    """Run a kernel on the CPU."""
    _launch(
        link_source(source, name, arch), grid, block, args, shared=shared, sanitize=sanitize, sample=sample
    )


def profile(
    source: str,
    name: str,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Any],
    *,
    shared: int = 0,
    arch: str = "sm_80",
    sanitize: bool = True,
    sample: Iterable[int] | None = None,
) -> Profile:
    """:func:`launch`, and what it did; ``print`` shows it."""
    with record() as profiles:
        launch(source, name, grid, block, args, shared=shared, arch=arch, sanitize=sanitize, sample=sample)
    return profiles[0]


@contextmanager
def record() -> Iterator[list[Profile]]:
    """A list that gets the profile of each launch inside the block, also of those that an op makes.

    ``with emulator.record() as profiles: gpu_ops.rmsnorm(x, weight, device="emulator")``, then
    ``print(profiles[0])``.
    """
    profiles: list[Profile] = []
    token = _recording.set(profiles)
    try:
        yield profiles
    finally:
        _recording.reset(token)


@lru_cache(maxsize=256)
def link_source(source: str, name: str, arch: str) -> Program:
    """The program of an entry of PTX or CUDA C++ text."""
    if ".address_size" in source or ".entry" in source:
        return link(parse(source), name)
    from gpu_ops.kernels.jit import compile_text

    compiled = compile_text(source, arch)
    module = parse(compiled.ptx)
    module.sources = dict(compiled.sources)
    return link(module, name)


def _triple(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    given = (size,) if isinstance(size, int) else tuple(size)
    x, y, z = (*given, 1, 1, 1)[:3]
    return int(x), int(y), int(z)


def _launch(
    program: Program,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Any],
    *,
    shared: int,
    sanitize: bool,
    sample: Iterable[int] | None = None,
) -> None:
    grid, block = _triple(grid), _triple(block)
    threads = math.prod(block)
    if not 0 < threads <= 1024:
        raise EmulatorError(f"{program.name}: a block of {block} threads; a block has 1 to 1024")
    count = math.prod(grid)
    blocks = np.arange(count) if sample is None else np.unique(np.fromiter(sample, np.int64))
    if len(blocks) and not 0 <= blocks[0] <= blocks[-1] < count:
        raise EmulatorError(f"{program.name}: sample names blocks outside the grid of {count}")
    memory = Memory(program, arguments.buffers(args), shadowed=sanitize)
    data, offsets = arguments.pack(program.parameters, args, memory)
    start = memory.constant("kernel parameters", data)
    memory.symbols.update({name: start + at for name, at in offsets.items()})
    sanitizer = Sanitizer(program) if sanitize else None
    recording = _recording.get()
    profiler = None if recording is None else Profiler(program, memory)
    machine = program.idle.pop() if program.idle else Machine(program)
    machine.configure(memory, grid, block, shared, (data, offsets), sanitizer, profiler)
    bytes_per_block = max(1, program.shared_bytes + shared)
    padded = -(-threads // WARP) * WARP
    batch = max(1, min(_THREADS // padded, _SHARED_BYTES // bytes_per_block))
    with (
        visible(f"gpu_ops: emulating {program.name}, {len(blocks)} blocks of {threads} threads"),
        np.errstate(all="ignore"),
    ):
        for first in range(0, len(blocks), batch):
            machine.run(blocks[first : first + batch])
    if len(blocks):
        machine.release()
    program.idle.append(machine)
    if recording is not None and profiler is not None:
        recording.append(profiler.profile(grid, block, len(blocks), shared))
