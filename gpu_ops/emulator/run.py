"""Launch a kernel on the emulator."""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from os import PathLike
from typing import Any

import numpy as np

from gpu_ops.emulator import arguments
from gpu_ops.emulator.batch import WARP
from gpu_ops.emulator.buffers import bind, pinned
from gpu_ops.emulator.errors import EmulatorError, Faults, SanitizerError
from gpu_ops.emulator.linker import link
from gpu_ops.emulator.machine import Limit, Machine
from gpu_ops.emulator.memory import Memory
from gpu_ops.emulator.parser import parse
from gpu_ops.emulator.profile import Profile
from gpu_ops.emulator.profiler import Profiler
from gpu_ops.emulator.program import PtxProgram
from gpu_ops.emulator.sanitizer import Sanitizer
from gpu_ops.emulator.signature import named_in_python, signature
from gpu_ops.emulator.syntax import Module
from gpu_ops.kernels.compiler.jit import NumbaKernel, compile_kernel, compile_text
from gpu_ops.kernels.compiler.progress import several, visible
from gpu_ops.kernels.compiler.toolkit import tool
from gpu_ops.kernels.compiler.uninterrupted import hold_in_forks
from gpu_ops.presets import DevicePreset

_THREADS = 32_768  # per batch, so that registers stay in the CPU's caches
_SHARED_BYTES = 1 << 24  # per batch; the sanitizer's state takes 16 times as much

Dimensions = tuple[int, int, int]


@dataclass(frozen=True)
class _Options:
    """Options of a launch; see :func:`launch`."""

    shared: int
    sanitize: bool | str
    sample: Iterable[int] | None
    together: bool
    symbols: Mapping[str, Any] | None
    limit: Limit
    truncating: bool


_recording: ContextVar[list[Profile] | None] = ContextVar("recording", default=None)


def launch(
    source: str,
    name: str,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Any],
    *,
    shared: int = 0,
    arch: str | None = None,
    sanitize: bool | str | None = None,
    sample: Iterable[int] | None = None,
    together: bool = False,
    include: Sequence[str | PathLike[str]] = (),
    symbols: Mapping[str, Any] | None = None,
    max_instructions: int = 20_000_000,
    max_seconds: float = 60.0,
    tensor_cores: str | None = None,
) -> None:
    """Run a kernel on the CPU, under the sanitizer.

    Parameters
    ----------
    source : str
        CUDA C++, which is compiled, or PTX. For a Numba kernel, the PTX that ``numba.cuda.compile`` returns.
    name : str
        Name of the entry in PTX, or in its source if it is unique: ``f`` for ``_Z1fPf``.
    grid, block : int or tuple of up to 3 ints
        Blocks, and threads per block (1 to 1024, 64 along z), as ``x``, ``(x, y)`` or ``(x, y, z)``.
    args : sequence
        NumPy arrays and :class:`Buffer`, used in place; numbers; structs as bytes or structured scalars. CUDA C++
        gets an array as a pointer to its first element, a Numba kernel as an array with shape and strides. Use
        :func:`pointer` for the address of an array in a struct or in a table of pointers.
    shared : int
        Dynamic shared memory of a block in bytes. Together with the static part it must fit the architecture.
    arch : str, optional
        Card to emulate, as in ``GPU_OPS_ARCH``: ``"sm_90"``, ``"RTX 4090"``. CUDA C++ is compiled for it, its limits
        apply, and a profile uses its L2 cache. Default: sm_80 for CUDA C++, the ``.target`` for PTX.
    sanitize : bool or "collect", optional
        False skips the checks for races, uninitialised reads and wrong masks, and is faster. ``"collect"`` runs to
        the end and reports all faults and notes in one error; notes alone are warnings (:class:`SanitizerNote`).
        Default: True, unless ``GPU_OPS_SANITIZE`` is ``0`` or ``collect``.
    sample : iterable of int, optional
        Run only these blocks, by linear id.
    together : bool
        Run all blocks at once, like a cooperative launch: they may wait for each other, as in ``grid.sync()``.
        Otherwise blocks run in batches.
    include : sequence of folders
        Header folders for CUDA C++, in addition to the toolkit's. A header is read once per process.
    symbols : dict, optional
        Arrays for ``__constant__`` and ``__device__`` variables, by name. An array is the variable's memory, used in
        place: pass it again to keep the variable for the next launch. Other variables are reset in each launch.
    max_instructions : int
    max_seconds : float
        Limits of a batch of blocks; beyond them it is stopped as an endless loop. Seconds are CPU time of this
        thread, which does not depend on the load of the machine.
    tensor_cores : {"exact", "truncate"}, optional
        Addition of products of ``mma``: exact with one rounding at the end, or as on A100 and H100, where an adder
        keeps 25 bits and truncates. Default: "exact", unless ``GPU_OPS_TENSOR_CORES`` says otherwise.

    Raises
    ------
    SanitizerError
        The kernel is at fault: ``kind`` is one of ``gpu_ops.emulator.sanitizer.KINDS``, and the message names the
        block, thread, instruction and source line. The arrays keep the values written before the fault. ``faults``
        has all faults found.
    PtxError, UnknownInstruction
        The text cannot be parsed, or has an instruction that is not implemented.
    EmulatorError
        There is no such kernel, card or variable, the arguments do not match the parameters, or no driver would
        accept the launch.
    KernelCompileError
        The CUDA C++ does not compile, or there is no compiler.

    Examples
    --------
    Every thread doubles one element. The second launch has a thread too many.

    >>> from gpu_ops import emulator
    >>> ptx = '''
    ... .version 8.0
    ... .target sm_80
    ... .address_size 64
    ... .visible .entry twice(.param .u64 x)
    ... {
    ...     .reg .b32 %r<2>;
    ...     .reg .f32 %f<2>;
    ...     .reg .b64 %rd<2>;
    ...     ld.param.u64 %rd0, [x];
    ...     mov.u32 %r0, %tid.x;
    ...     mul.wide.u32 %rd1, %r0, 4;
    ...     add.s64 %rd0, %rd0, %rd1;
    ...     ld.global.f32 %f0, [%rd0];
    ...     add.f32 %f0, %f0, %f0;
    ...     st.global.f32 [%rd0], %f0;
    ...     ret;
    ... }
    ... '''
    >>> x = np.arange(4, dtype=np.float32)
    >>> emulator.launch(ptx, "twice", 1, 4, [x])
    >>> x.tolist()
    [0.0, 2.0, 4.0, 6.0]
    >>> emulator.launch(ptx, "twice", 1, 5, [x])
    Traceback (most recent call last):
        ...
    gpu_ops.emulator.errors.SanitizerError: out of bounds: 4-byte read past the end of argument 0: element 4 of 4 ...
      kernel twice, block (0,0,0) thread (4,0,0)
      at PTX line 14: ld.global.f32 %f0, [%rd0];
    """
    arguments.check_text("source", source, "CUDA C++ or PTX as a str")
    arguments.check_text("name", name, "the name of an entry")
    compiled_for, card = arguments.select_card(arch if arch is not None else "sm_80")
    program = link_source(source, name, compiled_for, arguments.folders(include))
    if arch is None:
        _, card = arguments.select_card(program.module.target or "sm_80")
    shape = arguments.dimensions("grid", grid), arguments.dimensions("block", block)
    options = _Options(
        shared,
        arguments.sanitize_mode(sanitize),
        sample,
        together,
        symbols,
        Limit(arguments.limit(max_instructions), arguments.seconds(max_seconds)),
        arguments.truncating(tensor_cores),
    )
    _launch(program, card, shape, args, options)


