"""An open GGUF file: single values of its metadata, and its tensors, floats in pieces and ternary ones packed.

Every tensor of a known type is checked against the file's size, and none may share bytes with another: reading all
of them takes memory in proportion to the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.errors import FormatError
from gpu_ops.formats.files import read_part
from gpu_ops.formats.gguf_header import NUMBER_TYPES, STRING, GGUFTensor, read_header
from gpu_ops.formats.ternary_files import gguf_matrix
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.reference.weights.ternary_formats import FORMATS

__all__ = ["FLOATS", "TERNARY", "Blocks", "GGUFFile"]

_PIECE = 1 << 20  # numbers decoded at a time


TERNARY = {"TQ1_0": "tq1_0", "TQ2_0": "tq2_0", "I2_S": "i2_s"}


class GGUFFile:
    """Tensors and metadata of an open file; FormatError if it is damaged."""

    def __init__(self, op: str, path: Path, file: BinaryIO) -> None:
        self._file, self.path, self.what = file, path, f"{op}: {path}"
        header = read_header(op, path, file)
        self._values = header.values
        self.keys = tuple(header.values)
        self.tensors = {tensor.name: tensor for tensor in header.tensors}
        self._check_places(header.tensors)

    def value(self, key: str) -> Any:
        """Value of a key: a number, a bool or a string; None if there is no such key. A float32 is returned as the
        shortest decimal that rounds to it: 1e-05, as in the config that the file was made from."""
        if key not in self._values:
            return None
        type, position = self._values[key]
        what = f"{self.what}: {key}"
        if type == STRING:
            size = int(read_part(what, self._file, position, 8).view("<u8")[0])
            try:
                return read_part(what, self._file, position + 8, size).tobytes().decode()
            except UnicodeDecodeError as error:
                raise FormatError(f"{what} is no text: {error}") from error
        if type not in NUMBER_TYPES:
            raise FormatError(f"{what} is an array; a model has one value for all layers")
        dtype = np.dtype(NUMBER_TYPES[type]).newbyteorder("<")
        number = read_part(what, self._file, position, dtype.itemsize).view(dtype)[0]
        return float(str(number)) if dtype == np.float32 else number.item()

    def pieces(self, name: str) -> Iterator[Array]:
        """Elements in order, some at a time; quantised ones as float32, and ternary ones all at once."""
        tensor, what = self.tensors[name], f"{self.what}: {name}"
        if tensor.dtype in TERNARY:
            yield self.matrix(name).dequantize().reshape(-1)
            return
        floats = FLOATS[tensor.dtype]
        step = _PIECE // floats.count * floats.nbytes
        end = tensor.start + self._size(tensor)
        for start in range(tensor.start, end, step):
            data = read_part(what, self._file, start, min(step, end - start))
            with np.errstate(all="ignore"):  # for invalid scales
                numbers = floats.decode(data.reshape(-1, floats.nbytes))
            yield numbers.reshape(-1)

    def matrix(self, name: str) -> TernaryMatrix:
        """Read a ternary tensor."""
        tensor = self.tensors[name]
        return gguf_matrix(f"{self.what}: {name}", self._file, tensor, FORMATS[TERNARY[tensor.dtype]])

    def _size(self, tensor: GGUFTensor) -> int:
        """Size in bytes; 0 if the type is not supported."""
        shape = tensor.shape
        if tensor.dtype in FLOATS:
            floats = FLOATS[tensor.dtype]
            if math.prod(shape[-1:]) % floats.count:
                raise ValueError(f"rows of {tensor.dtype} have a multiple of {floats.count} elements")
            return math.prod(shape) // floats.count * floats.nbytes
        if tensor.dtype in TERNARY and len(shape) == 2:
            return math.prod(FORMATS[TERNARY[tensor.dtype]].packed_shape((shape[0], shape[1])))
        return 0

    def _check_places(self, tensors: list[GGUFTensor]) -> None:
        previous_end, total = 0, os.fstat(self._file.fileno()).st_size
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            label = f"{self.what}: tensor {tensor.name[:80]!r}"
            try:
                end = tensor.start + self._size(tensor)
            except ValueError as error:
                raise FormatError(f"{label} has shape {tensor.shape}: {error}") from error
            if tensor.start < previous_end:
                raise FormatError(f"{label} begins at byte {tensor.start}, within the one before it")
            if end > total:
                raise FormatError(f"{label} should end at byte {end}, and the file does at {total}")
            previous_end = end


# Numbers as GGUF stores them: plain, or as blocks of small integers and their scales.
#
# A quantised weight is ``scale * q``, or ``scale * q - offset`` in the types with an offset, in float32 as in ggml.


@dataclass(frozen=True)
class Blocks:
    """A type of blocks: ``count`` numbers in ``nbytes`` bytes; ``decode`` maps (blocks, bytes) to numbers."""

    count: int
    nbytes: int
    decode: Callable[[Array], Array]


def _plain(dtype: Any) -> Blocks:
    return Blocks(1, np.dtype(dtype).itemsize, lambda data: data.view(dtype))


def _q4_0(data: Array) -> Array:
    """Decode q4_0: float16 scale; 16 bytes, whose low nibbles are the first half."""
    return np.asarray(_half(data[:, :2]) * (_nibbles(data[:, 2:], 16).view(np.int8) - np.int8(8)))


def _q4_1(data: Array) -> Array:
    """Decode q4_1: float16 scale and minimum; 16 bytes as in q4_0."""
    return np.asarray(_half(data[:, :2]) * _nibbles(data[:, 4:], 16) + _half(data[:, 2:4]))


def _q5_0(data: Array) -> Array:
    """Decode q5_0: float16 scale; 32 fifth bits; 16 bytes as in q4_0."""
    return np.asarray(_half(data[:, :2]) * (_five_bits(data[:, 2:]).view(np.int8) - np.int8(16)))


def _q5_1(data: Array) -> Array:
    """Decode q5_1: float16 scale and minimum; then as q5_0."""
    return np.asarray(_half(data[:, :2]) * _five_bits(data[:, 4:]) + _half(data[:, 2:4]))


def _q8_0(data: Array) -> Array:
    """Decode q8_0: float16 scale; 32 integers."""
    return np.asarray(_half(data[:, :2]) * data[:, 2:].view(np.int8))


def _iq4_nl(data: Array) -> Array:
    """Decode iq4_nl: q4_0 with a table of values."""
    return np.asarray(_half(data[:, :2]) * IQ4_VALUES[_nibbles(data[:, 2:], 16)])


def _mxfp4(data: Array) -> Array:
    """Decode mxfp4: exponent of the scale, biased by 127; 16 bytes as in q4_0, E2M1 numbers (here doubled)."""
    scale = np.ldexp(np.float32(1), data[:, :1].astype(np.int32) - 128)
    return np.asarray(scale * E2M1_DOUBLED[_nibbles(data[:, 1:], 16)])


def _q2_k(data: Array) -> Array:
    """Decode q2_k: 16 bytes, each a scale and an offset of 4 bits; 64 bytes of codes; their float16 scales."""
    scale = _half(data[:, 80:82]) * (data[:, :16] & 15)
    offset = _half(data[:, 82:]) * (data[:, :16] >> 4)
    q = _two_bits(data[:, 16:80]).reshape(-1, 16, 16)
    return np.asarray(scale[..., None] * q - offset[..., None]).reshape(-1, 256)


def _q3_k(data: Array) -> Array:
    """Decode q3_k: 32 bytes of third bits, 64 of the two below; 16 scales of 6 bits; their float16 scale."""
    third = data[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit r of each byte: run r
    q = (_two_bits(data[:, 32:96]) | third << 2).view(np.int8) - np.int8(4)
    low, high = data[:, 96:104], data[:, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = np.concatenate([low & 15, low >> 4], axis=1) | high.reshape(-1, 16) << 4
    scale = _half(data[:, 108:]) * (scales.view(np.int8) - np.int8(32))
    return np.asarray(scale[..., None] * q.reshape(-1, 16, 16)).reshape(-1, 256)


def _iq4_xs(data: Array) -> Array:
    """Decode iq4_xs: float16 scale; 8 scales of 6 bits, the upper two first; 8 runs of 16 bytes as in iq4_nl."""
    upper = data[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    lower = np.stack([data[:, 4:8] & 15, data[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scale = _half(data[:, :2]) * ((lower | upper.astype(np.uint8) << 4).view(np.int8) - np.int8(32))
    values = IQ4_VALUES[_nibbles(data[:, 8:], 16)].reshape(-1, 8, 32)
    return np.asarray(scale[..., None] * values).reshape(-1, 256)


def _q4_k(data: Array) -> Array:
    """Decode q4_k: float16 scales of the scales and of the offsets; 8 of each; 128 bytes of nibbles."""
    return _scaled(data[:, :16], _nibbles(data[:, 16:], 32).reshape(-1, 8, 32))


def _q5_k(data: Array) -> Array:
    """Decode q5_k: q4_k with 32 bytes before the nibbles, whose bit j is the fifth bit of run j."""
    fifth = data[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _scaled(data[:, :16], _nibbles(data[:, 48:], 32).reshape(-1, 8, 32) | fifth << 4)


def _q6_k(data: Array) -> Array:
    """Decode q6_k: 128 bytes of nibbles, 64 of the two bits above them; 16 scales of 8 bits; their float16 scale."""
    low = _nibbles(data[:, :128], 64).reshape(-1, 2, 4, 32)
    high = data[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    q = (low | high << 4).reshape(-1, 16, 16).view(np.int8) - np.int8(32)
    scale = _half(data[:, 208:]) * data[:, 192:208].view(np.int8)
    return np.asarray(scale[..., None] * q).reshape(-1, 256)


def _half(data: Array) -> Array:
    """Read a float16 per block, as float32 (blocks, 1)."""
    half: Array = data.copy().view("<f2").astype(np.float32)
    return half


def _nibbles(data: Array, run: int) -> Array:
    """Low nibbles, then high nibbles of each run of bytes: (blocks, codes)."""
    runs = data.reshape(len(data), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(data), -1)


def _five_bits(data: Array) -> Array:
    """Codes of 32 fifth bits and 16 bytes of nibbles."""
    fifth = np.unpackbits(data[:, :4], axis=1, bitorder="little")
    return np.asarray(_nibbles(data[:, 4:], 16) | fifth << 4)


def _two_bits(data: Array) -> Array:
    """Codes of 64 bytes: 8 runs of 32, bits 2j of a half's bytes in run j of the half."""
    halves = data.reshape(-1, 2, 1, 32)
    return np.asarray(halves >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 8, 32)


