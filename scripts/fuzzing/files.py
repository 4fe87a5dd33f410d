"""Model files: written and read back, then damaged. Reading gives a typed error or sound matrices."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.errors import GpuOpsError
from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import Array
from scripts.fuzzing.ternary import FORMATS, matrix

NUMBERS = (0, 1, 2, 8, 9, 255, 2**31, 2**32 - 1, 2**48, 2**61, 2**63 - 1, 2**63, 2**64 - 1)
TOKENS = (
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b",",
    b":",
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"NaN",
    b"9" * 30,
    b"\\u0000",
)
DAMAGES = 25


def judge_files(draw: Draw) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        written = draw.pick(gguf, saved)(draw, path)
        if (wrong := damaged(path, written, exact=True)) is not None:
            return f"as written: {wrong}"
        whole = path.read_bytes()
        for i in range(DAMAGES):
            path.write_bytes(mutant(draw, whole))
            if (wrong := damaged(path, written, exact=False)) is not None:
                return f"damage {i}: {wrong}"
    return None


def gguf(draw: Draw, path: Path) -> dict[str, Array]:
    found, tensors = {}, {}
    for name in ("blk.0.a", "blk.1.b")[: draw.pick(1, 2)]:
        format = draw.pick("tq1_0", "tq2_0", "q2_0")
        found[name] = matrix(draw, format)
        tensors[name] = gpu_ops.TernaryMatrix.from_trits(found[name], format=format)
    metadata: dict[str, Any] = {"general.architecture": "bitnet", "a.words": ["x", "", "zz"], "a.float": 1.5}
    if draw.chance(0.5):
        metadata |= {
            "general.alignment": draw.pick(8, 32, 64),
            "a.nested": [[1, 2], [3]],
            "a.i": np.arange(5),
        }
    gpu_ops.write_gguf(path, {**tensors, "norm": np.ones(5, np.float32)}, metadata)
    return found


def saved(draw: Draw, path: Path) -> dict[str, Array]:
    format = draw.pick(*FORMATS)
    trits = matrix(draw, format)
    scale = draw.pick(1.0, 0.5) if draw.chance(0.5) else draw.rng.random(trits.shape[0]).astype(np.float32)
    gpu_ops.TernaryMatrix.from_trits(trits, scale, format=format).save(path)
    return {"": trits}


def damaged(path: Path, written: dict[str, Array], exact: bool) -> str | None:
    try:
        if "" in written:
            found = {"": gpu_ops.TernaryMatrix.load(path)}
        else:
            found = gpu_ops.read_gguf(path, formats={42: "q2_0"})
        for w in found.values():
            if np.abs(w.trits()).max(initial=0) > 1 or not np.isfinite(w.scale).all():
                return "read a matrix that is not sound"
    except GpuOpsError as error:
        return f"refused: {error}" if exact else None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if exact and (
        found.keys() != written.keys() or any((found[n].trits() != t).any() for n, t in written.items())
    ):
        return "read other trits than were written"
    return None


def mutant(draw: Draw, whole: bytes) -> bytes:
    """One to three accidents, most of them in the header."""
    data = bytearray(whole)
    for _ in range(draw.integer(1, 3)):
        at = draw.integer(0, (min(len(data), 900) if draw.chance(0.8) else len(data)) - 1)
        end = at + draw.pick(1, 2, 8, 40)
        match draw.pick("byte", "bit", "long", "int", "token", "cut", "twice", "short"):
            case "byte":
                data[at] = draw.integer(0, 255)
            case "bit":
                data[at] ^= 1 << draw.integer(0, 7)
            case "long":
                data[at : at + 8] = struct.pack("<Q", draw.pick(*NUMBERS))
            case "int":
                data[at : at + 4] = struct.pack("<I", draw.pick(*NUMBERS) & 0xFFFFFFFF)
            case "token":
                data[at:end] = draw.pick(*TOKENS)
            case "cut":
                del data[at:end]
            case "twice":
                data[at:at] = data[at:end] * draw.integer(1, 3)
            case _:
                del data[at:]
        data = data or bytearray(1)
    return bytes(data)