def profile(
    source: str,
    name: str,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Any],
    **options: Any,
) -> Profile:
    """Run :func:`launch`, which has the options, and return its profile, which ``print`` shows."""
    with record() as profiles:
        launch(source, name, grid, block, args, **options)
    return profiles[0]


@contextmanager
def record() -> Iterator[list[Profile]]:
    """List that collects the profile of each launch inside the block, including launches by ops.

    Use it as ``with emulator.record() as profiles: gpu_ops.rmsnorm(x, weight, device="emulator")``, then
    ``print(profiles[0])``.
    """
    profiles: list[Profile] = []
    token = _recording.set(profiles)
    try:
        yield profiles
    finally:
        _recording.reset(token)


class _Programs:
    """Cache of recently used linked programs. A dropped one is freed at once, not by the cyclic garbage collector."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: OrderedDict[tuple[object, ...], PtxProgram] = OrderedDict()
        self.lock = threading.Lock()

    def __call__(self, source: str, name: str, arch: str, include: tuple[str, ...] = ()) -> PtxProgram:
        """Return the program of an entry of PTX or CUDA C++ text."""
        key = source, name, arch, include
        with self.lock:
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key]
        module = _module(source, arch, include)
        program = link(module, name)
        known = signature(program.name, source if module.text is not source else "")
        program.signature = named_in_python(program.name, known, module.files.values())
        with self.lock:
            self.kept[key] = program
        self.drop(self.most)
        return program

    def drop(self, most: int = 0) -> None:
        """Drop the oldest programs, except ``most`` of them."""
        while True:
            with self.lock:
                if len(self.kept) <= most:
                    return
                _, program = self.kept.popitem(last=False)
            while (machine := _idle_machine(program)) is not None:
                machine.steps.clear()  # they refer to their machine


def _idle_machine(program: PtxProgram) -> Machine | None:
    try:
        machine: Machine = program.idle.pop()
    except IndexError:  # there is none, or another thread was faster
        return None
    return machine


link_source = _Programs(64)  # 5 to 30 MB each
hold_in_forks(link_source.lock)


@lru_cache(maxsize=8)
def _module(source: str, arch: str, include: tuple[str, ...]) -> Module:
    if re.search(r"^\s*\.(version|target|address_size)\b", source, re.MULTILINE):
        return parse(source)
    compiled = compile_text(
        source, arch, options=tuple(f"-I{folder}" for folder in (*include, *_wmma_headers()))
    )
    module = parse(compiled.ptx)
    module.sources = dict(compiled.sources)
    return module


@cache
def _wmma_headers() -> tuple[str, ...]:
    """Folder that <mma.h> needs in addition to the toolkit's, if the wheels have it: it comes with ptxas."""
    ptxas = tool("ptxas")
    folder = ptxas.parent.parent / "include" if ptxas else None
    is_separate = folder and (folder / "crt" / "mma.h").is_file() and not (folder / "cuda_fp16.h").exists()
    return (str(folder),) if is_separate else ()


