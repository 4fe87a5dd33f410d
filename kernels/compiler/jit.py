"""Compilation of GPU kernels, on any machine, and their launches. The only module that calls a GPU compiler.

A kernel is identified by its content: a :class:`CudaKernel` is one ``extern "C"`` entry of ``kernels/<stem>.cu``
specialised by ``-D`` macros, a :class:`NumbaKernel` is a Python function with a signature. :func:`compile_kernel`
compiles either to PTX (and machine code) once, and caches the result in memory and on disk. The key on disk covers
the source, the headers of its room and of ``common/cuda/``, the flags and the compiler versions, so an edited header
never gets a stale binary. :func:`load` loads a kernel on a GPU.

Environment: ``GPU_OPS_CACHE_DIR`` moves the cache; ``GPU_OPS_DUMP=folder`` writes everything compiled to a folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from gpu_ops.errors import KernelCompileError
from gpu_ops.kernels.compiler import nvrtc, toolkit
from gpu_ops.kernels.compiler.cache import CUDA, alone, cache_folder, ignore_entry, publish, read_entry
from gpu_ops.kernels.compiler.kernel import (
    Compiled,
    CudaKernel,
    NumbaKernel,
    Variant,
    dump,
    file_name,
    pack,
    short_label,
    source_files,
    spelled,
    unpack,
)
from gpu_ops.kernels.compiler.launch import CudaLauncher, NumbaLauncher, current_device, device_arch
from gpu_ops.kernels.compiler.numba_ptx import compile_numba, numba_key
from gpu_ops.kernels.compiler.progress import compilation
from gpu_ops.kernels.compiler.sources import (
    CUDA_FOLDER,
    KERNELS,
    NUMBA_FOLDER,
    cuda_folders,
    cuda_headers,
    python_sources,
    sources_digest,
)
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted

__all__ = [
    "Compiled",
    "CudaKernel",
    "NumbaKernel",
    "Variant",
    "all_variants",
    "assemble",
    "compile_kernel",
    "compile_text",
    "forget",
    "load",
    "source_key",
]

_memory: dict[tuple[object, ...], Compiled] = {}
_locks: defaultdict[tuple[object, ...], threading.Lock] = defaultdict(threading.Lock)
_locks_lock = threading.Lock()
_launchers: dict[tuple[CudaKernel | NumbaKernel, int], CudaLauncher | NumbaLauncher] = {}
_launchers_lock = threading.Lock()


def compile_kernel(kernel: CudaKernel | NumbaKernel, arch: str) -> Compiled:
    """Compile a kernel for an architecture such as ``"sm_80"`` or ``"sm_90a"``, or load it from the cache.

    Raises
    ------
    KernelCompileError
        The kernel does not compile (the error carries the compiler's log), the source has no such entry, or a
        compiler is not installed.
    """
    return _once((kernel, arch), lambda: _compile_kernel(kernel, arch))


def compile_text(
    source: str, arch: str, *, name: str = "kernel.cu", options: tuple[str, ...] = ()
) -> Compiled:
    """Compile any CUDA C++ text. Cached in memory only, since no key on disk could cover what it includes."""
    _check_arch(arch)

    def build() -> Compiled:
        flags = (f"-I{CUDA_FOLDER}", *options)
        with compilation(short_label(name), arch, kept=False) as begin:
            begin()
            unit = _run_nvrtc(source, name, arch, flags, {})
        with contextlib.suppress(FileNotFoundError):  # there is no current folder
            # NVRTC prefixes a relative name with it
            unit = replace(unit, ptx=unit.ptx.replace(f'"{Path.cwd() / name}"', f'"{name}"'))
        unit = replace(unit, sources={name: source})
        dump(unit, name, arch)
        return unit

    return _once((source, arch, name, options), build)


def load(kernel: CudaKernel | NumbaKernel) -> CudaLauncher | NumbaLauncher:
    """Load a kernel on CuPy's current device, compiled and loaded once per device.

    The launcher is called with grid, block, arguments (CuPy arrays and numbers) and the dynamic shared memory of a
    block in bytes. It runs on CuPy's current device and stream.
    """
    key = (kernel, current_device())
    launcher = _launchers.get(key)
    if launcher is None:
        with _launchers_lock:
            launcher = _launchers.get(key)
            if launcher is None:
                launcher = _launchers[key] = _load_on_device(kernel)
    return launcher


def _load_on_device(kernel: CudaKernel | NumbaKernel) -> CudaLauncher | NumbaLauncher:
    if isinstance(kernel, NumbaKernel):
        with compilation(short_label(kernel.label), "this GPU", kept=False) as begin:
            begin()
            return NumbaLauncher(kernel.function, kernel.signature)
    compiled = compile_kernel(kernel, device_arch())
    assert compiled.cubin is not None  # every CUDA C++ kernel has one
    return CudaLauncher(compiled.cubin, compiled.entry, cooperative=kernel.cooperative)


def forget() -> None:
    """Drop all kernels compiled by this process, so that edited sources are read again."""
    _memory.clear()
    _launchers.clear()
    source_key.cache_clear()


@functools.cache
def source_key(*stems: str) -> str:
    """Hash of the sources of CUDA C++ kernels, their headers and the compiler."""
    trees = [_read_tree(KERNELS / f"{stem}.cu") for stem in stems]
    files = sorted({Path(path).name: text for tree in trees for path, text in tree.items()}.items())
    return hashlib.sha256(repr((nvrtc.build_key(), files)).encode()).hexdigest()[:16]


def assemble(compiled: Compiled, arch: str) -> Compiled:
    """Kernel with machine code. A Numba kernel has none yet: ptxas makes it from the PTX."""
    if compiled.cubin is not None:
        return compiled
    cubin, log = toolkit.assemble(compiled.ptx, arch)
    return replace(compiled, cubin=cubin, log=log)


def all_variants(arch: str) -> Iterator[Variant]:
    """Every kernel of every op, as the op launches it on this architecture.

    An op lists its kernels in ``variants(arch)`` of its lowering, ``kernels/<room>/<op>.py``.
    """
    for path in sorted(KERNELS.glob("*/*.py"), key=lambda path: path.name):
        if "\ndef variants(arch" in path.read_text(encoding="utf-8"):
            yield from importlib.import_module(f"gpu_ops.kernels.{path.parent.name}.{path.stem}").variants(
                arch
            )


def _once(key: tuple[object, ...], build: Callable[[], Compiled]) -> Compiled:
    """Call ``build()`` for the first caller of a key; other threads wait for it. Failures are not cached."""
    kernel = _memory.get(key)
    return _build_once(key, build) if kernel is None else kernel


@uninterrupted  # an interrupt would leave Numba's data structures half filled
def _build_once(key: tuple[object, ...], build: Callable[[], Compiled]) -> Compiled:
    with _locks_lock:
        lock = _locks[key]
    with lock:
        kernel = _memory.get(key)
        if kernel is None:
            kernel = _memory[key] = build()
        return kernel


def _compile_kernel(kernel: CudaKernel | NumbaKernel, arch: str) -> Compiled:
    _check_arch(arch)
    if isinstance(kernel, NumbaKernel):
        key = numba_key(kernel.function, kernel.signature)
        unit = _cached(kernel.label, arch, key, NUMBA_FOLDER, lambda: _run_numba(kernel, arch))
        return replace(unit, entry=unit.entries[0])
    path = kernel.folder / f"{kernel.stem}.cu"
    files = _read_tree(path)
    includes = (f"-I{folder}" for folder in cuda_folders(path))
    flags = (*includes, *(f"-D{name}={value}" for name, value in kernel.defines))
    # Entries of one file with the same macros share a compilation.
    unit = _cached(
        kernel.stem + spelled(kernel.defines),
        arch,
        repr((nvrtc.build_key(), flags, sorted(files.items()))),
        path,
        lambda: _run_nvrtc(files[str(path)], str(path), arch, flags, files),
    )
    if kernel.entry not in unit.entries:
        raise KernelCompileError(
            f'{path} has no extern "C" __global__ function {kernel.entry!r}; it has: '
            f"{', '.join(unit.entries) or 'none'}"
        )
    return replace(unit, entry=kernel.entry)


def _cached(name: str, arch: str, key: str, origin: Path, build: Callable[[], Compiled]) -> Compiled:
    """Kernel from memory or disk, or built and stored. ``origin``: the file or folder of its sources."""
    key = hashlib.sha256(f"{arch} {key}".encode()).hexdigest()[:24]
    return _once((key,), lambda: _from_disk(name, arch, key, origin, build))


def _from_disk(name: str, arch: str, key: str, origin: Path, build: Callable[[], Compiled]) -> Compiled:
    entry = f"{file_name(name)}.{arch}.{key}.jit"
    unit = _load(entry)
    if unit is None:
        kept = cache_folder(CUDA, quiet=True) is not None
        with (
            compilation(short_label(name), arch, kept=kept) as begin,
            alone(CUDA, entry, wait=begin) as waited,
        ):
            unit = _load(entry) if waited else None
            if unit is None:
                begin()
                unit = build()
                publish(pack(unit, {"origin": str(origin), "digest": sources_digest(origin)}), CUDA, entry)
    dump(unit, name, arch)
    return unit


def _load(name: str) -> Compiled | None:
    entry = read_entry(CUDA, name)
    try:
        return None if entry is None else unpack(entry)
    except ValueError as error:  # intact, but not a kernel
        ignore_entry(name, error)
        return None


def _run_nvrtc(
    source: str, name: str, arch: str, flags: tuple[str, ...], files: Mapping[str, str]
) -> Compiled:
    start = time.perf_counter()
    output = nvrtc.compile_cuda(source, name, arch, flags)
    seconds = time.perf_counter() - start
    named = source_files(output.ptx)
    sources = {file: text for file, text in files.items() if file in named}
    return Compiled("", output.ptx, output.cubin, output.log, seconds, sources)


def _run_numba(kernel: NumbaKernel, arch: str) -> Compiled:
    start = time.perf_counter()
    ptx = compile_numba(kernel.function, kernel.signature, kernel.label, arch)
    seconds = time.perf_counter() - start
    named = map(Path, source_files(ptx))
    ours = {*python_sources(NUMBA_FOLDER), Path(kernel.function.__code__.co_filename)}
    sources = {str(file): file.read_text() for file in named if file in ours and file.is_file()}
    return Compiled("", ptx, None, "", seconds, sources)


def _read_tree(path: Path) -> dict[str, str]:
    """Text of a .cu file and of every header that it may include, by path."""
    headers = cuda_headers(path)
    try:
        files = {str(file): file.read_text(encoding="utf-8") for file in (path, *headers)}
    except (OSError, UnicodeDecodeError) as error:
        raise KernelCompileError(f"cannot read the kernel source {path} and its headers: {error}") from error
    for line, name in enumerate(files[str(path)].splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*"([^"]+)"', name)
        if match and not any(Path(file).name == match.group(1) for file in files):
            raise KernelCompileError(
                f"{path}:{line}: {match.group(1)!r} is no header of {path.parent} or {CUDA_FOLDER}: kernels include "
                "from there only, since the cache's key covers nothing else"
            )
    return files


def _check_arch(arch: str) -> None:
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise KernelCompileError(f"architecture {arch!r}: want a real one, such as sm_80 or sm_90a")
