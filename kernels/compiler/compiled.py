"""A compiled kernel as a value: compiler output, its form on disk, and a readable dump."""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Compiled", "dump", "file_name", "pack", "source_files", "unpack"]


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. ``entry`` is its name in the PTX (mangled by Numba; empty for a whole text)."""

    entry: str
    ptx: str
    cubin: bytes | None  # machine code for the architecture; None for a Numba kernel
    log: str  # warnings, and the lines of ptxas on registers and spills
    seconds: float  # compile time, kept when loaded from disk
    sources: Mapping[str, str]  # text of our own files, by name in the .file table of the PTX

    @property
    def entries(self) -> list[str]:
        """Names of all kernels in the PTX."""
        return re.findall(r"^\s*(?:\.\w+\s+)*\.entry\s+([\w$]+)", self.ptx, re.MULTILINE)


def source_files(ptx: str) -> list[str]:
    """Names in the ``.file`` table of the PTX, to which its ``.loc`` lines refer by number."""
    return re.findall(r'^\s*\.file\s+\d+\s+"([^"]*)"', ptx, re.MULTILINE)


def pack(unit: Compiled) -> bytes:
    cubin = None if unit.cubin is None else base64.b64encode(unit.cubin).decode()
    return zlib.compress(json.dumps({**vars(unit), "cubin": cubin}).encode(), 1)


def unpack(payload: bytes) -> Compiled:
    """The inverse of :func:`pack`; ValueError for anything else."""
    try:
        fields = json.loads(zlib.decompress(payload))
        cubin = fields.pop("cubin")
        return Compiled(**fields, cubin=None if cubin is None else base64.b64decode(cubin))
    except (zlib.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a compiled kernel: {error!r}") from error


def dump(unit: Compiled, name: str, arch: str) -> None:
    """With ``GPU_OPS_DUMP=folder``, write sources, PTX and machine code of every kernel used."""
    target = os.environ.get("GPU_OPS_DUMP")
    if not target:
        return
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{file_name(name)}.{arch}"
    for file, text in unit.sources.items():
        (folder / f"{stem}.{Path(file).name}").write_text(text, encoding="utf-8")
    (folder / f"{stem}.ptx").write_text(unit.ptx, encoding="utf-8")
    if unit.cubin is not None:
        (folder / f"{stem}.cubin").write_bytes(unit.cubin)


def file_name(label: str) -> str:
    """A kernel's label as a file name."""
    return re.sub(r"[^\w.=-]+", "-", label).strip("-")[:120]