def _scaled(head: Array, q: Array) -> Array:
    """Apply 6-bit scales and offsets to runs of 32: four of each are stored in 6 bits, four in 4 bits plus 2."""
    a, b, c = head[:, 4:8], head[:, 8:12], head[:, 12:]
    scale = _half(head[:, :2]) * np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    offset = _half(head[:, 2:4]) * np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)
    return np.asarray(scale[..., None] * q - offset[..., None]).reshape(len(q), 256)


# Values of the codes of iq4_nl and iq4_xs, of mxfp4 (doubled).
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)

FLOATS = {
    "F32": _plain("<f4"),
    "F16": _plain("<f2"),
    "BF16": _plain(ml_dtypes.bfloat16),
    "F64": _plain("<f8"),
    "Q4_0": Blocks(32, 18, _q4_0),
    "Q4_1": Blocks(32, 20, _q4_1),
    "Q5_0": Blocks(32, 22, _q5_0),
    "Q5_1": Blocks(32, 24, _q5_1),
    "Q8_0": Blocks(32, 34, _q8_0),
    "IQ4_NL": Blocks(32, 18, _iq4_nl),
    "MXFP4": Blocks(32, 17, _mxfp4),
    "Q2_K": Blocks(256, 84, _q2_k),
    "Q3_K": Blocks(256, 110, _q3_k),
    "Q4_K": Blocks(256, 144, _q4_k),
    "Q5_K": Blocks(256, 176, _q5_k),
    "Q6_K": Blocks(256, 210, _q6_k),
    "IQ4_XS": Blocks(256, 136, _iq4_xs),
}