def _launch(
    program: PtxProgram,
    card: DevicePreset,
    shape: tuple[Dimensions, Dimensions],
    args: Sequence[Any],
    options: _Options,
) -> None:
    grid, block = shape
    arguments.check_launch(program, card.arch, grid, block, options.shared)
    threads = math.prod(block)
    blocks = arguments.block_ids(options.sample, math.prod(grid))
    if program.waits_for_grid and options.together and len(blocks) < math.prod(grid):
        raise EmulatorError(f"{program.title} waits for the whole grid, and sample leaves blocks out")
    args = arguments.check_arguments(args)
    arguments.check_types(program.title, program.signature, args)
    arguments.check_numba(program.name, args)
    buffers, sanitize = arguments.buffers(args, program.signature), options.sanitize
    buffers = [*buffers, *pinned()]
    memory = Memory(program, buffers, shadowed=bool(sanitize), symbols=bind(program, options.symbols))
    data, offsets = arguments.pack(program.parameters, args, memory)
    start = memory.constant("kernel parameters", data)
    memory.symbols.update({name: start + at for name, at in offsets.items()})
    if options.together:
        memory.grid_barrier = memory.constant("the barrier of the grid", np.zeros(64, np.uint8))
    sanitizer = Sanitizer(program) if sanitize else None
    recording = _recording.get()
    profiler = None if recording is None else Profiler(program, memory)
    faults = Faults() if sanitize == "collect" else None
    machine = _idle_machine(program) or Machine(program)
    machine.configure(memory, grid, block, options.shared, (data, offsets), sanitizer, profiler, faults)
    machine.limit = options.limit
    machine.truncating = options.truncating
    bytes_per_block = max(1, program.shared_bytes + options.shared)
    padded = -(-threads // WARP) * WARP
    batch = max(1, min(_THREADS // padded, _SHARED_BYTES // bytes_per_block))
    if options.together:
        batch = max(1, len(blocks))
    size = f"{several(len(blocks), 'block')} of {several(threads, 'thread')}"
    with visible(f"gpu_ops: emulating {program.title}, {size}"), np.errstate(all="ignore"):
        try:
            for first in range(0, len(blocks), batch):
                machine.run(blocks[first : first + batch])
        except SanitizerError as error:  # a fault that ends the launch
            if faults is None:
                raise
            faults.found[error.kind, "the end"] = error
        finally:  # release the arrays after a fault too
            machine.release()
            program.idle.append(machine)
    if faults is not None:
        faults.finish(program.title)
    if recording is not None and profiler is not None:
        recording.append(profiler.profile(card, grid, block, len(blocks), options.shared))


def ptx_of(function: Callable[..., Any], signature: str, arch: str = "sm_80") -> str:
    """PTX of a Numba kernel with its device functions, compiled without a driver or a GPU.

    ``signature`` is as for ``cuda.compile``, such as ``"void(float32[::1], int32)"``.

        >>> import numpy as np
        >>> from numba import cuda
        >>> from gpu_ops import emulator
        >>> @cuda.jit(device=True)
        ... def twice(v):
        ...     return 2 * v
        >>> def kernel(x):
        ...     i = cuda.grid(1)
        ...     x[i] = twice(x[i])
        >>> x = np.arange(32, dtype=np.float32)
        >>> emulator.launch(emulator.ptx_of(kernel, "void(float32[::1])"), "kernel", 1, 32, (x,))
        >>> float(x[31])
        62.0

    Raises ``KernelCompileError`` if numba-cuda is missing or cannot compile the kernel.
    """
    kernel = getattr(function, "py_func", function)  # a kernel of cuda.jit has it
    return compile_kernel(NumbaKernel(kernel, signature, kernel.__name__), arch).ptx
