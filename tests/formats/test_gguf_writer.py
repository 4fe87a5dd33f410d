"""GGUF files written by gpu_ops, read by the gguf package and by gpu_ops; and files written by the package."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import DTypeError, FormatError, OptionError, ShapeError
from gpu_ops.formats.gguf_file import GGUFFile
from gpu_ops.formats.gguf_header import FLOAT_TYPES, NUMBER_TYPES, PACKED_TYPES
from gpu_ops.reference.weights.packed_formats import FORMATS
from tests.models.model_files import INSTALL, trits

Q2_0 = {42: "q2_0"}


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf", reason=INSTALL)


def floats(rng):
    """Arrays of every dtype, with 1 to 4 axes and odd lengths."""
    shapes = {"a": (5,), "b": (3, 7), "c": (2, 3, 5), "d": (1, 2, 3, 1)}
    dtypes = (np.float32, np.float16, ml_dtypes.bfloat16)
    return {f"{n}.{np.dtype(d)}": rng.standard_normal(s).astype(d) for n, s in shapes.items() for d in dtypes}


def matrix(rng, format, shape, scale=1.0):
    return gpu_ops.TernaryMatrix.from_trits(trits(rng, shape), scale, format=format)


def test_floats_are_read_back_by_the_package_byte_for_byte(gguf, tmp_path, rng):
    path, tensors = tmp_path / "a.gguf", floats(rng)
    tensors["transposed"] = rng.standard_normal((4, 6)).astype(np.float32).T
    tensors["strided"] = rng.standard_normal((4, 6)).astype(np.float16)[::2, ::-1]
    gpu_ops.write_gguf(path, tensors)
    read = gguf.GGUFReader(path).tensors
    assert [tensor.name for tensor in read] == list(tensors)
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    for tensor in read:
        expected = tensors[tensor.name]
        assert tensor.tensor_type.name == names[str(expected.dtype)]
        assert tuple(reversed(tensor.shape.tolist())) == expected.shape
        assert tensor.data.tobytes() == expected.tobytes()
        assert tensor.data_offset % 32 == 0
    assert gpu_ops.read_gguf(path) == {}


def test_a_long_tensor_is_read_in_pieces(tmp_path, rng):
    """Two whole pieces of 2^20 numbers and a part of a third."""
    path, x = tmp_path / "a.gguf", rng.standard_normal((2200, 1000)).astype(np.float16)
    gpu_ops.write_gguf(path, {"v": np.ones(3, np.float32), "x": x})
    with path.open("rb") as file:
        pieces = list(GGUFFile("read_gguf", path, file).pieces("x"))
    assert [piece.size for piece in pieces] == [1 << 20, 1 << 20, 2_200_000 - (1 << 21)]
    np.testing.assert_array_equal(np.concatenate(pieces), x.reshape(-1))


@pytest.mark.parametrize("format", ["tq1_0", "tq2_0", "q2_0"])
@pytest.mark.parametrize("per", ["one", "tensor", "row", "group"])
def test_ternary_matrices_are_read_back(format, per, tmp_path, rng):
    path, n, k = tmp_path / "a.gguf", 3, 1024
    scale = {
        "one": np.float32(1),
        "tensor": np.float32(0.37),
        "row": rng.uniform(-2, 2, n).astype(np.float32),
        "group": rng.uniform(0, 2, (n, 2)).astype(np.float32),  # of 512: several blocks
    }[per]
    w = matrix(rng, format, (n, k), scale)
    gpu_ops.write_gguf(path, {"w": w, "v": np.ones(3, np.float32)})
    (name, read), *others = gpu_ops.read_gguf(path, formats=Q2_0).items()
    assert (name, others, read.format, read.shape) == ("w", [], format, (n, k))
    np.testing.assert_array_equal(read.trits(), w.trits())
    columns = np.broadcast_to(
        scale.reshape(-1, 1) if scale.ndim < 2 else np.repeat(scale, 512, axis=1), (n, k)
    )
    np.testing.assert_array_equal(
        read.dequantize(), w.trits() * columns.astype(np.float16).astype(np.float32)
    )
    if per == "one":
        assert read.codes.tobytes() == w.codes.tobytes()
    again = tmp_path / "b.gguf"
    gpu_ops.write_gguf(again, {"w": read, "v": np.ones(3, np.float32)})
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", [name for name in PACKED_TYPES if FORMATS[name].encode is not None])
def test_packed_matrices_are_read_back_by_the_package(name, gguf, tmp_path, rng):
    w = gpu_ops.quantize(rng.standard_normal((5, 512)).astype(np.float32), name)
    gpu_ops.linear(np.ones((1, 512), np.float32), w)  # replaces the blocks
    gpu_ops.write_gguf(tmp_path / "a.gguf", {"w": w})
    (read,) = gguf.GGUFReader(tmp_path / "a.gguf").tensors
    assert read.tensor_type.name == name.upper()
    np.testing.assert_array_equal(gguf.quants.dequantize(read.data, read.tensor_type), w.dequantize())


@pytest.mark.parametrize("name", FLOAT_TYPES)
def test_packed_floats_are_written_as_the_array(name, tmp_path, rng):
    w = rng.standard_normal((5, 64)).astype(name)
    packed = gpu_ops.quantize(w, name)
    gpu_ops.linear(np.ones((1, 64), np.float32), packed)
    gpu_ops.write_gguf(tmp_path / "a.gguf", {"w": packed})
    gpu_ops.write_gguf(tmp_path / "b.gguf", {"w": w})
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_packed_matrices_that_gguf_lacks_are_refused(tmp_path):
    w = np.ones((2, 64), np.float32)
    mixed = gpu_ops.PackedMatrix.joined([gpu_ops.quantize(w, name) for name in ("q4_0", "q8_0")])
    nested = gpu_ops.quantize(w, "nf4_nested")
    for matrix_, words in (
        (gpu_ops.quantize(w, "nf4"), "nf4"),
        (nested, "nf4_nested"),
        (mixed, "q4_0 and q8_0"),
    ):
        with pytest.raises(FormatError, match=words):
            gpu_ops.write_gguf(tmp_path / "a.gguf", {"w": matrix_})
    assert not list(tmp_path.iterdir())


def test_a_scale_apart_multiplies_the_embedded_ones(tmp_path, rng):
    t, embedded = trits(rng, (2, 512)), np.array([[0.5, 2], [3, 0.25]], np.float32)
    codes = gpu_ops.ternary_pack(t, "tq2_0", scale=embedded)
    w = gpu_ops.TernaryMatrix(codes, np.array([4, -0.5], np.float32), t.shape, "tq2_0")
    gpu_ops.write_gguf(tmp_path / "a.gguf", {"w": w})
    read = gpu_ops.read_gguf(tmp_path / "a.gguf")["w"]
    np.testing.assert_array_equal(read.dequantize(), w.dequantize())
    np.testing.assert_array_equal(w.dequantize()[:, ::256] != 0, t[:, ::256] != 0)


@pytest.mark.parametrize("format", ["tq1_0", "tq2_0"])
def test_the_package_dequantises_what_is_written(format, gguf, tmp_path, rng):
    w = matrix(rng, format, (4, 512), np.float32(0.37))
    gpu_ops.write_gguf(tmp_path / "a.gguf", {"w": w})
    (tensor,) = gguf.GGUFReader(tmp_path / "a.gguf").tensors
    assert tensor.tensor_type.name == format.upper()
    expected = w.trits() * np.float32(np.float16(0.37))
    np.testing.assert_array_equal(gguf.dequantize(tensor.data, tensor.tensor_type), expected)


VALUES = {
    "general.architecture": "bitnet",
    "a.text": "ä\n€𝄞",
    "a.empty": "",
    "a.true": True,
    "a.false": np.bool_(False),
    "a.float": 0.1,
    "a.infinity": float("-inf"),
    **{f"a.{dtype}": np.dtype(dtype).type(1) for dtype in NUMBER_TYPES.values()},
    "a.least": np.int64(-(2**63)),
    "a.most": np.uint64(2**64 - 1),
    "a.double": np.float64(1e300),
    "a.words": ["x", "", "zzz"],
    "a.word_array": np.array(["x", "yy"]),
    "a.flags": [True, False],
    "a.counts": (1, 2, 3),
    "a.floats": [0.5, float("inf")],
    "a.scalars": [np.int8(-1), np.int8(3)],
    **{f"a.array_{dtype}": np.arange(5).astype(dtype) for dtype in NUMBER_TYPES.values()},
    "a.swapped": np.arange(3, dtype=">i4"),
    "a.strided": np.arange(6, dtype=np.float64)[::2],
    "a.no_items": np.empty(0, np.int16),
}


def test_metadata_of_every_type_is_read_back(gguf, tmp_path):
    gpu_ops.write_gguf(tmp_path / "a.gguf", {}, VALUES)
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert [name for name in fields if not name.startswith("GGUF.")] == list(VALUES)
    for name, value in VALUES.items():
        if name == "a.no_items":  # the package's contents() fails on it
            continue
        read, value_array = fields[name].contents(), np.asarray(value)
        expected = np.float32(value_array) if value is VALUES["a.float"] else value_array
        np.testing.assert_array_equal(np.asarray(read), expected)
    types = {name: [entry.name for entry in fields[name].types] for name in VALUES}
    for type, dtype in NUMBER_TYPES.items():
        assert types[f"a.{dtype}"] == [gguf.GGUFValueType(type).name]
        assert types[f"a.array_{dtype}"] == ["ARRAY", gguf.GGUFValueType(type).name]
    assert types["a.float"] == ["FLOAT32"]
    assert types["a.counts"] == ["ARRAY", "UINT32"]
    assert types["a.words"] == ["ARRAY", "STRING"]
    assert types["a.scalars"] == ["ARRAY", "INT8"]


@pytest.mark.parametrize(
    ("value", "type"),
    [(0, "UINT32"), (2**32 - 1, "UINT32"), (-1, "INT32"), (2**32, "UINT64"), (-(2**31) - 1, "INT64"),
     ([-1, 2**31], "INT64"), ([0, 2**63], "UINT64")],
)  # fmt: skip
def test_an_int_takes_the_first_type_that_holds_it(value, type, gguf, tmp_path):
    gpu_ops.write_gguf(tmp_path / "a.gguf", {}, {"x": value})
    field = gguf.GGUFReader(tmp_path / "a.gguf").fields["x"]
    assert (field.types[-1].name, field.contents()) == (type, value)


def test_nested_lists(gguf, tmp_path, rng):
    """Check nested lists by their bytes, and by the reader of gpu_ops, which skips them."""
    w, nested = matrix(rng, "tq2_0", (2, 256)), [[1, 2], [3]]
    gpu_ops.write_gguf(
        tmp_path / "a.gguf", {"w": w}, {"n": nested, "m": np.ones((2, 3), np.int8), "s": [["x"], ["y"]]}
    )
    header = (tmp_path / "a.gguf").read_bytes()
    inner = b"".join(
        np.array(4, "<u4").tobytes() + np.array(len(x), "<u8").tobytes() + np.array(x, "<u4").tobytes()
        for x in nested
    )
    assert b"n" + np.array([9, 9], "<u4").tobytes() + np.array(2, "<u8").tobytes() + inner in header
    np.testing.assert_array_equal(gpu_ops.read_gguf(tmp_path / "a.gguf")["w"].trits(), w.trits())


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_the_file_is_that_of_the_package(alignment, gguf, tmp_path, rng):
    tensors = {
        "token_embd.weight": rng.standard_normal((3, 5)).astype(np.float32),
        "norm": rng.standard_normal(7).astype(np.float16),
        "w": matrix(rng, "tq1_0", (3, 512)),
    }
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "bitnet")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_uint32("bitnet.block_count", 2)
    writer.add_float32("bitnet.eps", 1e-5)
    writer.add_array("tokens", ["a", "b"])
    writer.add_bool("flag", True)
    for name, x in tensors.items():
        if name == "w":
            writer.add_tensor(name, x.codes, raw_dtype=gguf.GGMLQuantizationType.TQ1_0)
        else:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = {"general.architecture": "bitnet", **({"general.alignment": alignment} if alignment else {})}
    metadata |= {"bitnet.block_count": 2, "bitnet.eps": 1e-5, "tokens": ["a", "b"], "flag": True}
    gpu_ops.write_gguf(tmp_path / "ours.gguf", tensors, metadata)
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_what_cannot_be_written_is_refused_and_nothing_is_left(tmp_path, rng):
    w2, path = matrix(rng, "w2", (2, 256)), tmp_path / "a.gguf"
    small = gpu_ops.TernaryMatrix.from_trits(w2.trits(), np.full((2, 8), 0.5, np.float32), format="tq2_0")
    array = np.ones(3, np.float32)
    path.write_bytes(b"old")
    for tensors, metadata, error, message in (
        (
            {"w": w2},
            None,
            FormatError,
            r"write_gguf: w is a TernaryMatrix in the format 'w2'.*\.to\('tq2_0'\)",
        ),
        ({"w": small}, None, FormatError, "w has a scale per 32 weights, and tq2_0 holds one per 256"),
        (
            {"w": matrix(rng, "q2_0", (2, 256), 1e5)},
            None,
            FormatError,
            "w has the scale 100000.0, and q2_0 stores",
        ),
        ({"w": matrix(rng, "q2_0", (2, 256), 1e-9)}, None, FormatError, "stores scales as float16"),
        ({"w": np.ones((0, 3), np.float32)}, None, ShapeError, r"w has shape \(0, 3\).*none of length 0"),
        ({"w": matrix(rng, "tq2_0", (0, 256))}, None, ShapeError, "none of length 0"),
        ({"w": np.array(1, np.float32)}, None, ShapeError, "1 to 4 axes"),
        ({"w": np.ones((1,) * 5, np.float32)}, None, ShapeError, "1 to 4 axes"),
        (
            {"w": np.ones(3)},
            None,
            DTypeError,
            "w is float64; expected float32, float16, bfloat16, a PackedMatrix or a Ternary",
        ),
        ({"w": [1.0]}, None, DTypeError, "write_gguf: w is list, not an array"),
        ({5: array}, None, OptionError, "a tensor's name is a string of 1 to 63 bytes, got 5"),
        ({"ä" * 32: array}, None, OptionError, "1 to 63 bytes"),
        ({"": array}, None, OptionError, "1 to 63 bytes"),
        ({"\ud800": array}, None, OptionError, "no text that UTF-8 can hold"),
        ([("w", array)], None, OptionError, "tensors must be a dict, got list"),
        (None, None, OptionError, "tensors must be a dict, got NoneType"),
        ({}, [], OptionError, "metadata must be a dict, got list"),
        ({}, {5: 1}, OptionError, "a key of metadata is a string"),
        ({}, {"k" * 65536: 1}, OptionError, "1 to 65535 bytes"),
        ({}, {"k": "\ud800"}, OptionError, "no text that UTF-8 can hold"),
        ({}, {"k": None}, DTypeError, "k is NoneType; GGUF has types for"),
        ({}, {"k": np.float16(1)}, DTypeError, "k is float16"),
        ({}, {"k": np.ones(3, np.float16)}, DTypeError, "k is float16"),
        ({}, {"k": 1j}, DTypeError, "k is complex"),
        ({}, {"k": b"bytes"}, DTypeError, "k is bytes"),
        ({}, {"k": {}}, DTypeError, "k is dict"),
        ({}, {"k": np.datetime64(1, "s")}, DTypeError, "k is datetime64"),
        ({}, {"k": [1, "x"]}, OptionError, "k is a list of several types"),
        ({}, {"k": [1, 2.0]}, OptionError, "k is a list of several types"),
        ({}, {"k": [True, 1]}, OptionError, "k is a list of several types"),
        ({}, {"k": []}, OptionError, "k is an empty list, which has no type"),
        ({}, {"k": 2**64}, OptionError, "no 64 bits hold"),
        ({}, {"k": [-1, 2**64 - 1]}, OptionError, "no 64 bits hold"),
        ({}, {"k": 1e300}, OptionError, "beyond float32.*pass np.float64"),
        ({}, {"general.alignment": 12}, OptionError, "general.alignment must be a power of two"),
        ({}, {"general.alignment": np.int64(32)}, OptionError, "general.alignment must be a power of two"),
        ({}, {"general.alignment": "x"}, OptionError, "general.alignment must be a power of two"),
        ({}, {"general.alignment": 4}, OptionError, "general.alignment must be a power of two"),
    ):
        with pytest.raises(error, match=message):
            gpu_ops.write_gguf(path, tensors, metadata)
        assert [file.name for file in tmp_path.iterdir()] == ["a.gguf"]
        assert path.read_bytes() == b"old"


def test_a_list_within_itself_is_refused(tmp_path):
    circle = []
    circle.append(circle)
    with pytest.raises(OptionError, match="metadata holds a list within itself"):
        gpu_ops.write_gguf(tmp_path / "a.gguf", {}, {"k": circle})
