"""Model files written by the packages of their formats."""

from __future__ import annotations

import dataclasses

import numpy as np

import gpu_ops
from gpu_ops import RopeScaling, models
from gpu_ops.models import LlamaConfig
from tests.weights.tables import TABLES

INSTALL = "pip install safetensors gguf tests the readers of model files"


def trits(rng, shape):
    return rng.integers(-1, 2, shape).astype(np.int8)


def write(gguf, path, tensors):
    """Write a GGUF file of (name, bytes, shape, type) with the writer of the package, with any type number."""
    writer = gguf.GGUFWriter(path, "bitnet")
    writer.add_uint32("answer", 42)
    for name, data, shape, type in tensors:
        # the writer supports types of llama.cpp only: bytes are written as int8, and the number is replaced below
        writer.add_tensor(
            name, np.frombuffer(data, np.int8), raw_shape=shape, raw_dtype=gguf.GGMLQuantizationType.I8
        )
        writer.tensors[-1][name].dtype = _Type(type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _Type(int):
    """Type number that the writer packs."""


def trailer(scale, size):
    return np.float32(scale).tobytes() + bytes(-(size + 4) % 32)


def in_file(name, t, scale):
    data = TABLES[name](t)
    if name in ("i2_s", "tl1", "tl2"):
        if name == "tl2":  # the size that bitnet.cpp assumes
            n, k = t.shape
            data += bytes((k - 256) * n // 3 * 5 // 8 + 256 * n // 2 * 4 // 8 - len(data))
            data += bytes(-len(data) % 32)
        data += trailer(scale, len(data))
    return data


SIZES = {"vocab": 40, "hidden": 64, "ffn": 96, "nlayers": 2, "nheads": 4, "nheads_kv": 2}
LLAMA = LlamaConfig(**SIZES)
YARN = RopeScaling.yarn(4.0, 32)
CASES = {
    "llama": ("llama", LLAMA),
    "llama-tied": ("llama", LlamaConfig(**SIZES, tied=True, theta=500000.0)),
    "llama-biases": ("llama", LlamaConfig(**SIZES, head_dim=24, biases=("qkv", "o", "gate_up", "down"))),
    "llama-linear": ("llama", LlamaConfig(**SIZES, scaling=RopeScaling.linear(4.0))),
    "qwen2": ("qwen2", LlamaConfig(**SIZES, tied=True, biases=("qkv",), eps=1e-6)),
    "qwen2-yarn": ("qwen2", LlamaConfig(**SIZES, biases=("qkv",), scaling=YARN)),
    "qwen3": ("qwen3", LlamaConfig(**SIZES, head_dim=128, qk_norm=True)),
    "bitnet": ("bitnet", LlamaConfig(**SIZES, sub_norms=True)),
    "bitnet-b1.58": ("bitnet-b1.58", LlamaConfig(**SIZES, sub_norms=True, activation="relu2", tied=True)),
}
NAMES = {
    "embed": ["token_embd"],
    "norm": ["output_norm"],
    "lm_head": ["output"],
    "attn_norm": ["attn_norm"],
    "qkv": ["attn_q", "attn_k", "attn_v"],
    "o": ["attn_output"],
    "mlp_norm": ["ffn_norm"],
    "gate_up": ["ffn_gate", "ffn_up"],
    "down": ["ffn_down"],
    "q_norm": ["attn_q_norm"],
    "k_norm": ["attn_k_norm"],
    "attn_sub_norm": ["attn_sub_norm"],
    "ffn_sub_norm": ["ffn_sub_norm"],
}


def made(config, seed=0):
    """Model in float32 with random weights, norms and biases."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: rng.standard_normal(shape, np.float32) * np.float32(0.1) + np.float32(name.endswith("norm"))
        for name, shape in config.shapes().items()
    }
    return models.Llama.of(arrays, config)


def permuted(rows, heads):
    """Permute queries or keys of a Llama as the converter does: halves of a head become pairs."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def stored(weights, config, arch):
    """Tensors by their GGUF names."""
    q, kv = config.nheads * config.head_dim, config.nheads_kv * config.head_dim
    cuts = {"qkv": [q, q + kv], "gate_up": [config.ffn]}
    tensors = {}
    for name, array in weights.arrays().items():
        layer, _, part = name.rpartition(".")
        of, suffix = part.removesuffix("_bias"), "bias" if part.endswith("_bias") else "weight"
        prefix = layer.replace("layers.", "blk.") + "." if layer else ""
        for module, rows in zip(NAMES[of], np.split(array, cuts.get(of, [])), strict=True):
            heads = {"attn_q": config.nheads, "attn_k": config.nheads_kv}.get(module)
            rows = permuted(rows, heads) if heads and arch == "llama" else rows
            tensors[f"{prefix}{module}.{suffix}"] = rows
    return tensors


def metadata(config, arch):
    keys = {
        "context_length": 8192,
        "embedding_length": config.hidden,
        "block_count": config.nlayers,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.nheads,
        "attention.head_count_kv": config.nheads_kv,
        "attention.layer_norm_rms_epsilon": config.eps,
        "rope.freq_base": config.theta,
        "rope.dimension_count": config.head_dim,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "vocab_size": config.vocab,
    }
    return {f"{arch}.{key}": value for key, value in keys.items()}


def write_model(gguf, path, arch, keys, tensors, types=None):
    """Write float32 arrays; ``types``: type names of the package by tensor, F32 for tensors that it lacks."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        gguf_type = {bool: "bool", int: "uint32", float: "float32", str: "string"}.get(type(value))
        writer.add_array(key, value) if gguf_type is None else getattr(writer, f"add_{gguf_type}")(key, value)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "a", "b"])
    for name, array in tensors.items():
        gguf_type = gguf.GGMLQuantizationType[(types or {}).get(name, "F32")]
        if array.dtype == np.uint8:  # made already
            writer.add_tensor(name, array, raw_dtype=gguf_type)
        elif gguf_type.name in ("F32", "F16"):
            writer.add_tensor(name, array.astype({"F32": np.float32, "F16": np.float16}[gguf_type.name]))
        else:
            writer.add_tensor(
                name, gguf.quants.quantize(np.ascontiguousarray(array), gguf_type), raw_dtype=gguf_type
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def written(gguf, path, case="llama", types=None, more=None):
    """Write a model to a file and return it. ``types``: a type for all matrices, or types by name."""
    arch, config = CASES[case]
    weights = made(config)
    tensors = stored(weights, config, arch)
    if isinstance(types, str):
        types = {name: types for name, x in tensors.items() if x.ndim == 2}
    keys = metadata(config, arch) | (more or {})
    if config.scaling is not None:
        keys |= {f"{arch}.rope.scaling.type": config.scaling.kind, f"{arch}.rope.scaling.factor": 4.0}
        keys |= {f"{arch}.rope.scaling.original_context_length": 32, f"{arch}.rope.scaling.finetuned": True}
    write_model(gguf, path, arch, keys, tensors, types)
    return weights, config


def same(a, b):
    a, b = a.arrays(), b.arrays()
    return a.keys() == b.keys() and all(
        x.dtype == b[n].dtype and x.tobytes() == b[n].tobytes() for n, x in a.items()
    )


BIG = LlamaConfig(vocab=40, hidden=256, ffn=256, nlayers=1, nheads=4, nheads_kv=2)


def ternary_tensors(rng, format, scales, config=BIG, arch="llama"):
    """Tensors of a model, and its weights with ternary projections. ``scales``: scale of each tensor, in order."""
    weights = made(config)
    trits, scale = {}, {}
    for part in models.projection.PROJECTIONS:
        shape = config.block_shapes()[part]
        trits[part] = rng.integers(-1, 2, shape).astype(np.int8)
        sizes = {"qkv": (256, 128, 128), "gate_up": (256, 256)}.get(part, shape[:1])
        values = np.array([next(scales) for _ in sizes], np.float32)
        scale[part] = np.repeat(values, sizes)
    dense = {f"layers.0.{part}": trits[part] * scale[part][:, None] for part in trits}
    tensors = stored(models.Llama.of(weights.arrays() | dense, config), config, arch)
    for name, x in tensors.items():
        if x.ndim == 2 and name.startswith("blk."):
            step = np.float32(np.abs(x).max())
            codes = gpu_ops.ternary_pack(np.sign(x).astype(np.int8), format)
            w = gpu_ops.TernaryMatrix(codes, step, x.shape, format)
            tensors[name] = w
    packed = {
        part: gpu_ops.TernaryMatrix.from_trits(trits[part], scale[part])
        for part in models.projection.PROJECTIONS
    }
    return tensors, dataclasses.replace(weights, layers=[dataclasses.replace(weights.layers[0], **packed)])
