"""Model and training files: written, read back, then damaged. Reading gives a typed error or valid data."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops import models, training
from gpu_ops.errors import GpuOpsError
from gpu_ops.formats.safetensors import NUMPY_DTYPES
from gpu_ops.models.gguf import NAMES
from gpu_ops.models.tensors import planned
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


Look = Callable[[bool], str | None]
"""Reads the file that was written, and says what is wrong with what it got. Exact: the file is as it was written."""


def judge_files(draw: Draw) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        look = draw.pick(gguf, saved, state, tokens, merges, model, gguf_model)(draw, path)
        if (wrong := attempt(look, exact=True)) is not None:
            return f"as written: {wrong}"
        whole = path.read_bytes()
        for i in range(DAMAGES):
            path.write_bytes(mutant(draw, whole))
            if (wrong := attempt(look, exact=False)) is not None:
                return f"damage {i}: {wrong}"
    return None


def attempt(look: Look, exact: bool) -> str | None:
    try:
        return look(exact)
    except GpuOpsError as error:
        return f"refused: {error}" if exact else None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def gguf(draw: Draw, path: Path) -> Look:
    matrices, tensors = {}, {}
    for name in ("blk.0.a", "blk.1.b")[: draw.pick(1, 2)]:
        format = draw.pick("tq1_0", "tq2_0", "q2_0")
        matrices[name] = matrix(draw, format)
        tensors[name] = gpu_ops.TernaryMatrix.from_trits(matrices[name], format=format)
    metadata: dict[str, Any] = {"general.architecture": "bitnet", "a.words": ["x", "", "zz"], "a.float": 1.5}
    if draw.chance(0.5):
        metadata |= {
            "general.alignment": draw.pick(8, 32, 64),
            "a.nested": [[1, 2], [3]],
            "a.i": np.arange(5),
        }
    gpu_ops.write_gguf(path, {**tensors, "norm": np.ones(5, np.float32)}, metadata)
    return lambda exact: judge_matrices(
        gpu_ops.read_gguf(path, formats={42: "q2_0"}), matrices if exact else None
    )


def saved(draw: Draw, path: Path) -> Look:
    format = draw.pick(*FORMATS)
    trits = matrix(draw, format)
    scale = draw.pick(1.0, 0.5) if draw.chance(0.5) else draw.rng.random(trits.shape[0]).astype(np.float32)
    gpu_ops.TernaryMatrix.from_trits(trits, scale, format=format).save(path)
    return lambda exact: judge_matrices(
        {"": gpu_ops.TernaryMatrix.load(path)}, {"": trits} if exact else None
    )


def judge_matrices(found: dict[str, Any], written: dict[str, Array] | None) -> str | None:
    for w in found.values():
        if np.abs(w.trits()).max(initial=0) > 1 or not np.isfinite(w.scale).all():
            return "read a matrix that is not sound"
    if written is not None and (
        found.keys() != written.keys() or any((found[n].trits() != t).any() for n, t in written.items())
    ):
        return "read other trits than were written"
    return None


def state(draw: Draw, path: Path) -> Look:
    arrays = {}
    for i in range(draw.integer(0, 3)):
        dtype = draw.pick(*NUMPY_DTYPES.values())
        data = bytes(i % 2 for i in range(24)) if dtype == np.bool_ else draw.rng.bytes(24)
        arrays[f"w{i}"] = np.frombuffer(data, dtype)[: draw.integer(0, 3)]
    meta = {"step": draw.integer(0, 10**9), "loss": float(draw.rng.random()), "words": ["x", "ü"]}
    training.save_state(path, arrays, meta)

    def look(exact: bool) -> str | None:
        loaded, numbers = training.load_state(path)
        same = numbers == meta and loaded.keys() == arrays.keys()
        if exact and not (same and all(loaded[n].tobytes() == x.tobytes() for n, x in arrays.items())):
            return "loaded another state than was saved"
        return None

    return look


def tokens(draw: Draw, path: Path) -> Look:
    vocab = draw.pick(1, 2, 256, 65536, 65537, 1 << 31)
    written = draw.rng.integers(0, vocab, draw.integer(0, 60))
    training.write_tokens(path, written, vocab=vocab)

    def look(exact: bool) -> str | None:
        file = training.TokenFile(path)
        read = file[:]
        if (read >= file.vocab).any():
            return "read a token outside of the vocabulary"
        return "read other tokens than were written" if exact and (read != written).any() else None

    return look


def merges(draw: Draw, path: Path) -> Look:
    text = bytes(draw.pick(*b"ab a\n.1\xc3") for _ in range(draw.integer(0, 200)))
    written = training.BytePairEncoding.train(text, draw.integer(256, 290), progress=False)
    written.save(path)

    def look(exact: bool) -> str | None:
        loaded = training.BytePairEncoding.load(path)
        if loaded.decode(loaded.encode(text)) != text:
            return "encoded text does not come back"
        return (
            "read other merges than were saved" if exact and (loaded.merges != written.merges).any() else None
        )

    return look


def model(draw: Draw, path: Path) -> Look:
    """Folder with a config and weights, one of which is damaged."""
    options: dict[str, Any] = draw.pick(
        {}, {"tied": True}, {"biases": ("qkv",)}, {"qk_norm": True}, {"layers": (models.Layer(window=2),)}
    )
    config = models.LlamaConfig(vocab=5, hidden=8, ffn=6, nlayers=1, nheads=2, **options)
    written = models.Llama.of(models.initial_weights(config), config)
    models.save(path.parent, written, config)
    file = path.parent / draw.pick("model.safetensors", "config.json")
    file.rename(path)
    file.symlink_to(path)

    def look(exact: bool) -> str | None:
        weights, read = models.load(path.parent)
        loaded = models.Llama.of(weights.arrays(), read).arrays()
        same = read == config and all(loaded[n].tobytes() == x.tobytes() for n, x in written.arrays().items())
        return "loaded another model than was saved" if exact and not same else None

    return look


def gguf_model(draw: Draw, path: Path) -> Look:
    """GGUF file of a model, some of whose projections may be ternary."""
    config = models.LlamaConfig(vocab=5, hidden=256, ffn=256, nlayers=1, nheads=2, biases=("qkv",))
    written = models.initial_weights(config)
    tensors: dict[str, Any] = {}
    for name, parts in planned(config, NAMES).items():
        for part in parts:
            rows = written[name][part.rows]
            if part.name.startswith("blk.") and rows.ndim == 2 and draw.chance(0.5):
                rows = gpu_ops.ternary_quantize(rows).to(draw.pick("tq1_0", "tq2_0"))
                rows = gpu_ops.TernaryMatrix(rows.codes, 0.25, rows.shape, rows.format)
                written[name][part.rows] = rows.dequantize()
            tensors[part.name] = rows
    sizes = {"embedding_length": 256, "feed_forward_length": 256, "block_count": 1, "attention.head_count": 2}
    keys = {f"qwen2.{key}": size for key, size in sizes.items()} | {"general.architecture": "qwen2"}
    gpu_ops.write_gguf(path, tensors, keys | {"qwen2.attention.layer_norm_rms_epsilon": config.eps})

    def look(exact: bool) -> str | None:
        weights, read = models.load(path)
        loaded = models.Llama.of(weights.arrays(), read).arrays()
        dense = {n: x if isinstance(x, np.ndarray) else x.dequantize() for n, x in loaded.items()}
        same = read == config and all((dense[n] == x).all() for n, x in written.items())
        return "loaded another model than was written" if exact and not same else None

    return look


def mutant(draw: Draw, whole: bytes) -> bytes:
    """Damage a file in one to three places, mostly in the header."""
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
