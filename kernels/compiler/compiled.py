"""A compiled kernel as a value: compiler output, its form on disk, and a readable dump."""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_ops.kernels.compiler.cache import Entry, warn_once, write_whole

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


def pack(unit: Compiled, made_of: Mapping[str, str]) -> Entry:
    """Make an entry of a kernel. ``made_of``: digests that later show whether the sources have changed."""
    parts = {
        "ptx": unit.ptx.encode(),
        "log": unit.log.encode(),
        "sources": json.dumps(dict(unit.sources)).encode(),
    }
    if unit.cubin is not None:
        parts["cubin"] = unit.cubin
    fields = {"entry": unit.entry, "seconds": unit.seconds, "made_of": dict(made_of)}
    return Entry(fields, {name: zlib.compress(part, 1) for name, part in parts.items()})


def unpack(entry: Entry) -> Compiled:
    """Inverse of :func:`pack`; ValueError for any other entry."""
    try:
        parts = {name: zlib.decompress(part) for name, part in entry.parts.items()}
        texts = {name: parts[name].decode() for name in ("ptx", "log", "sources")}
        sources = dict(json.loads(texts.pop("sources")))
        name, seconds = str(entry.fields["entry"]), float(entry.fields["seconds"])
        return Compiled(name, texts["ptx"], parts.get("cubin"), texts["log"], seconds, sources)
    except (zlib.error, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"not a compiled kernel: {error!r}") from error


def dump(unit: Compiled, name: str, arch: str) -> None:
    """With ``GPU_OPS_DUMP=folder``, write sources, PTX and machine code of every kernel used.

    No link is followed. If the folder cannot be written, the files are skipped with one warning.
    """
    target = os.environ.get("GPU_OPS_DUMP")
    if not target:
        return
    files = {Path(file).name: text.encode() for file, text in unit.sources.items()} | {
        "ptx": unit.ptx.encode()
    }
    if unit.cubin is not None:
        files["cubin"] = unit.cubin
    folder = Path(target)
    try:
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, name the folder itself", target)
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, content in files.items():
            write_whole(folder / f"{file_name(name)}.{arch}.{suffix}", content)
    except OSError as error:
        warn_once(("dump", target), f"gpu_ops: GPU_OPS_DUMP={target}: cannot write there: {error}")


def file_name(label: str) -> str:
    """A kernel's label as a file name."""
    return re.sub(r"[^\w.=-]+", "-", label).strip("-")[:120]
