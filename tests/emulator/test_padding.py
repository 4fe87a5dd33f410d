"""Reads that only the compiler adds are not faults: copied padding, and unused lanes of wider loads."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.emulator import Buffer, SanitizerError, launch

STRUCTS = {
    "double int": [("v", "f8"), ("i", "i4")],
    "float short": [("v", "f4"), ("i", "i2")],
    "int char": [("v", "i4"), ("i", "i1")],
    "double char": [("v", "f8"), ("i", "i1")],
}
C = {"f8": "double", "f4": "float", "i4": "int", "i2": "short", "i1": "char"}


def struct_of(fields):
    return "struct Best { " + " ".join(f"{C[dtype]} {name};" for name, dtype in fields) + " };"


ARG_MAX = """
extern "C" __global__ void k(const float* x, Best* out) {
  __shared__ Best s[64];
  int t = threadIdx.x;
  s[t].v = x[t];
  if (t != %d) s[t].i = t;
  __syncthreads();
  for (int o = 32; o; o /= 2) {
    if (t < o && s[t + o].v > s[t].v) s[t] = s[t + o];
    __syncthreads();
  }
  if (t == 0) { out[0] = s[0]; out[1].i = s[0].i + 1; }
}
"""


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_copied_with_their_padding(name):
    x = np.random.default_rng(0).permutation(64).astype(np.float32)
    out = np.zeros(2, np.dtype(STRUCTS[name], align=True))
    launch(struct_of(STRUCTS[name]) + ARG_MAX % -1, "k", 1, 64, (x, out))
    assert out[0]["v"] == 63
    assert out[0]["i"] == x.argmax()


@pytest.mark.parametrize("name", ["double int", "float short"])
def test_a_field_that_nobody_wrote_is_found(name):
    x = np.random.default_rng(0).permutation(64).astype(np.float32)
    out = np.zeros(2, np.dtype(STRUCTS[name], align=True))
    with pytest.raises(SanitizerError) as caught:
        launch(struct_of(STRUCTS[name]) + ARG_MAX % int(x.argmax()), "k", 1, 64, (x, out))
    assert caught.value.kind == "uninitialised read"


COPIES = """
extern "C" __global__ void k(Best* y, Best* z) {
  int t = threadIdx.x;
  Best mine[2];
  mine[t & 1].v = t;
  mine[t & 1].i = t;
  if (%d) y[t] = mine[t & 1];
  __syncthreads();
  z[t] = y[63 - t];
}
"""


@pytest.mark.parametrize("name", STRUCTS)
def test_copies_through_local_and_global_memory(name):
    dtype = np.dtype(STRUCTS[name], align=True)
    z = np.zeros(64, dtype)
    y = Buffer(np.zeros(64, dtype), "y", written=False)
    launch(struct_of(STRUCTS[name]) + COPIES % 1, "k", 1, 64, (y, z))
    np.testing.assert_array_equal(z["i"], np.arange(64)[::-1])
    y = Buffer(np.zeros(64, dtype), "y", written=False)
    with pytest.raises(SanitizerError, match="a byte that nothing has written"):
        launch(struct_of(STRUCTS[name]) + COPIES % 0, "k", 1, 64, (y, z))


WIDENED = """
extern "C" __global__ void k(const int* x, int* y) {
  __shared__ struct { __align__(16) int w[3]; int other; } s;
  int t = threadIdx.x;
  if (t < %d) s.w[t] = x[t];
  if (t == 0 && x[0] == 5) s.other = 0;
  __syncthreads();
  y[t] = s.w[0] + 2 * s.w[1] + 3 * s.w[2];
  if (t == 63) s.other = 1;
}
"""


@pytest.mark.parametrize("first", [1, 5])
def test_a_lane_of_a_load_that_nobody_reads(first):
    x, y = np.array([first, 2, 3], np.int32), np.zeros(64, np.int32)
    launch(WIDENED % 3, "k", 1, 64, (x, y))
    assert (y == first + 4 + 9).all()
    with pytest.raises(SanitizerError) as caught:
        launch(WIDENED % 2, "k", 1, 64, (x, y))
    assert caught.value.kind == "uninitialised read"


def test_plain_copies_of_what_nobody_wrote_are_found():
    for ptype in ("float", "int", "float4", "int4", "short"):
        source = (
            f'extern "C" __global__ void k({ptype}* y) {{ __shared__ {ptype} s[64]; int t = threadIdx.x;'
            f" if (t != 9) s[t] = {ptype}(); __syncthreads(); y[t] = s[63 - t]; }}"
        )
        y = np.zeros(64 * 16, np.uint8).view({"short": np.int16, "float": np.float32}.get(ptype, np.int32))
        with pytest.raises(SanitizerError) as caught:
            launch(source, "k", 1, 64, (y,), sanitize=True)
        assert caught.value.kind == "uninitialised read", ptype
