"""Thousands of randomly damaged files: each gives a typed error or a sound matrix, in bounded time and memory."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

import gpu_ops
from gpu_ops.formats.safetensors import header_of
from tests.models.model_files import trits
from tests.support.laws import python_calls

GGUF_FORMATS = {34: "tq1_0", 35: "tq2_0", 36: "i2_s", 38: "tl1", 39: "tl2", 42: "q2_0"}
METADATA = {
    "general.architecture": "bitnet",
    "general.alignment": 64,
    "a.words": ["x", "yy", "", "zzz"],
    "a.nested": [[1, 2], [3]],
    "a.numbers": np.arange(9, dtype=np.int16),
    "a.float": 1.5,
}


def gguf_file(path, rng):
    w = {
        name: gpu_ops.TernaryMatrix.from_trits(trits(rng, (2, 256)), format=name)
        for name in ("tq1_0", "q2_0")
    }
    gpu_ops.write_gguf(path, {**w, "norm": np.ones(5, np.float32)}, METADATA)


def bitnet_file(path, rng):
    arrays = {
        "a.weight": gpu_ops.ternary_pack(trits(rng, (8, 16)), "hf_bitnet"),
        "a.weight_scale": np.full(1, 0.5, np.float32),
        "a.bias": np.zeros(8, np.float16),
        "embed.weight": np.ones((3, 4), np.float32),
    }
    names = {"float32": "F32", "uint8": "U8", "float16": "F16"}
    header = header_of({name: (names[str(x.dtype)], x.shape) for name, x in arrays.items()}, {"format": "np"})
    path.write_bytes(header + b"".join(x.tobytes() for x in arrays.values()))


def saved_file(format):
    def write(path, rng):
        shape = {"tl1": (256, 128), "tl2": (256, 96), "bitnet_gpu": (16, 64)}.get(format, (2, 256))
        scale = rng.random((shape[0], 2)).astype(np.float32)
        gpu_ops.TernaryMatrix.from_trits(trits(rng, shape), scale, format=format).save(path)

    return write


def read_gguf(path):
    return gpu_ops.read_gguf(path, formats=GGUF_FORMATS).values()


def read_bitnet(path):
    return gpu_ops.read_bitnet(path, weight_scale="divide").values()


def load(path):
    return [gpu_ops.TernaryMatrix.load(path)]


KINDS = {
    "gguf": (gguf_file, read_gguf),
    "bitnet": (bitnet_file, read_bitnet),
    **{format: (saved_file(format), load) for format in ("w2", "base3", "planes", "tq1_0", "tl2")},
}
NUMBERS = (0, 1, 2, 8, 9, 13, 255, 2**31, 2**32 - 1, 2**48, 2**60, 2**61, 2**63 - 1, 2**63, 2**64 - 1)
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
    b"0.5",
    b"\\u0000",
)


def mutant(whole, rng):
    """Copy of ``whole`` after one to three random changes, most of them in the header."""
    data = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(min(len(data), 900) if rng.random() < 0.8 else len(data)))
        end = at + int(rng.choice([1, 2, 8, 40]))
        match rng.integers(8):
            case 0:
                data[at] = rng.integers(256)
            case 1:
                data[at] ^= 1 << rng.integers(8)
            case 2:
                data[at : at + 8] = int(rng.choice(np.array(NUMBERS, object))).to_bytes(8, "little")
            case 3:
                data[at : at + 4] = int(rng.choice(np.array(NUMBERS, object)) & 0xFFFFFFFF).to_bytes(
                    4, "little"
                )
            case 4:
                data[at:end] = TOKENS[rng.integers(len(TOKENS))]
            case 5:
                del data[at:end]
            case 6:
                data[at:at] = data[at:end] * int(rng.integers(1, 4))
            case _:
                del data[at:]
        data = data or bytearray(1)
    return bytes(data)


def check(read, path):
    """Outcome of a read: an error of gpu_ops, or matrices whose bytes are sound."""
    try:
        for w in read(path):
            assert not w.trits().size or np.abs(w.trits()).max() <= 1
            assert np.isfinite(w.scale).all()
    except gpu_ops.errors.GpuOpsError as error:
        return type(error).__name__, len(str(error))
    return "read", 0


def survive(format, count, path, rng):
    write, read = KINDS[format]
    write(path, rng)
    whole = path.read_bytes()
    assert check(read, path) == ("read", 0)
    outcomes = set()
    tracemalloc.start()
    try:
        for _ in range(count):
            data = mutant(whole, rng)
            path.write_bytes(data)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            calls = python_calls(lambda: outcomes.add(check(read, path)))
            peak = tracemalloc.get_traced_memory()[1] - before
            assert calls < 20_000
            assert peak < 40 * len(data) + 500_000
    finally:
        tracemalloc.stop()
    names, lengths = zip(*outcomes, strict=True)
    assert "FormatError" in names
    assert max(lengths) < 1000


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files(kind, tmp_path, rng):
    survive(kind, 150, tmp_path / "a", rng)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_files(kind, tmp_path):
    survive(kind, 3000, tmp_path / "a", np.random.default_rng(1))


def test_memory_is_bounded_for_large_files(tmp_path, rng):
    """Codes are decoded to be checked; no format takes more than 40 times its bytes for it."""
    for name in ("planes", "bitnet_gpu", "tl2", "tq1_0"):
        w = gpu_ops.TernaryMatrix.from_trits(trits(rng, (1280, 1536)), format=name)
        w.save(tmp_path / "a")
        tracemalloc.start()
        gpu_ops.TernaryMatrix.load(tmp_path / "a")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 * w.nbytes


def test_tensors_that_share_bytes_cannot_multiply_them(tmp_path):
    """Read a small GGUF file whose thousand tensors all begin at the same byte."""
    from tests.weights.test_damaged import header

    path = tmp_path / "a"
    data = header([(f"{i}", (256, 4096), 35) for i in range(1000)])
    codes = gpu_ops.ternary_pack(np.zeros((4096, 256), np.int8), "tq2_0").tobytes()
    path.write_bytes(data + bytes(-len(data) % 32) + codes)
    tracemalloc.start()
    with pytest.raises(
        gpu_ops.errors.FormatError, match=r"read_gguf: 1: the tensors up to this one take .* bytes, more"
    ):
        gpu_ops.read_gguf(path)
    assert tracemalloc.get_traced_memory()[1] < 40 * path.stat().st_size
    tracemalloc.stop()


def test_a_json_header_of_many_objects_is_bounded(tmp_path):
    """Objects of 3 bytes each become lists of 64."""
    text = b'{"a":[' + b"[]," * (1 << 17) + b"[]]}"
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text)
    assert len(json.loads(text)["a"]) == (1 << 17) + 1
    tracemalloc.start()
    with pytest.raises(gpu_ops.errors.FormatError, match="entry of 'a'"):
        gpu_ops.TernaryMatrix.load(tmp_path / "a")
    assert tracemalloc.get_traced_memory()[1] < 40 * len(text)
    tracemalloc.stop()
