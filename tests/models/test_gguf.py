"""Models from GGUF files: equal to those from folders, with quantised matrices packed."""

from __future__ import annotations

import dataclasses
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import RopeScaling, inference, models
from gpu_ops.errors import FileError, FormatError, GpuOpsError, MissingFileError, OptionError, ShapeError
from gpu_ops.models import LlamaConfig
from gpu_ops.reference.weights.packed_formats import FORMATS
from tests.formats.test_file_mutations import mutant
from tests.models.model_files import (
    BIG,
    CASES,
    INSTALL,
    LLAMA,
    SIZES,
    made,
    metadata,
    permuted,
    same,
    stored,
    ternary_tensors,
    write,
    write_model,
    written,
)

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


BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4",
          "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0")  # fmt: skip


@pytest.mark.parametrize("stored_as", BLOCKS)
def test_quantised_types_are_decoded_as_the_package_does(stored_as, gguf, tmp_path, rng):
    """Decode random bytes, infinite scales included, since the package quantises to some of the types only."""
    tensor_type = gguf.GGMLQuantizationType[stored_as]
    count, nbytes = gguf.GGML_QUANT_SIZES[tensor_type]
    config = LlamaConfig(vocab=4500, hidden=256, ffn=64, nlayers=0, nheads=4, tied=True)
    codes = rng.integers(0, 256, (4500, 256 // count * nbytes), np.uint8)
    tensors = {"token_embd.weight": codes, "output_norm.weight": np.ones(256, np.float32)}
    write_model(
        gguf, tmp_path / "a", "llama", metadata(config, "llama"), tensors, {"token_embd.weight": stored_as}
    )
    packed = models.load(tmp_path / "a")[0].embed
    with np.errstate(over="ignore", invalid="ignore"):
        right = gguf.quants.dequantize(codes, tensor_type)
    assert not np.isfinite(right).all()
    assert packed.formats == ((4500, stored_as.lower()),)
    np.testing.assert_array_equal(packed.blocks()[0], codes)
    for table in (packed.dequantize(), models.load(tmp_path / "a", dtype="float32")[0].embed):
        assert table.dtype == np.float32
        np.testing.assert_array_equal(table, right)


def mixed_types(config):
    """Types of a file that mixes them within one layer, as Q4_K_M does."""
    types = {"token_embd.weight": "Q8_0"}
    for i in range(config.nlayers):
        parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        names = ("Q4_0", "Q4_0", "Q8_0", "Q5_1", "Q4_1", "Q4_1", "Q5_0")
        types |= {f"blk.{i}.{part}.weight": name for part, name in zip(parts, names, strict=True)}
    return types


def test_a_quantised_model_stays_packed(gguf, tmp_path):
    weights, config = written(gguf, tmp_path / "a.gguf", "llama")
    tensors, keys = stored(weights, config, "llama"), metadata(config, "llama")
    write_model(gguf, tmp_path / "a.gguf", "llama", keys, tensors, mixed_types(config))
    packed, _ = models.load(tmp_path / "a.gguf")
    floats, _ = models.load(tmp_path / "a.gguf", dtype="float32")
    rows = config.nheads_kv * config.head_dim
    assert packed.layers[0].qkv.formats[-1] == (rows, "q8_0")
    assert {name for _, name in packed.layers[0].qkv.formats} == {"q4_0", "q8_0"}
    for name, matrix in packed.arrays().items():
        if isinstance(matrix, gpu_ops.PackedMatrix):
            np.testing.assert_array_equal(matrix.dequantize(), floats.arrays()[name], name)
    right = models.logits(IDS, floats, config)
    np.testing.assert_array_equal(models.logits(IDS, packed, config), right)
    targets = np.roll(IDS, -1, axis=1)
    assert models.loss(IDS, targets, packed, config) == models.loss(IDS, targets, floats, config)
    fast, _ = models.load(tmp_path / "a.gguf", activations="int8")
    error = models.logits(IDS, fast, config) - right
    assert 0 < np.sqrt(np.mean(error**2) / np.mean(right**2)) < 0.03
    prompt = [IDS[0, :7].tolist()]
    generated = [inference.generate(w, config, prompt, max_new_tokens=5) for w in (packed, floats)]
    assert generated[0] == generated[1]
    with pytest.raises(OptionError, match="dequantize"):
        models.save(tmp_path / "folder", packed, config)
    with pytest.raises(OptionError, match="with format="):
        models.load(tmp_path / "a.gguf", dtype="float32", activations="int8")


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
    write_model(gguf, tmp_path / "a", "llama", metadata(config, "llama"), tensors)
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


# ---- ternary -----------------------------------------------------------------------------------------------


BITNET = dataclasses.replace(BIG, sub_norms=True, activation="relu2", tied=True)


@pytest.mark.parametrize("one_scale", [True, False])
@pytest.mark.parametrize(("arch", "big"), [("llama", BIG), ("bitnet-b1.58", BITNET)])
def test_projections_in_i2_s_stay_packed(arch, big, one_scale, gguf, tmp_path, rng):
    scales = iter([0.5] * 7 if one_scale else [0.25, 0.5, 0.125, 1.0, 0.375, 2.0, 0.75])
    tensors, right = ternary_tensors(rng, "i2_s", scales, big, arch)
    path = tmp_path / "a.gguf"
    write_i2_s(gguf, path, tensors, arch, big)
    weights_read, config = models.load(path)
    assert config == big
    for part in models.projection.PROJECTIONS:
        w, expected = getattr(weights_read.layers[0], part), getattr(right.layers[0], part)
        assert w.format == "w2"
        assert w.scale.ndim == (0 if one_scale or part in ("o", "down") else 1)
        np.testing.assert_array_equal(w.dequantize(), expected.dequantize())
    np.testing.assert_array_equal(models.logits(IDS, weights_read, config), models.logits(IDS, right, config))
    assert models.load(path, dtype="bfloat16")[0].layers[0].mlp_norm.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("format", ["tq1_0", "tq2_0"])
def test_ternary_blocks_are_packed_matrices(format, tmp_path, rng):
    scales = np.array([0.25, 0.5, 0.125, 1.0, 0.375, 2.0, 0.75]) / 16
    tensors, right = ternary_tensors(rng, format, iter(scales))
    path, keys = tmp_path / "a", {"general.architecture": "llama", **metadata(BIG, "llama"), "answer": [1, 2]}
    gpu_ops.write_gguf(path, tensors, keys)
    weights, config = models.load(path)
    assert config == BIG
    for part in models.projection.PROJECTIONS:
        w, expected = getattr(weights.layers[0], part), getattr(right.layers[0], part)
        assert w.formats == ((expected.shape[0], format),)
        np.testing.assert_array_equal(w.dequantize(), expected.dequantize())
        ternary = gpu_ops.TernaryMatrix.from_packed(w)
        np.testing.assert_array_equal(ternary.trits(), expected.trits())
        assert ternary.scale.ndim == (0 if part in ("o", "down") else 1)
    floats, _ = models.load(path, dtype="float32")
    plain = models.logits(IDS, floats, config)
    np.testing.assert_array_equal(models.logits(IDS, weights, config), plain)
    fast, _ = models.load(path, activations="int8")
    error = models.logits(IDS, fast, config) - plain
    assert 0 < np.sqrt(np.mean(error**2) / np.mean(plain**2)) < 0.03
    everywhere = models.projection.PROJECTIONS
    per_token = [models.logits(IDS, models.with_int8_input(w, everywhere), config) for w in (weights, right)]
    np.testing.assert_array_equal(*per_token)
    adapters = models.initial_lora(models.lora_shapes(config, rank=2))
    prompt = [IDS[0, :7].tolist()]
    expected = inference.generate(floats, config, prompt, max_new_tokens=5)
    for w in (weights, models.with_lora(weights, adapters)):
        assert inference.generate(w, config, prompt, max_new_tokens=5) == expected


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
    assert isinstance(layer.o, gpu_ops.PackedMatrix)


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
    ternary = gpu_ops.TernaryMatrix.from_packed(qkv)
    np.testing.assert_array_equal(ternary.dequantize(), right)
    assert ternary.group_size == 256


# GGUF files with unknown models or damage: refused, in bounded memory.

REFUSED_KEYS = [
    ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported"),
    ({"llama.attention.sliding_window": 4096}, "sliding_window=4096 is not supported"),
    ({"llama.attention.causal": False}, "causal=False is not supported"),
    ({"llama.attn_logit_softcapping": 50.0}, "softcapping=50.0 is not supported"),
    ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'; known: none, linear, yarn"),
    ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor=1.5 is not supported"),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, and a head has 16"),
    ({"llama.attention.value_length": 8}, "value_length is 8"),
    ({"llama.attention.head_count": [4, 4]}, "head_count is an array"),
    ({"llama.attention.head_count": 0}, "head_count"),
    ({"llama.attention.head_count_kv": 3}, "nheads=4 is no multiple of nheads_kv=3"),
    ({"llama.embedding_length": "64"}, "embedding_length"),
    ({"llama.block_count": 3}, "no 'blk.2.attn_norm.weight'"),
    ({"llama.block_count": 60000}, "60000 layers, and the files 21 tensors"),
    ({"llama.block_count": 1}, "'blk.1.attn_k.weight' is no part of a 1-layer model"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps|eps"),
    ({"split.count": 3}, "one of 3 parts"),
]


@pytest.mark.parametrize(
    ("keys", "words"), REFUSED_KEYS, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_keys_that_are_refused(keys, words, gguf, tmp_path):
    written(gguf, tmp_path / "a", more=keys)
    with pytest.raises(GpuOpsError, match=words):
        models.load(tmp_path / "a")


def test_yarn_without_the_length_it_stretches(tmp_path):
    keys = {"general.architecture": "llama", **metadata(LLAMA, "llama")}
    keys |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    tensors = stored(made(LLAMA), LLAMA, "llama")
    gpu_ops.write_gguf(tmp_path / "a", tensors, keys)
    assert models.load(tmp_path / "a")[1].scaling.original_max_position == 8192
    gpu_ops.write_gguf(
        tmp_path / "a", tensors, {n: x for n, x in keys.items() if n != "llama.context_length"}
    )
    with pytest.raises(
        OptionError, match=r"llama.rope.scaling.original_context_length must be an integer, got None"
    ):
        models.load(tmp_path / "a")


def test_keys_that_change_nothing(gguf, tmp_path):
    more = {
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.attn_factor": 1.0,
        "qwen2.expert_count": 8,
        "general.file_type": 7,
    }
    weights, config = written(gguf, tmp_path / "a", more=more)
    weights_read, read = models.load(tmp_path / "a")
    assert read == config
    assert same(weights_read, weights)


REFUSED_TENSORS = {
    "missing": (lambda a: a.pop("blk.1.ffn_up.weight"), FormatError, "no 'blk.1.ffn_up.weight', of shape (96, 64)"),
    "no table": (lambda a: a.pop("token_embd.weight"), FormatError, "no 'token_embd.weight' of two axes"),
    "shape": (
        lambda a: a.update({"blk.1.attn_output.weight": np.zeros((64, 60), np.float32)}),
        ShapeError,
        "blk.1.attn_output.weight has shape (64, 60), and (64, 64) by the config",
    ),
    "experts": (
        lambda a: a.update({"blk.0.ffn_gate_inp.weight": np.zeros((8, 64), np.float32)}),
        FormatError,
        "'blk.0.ffn_gate_inp.weight' is no part",
    ),
    "one bias": (
        lambda a: a.update({"blk.0.attn_q.bias": np.zeros(64, np.float32)}),
        FormatError,
        "'blk.0.attn_q.bias' is no part",
    ),
    "divisors": (
        lambda a: a.update({"rope_freqs.weight": np.ones(7, np.float32)}),
        FormatError,
        "rope_freqs.weight is F32 (7,); expected F32 (8,)",
    ),
    "divisors below 0": (
        lambda a: a.update({"rope_freqs.weight": np.full(8, -1, np.float32)}),
        OptionError,
        "short_factor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_another_model_than_the_metadatas_is_refused(name, gguf, tmp_path):
    change, error, words = REFUSED_TENSORS[name]
    tensors = stored(made(LLAMA), LLAMA, "llama")
    change(tensors)
    write_model(gguf, tmp_path / "a", "llama", metadata(LLAMA, "llama"), tensors)
    with pytest.raises(error, match=re.escape(words)):
        models.load(tmp_path / "a")


def test_types_that_are_not_read_are_named(gguf, tmp_path):
    config = LlamaConfig(vocab=8, hidden=256, ffn=64, nlayers=0, nheads=4, tied=True)
    tensors = {
        "token_embd.weight": np.zeros((8, 66), np.uint8),
        "output_norm.weight": np.ones(256, np.float32),
    }
    types = {"token_embd.weight": "IQ2_XXS"}
    write_model(gguf, tmp_path / "a", "llama", metadata(config, "llama"), tensors, types)
    with pytest.raises(
        FormatError, match=r"token_embd\.weight is of type 16; F32, F16, BF16, F64, Q4_0, Q4_1, "
    ):
        models.load(tmp_path / "a")


def test_other_architectures_are_named(gguf, tmp_path):
    write_model(gguf, tmp_path / "a", "mamba", {}, {"token_embd.weight": np.ones((3, 4), np.float32)})
    with pytest.raises(
        OptionError, match="architecture is 'mamba'; known: llama, qwen2, qwen3, bitnet, bitnet-b1"
    ):
        models.load(tmp_path / "a")
    gpu_ops.write_gguf(tmp_path / "a", {"token_embd.weight": np.ones((3, 4), np.float32)})
    with pytest.raises(OptionError, match="architecture is None"):
        models.load(tmp_path / "a")


def test_numbers_that_the_dtype_cannot_hold(tmp_path):
    tensors = stored(made(LLAMA), LLAMA, "llama")
    tensors["blk.1.ffn_down.weight"][3, 4] = 1e6
    keys = {"general.architecture": "llama", **metadata(LLAMA, "llama")}
    gpu_ops.write_gguf(tmp_path / "a", tensors, keys)
    with pytest.raises(
        OptionError, match=r"blk\.1\.ffn_down\.weight holds numbers beyond the range of float16"
    ):
        models.load(tmp_path / "a", dtype="float16")


def test_paths(tmp_path):
    with pytest.raises(MissingFileError, match="missing"):
        models.load(tmp_path / "missing.gguf")
    (tmp_path / "a.gguf").write_bytes(b"GGML" + bytes(40))
    with pytest.raises(FormatError, match="does not begin with GGUF"):
        models.load(tmp_path / "a.gguf")
    with pytest.raises(FileError, match="device"):
        models.load("/dev/null")


# ---- bounds ------------------------------------------------------------------------------------------------


def test_loading_takes_the_models_memory_and_a_piece(gguf, tmp_path):
    config = LlamaConfig(vocab=32768, hidden=512, ffn=64, nlayers=1, nheads=8, tied=True)
    small = LlamaConfig(vocab=1, hidden=512, ffn=64, nlayers=1, nheads=8, tied=True)
    table = {"token_embd.weight": np.zeros((32768, 512 // 32 * 34), np.uint8)}
    tensors = stored(made(small), small, "llama") | table
    write_model(
        gguf, tmp_path / "a", "llama", metadata(config, "llama"), tensors, dict.fromkeys(table, "Q8_0")
    )
    tracemalloc.start()
    models.load(tmp_path / "a", dtype="bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * config.parameters + 25 * 2**20


def test_damaged_files_are_refused_or_read_soundly(tmp_path, rng):
    tensors, _ = ternary_tensors(rng, "tq2_0", iter([0.25, 0.5, 0.125, 1.0, 0.375, 2.0, 0.75]))
    path, keys = tmp_path / "a", {"general.architecture": "llama", **metadata(BIG, "llama")}
    gpu_ops.write_gguf(path, tensors, keys)
    whole, refused = path.read_bytes(), 0
    models.load(path)
    tracemalloc.start()
    for _ in range(200):
        path.write_bytes(mutant(whole, rng))
        try:
            weights, config = models.load(path)
        except GpuOpsError:
            refused += 1
        else:
            models.Llama.of(weights.arrays(), config)
    assert tracemalloc.get_traced_memory()[1] < 40 * len(whole)
    tracemalloc.stop()
    assert refused > 100


@pytest.mark.parametrize(("name", "type"), [("tq1_0", 34), ("tq2_0", 35)])
def test_ternary_blocks_of_another_size_are_refused(name, type, gguf, tmp_path):
    codes = bytes(4 * FORMATS[name].nbytes)
    cases = [
        (codes, (4, 255), f"{name.upper()} have a multiple of 256 elements"),
        (codes[:-64], (4, 256), "should end at byte"),  # less than the padding of tensors
    ]
    for data, shape, words in cases:
        write(gguf, tmp_path / "a", [("w", data, shape, type)])
        with pytest.raises(FormatError, match=words):
            models.load(tmp_path / "a")


def test_tensors_that_share_bytes_are_refused(tmp_path):
    """Otherwise a small file would become as many arrays as it has tensor names."""
    keys = {"general.architecture": "llama", **metadata(LLAMA, "llama")}
    gpu_ops.write_gguf(tmp_path / "a", stored(made(LLAMA), LLAMA, "llama"), keys)
    data = (tmp_path / "a").read_bytes()
    at = data.index(b"blk.0.attn_k.weight") + len(b"blk.0.attn_k.weight") + 4 + 16 + 4
    (tmp_path / "a").write_bytes(data[:at] + bytes(8) + data[at + 8 :])
    with pytest.raises(FormatError, match=r"begins at byte \d+, within the one before it"):
        models.load(tmp_path / "a")
    (tmp_path / "a").write_bytes(data[:-1])
    with pytest.raises(FormatError, match="should end at byte"):
        models.load(tmp_path / "a")
