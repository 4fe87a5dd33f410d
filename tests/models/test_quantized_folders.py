"""Folders with quantised layers: read as the packages that write them define their numbers."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import models
from gpu_ops.errors import FormatError, OptionError, ShapeError
from gpu_ops.formats.files import opened
from gpu_ops.formats.safetensors import NUMPY_DTYPES, SafetensorsFile, header_of
from gpu_ops.reference.weights.packed_bitsandbytes import DYNAMIC
from gpu_ops.reference.weights.packed_encode import FP4, NF4

CONFIG = models.LlamaConfig(vocab=96, hidden=128, ffn=256, nlayers=1, nheads=4, nheads_kv=2)
NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
PARTS = {
    "qkv": QKV,
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
IDS = np.array([[5, 90, 17, 3]])


def words(codes, bits, axis):
    """Codes packed into int32 along an axis, the first in the lowest bits: a stream of bits."""
    codes = np.moveaxis(np.asarray(codes, np.uint8), axis, -1)
    stream = (codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1).reshape(*codes.shape[:-1], -1)
    stream = np.concatenate(
        [stream, np.zeros((*stream.shape[:-1], -stream.shape[-1] % 32), np.uint8)], axis=-1
    )
    packed = np.packbits(stream, axis=-1, bitorder="little").view(np.int32)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis))


def integers(rng, shape, bits, group, symmetric):
    """Codes (N, K), zero points and float16 scales (N, groups), and the index of each column's group."""
    n, k = shape
    groups = -(-k // group)
    codes = rng.integers(0, 1 << bits, shape)
    half = 1 << (bits - 1)
    low, high = (1, 2 * half) if bits < 8 else (112, 144)
    zeros = np.full((n, groups), half) if symmetric else rng.integers(low, high, (n, groups))
    scales = rng.uniform(0.001, 0.01, (n, groups)).astype(np.float16)
    return codes, zeros, scales, np.arange(k) // group


def values(codes, zeros, scales, group):
    """``(code - zero) * scale`` in float32."""
    return (codes - zeros[:, group]).astype(np.float32) * scales.astype(np.float32)[:, group]


def gptq(rng, shape, *, bits=4, group=64, symmetric=True, act_order=False, version="gptq"):
    codes, zeros, scales, index = integers(rng, shape, bits, group, symmetric)
    if act_order:
        index = np.random.default_rng(shape[1]).permutation(index)  # the same for layers with the same inputs
    tensors = {
        "qweight": words(codes.T, bits, 0),
        "qzeros": words(zeros.T - (version == "gptq"), bits, 1),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": index.astype(np.int32),
    }
    return tensors, values(codes, zeros, scales, index)


def awq(rng, shape):
    codes, zeros, scales, index = integers(rng, shape, 4, 32, False)

    def pack(x):
        order = (np.arange(x.shape[1]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]]).reshape(-1)
        return words(x[:, order], 4, 1)

    tensors = {"qweight": pack(codes.T), "qzeros": pack(zeros.T), "scales": np.ascontiguousarray(scales.T)}
    return tensors, values(codes, zeros, scales, index)


