"""GPU kernels as values: identified before they are compiled, and compiled, with their form on disk."""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpu_ops.kernels.compiler.cache import Entry, warn_once, write_whole
from gpu_ops.kernels.compiler.sources import KERNELS

__all__ = [
    "Compiled",
    "CudaKernel",
    "Define",
    "NumbaKernel",
    "Variant",
    "dump",
    "file_name",
    "pack",
    "short_label",
    "source_files",
    "spelled",
    "unpack",
]

Define = tuple[str, str | int]


@dataclass(frozen=True)
class CudaKernel:
    """One entry of ``<folder>/<stem>.cu``, specialised by ``-D`` macros.

    For example ``CudaKernel("norm/norm", "rmsnorm_forward")``. Headers are those of the file's folder and of
    ``kernels/common/cuda``.

    Macros also apply to NVRTC's own headers: a name such as ``T``, a template parameter there, breaks them.
    """

    stem: str
    entry: str
    defines: tuple[Define, ...] = ()
    folder: Path = field(default=KERNELS, repr=False)
    cooperative: bool = False  # blocks wait for each other, so all must be resident

    @property
    def label(self) -> str:
        """Label, for example ``rmsnorm_forward[DTYPE=bf16,VEC=8]``."""
        return self.entry + spelled(self.defines)


@dataclass(frozen=True)
class NumbaKernel:
    """A plain Python function written for ``numba.cuda``. Variables of its closure are compile-time constants."""

    function: Callable[..., None]
    signature: str
    name: str

    @property
    def label(self) -> str:
        return self.name


@dataclass(frozen=True)
class Variant:
    """A kernel as an op launches it, to be compiled and inspected on every architecture."""

    kernel: CudaKernel | NumbaKernel
    threads_per_block: int
    dynamic_shared_bytes: int = 0


def spelled(defines: tuple[Define, ...]) -> str:
    """Macros as text for labels and cache entries."""
    return f"[{','.join(f'{name}={value}' for name, value in defines)}]" if defines else ""


_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "s8": "int8"}
_FLAGS = frozenset(
    {
        *("SOFTCAP", "ALIBI", "SINKS", "BLOCK_MASK", "DROPOUT", "VARLEN", "SEQUSED_K", "PAGED", "PACK_GQA"),
        *("SPLIT", "GATED", "PLAIN", "INTERLEAVED", "GROUPED", "SCALED", "DIVIDED", "TEAM", "ALIGNED"),
        *(
            "EXACT",
            "SKIP",
            "A_ALONG_K",
            "B_ALONG_K",
            "WIDE_LSE",
            "DELTA",
            "PARTS",
            "WIDE_DOUT",
            "ONE_K",
            "MASTER",
        ),
    }
)
_NOTHING = frozenset({"kNone", "kOne", "kPlain", "nothing"})


def short_label(label: str) -> str:
    """Readable label of a kernel: ``attention_forward bfloat16 D128 causal 128x64 warps8x1``.

    ``label``: ``name[MACRO=value,...]`` of a GPU kernel, or ``name-dtype-...`` of a CPU kernel. Options that are
    off and numbers that are 1 are left out.
    """
    name, bracket, rest = label.partition("[")
    if not bracket:
        return " ".join(part for part in name.split("-") if part != "None")
    macros: dict[str, str] = {}
    plain = []
    for part in rest.removesuffix("]").split(","):
        key, equals, value = part.partition("=")
        if equals:
            macros[key] = value
        else:
            plain.append(key)
    return " ".join([name, *plain, *_words(macros)])


def _words(macros: dict[str, str]) -> list[str]:
    dtype, out = macros.pop("DTYPE", ""), macros.pop("OUT", "")
    words = [_DTYPES.get(dtype, dtype)] if dtype else []
    if out != dtype and out:
        words.append(f"to {_DTYPES.get(out, out)}")
    pages = macros.pop("PAGE_DTYPE", dtype)
    if pages != dtype:
        words.append(f"pages of {_DTYPES.get(pages, pages)}")
    dim, dim_v = macros.pop("HEAD_DIM", ""), macros.pop("HEAD_DIM_V", "")
    words += [f"D{dim}"] if dim else []
    words += [f"Dv{dim_v}"] if dim_v != dim else []
    macros.pop("NORM", None)  # the name includes it
    numbers: list[str] = []
    sizes: dict[str, list[str]] = {}
    for key, value in macros.items():
        if key in _FLAGS:
            words += [] if value == "0" else [key.lower() + value.removeprefix("1")]
        elif value in _DTYPES:
            words += ["mask"] * (key == "MASK") + [_DTYPES[value]]
        elif not value.isdigit():
            words += [] if value in _NOTHING else [value.removeprefix("k").lower()]
        elif key.startswith(("BLOCK_", "WARPS_")):
            prefix = key.partition("_")[0].lower()
            sizes.setdefault(prefix, []).append(value)
        elif int(value) > 1:
            numbers.append(f"{key.lower()}{value}")
    blocks, warps = ("x".join(sizes.get(prefix, [])) for prefix in ("block", "warps"))
    return words + [blocks] * bool(blocks) + [f"warps{warps}"] * bool(warps) + numbers


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
