"""Lists the entries of the cache folder, tells which match the current sources, and clears them."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpu_ops.kernels.compiler.cache import read_header, root
from gpu_ops.kernels.compiler.sources import CPU_FOLDER, sources_digest

__all__ = ["CPU", "CUDA", "TUNING", "File", "clear", "contents", "cpu_sources"]

CPU, CUDA, TUNING = "numba_cpu", "cuda", "tuning"  # folders of the cache


@dataclass(frozen=True)
class File:
    """A file of the cache. ``old``: made from sources that have changed since, or are gone."""

    path: Path
    kind: str
    nbytes: int
    old: bool


def contents() -> list[File]:
    """All files of the cache. Only call it if ``cache.folder_problem`` returns None."""
    return [*_cpu_files(root() / CPU), *_cuda_files(root() / CUDA), *_tuning_files(root() / TUNING)]


def clear(files: Iterable[File]) -> tuple[int, int]:
    """Remove files, and folders that become empty. Returns their number and bytes, without files already gone.

    Safe while other processes use the cache: they read whole files, and make folders that are missing.
    """
    count = nbytes = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            file.path.unlink()
            count, nbytes = count + 1, nbytes + file.nbytes
        with contextlib.suppress(OSError):  # not empty
            file.path.parent.rmdir()
    return count, nbytes


@cache
def cpu_sources() -> str:
    """:func:`sources_digest` of the CPU kernels, once per process: their folder's name up to the dash."""
    return sources_digest(CPU_FOLDER)


def _cpu_files(folder: Path) -> Iterator[File]:
    for build in _scan(folder, stat.S_ISDIR):
        old = build.name.partition("-")[0] != cpu_sources()
        for path, size in _scan(build, stat.S_ISREG).items():
            if path.suffix == ".nbc":
                category = "emulator" if path.name.startswith("emulator-") else "CPU kernels"
                yield File(path, category, size, old)
            elif path.name.startswith("."):
                yield File(path, "left over", size, True)


def _cuda_files(folder: Path) -> Iterator[File]:
    now: dict[str, str] = {}
    for path, size in _scan(folder, stat.S_ISREG).items():
        if path.suffix == ".jit":
            yield File(path, "GPU kernels", size, _is_old(path, now))
        elif path.name.startswith("."):
            yield File(path, "left over", size, True)


def _is_old(path: Path, now: dict[str, str]) -> bool:
    """Whether a file is old. ``now``: known digests of the sources, by origin."""
    header = read_header(path)
    if header is None:
        return True
    made_of = header[1].get("made_of", {})
    origin = str(made_of.get("origin", ""))
    if origin not in now:
        try:
            now[origin] = sources_digest(Path(origin))
        except OSError:
            now[origin] = "gone"
    return bool(made_of.get("digest") != now[origin])


def _tuning_files(folder: Path) -> Iterator[File]:
    """Files of measurements. A new measurement replaces the old one, so none is old."""
    for path, size in _scan(folder, stat.S_ISREG).items():
        if path.suffix == ".json":
            yield File(path, "measured choices", size, False)
        elif path.name.startswith("."):
            yield File(path, "left over", size, True)


def _scan(folder: Path, wanted: Callable[[int], bool]) -> dict[Path, int]:
    """Sizes of folders or regular files of a folder that is not a link; empty if it is missing."""
    try:
        paths = sorted(folder.iterdir()) if stat.S_ISDIR(folder.lstat().st_mode) else []
    except OSError:
        return {}
    sizes = {}
    for path in paths:
        with contextlib.suppress(OSError):  # other processes replace and remove files meanwhile
            status = path.lstat()
            if wanted(status.st_mode):
                sizes[path] = status.st_size
    return sizes
