"""Saving and loading of TernaryMatrix."""

from __future__ import annotations

import io
import json
import os

import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import FormatError
from gpu_ops.formats.safetensors import header_of
from gpu_ops.reference.weights.ternary_formats import FORMATS
from tests.models.model_files import INSTALL, trits

SHAPES = {
    "bitnet_gpu": [(16, 32), (48, 64), (0, 32), (16, 0)],
    "i2_s": [(1, 128), (5, 384), (4, 96), (0, 7)],
    "tl1": [(256, 128), (512, 256), (0, 128)],
    "tl2": [(256, 96), (256, 352), (256, 0)],
    "tq1_0": [(1, 256), (3, 768), (0, 256), (3, 0)],
    "tq2_0": [(1, 256), (3, 768), (0, 256), (3, 0)],
    "q2_0": [(1, 64), (7, 192), (0, 64), (3, 0)],
}
ODD = [(1, 1), (3, 5), (4, 67), (5, 130), (0, 5), (5, 0), (0, 0)]
CASES = [(format, shape) for format in FORMATS for shape in SHAPES.get(format, ODD)]


def scales(rng, shape):
    """Scales per tensor, of every type of number; per row; per group, from few groups to one per weight."""
    n, k = shape
    yield from (0.37, 2, np.float32(-0.5), np.float64(0.37), np.float16(0.1), np.array(0.25), 0)
    yield rng.standard_normal(n).astype(np.float32)
    for groups in {1, 2, 3, 5, k // 64, k}:
        if groups and k % groups == 0:
            yield rng.standard_normal((n, groups)).astype(np.float32)


@pytest.mark.parametrize(("format", "shape"), CASES)
def test_what_is_saved_is_loaded(format, shape, tmp_path, rng, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # there are hundreds of files
    t, path = trits(rng, shape), tmp_path / "w.safetensors"
    for scale in scales(rng, shape):
        w = gpu_ops.TernaryMatrix.from_trits(t, scale, format=format)
        w.save(path)
        read = gpu_ops.TernaryMatrix.load(path)
        assert (read.format, read.shape, read.group_size) == (format, shape, w.group_size)
        assert repr(read) == repr(w)
        assert read.codes.tobytes() == w.codes.tobytes()
        assert read.scale.dtype == np.float32
        np.testing.assert_array_equal(read.scale, w.scale)
        np.testing.assert_array_equal(read.trits(), t)
        assert not read.codes.flags.writeable


def test_embedded_scales_are_kept(tmp_path, rng):
    t = trits(rng, (2, 512))
    codes = gpu_ops.ternary_pack(t, "tq2_0", scale=np.array([[0.5, 2], [3, 0.25]], np.float32))
    w = gpu_ops.TernaryMatrix(codes, 2.0, t.shape, "tq2_0")
    w.save(tmp_path / "w")
    np.testing.assert_array_equal(gpu_ops.TernaryMatrix.load(tmp_path / "w").dequantize(), w.dequantize())


def test_a_loaded_matrix_multiplies(tmp_path, rng):
    w = gpu_ops.ternary_quantize(rng.standard_normal((64, 128), dtype=np.float32), group_size=64)
    w.save(tmp_path / "w")
    x = rng.standard_normal((3, 128), dtype=np.float32)
    # the reference compiles nothing
    read, on = (
        gpu_ops.TernaryMatrix.load(tmp_path / "w"),
        {"backend": "reference"},
    )
    np.testing.assert_array_equal(gpu_ops.ternary_matmul(x, read, **on), gpu_ops.ternary_matmul(x, w, **on))


def test_the_package_safetensors_reads_the_file(tmp_path, rng):
    safetensors = pytest.importorskip("safetensors", reason=INSTALL)
    path, t = tmp_path / "w.safetensors", trits(rng, (3, 7))
    w = gpu_ops.TernaryMatrix.from_trits(t, np.arange(3, dtype=np.float32), format="base3")
    w.save(path)
    metadata = {"gpu_ops.kind": "TernaryMatrix 1", "gpu_ops.format": "base3", "gpu_ops.shape": "[3, 7]"}
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata() == metadata
        np.testing.assert_array_equal(file.get_tensor("codes"), w.codes)
        np.testing.assert_array_equal(file.get_tensor("scale"), w.scale)
    from safetensors.numpy import save_file

    save_file({"codes": w.codes, "scale": w.scale}, path, metadata=metadata)
    np.testing.assert_array_equal(gpu_ops.TernaryMatrix.load(path).dequantize(), w.dequantize())


def written(path, **changes):
    """Write a file of ``save`` with parts replaced: kind, format, shape, scale, codes, or all tensors."""
    parts = {"kind": "TernaryMatrix 1", "format": "base3", "shape": "[2, 5]"}
    parts |= {"scale": np.ones((), np.float32), "codes": np.full((2, 1), 121, np.uint8)} | changes
    metadata = {f"gpu_ops.{key}": parts[key] for key in ("kind", "format", "shape") if parts[key] is not None}
    arrays = parts.get("tensors") or {"scale": parts["scale"], "codes": parts["codes"]}
    names = {"float32": "F32", "uint8": "U8", "float16": "F16"}
    header = header_of({name: (names[str(x.dtype)], x.shape) for name, x in arrays.items()}, metadata)
    path.write_bytes(header + b"".join(x.tobytes() for x in arrays.values()))


ONE = np.ones((), np.float32)
BAD = {
    "another kind": ({"kind": "TernaryMatrix 2"}, "'TernaryMatrix 2'; expected 'TernaryMatrix 1'"),
    "no kind": ({"kind": None}, "is no file of TernaryMatrix.save"),
    "a format": ({"format": "base4"}, "'base4' is unknown; did you mean 'base3'"),
    "no format": ({"format": None}, "=None is unknown"),
    "no shape": ({"shape": None}, "Expecting value"),
    "a word for a shape": ({"shape": "two"}, "Expecting value"),
    "a number for a shape": ({"shape": "5"}, r"shape must be \(N, K\), got 5"),
    "three axes": ({"shape": "[2, 5, 1]"}, r"shape must be \(N, K\)"),
    "a negative axis": ({"shape": "[2, -5]"}, "shape must be an integer|-5"),
    "a deep shape": ({"shape": "[" * 99_999}, "recursion"),
    "another shape": ({"shape": "[2, 6]"}, "which base3 does not take for"),
    "an endless axis": ({"shape": f"[0, {2**60}]"}, "more than 2"),
    "bytes that are no trits": ({"codes": np.full((2, 1), 250, np.uint8)}, "value 250 at"),
    "scales of another shape": ({"scale": np.ones(3, np.float32)}, r"scale has shape \(3,\)"),
    "a scale that is NaN": ({"scale": ONE * np.nan}, "scale holds NaN or infinity"),
    "scales of float16": ({"scale": np.ones((), np.float16)}, "and the tensors 'scale' and 'codes'"),
    "a tensor more": (
        {"tensors": {"scale": ONE, "codes": np.zeros((2, 1), np.uint8), "x": ONE}},
        "the tensors",
    ),
    "a tensor less": ({"tensors": {"codes": np.full((2, 1), 121, np.uint8)}}, "and the tensors"),
}


@pytest.mark.parametrize("what", BAD)
def test_other_files_are_refused(what, tmp_path):
    path = tmp_path / "w"
    written(path)
    gpu_ops.TernaryMatrix.load(path)
    changes, message = BAD[what]
    written(path, **changes)
    with pytest.raises(FormatError, match=f"^TernaryMatrix.load: {path}.*{message}"):
        gpu_ops.TernaryMatrix.load(path)


def entry(dtype="U8", shape=(4,), span=(0, 4)):
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


HEADERS = {
    "no object": "[]",
    "a space first": ' {"a": 1}',
    "no JSON": "{",
    "no UTF-8": b'{"\xff": 1}',
    "a key twice": '{"a": 1, "a": 2}',
    "deep": '{"a":' * 99_999,
    "metadata of numbers": {"__metadata__": {"a": 1}},
    "metadata in a list": {"__metadata__": ["a"]},
    "an entry that is no object": {"a": 5},
    "no offsets": {"a": {"dtype": "U8", "shape": [4]}},
    "a member more": {"a": {**entry(), "x": 1}},
    "a dtype that is no string": {"a": entry(dtype=[])},
    "a shape of booleans": {"a": entry(shape=[True, 4])},
    "a shape of floats": {"a": entry(shape=[4.0])},
    "a negative shape": {"a": entry(shape=[-2, -2])},
    "a huge shape": {"a": entry(shape=[2**63, 0], span=(0, 0))},
    "many axes": {"a": entry(shape=[1] * 99 + [4])},
    "a shape of another size": {"a": entry(shape=[5])},
    "offsets backwards": {"a": entry(span=(4, 0))},
    "one offset": {"a": entry(span=(4,))},
    "beyond the end": {"a": entry(shape=[5], span=(0, 5))},
    "a gap": {"a": entry(shape=[3], span=(1, 4))},
    "bytes after the last": {"a": entry(shape=[3], span=(0, 3))},
    "an overlap": {"a": entry(), "b": entry(shape=[2], span=(1, 3))},
    "the same bytes twice": {"a": entry(), "b": entry()},
}


@pytest.mark.parametrize("what", HEADERS)
def test_damaged_safetensors_headers_are_refused(what, tmp_path):
    """Every file that the package refuses is refused, with the error message of the package."""
    path, text = tmp_path / "a", HEADERS[what]
    data = text if isinstance(text, bytes) else (text if isinstance(text, str) else json.dumps(text)).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data + b"\1\2\3\4")
    for read in (gpu_ops.TernaryMatrix.load, lambda p: gpu_ops.read_bitnet(p, weight_scale="divide")):
        with pytest.raises(FormatError, match=f"{path} cannot be read as a safetensors file: "):
            read(path)


@pytest.mark.parametrize("size", [0, 7, 8])
def test_short_safetensors_files_are_refused(size, tmp_path):
    (tmp_path / "a").write_bytes(b"\xff" * size)
    with pytest.raises(FormatError, match=r"cannot be read as a safetensors file: (it has|its header)"):
        gpu_ops.TernaryMatrix.load(tmp_path / "a")


def test_a_header_beyond_the_longest_is_refused(tmp_path):
    (tmp_path / "a").write_bytes((1 << 25).to_bytes(8, "little") + b" " * (1 << 25))
    with pytest.raises(FormatError, match="its header has 33554432 bytes; at most 16777216 are read"):
        gpu_ops.TernaryMatrix.load(tmp_path / "a")


@pytest.mark.parametrize("name", FORMATS)
def test_a_formats_name_may_come_from_an_npz_file(name):
    """np.load gives a 0-d array of the string. Calls that differ only in its value are not confused."""
    t = np.ones((256, 768), np.int8)
    file = io.BytesIO()
    np.savez(file, codes=gpu_ops.ternary_pack(t, name), format=name, scale=0.5)
    file.seek(0)
    saved = np.load(file)
    format = saved["format"]
    assert (format.shape, format.dtype.kind) == ((), "U")
    w = gpu_ops.TernaryMatrix(saved["codes"], saved["scale"], t.shape, format)
    assert type(w.format) is str
    assert w.format == name
    assert w.scale == np.float32(0.5)
    assert w.to(format) is w
    assert gpu_ops.TernaryMatrix.from_trits(t, format=format).to(np.array("w2")).format == "w2"
    # arrays that differ only in value
    words = [np.array(other, "U10") for other in ("w2", name, "i2_s", name)]
    for word in (format, *words, np.str_(name), np.array(name, np.dtypes.StringDType())):
        plain = str(word)
        np.testing.assert_array_equal(gpu_ops.ternary_pack(t, word), gpu_ops.ternary_pack(t, plain))
        codes = gpu_ops.ternary_pack(t, plain)
        np.testing.assert_array_equal(gpu_ops.ternary_unpack(codes, t.shape, word), t)
