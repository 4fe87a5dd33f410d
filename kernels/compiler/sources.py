"""Source files of a kernel, on which a cache entry depends.

A room, ``kernels/<room>/``, holds one op family: ``*.cu`` and ``*.cuh`` (CUDA C++), a folder ``numba_cuda/`` and a
folder ``cpu/``. ``kernels/common/`` is the room shared by the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "CPU_FOLDER",
    "CUDA_FOLDER",
    "KERNELS",
    "NUMBA_FOLDER",
    "cuda_folders",
    "cuda_headers",
    "python_sources",
    "sources_digest",
]

KERNELS = Path(__file__).resolve().parents[1]
CUDA_FOLDER, NUMBA_FOLDER, CPU_FOLDER = (KERNELS / "common" / name for name in ("cuda", "numba_cuda", "cpu"))


def cuda_folders(source: Path) -> list[Path]:
    """Folders that a .cu file may include from: its own and ``common/cuda``."""
    return list(dict.fromkeys((source.parent, CUDA_FOLDER)))


def cuda_headers(source: Path) -> list[Path]:
    """Headers that a .cu file may include."""
    # no editor's hidden files
    return [path for folder in cuda_folders(source) for path in sorted(folder.glob("[!.]*.cuh"))]


def python_sources(folder: Path) -> list[Path]:
    """All modules of a backend: the folders of its name in every room. ``folder``: the one in ``common/``."""
    return sorted(folder.parents[1].glob(f"*/{folder.name}/**/*.py"))


def sources_digest(origin: Path) -> str:
    """Hash of a .cu file and its headers, or of all modules of a backend, by its folder in ``common/``."""
    digest = hashlib.sha256()
    for name, content in _contents(origin):
        digest.update(f"{name}\0".encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def _contents(origin: Path) -> Iterator[tuple[str, bytes]]:
    is_cuda = origin.suffix == ".cu"
    root = origin.parent if is_cuda else origin.parents[1]
    for path in [origin, *cuda_headers(origin)] if is_cuda else python_sources(origin):
        name = path.relative_to(root if path.is_relative_to(root) else KERNELS)
        yield str(name), path.read_bytes()
