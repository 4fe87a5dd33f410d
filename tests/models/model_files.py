"""Model files written by the packages of their formats."""

from __future__ import annotations

import numpy as np

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
