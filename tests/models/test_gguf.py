"""Models from GGUF files: equal to those from folders, with ternary projections packed."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import RopeScaling, models
from gpu_ops.models import LlamaConfig
from tests.models.gguf_models import (
    BIG,
    CASES,
    SIZES,
    made,
    metadata,
    permuted,
    same,
    stored,
    ternary_tensors,
    write,
    written,
)
from tests.models.model_files import INSTALL

IDS = np.random.default_rng(1).integers(0, SIZES["vocab"], (2, 19))


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf", reason=INSTALL)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stored_as", ["F32", "F16", "BF16", "Q8_0"])
def test_a_model_is_the_same_as_from_its_folder(case, stored_as, gguf, tmp_path):
    weights, config = written(gguf, tmp_path / "a.gguf", case, stored_as)
    tensor_type = gguf.GGMLQuantizationType[stored_as]

    def rounded(x):
        return x if x.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(x, tensor_type), tensor_type)

    arrays = {name: rounded(x) for name, x in weights.arrays().items()}
    models.save(tmp_path / "folder", models.Llama.of(arrays, config), config)
    for dtype in ("float32", "bfloat16", "float64"):
        weights_read, read = models.load(tmp_path / "a.gguf", dtype=dtype)
        folder, expected = models.load(tmp_path / "folder", dtype=dtype)
        assert read == expected == config
        assert same(weights_read, folder)
        assert (weights_read.lm_head is weights_read.embed) == config.tied
    defaults = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}
    assert models.load(tmp_path / "a.gguf")[0].embed.dtype == defaults.get(stored_as, np.float32)


BLOCKS = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}


@pytest.mark.parametrize("stored_as", BLOCKS)
def test_quantised_types_are_decoded_as_the_package_does(stored_as, gguf, tmp_path, rng):
    """Decode random bytes, infinite scales included, since the package quantises to some of the types only."""
    tensor_type, (count, nbytes) = gguf.GGMLQuantizationType[stored_as], BLOCKS[stored_as]
    config = LlamaConfig(vocab=4500, hidden=256, ffn=64, nlayers=0, nheads=4, tied=True)
    codes = rng.integers(0, 256, (4500, 256 // count * nbytes), np.uint8)
    tensors = {"token_embd.weight": codes, "output_norm.weight": np.ones(256, np.float32)}
    write(gguf, tmp_path / "a", "llama", metadata(config, "llama"), tensors, {"token_embd.weight": stored_as})
    table = models.load(tmp_path / "a")[0].embed
    with np.errstate(over="ignore", invalid="ignore"):
        right = gguf.quants.dequantize(codes, tensor_type)
    assert table.dtype == np.float32
    assert not np.isfinite(right).all()
    np.testing.assert_array_equal(table, right)


def llama3_divisors(config, original=8192):
    """Divisors of frequencies as the converter computes them."""
    d, divisors = config.head_dim, []
    for i in range(0, d, 2):
        wavelength = 2 * np.pi * config.theta ** (i / d)
        smooth = (original / wavelength - 1.0) / 3.0
        ends = 8.0 if wavelength > original else 1 / ((1 - smooth) / 8.0 + smooth)
        divisors.append(1.0 if wavelength < original / 4.0 else ends)
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("original", [8192, 64])
def test_rope_freqs(original, gguf, tmp_path):
    config = LlamaConfig(**{**SIZES, "hidden": 256, "nheads": 2}, theta=500000.0)
    weights = made(config)
    divisors = llama3_divisors(config, original)
    assert np.unique(divisors).size > 3
    tensors = stored(weights, config, "llama") | {"rope_freqs.weight": divisors}
    write(gguf, tmp_path / "a", "llama", metadata(config, "llama"), tensors)
    weights_read, read = models.load(tmp_path / "a")
    right = RopeScaling.llama3(8.0, original)
    if original == 8192:
        assert read == dataclasses.replace(config, scaling=right)
    frequencies = read.scaling.inv_freq(128, 500000.0)
    np.testing.assert_allclose(frequencies, right.inv_freq(128, 500000.0), rtol=1e-6)
    assert read.scaling.attention_factor_at(10**6) == 1.0
    expected = models.logits(IDS, weights, dataclasses.replace(config, scaling=right))
    np.testing.assert_allclose(
        models.logits(IDS, weights_read, read), expected, atol=2e-5 * np.abs(expected).max()
    )


# --- ternary ---------------------------------------------------------------------------------------


BITNET = dataclasses.replace(BIG, sub_norms=True, activation="relu2", tied=True)


@pytest.mark.parametrize("one_scale", [True, False])
@pytest.mark.parametrize(
    ("format", "arch", "big"),
    [(x, "llama", BIG) for x in ("tq1_0", "tq2_0", "i2_s")] + [("i2_s", "bitnet-b1.58", BITNET)],
)
def test_ternary_projections_stay_packed(format, arch, big, one_scale, gguf, tmp_path, rng):
    scales = iter([0.5] * 7 if one_scale else [0.25, 0.5, 0.125, 1.0, 0.375, 2.0, 0.75])
    tensors, right = ternary_tensors(rng, format, scales, big, arch)
    path = tmp_path / "a.gguf"
    if format == "i2_s":
        write_i2_s(gguf, path, tensors, arch, big)
    else:
        keys = {"general.architecture": arch, **metadata(big, arch), "answer": [1, 2]}
        gpu_ops.write_gguf(path, tensors, keys)
    weights_read, config = models.load(path)
    assert config == big
    for part in models.projection.PROJECTIONS:
        w, expected = getattr(weights_read.layers[0], part), getattr(right.layers[0], part)
        assert w.format == "w2"
        assert w.scale.ndim == (0 if one_scale or part in ("o", "down") else 1)
        np.testing.assert_array_equal(w.dequantize(), expected.dequantize())
    np.testing.assert_array_equal(models.logits(IDS, weights_read, config), models.logits(IDS, right, config))
    assert models.load(path, dtype="bfloat16")[0].layers[0].mlp_norm.dtype == ml_dtypes.bfloat16


def write_i2_s(gguf, path, tensors, arch, config):
    """Write I2_S, which the package lacks: bytes are written as int8, and the type number is replaced in the file."""
    made_of = {n: x for n, x in tensors.items() if isinstance(x, gpu_ops.TernaryMatrix)}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata(config, arch).items():
        getattr(writer, "add_float32" if isinstance(value, float) else "add_uint32")(key, value)
    for name, x in tensors.items():
        if name not in made_of:
            writer.add_tensor(name, x)
            continue
        data = np.frombuffer(x.codes.tobytes() + x.scale.tobytes() + bytes(28), np.int8)
        writer.add_tensor(name, data, raw_shape=x.shape, raw_dtype=gguf.GGMLQuantizationType.I8)
        writer.tensors[-1][name].dtype = I2S(36)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class I2S(int):
    """Type number that the writer packs."""


def test_a_projection_that_is_ternary_in_part_becomes_an_array(tmp_path, rng):
    tensors, right = ternary_tensors(rng, "tq2_0", iter([0.25, 0.5, 0.125, 1.0, 0.375, 2.0, 0.75]))
    for name in ("blk.0.attn_k.weight", "blk.0.ffn_up.weight"):
        tensors[name] = tensors[name].dequantize()
    path = tmp_path / "a.gguf"
    gpu_ops.write_gguf(path, tensors, {"general.architecture": "llama", **metadata(BIG, "llama")})
    layer = models.load(path)[0].layers[0]
    for part in ("qkv", "gate_up"):
        np.testing.assert_array_equal(getattr(layer, part), getattr(right.layers[0], part).dequantize())
    assert isinstance(layer.o, gpu_ops.TernaryMatrix)


def test_blocks_with_scales_of_their_own(tmp_path, rng):
    config = LlamaConfig(vocab=8, hidden=512, ffn=256, nlayers=1, nheads=4)
    tensors = stored(made(config), config, "llama")
    trits = rng.integers(-1, 2, (512, 512)).astype(np.int8)
    groups = rng.uniform(0.5, 2, (512, 2)).astype(np.float16).astype(np.float32)
    groups[:, 0] = 0.5  # and the second blocks differ
    ours = gpu_ops.TernaryMatrix.from_trits(trits, groups)
    theirs = gpu_ops.TernaryMatrix.from_trits(permuted(trits, 4), permuted(groups, 4), format="tq2_0")
    plain = gpu_ops.TernaryMatrix.from_trits(trits, 0.5, format="tq2_0")
    tensors |= {"blk.0.attn_q.weight": theirs, "blk.0.attn_k.weight": theirs, "blk.0.attn_v.weight": plain}
    gpu_ops.write_gguf(
        tmp_path / "a", tensors, {"general.architecture": "llama", **metadata(config, "llama")}
    )
    qkv = models.load(tmp_path / "a")[0].layers[0].qkv
    right = np.concatenate([ours.dequantize(), ours.dequantize(), trits * np.float32(0.5)])
    np.testing.assert_array_equal(qkv.dequantize(), right)
    assert qkv.group_size == 256
