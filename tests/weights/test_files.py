"""Readers of model files: small files, written by the packages of their formats."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import FormatError, MissingFileError, OptionError, ShapeError
from gpu_ops.reference.weights.ternary_formats import FORMATS
from tests.models.model_files import INSTALL, in_file, trits, write
from tests.weights.tables import TABLES

# ---- safetensors -------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path, rng):
    """Folder with two shards, in the format of transformers: packed weights, scales, a bias, an embedding."""
    numpy = pytest.importorskip("safetensors.numpy", reason=INSTALL)
    t = {"layers.0.up": trits(rng, (12, 5)), "layers.0.down": trits(rng, (6, 8))}
    scale = {"layers.0.up": 0.5, "layers.0.down": 0.25}
    bf16 = ml_dtypes.bfloat16

    def packed(name):
        codes = np.frombuffer(TABLES["hf_bitnet"](t[name]), np.uint8)
        return codes.reshape(-1, t[name].shape[1])

    first = {
        "layers.0.up.weight": packed("layers.0.up"),
        "layers.0.up.weight_scale": np.array([scale["layers.0.up"]], bf16),
        "embed.weight": rng.standard_normal((3, 5)).astype(bf16),
        "layers.0.down.bias": np.zeros(6, bf16),  # 6 outputs, not 8
    }
    second = {
        "layers.0.down.weight": packed("layers.0.down"),
        "layers.0.down.weight_scale": np.array([scale["layers.0.down"]], np.float32),
    }
    numpy.save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    numpy.save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path, t, scale


def config_of(linear_class):
    entries = {} if linear_class is None else {"linear_class": linear_class}
    return {"hidden_size": 5, "quantization_config": {"quant_method": "bitnet", **entries}}


def test_a_tensor_in_two_files_is_refused(checkpoint):
    path, _, _ = checkpoint
    second = path / "model-00002-of-00002.safetensors"
    second.write_bytes((path / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(FormatError, match=rf"is in {second.name} and in a file before it"):
        gpu_ops.read_bitnet(path, weight_scale="multiply")


@pytest.mark.parametrize(
    ("linear_class", "divides"), [("autobitlinear", False), ("bitlinear", True), (None, True)]
)
def test_the_config_says_whether_the_scale_divides(checkpoint, linear_class, divides):
    path, t, scale = checkpoint
    (path / "config.json").write_text(json.dumps(config_of(linear_class)))
    read = gpu_ops.read_bitnet(path)
    assert set(read) == set(t)
    for name, w in read.items():
        assert w.format == "hf_bitnet"
        np.testing.assert_array_equal(w.trits(), t[name])
        factor = 1 / scale[name] if divides else scale[name]
        np.testing.assert_array_equal(w.dequantize(), t[name] * np.float32(factor))


def test_the_caller_says_whether_the_scale_divides(checkpoint):
    path, t, _ = checkpoint
    file = path / "model-00001-of-00002.safetensors"
    for meaning, factor in (("multiply", 0.5), ("divide", 2.0)):
        read = gpu_ops.read_bitnet(file, weight_scale=meaning)
        assert list(read) == ["layers.0.up"]
        assert read["layers.0.up"].scale == factor
    matrices = gpu_ops.read_bitnet(file, config=config_of("autobitlinear"), names=["layers.0.up"])
    np.testing.assert_array_equal(matrices["layers.0.up"].trits(), t["layers.0.up"])


def test_a_scale_of_unknown_meaning_is_refused(checkpoint):
    path, _, _ = checkpoint
    message = "read_bitnet: whether weight_scale multiplies or divides is written nowhere: pass weight_scale="
    with pytest.raises(OptionError, match=message):
        gpu_ops.read_bitnet(path)
    with pytest.raises(OptionError, match=message):
        gpu_ops.read_bitnet(path, config={"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(
        OptionError, match="weight_scale='divide', but the config's linear_class says 'multiply'"
    ):
        gpu_ops.read_bitnet(path, weight_scale="divide", config=config_of("autobitlinear"))
    with pytest.raises(OptionError, match="linear_class='linear' is unknown"):
        gpu_ops.read_bitnet(path, config=config_of("linear"))
    with pytest.raises(OptionError, match="did you mean 'divide'"):
        gpu_ops.read_bitnet(path, weight_scale="divided")


def test_a_path_to_nothing_is_what_both_readers_say(tmp_path):
    missing = tmp_path / "nothing"
    for read in (gpu_ops.read_bitnet, gpu_ops.read_gguf):
        with pytest.raises(MissingFileError, match=r"No such file or directory: '.*nothing'"):
            read(missing)


def test_bad_checkpoints_are_refused(checkpoint, tmp_path_factory):
    import safetensors.numpy

    path, _, _ = checkpoint
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(OptionError, match=r"no .safetensors file"):
        gpu_ops.read_bitnet(empty, weight_scale="multiply")
    with pytest.raises(
        OptionError, match=r"no ternary 'layers.0.upp', but 2 others; did you mean 'layers.0.up'"
    ):
        gpu_ops.read_bitnet(path, weight_scale="multiply", names=["layers.0.upp"])
    good = {"a.weight": np.zeros((2, 5), np.uint8), "a.weight_scale": np.ones(1, np.float32)}
    for change, message in (
        (
            {"a.weight": np.full((2, 5), 3, np.uint8)},
            r"read_bitnet: a: TernaryMatrix: hf_bitnet: code 3 at \(0, 0\)",
        ),
        ({"a.weight": np.ones((8, 5), np.float32)}, r"a weight of F32 \(8, 5\); expected the packed"),
        (
            {"a.weight_scale": np.zeros(1, np.float32)},
            "a.weight_scale is 0.0; a scale is finite and positive",
        ),
        ({"a.weight_scale": np.array([np.nan], np.float32)}, "a.weight_scale is nan"),
        ({"a.weight_scale": np.ones(2, np.float32)}, r"F32 and shape \(2,\); expected one number"),
    ):
        file = empty / "bad.safetensors"
        safetensors.numpy.save_file({**good, **change}, file)
        with pytest.raises(FormatError, match=message):
            gpu_ops.read_bitnet(file, weight_scale="divide")
    file.write_bytes(b"no safetensors at all")
    with pytest.raises(FormatError, match=r"bad.safetensors"):
        gpu_ops.read_bitnet(file, weight_scale="divide")
    (empty / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"config.json is not JSON"):
        gpu_ops.read_bitnet(file)


# ---- GGUF --------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf", reason=INSTALL)


CASES = [
    ("tq1_0", 34, (4, 512)),
    ("tq2_0", 35, (4, 512)),
    ("i2_s", 36, (4, 96)),
    ("tl1", 38, (256, 128)),
    ("tl2", 42, (256, 352)),
    ("tl2", 39, (256, 96)),
    ("q2_0", 42, (3, 192)),
]


@pytest.mark.parametrize(("name", "type", "shape"), CASES)
def test_read_gguf(gguf, name, type, shape, tmp_path, rng):
    t, path = trits(rng, shape), tmp_path / "model.gguf"
    tensors = [
        ("token_embd.weight", np.ones(6, np.float32).tobytes(), (2, 3), 0),
        ("blk.0.ffn_up.weight", in_file(name, t, 0.125), shape, type),
        ("blk.0.norm.weight", np.ones(5, np.float32).tobytes(), (5,), 0),
    ]
    write(gguf, path, tensors)
    certain = type in (34, 35)
    read = gpu_ops.read_gguf(path, formats=None if certain else {type: name})
    assert list(read) == ["blk.0.ffn_up.weight"]
    w = read["blk.0.ffn_up.weight"]
    assert w.format == name
    np.testing.assert_array_equal(w.trits(), t)
    assert w.scale == (1.0 if FORMATS[name].block_scale else 0.125)
    if not certain and type != 39:
        with pytest.raises(OptionError, match=f"has type {type}, which is .*{name}.*; say which: formats="):
            gpu_ops.read_gguf(path)


def test_the_package_writes_what_is_read(gguf, tmp_path, rng):
    """Read tq1_0 and tq2_0 that the gguf package alone has quantised, written and typed."""
    path, scale = tmp_path / "model.gguf", np.float16(0.3)
    writer, dense = gguf.GGUFWriter(path, "bitnet"), {}
    for name in ("TQ1_0", "TQ2_0"):
        tensor_type = gguf.GGMLQuantizationType[name]
        t = trits(rng, (4, 512))
        t[:, ::256] = 1
        data = gguf.quantize((t * np.float32(scale)).astype(np.float32), tensor_type)
        writer.add_tensor(name, data, raw_dtype=tensor_type)
        dense[name] = gguf.dequantize(data, tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = gpu_ops.read_gguf(path)
    assert set(read) == set(dense)
    for name, w in read.items():
        np.testing.assert_array_equal(w.dequantize(), dense[name])
    path.unlink()  # the codes are a copy
    assert read["TQ1_0"].trits().shape == (4, 512)


def test_bad_gguf_files_are_refused(gguf, tmp_path, rng):
    path, t = tmp_path / "model.gguf", trits(rng, (4, 256))
    good = in_file("tq2_0", t, 1)
    for tensor, error, message in (
        (("w", good[:-80], (4, 256), 35), FormatError, "w: the file ends .* bytes before the tensor does"),
        (("w", b"\xff" * len(good), (4, 256), 35), FormatError, "read_gguf: w: TernaryMatrix: tq2_0: "),
        (("w", good, (4, 255), 35), ShapeError, r"w: format 'tq2_0' needs K % 256 == 0"),
        (("w", good, (2, 2, 256), 35), ShapeError, "two axes"),
        (("w", in_file("i2_s", t, np.nan), (4, 256), 36), FormatError, "the scale behind the codes is nan"),
    ):
        write(gguf, path, [tensor])
        with pytest.raises(error, match=message):
            gpu_ops.read_gguf(path, formats={36: "i2_s"})
    with pytest.raises(OptionError, match="no ternary 'v'"):
        gpu_ops.read_gguf(path, names=["v"])
    with pytest.raises(OptionError, match="formats='w2' is unknown; allowed"):
        gpu_ops.read_gguf(path, formats={36: "w2"})
    whole = path.read_bytes()
    for size in (0, 3, 20, 40, 60, 100):
        path.write_bytes(whole[:size] or b"\0")
        with pytest.raises(FormatError, match="cannot be read as a GGUF file"):
            gpu_ops.read_gguf(path)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_damaged_files_are_read_or_refused(kind, gguf, tmp_path, rng):
    """Replacing bytes of the header or the codes, 300 times, gives matrices or a typed error."""
    numpy = pytest.importorskip("safetensors.numpy", reason=INSTALL)
    path, t = tmp_path / f"a.{kind}", trits(rng, (4, 256))
    if kind == "gguf":
        write(gguf, path, [("a", in_file("i2_s", t, 2), t.shape, 36)])
    else:
        codes = gpu_ops.ternary_pack(t, "hf_bitnet")
        numpy.save_file({"a.weight": codes, "a.weight_scale": np.ones(1, np.float32)}, path)
    whole, outcomes = path.read_bytes(), set()
    for _ in range(300):
        damaged = bytearray(whole)
        for position in rng.integers(0, 250, 2):
            damaged[position] = rng.choice([0, 255, rng.integers(256)])
        path.write_bytes(damaged)
        try:
            if kind == "gguf":
                gpu_ops.read_gguf(path, formats={36: "i2_s"})
            else:
                gpu_ops.read_bitnet(path, weight_scale="multiply")
            outcomes.add("read")
        except gpu_ops.errors.GpuOpsError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
