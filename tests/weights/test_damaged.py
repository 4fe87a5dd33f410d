"""Damaged, foreign or odd model files: a typed error that names the module, and never a wrong number."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import FormatError, OptionError, ShapeError
from tests.models.model_files import INSTALL, in_file, trits, write
from tests.support.laws import python_calls

# ---- GGUF --------------------------------------------------------------------------------------------------

I2_S = {36: "i2_s"}


def header(tensors=(), keys=b"", n_keys=0, version=3):
    """GGUF header of (name, dimensions, type), as bytes."""
    made = b"GGUF" + struct.pack("<IQQ", version, len(tensors), n_keys) + keys
    for name, dims, type in tensors:
        made += struct.pack("<Q", len(name)) + name.encode()
        made += struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type, 0)
    return made


def key(name, type, value):
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", type) + value


def test_headers_of_every_kind_of_value_are_read(tmp_path, rng):
    """Values as the package writes them, and arrays of arrays; tensors start at the alignment of the file."""
    package, path, t = pytest.importorskip("gguf", reason=INSTALL), tmp_path / "a.gguf", trits(rng, (4, 256))
    writer = package.GGUFWriter(path, "bitnet")
    writer.add_custom_alignment(256)
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "bool"):
        getattr(writer, f"add_{name}")(name, 1)
    for name, values in (("s", ["x", "", "zzz"]), ("i", [1, 2, 3]), ("f", [0.5]), ("n", [[1, 2], [3, 4]])):
        writer.add_array(name, values)
    tensor_type = package.GGMLQuantizationType.TQ2_0
    codes = np.frombuffer(in_file("tq2_0", t, 1), np.uint8).reshape(4, -1)
    writer.add_tensor("first", np.ones(3, np.float32))
    writer.add_tensor("w", codes, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_array_equal(gpu_ops.read_gguf(path)["w"].trits(), t)


@pytest.mark.parametrize("alignment", [8, 64, 256])
def test_tensors_start_at_the_alignment_of_the_file(alignment, tmp_path, rng):
    """A header of 137 bytes ends where rounding up to each alignment, and to 32, gives another start."""
    t, path, name = trits(rng, (1, 256)), tmp_path / "a.gguf", "w" * 40
    data = header([(name, (256, 1), 35)], key("general.alignment", 4, struct.pack("<I", alignment)), 1)
    assert len(data) == 137
    data = data.ljust(-(-len(data) // alignment) * alignment, b"\x55")
    path.write_bytes(data + in_file("tq2_0", t, 1) + bytes(256))
    np.testing.assert_array_equal(gpu_ops.read_gguf(path)[name].trits(), t)


BAD_HEADERS = {
    "an array longer than the file": (
        header((), key("ids", 9, struct.pack("<IQ", 5, 2**40)), 1),
        "should follow",
    ),
    "strings beyond the end": (header((), key("ids", 9, struct.pack("<IQ", 8, 2**60)), 1), "should follow"),
    "a string beyond the end": (
        header((), key("ids", 9, struct.pack("<IQQQ", 8, 2, 0, 2**60)), 1),
        "a string should end",
    ),
    "more strings than a vocabulary has": (
        header((), key("ids", 9, struct.pack("<IQ", 8, 2**22) + bytes(2**25)), 1),
        "more than 2097152 strings",
    ),
    "arrays beyond the end": (header((), key("ids", 9, struct.pack("<IQ", 9, 2**60)), 1), "should follow"),
    "values of no type": (header((), key("ids", 9, struct.pack("<IQ", 13, 2**60)), 1), "2097152 strings"),
    "more tensors than models have": (
        b"GGUF" + struct.pack("<IQQ", 3, 2**19, 0) + bytes(24 << 19),
        "at most 262144 are read",
    ),
    "a name beyond the longest": (header((), struct.pack("<Q", 2**16) + bytes(2**17), 1), "at most 65535"),
    "arrays without end": (header((), key("a", 9, struct.pack("<IQ", 9, 1) * 9999), 1), "recursion"),
    "a long name": (header((), struct.pack("<Q", 2**63), 1), "should follow"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "should follow"),
    "many axes": (b"GGUF" + struct.pack("<IQQQI", 3, 1, 0, 0, 2**32 - 1) + bytes(12), "4294967295 axes"),
    "a type of value": (header((), key("a", 13, bytes(8)), 1), "no value has type 13"),
    "a key twice": (header((), 2 * key("a", 0, b"0"), 2), "the key 'a' twice"),
    "an alignment": (header((), key("general.alignment", 4, bytes(4)), 1), "alignment is 0"),
    "a version": (header(version=1), "version 1; 2 and 3 are known"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "only little-endian files are read"),
    "two tensors of a name": (header([("w", (256, 4), 35)] * 2), "two tensors 'w'"),
}


@pytest.mark.parametrize("what", BAD_HEADERS)
def test_bad_headers_are_refused_at_once(what, tmp_path):
    data, message = BAD_HEADERS[what]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)

    def read():
        with pytest.raises(
            FormatError, match=f"^read_gguf: .*a.gguf cannot be read as a GGUF file: .*{message}"
        ):
            gpu_ops.read_gguf(path)

    assert python_calls(read) < 100_000  # no loop over numbers that the file claims


def test_shapes_beyond_all_memory_are_refused(tmp_path):
    path = tmp_path / "a.gguf"
    for dims in ((2**63, 0), (2**63, 2**63), (256, 2**50)):
        path.write_bytes(header([("w", dims, 35)]) + bytes(99))
        with pytest.raises((FormatError, ShapeError), match=r"^read_gguf: w: .*(2\^48|ends)"):
            gpu_ops.read_gguf(path)
    with pytest.raises(
        ShapeError, match=r"ternary_unpack: shape \(0, 9223372036854775808\) has an axis of more"
    ):
        gpu_ops.ternary_unpack(np.zeros(0, np.uint8), (0, 2**63), "w2")


def test_what_is_asked_of_a_gguf_file_is_checked(tmp_path, rng):
    package, path, t = pytest.importorskip("gguf", reason=INSTALL), tmp_path / "a.gguf", trits(rng, (4, 256))
    write(package, path, [("w", in_file("i2_s", t, 2), t.shape, 36)])
    for names in ([1], 5, ["q", 1, None], "w"):
        with pytest.raises(OptionError, match="read_gguf: names must be a list of strings"):
            gpu_ops.read_gguf(path, formats=I2_S, names=names)
    for formats in ([36], "i2_s"):
        with pytest.raises(OptionError, match="read_gguf: formats must be a dict such as"):
            gpu_ops.read_gguf(path, formats=formats)
    assert list(gpu_ops.read_gguf(path, formats=I2_S, names=(n for n in ("w",)))) == ["w"]


# ---- safetensors -------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """Function that writes ``a.safetensors`` of one module, with some parts replaced by (dtype, shape, bytes)."""
    pytest.importorskip("safetensors", reason=INSTALL)
    good = {"weight": ("U8", (1, 8), bytes(8)), "weight_scale": ("F32", (1,), np.float32(1).tobytes())}

    def written(**parts):
        entries, body = {}, b""
        for part, (dtype, shape, data) in {**good, **parts}.items():
            span = (len(body), len(body) + len(data))
            entries[f"a.{part}"] = {"dtype": dtype, "shape": shape, "data_offsets": span}
            body += data
        text = json.dumps(entries).encode()
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
        return tmp_path / "a.safetensors"

    return written


@pytest.mark.parametrize(
    ("dtype", "bits"), [("F8_E4M3", 8), ("F8_E8M0", 8), ("F4", 4), ("F6_E2M3", 6), ("C64", 64)]
)
def test_dtypes_that_numpy_lacks_are_refused(dtype, bits, checkpoint):
    file = checkpoint(weight=(dtype, (1, 8), bytes(bits)))
    with pytest.raises(
        FormatError, match=rf"read_bitnet: a has a weight_scale and a weight of {dtype} \(1, 8\)"
    ):
        gpu_ops.read_bitnet(file, weight_scale="multiply")
    count = 8 if bits < 8 else 1
    file = checkpoint(weight_scale=(dtype, (count,), bytes(bits * count // 8)))
    with pytest.raises(
        FormatError, match=f"read_bitnet: a.weight_scale has {dtype} and shape .*expected one number"
    ):
        gpu_ops.read_bitnet(file, weight_scale="multiply")
    bias = (dtype, (8,), bytes(bits))  # only the length of a bias matters
    with pytest.raises(FormatError, match="a: TernaryMatrix: hf_bitnet"):
        gpu_ops.read_bitnet(checkpoint(bias=bias), weight_scale="multiply")


def test_a_bias_has_one_axis(checkpoint):
    for shape in ((), (4, 1)):
        file = checkpoint(bias=("U8", shape, bytes(4 if shape else 1)))
        with pytest.raises(FormatError, match=r"read_bitnet: a has a bias of U8 \(.*\); expected one axis"):
            gpu_ops.read_bitnet(file, weight_scale="multiply")


@pytest.mark.parametrize(
    ("scale", "meaning", "lost"),
    [
        (1e300, "divide", "its reciprocal"),
        (1e-40, "divide", "its reciprocal"),
        (1e-320, "divide", "its reciprocal"),
        (1e39, "multiply", "it$"),
        (1e-50, "multiply", "it$"),
    ],
)
def test_a_scale_that_float32_cannot_hold_is_refused(scale, meaning, lost, checkpoint):
    file = checkpoint(weight_scale=("F64", (1,), np.float64(scale).tobytes()))
    with pytest.raises(FormatError, match=f"read_bitnet: a.weight_scale is .*float32.*cannot hold {lost}"):
        gpu_ops.read_bitnet(file, weight_scale=meaning)


@pytest.mark.parametrize("text", ["[]", "null", "5", '"x"', '{"quantization_config": []}', "[" * 99_999])
def test_configs_that_are_no_objects_are_refused(text, checkpoint):
    file = checkpoint()
    (file.parent / "config.json").write_text(text)
    with pytest.raises(FormatError, match=r"read_bitnet: .*config.* (no JSON object|is not JSON)"):
        gpu_ops.read_bitnet(file, weight_scale="multiply")


def test_a_config_of_null_says_nothing(checkpoint):
    file, said_nothing = checkpoint(), {"quantization_config": None}
    (file.parent / "config.json").write_text(json.dumps(said_nothing))
    with pytest.raises(OptionError, match="multiplies or divides is written nowhere"):
        gpu_ops.read_bitnet(file)
    for config in (None, said_nothing):
        assert gpu_ops.read_bitnet(file, weight_scale="multiply", config=config)["a"].scale == 1
    for config in ([], 5):
        with pytest.raises(OptionError, match="read_bitnet: config must be a path or a dict"):
            gpu_ops.read_bitnet(file, config=config)
    with pytest.raises(OptionError, match="read_bitnet: names must be a list of strings"):
        gpu_ops.read_bitnet(file, weight_scale="multiply", names=[1])