def compressed(rng, shape, *, bits=4, group=128, symmetric=True):
    codes, zeros, scales, index = integers(rng, shape, bits, group, symmetric)
    scales = scales.astype(ml_dtypes.bfloat16)
    tensors = {
        "weight_packed": words(codes, bits, 1),
        "weight_scale": scales,
        "weight_shape": np.array(shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros, bits, 0)
    return tensors, values(codes, zeros, scales, index)


def compressed_int8(rng, shape):
    codes, scales = rng.integers(-128, 128, shape), rng.uniform(0.001, 0.01, (shape[0], 1)).astype(np.float32)
    return {"weight": codes.astype(np.int8), "weight_scale": scales}, codes.astype(np.float32) * scales


def e4m3(rng, shape, *, suffix="weight_scale", tile=None):
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[codes & 127 == 127] = 3
    numbers = codes.view(ml_dtypes.float8_e4m3fn)
    if tile is None:
        scales = np.float32(0.003) if suffix == "input" else rng.uniform(0.001, 0.01, (shape[0], 1))
        rows = scales = scales.astype(np.float32)
    else:
        counts = [-(-n // size) for n, size in zip(shape, tile, strict=True)]
        scales = rng.uniform(0.001, 0.01, counts).astype(np.float32)
        rows = np.repeat(np.repeat(scales, tile[0], axis=0), tile[1], axis=1)[: shape[0], : shape[1]]
    return {"weight": numbers, suffix: scales}, numbers.astype(np.float32) * rows


def tensor_fp8(rng, shape):
    tensors, _ = e4m3(rng, shape)
    scale = np.array(0.0123, np.float32)
    weight = tensors["weight"].astype(np.float32) * scale
    return {
        "weight": tensors["weight"],
        "weight_scale": scale,
        "input_scale": np.array(1.5, np.float32),
    }, weight


def four_bits(rng, shape, *, table="nf4", block=64, nested=0, another_map=False, storage=np.uint8):
    """Layer of bitsandbytes: the codes of the flattened matrix, and the state of its scales."""
    values = np.array(NF4, np.float32) if table == "nf4" else np.array(FP4, np.float32) / np.float32(12)
    codes = rng.integers(0, 16, shape).astype(np.uint8).reshape(-1)
    absmax = rng.uniform(0.01, 0.02, len(codes) // block).astype(np.float32)
    data = (codes[::2] << 4 | codes[1::2]).view(storage)[:, None]
    state = {"quant_type": table, "blocksize": block, "dtype": "float16", "shape": list(shape)}
    tensors = {"weight": data, "weight.absmax": absmax, "weight.quant_map": values}
    if nested:
        scales = rng.integers(0, 256, len(absmax)).astype(np.uint8)
        map_ = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32) if another_map else DYNAMIC
        second = rng.uniform(0.002, 0.004, -(-len(absmax) // nested)).astype(np.float32)
        absmax = map_[scales] * np.repeat(second, nested)[: len(scales)] + np.float32(0.02)
        more = {"weight.nested_absmax": second, "weight.nested_quant_map": map_}
        tensors |= {"weight.absmax": scales, **more}
        state |= {"nested_blocksize": nested, "nested_offset": 0.02, "nested_dtype": "float32"}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{table}"] = text
    return tensors, (values[codes] * np.repeat(absmax, block)).reshape(shape)


def eight_bits(rng, shape):
    codes, scb = (
        rng.integers(-127, 128, shape).astype(np.int8),
        rng.uniform(0.5, 2, shape[0]).astype(np.float32),
    )
    tensors = {"weight": codes, "SCB": scb, "weight_format": np.array(0, np.uint8)}
    return tensors, codes * (scb * np.float32(7.874015718698502e-3))[:, None]


def with_(method, **options):
    return {"quant_method": method, **options}


GPTQ = with_("gptq", bits=4, group_size=64)
CASES = {
    "gptq": (gptq, {}, GPTQ, "int4_g64"),
    "gptq with zero points": (gptq, {"symmetric": False}, GPTQ, "uint4_g64"),
    "gptq in the order of activations": (gptq, {"symmetric": False, "act_order": True}, GPTQ, "uint4_g64"),
    "gptq_v2": (gptq, {"version": "gptq_v2"}, GPTQ | {"checkpoint_format": "gptq_v2"}, "int4_g64"),
    "gptq of 2 bits": (gptq, {"bits": 2}, GPTQ | {"bits": 2}, "int4_g64"),
    "gptq of 3 bits": (gptq, {"bits": 3, "symmetric": False}, GPTQ | {"bits": 3}, "uint4_g64"),
    "gptq of 8 bits": (gptq, {"bits": 8, "symmetric": False}, GPTQ | {"bits": 8}, "uint8_g64"),
    "gptq, a scale per row": (gptq, {"group": 10**6}, GPTQ | {"group_size": -1}, "int4_g128"),
    "awq": (awq, {}, with_("awq", bits=4, group_size=32, version="gemm", zero_point=True), "uint4_g32"),
    "compressed int4": (compressed, {}, with_("compressed-tensors"), "int4_g128"),
    "compressed uint4": (
        compressed,
        {"symmetric": False, "group": 32},
        with_("compressed-tensors"),
        "uint4_g32",
    ),
    "compressed int8": (compressed, {"bits": 8}, with_("compressed-tensors"), "int8_g128"),
    "compressed int8, not in words": (compressed_int8, {}, with_("compressed-tensors"), "int8_g128"),
    "compressed float8": (e4m3, {}, with_("compressed-tensors"), "e4m3_g128"),
    "fp8 of a tensor": (tensor_fp8, {}, with_("fp8", activation_scheme="static"), "e4m3_g128"),
    "fp8 of tiles": (
        e4m3,
        {"suffix": "weight_scale_inv", "tile": (96, 64)},
        with_("fp8", weight_block_size=[96, 64]),
        "e4m3_g64",
    ),
    "fbgemm_fp8": (e4m3, {}, with_("fbgemm_fp8"), "e4m3_g128"),
    "nf4": (four_bits, {}, with_("bitsandbytes", load_in_4bit=True), "nf4"),
    "nested nf4": (four_bits, {"nested": 256}, with_("bitsandbytes", load_in_4bit=True), "nf4_nested"),
    "nested fp4": (
        four_bits,
        {"table": "fp4", "block": 128, "nested": 128},
        with_("bitsandbytes", load_in_4bit=True),
        "fp4_nested",
    ),
    "nested nf4 in short blocks": (
        four_bits,
        {"nested": 64},
        with_("bitsandbytes", load_in_4bit=True),
        "nf4",
    ),
    "nested nf4 by another map": (
        four_bits,
        {"nested": 256, "another_map": True},
        with_("bitsandbytes", load_in_4bit=True),
        "nf4",
    ),
    "fp4 stored as bfloat16": (
        four_bits,
        {"table": "fp4", "block": 128, "storage": ml_dtypes.bfloat16},
        with_("bitsandbytes", load_in_4bit=True),
        "fp4",
    ),
    "LLM.int8()": (eight_bits, {}, with_("bitsandbytes", load_in_8bit=True), "int8_g128"),
}


def folder(path, rng, make, options, quantization):
    """Write a folder whose projections ``make`` quantises; return it and the projections."""
    models.save(path, models.Llama.of(models.initial_weights(CONFIG), CONFIG), CONFIG, entries={})
    tensors, weights, shapes = read(path), {}, CONFIG.shapes()
    for part, modules in PARTS.items():
        rows = CONFIG.joined().get(part, shapes[f"layers.0.{part}"][:1])
        for module, count in zip(modules, rows, strict=True):
            name = f"model.layers.0.{module}"
            stored, weight = make(rng, (count, shapes[f"layers.0.{part}"][1]), **options)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{suffix}": x for suffix, x in stored.items()}
            weights.setdefault(part, []).append(weight)
    write(path, tensors)
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    return path, {part: np.concatenate(each).astype(np.float32) for part, each in weights.items()}


def read(path):
    with opened("test", path / "model.safetensors") as file:
        stored = SafetensorsFile("test", path / "model.safetensors", file)
        return {name: stored.read(name) for name in stored.tensors}


def write(path, tensors):
    arrays = {name: np.ascontiguousarray(x).reshape(np.shape(x)) for name, x in tensors.items()}
    header = header_of({name: (NAMES[x.dtype], x.shape) for name, x in arrays.items()}, {})
    data = b"".join(x.tobytes() for x in arrays.values())
    (path / "model.safetensors").write_bytes(header + data)


@pytest.mark.parametrize("case", CASES)
def test_weights(case, rng, tmp_path):
    make, options, quantization, format = CASES[case]
    where, weights = folder(tmp_path, rng, make, options, quantization)
    model, config = models.load(where)
    for part, weight in weights.items():
        matrix = getattr(model.layers[0], part)
        is_short = weight.shape[1] % 256 != 0  # nested scales would take more bytes
        assert {name for _, name in matrix.formats} == {
            format.removesuffix("_nested") if is_short else format
        }
        np.testing.assert_array_equal(matrix.dequantize(), weight)
    plain, _ = models.load(where, dtype="float32")
    np.testing.assert_array_equal(plain.layers[0].qkv, weights["qkv"])
    y = models.logits(IDS, model, config)
    right = models.logits(IDS, plain, config)
    if "order" in case:  # products add up in another order
        np.testing.assert_allclose(y, right, rtol=0, atol=1e-4 * abs(right).max())
    else:
        np.testing.assert_array_equal(y, right)
    if "nf4" not in format and "fp4" not in format and "e4m3" not in format:
        fast, _ = models.load(where, activations="int8")
        error = models.logits(IDS, fast, config) - right
        assert np.sqrt((error**2).mean() / (right**2).mean()) < 0.03


def damaged(change):
    """Tensors of a folder after ``change`` of those of q_proj."""

    def edit(tensors):
        prefix = "model.layers.0.self_attn.q_proj."
        layer = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        others = {name: x for name, x in tensors.items() if not name.startswith(prefix)}
        return others | {prefix + name: x for name, x in change(layer).items()}

    return edit


def without(name):
    return damaged(lambda layer: {key: x for key, x in layer.items() if key != name})


def replaced(name, change):
    return damaged(lambda layer: layer | {name: change(layer[name])})


def state_with(**entries):
    def change(text):
        return np.frombuffer(json.dumps(json.loads(text.tobytes()) | entries).encode(), np.uint8)

    return replaced("weight.quant_state.bitsandbytes__nf4", change)


FAULTS = {
    "no scales": ("gptq", without("scales"), FormatError, "no 'scales'"),
    "no codes": ("gptq", without("qweight"), FormatError, "not as a whole"),
    "scales of another shape": ("gptq", replaced("scales", lambda x: x[:-1]), ShapeError, r"\(1, 128\)"),
    "codes of another dtype": ("gptq", replaced("qweight", lambda x: x.astype(np.int64)), FormatError, "I64"),
    "NaN scale": ("gptq", replaced("scales", lambda x: x * np.float16(np.nan)), FormatError, "NaN"),
    "a zero point of 16": ("gptq", replaced("qzeros", lambda x: x | 15), FormatError, "stored as 15"),
    "uneven groups": ("gptq", replaced("g_idx", lambda x: x * 0), FormatError, "2 groups of 64"),
    "negative groups": ("gptq", replaced("g_idx", lambda x: x - 1), FormatError, "2 groups of 64"),
    "another shape": (
        "compressed int4",
        replaced("weight_shape", lambda x: x + 1),
        FormatError,
        "weight_shape",
    ),
    "another table": ("nf4", replaced("weight.quant_map", lambda x: x * 2), FormatError, "other numbers"),
    "a short weight": ("nf4", replaced("weight", lambda x: x[:-1]), FormatError, "8191 bytes"),
    "a state that is no JSON": (
        "nf4",
        replaced("weight.quant_state.bitsandbytes__nf4", lambda x: x[:-1]),
        FormatError,
        "damaged",
    ),
    "a state of another shape": ("nf4", state_with(shape=[64, 256]), FormatError, "by the config"),
    "an absurd block": ("nf4", state_with(blocksize=-64), FormatError, "blocks of -64"),
    "blocks of 32": ("nf4", state_with(blocksize=32), OptionError, "multiples of 64"),
    "nested without its arrays": (
        "nf4",
        state_with(nested_blocksize=256, nested_offset=0.1),
        FormatError,
        "absmax is F32",
    ),
    "an infinite offset": (
        "nested nf4",
        state_with(nested_offset=float("inf")),
        FormatError,
        "not a finite",
    ),
    "an offset beyond float32": ("nested nf4", state_with(nested_offset=1e39), FormatError, "not a finite"),
    "a factor that is not finite": (
        "nested nf4",
        replaced("weight.nested_absmax", lambda x: x * np.float32(np.nan)),
        FormatError,
        "NaN",
    ),
    "nested scales cut short": (
        "nested nf4",
        replaced("weight.absmax", lambda x: x[:-1]),
        ShapeError,
        "expected",
    ),
    "scales of tiles": (
        "fp8 of tiles",
        replaced("weight_scale_inv", lambda x: x[:, :1]),
        ShapeError,
        "expected",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_damaged_folders(case, rng, tmp_path):
    table, change, error, match = FAULTS[case]
    make, options, quantization, _ = CASES[table]
    where, _ = folder(tmp_path, rng, make, options, quantization)
    write(where, change(read(where)))
    with pytest.raises(error, match=match):
        models.load(where)


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"quant_method": "hqq"}, "hqq.*gptq, awq"),
        ({"bits": 5}, "bits=5"),
        ({"checkpoint_format": "marlin"}, "marlin"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": "64"}, "group_size='64'"),
    ],
)
def test_configs_that_are_not_supported(entries, match, rng, tmp_path):
    make, options, quantization, _ = CASES["gptq"]
    where, _ = folder(tmp_path, rng, make, options, quantization | entries)
    with pytest.raises(OptionError, match=match):
        models.load(where)


def test_a_config_of_quantised_weights_with_floats(rng, tmp_path):
    models.save(tmp_path, models.Llama.of(models.initial_weights(CONFIG), CONFIG), CONFIG)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": GPTQ}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="none is"):
        models.load(tmp_path)


def test_group_formats_are_written_back(rng):
    """A matrix in a format of groups, encoded again, keeps its codes."""
    w = rng.standard_normal((8, 128)).astype(np.float32)
    for format in ("int4_g64", "uint4_g32", "int8_g128"):
        matrix = gpu_ops.quantize(w, format)
        error = abs(matrix.to("q8_0").dequantize() - matrix.dequantize()).max()
        assert error < 0.02 * abs(w).max()
