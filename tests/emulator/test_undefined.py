"""Uninitialised values are reported where they matter, not where a kernel discards them or copies padding."""

from __future__ import annotations

import re
from itertools import combinations, product

import numpy as np
import pytest

from gpu_ops.emulator import Buffer, SanitizerError, bits, flow, launch, undefined
from gpu_ops.emulator.instructions import lookup
from gpu_ops.emulator.syntax import BITS, DTYPE

pytest.importorskip("cuda.bindings.nvrtc")

STORES, BRANCHES, ADDRESS = (
    "stores the value in global memory",
    "branches on the value",
    "uses the value as an address",
)
ATOMIC, RUNS = "gives the value to an atomic", "decides by the value"

KERNEL = """
#include <cuda_fp16.h>
%s
extern "C" __global__ void k(int* y, const int* x) {
  __shared__ int s[65], z[65];
  int t = threadIdx.x;
  s[t] = x[t];
  __syncthreads();
  int a = s[t + 1];  // s[64] has no value
  %s
}
"""
#: The predicate of a shuffle from a lane.
SHUFFLE = (
    'asm volatile("{.reg .pred p; .reg .b32 r; shfl.sync.idx.b32 r|p, %%1, %s, 31, -1; selp.b32 %%0, 1, 0, p;}"'
    ' : "=r"(y[t]) : "r"(t & 31), "r"(a));'
)
#: Ends of the kernel that use the value of one thread, with a name of the use and the thread.
FOUND = [
    ("y[t] = a;", STORES, 63),
    ("y[t] = 2 * a + 1;", STORES, 63),
    ("if (a > 3) y[t] = 1;", BRANCHES, 63),
    ("if (t < 63 || a > 3) y[t] = t;", BRANCHES, 63),
    ("for (int i = 0; i < (a & 7); i++) y[t] += i;", BRANCHES, 63),
    ("y[a & 63] = 1;", ADDRESS, 63),
    ("y[t] = x[a & 63];", ADDRESS, 63),
    ("y[t] = s[a & 63];", ADDRESS, 63),
    ("y[t] = a > 3 ? t : -t;", STORES, 63),
    ("y[t] = t == 63 ? a : 5;", STORES, 63),
    ("y[t] = a & 1;", STORES, 63),
    ("y[t] = __shfl_down_sync(~0u, a, 1);", STORES, 62),
    ("y[t] = __shfl_sync(~0u, t, a);", STORES, 63),
    (SHUFFLE % "%2", STORES, 63),
    ("y[t] = (t == 62) | (a & 1);", STORES, 63),
    ("y[t] = (t == 63) | (a & 2);", STORES, 63),
    ("y[t] = ((t == 63) | (a & 2)) >= 2;", STORES, 63),
    ("y[t] = (a & 15) > 14;", STORES, 63),
    ("y[t] = (a | -16) < -1;", STORES, 63),
    ("y[t] = (a & 9) == 8;", STORES, 63),
    ("y[t] = (a << (a & 1)) & 1;", STORES, 63),
    ("y[t] = ((short)a << 8) & 256;", STORES, 63),
    ("y[t] = (signed char)(a | 1) >> 8;", STORES, 63),
    ("y[t] = ((signed char*)(s + t + 1))[0] >> 31;", STORES, 63),
    ("y[t] = ((unsigned char*)(s + t + 1))[0] >> 7;", STORES, 63),
    ("y[t] = __all_sync(~0u, t < 63 || a > -1);", STORES, 32),
    ("y[t] = __ballot_sync(~0u, a > 3) >> 31;", STORES, 32),
    ("z[t] = a << 16 | t; __syncthreads(); y[t] = ((short*)z)[2 * t + 1];", STORES, 63),
    ("long long w = (long long)a << 32 | t; y[t] = w >> 63;", STORES, 63),
    ("y[t] = __reduce_add_sync(~0u, a);", STORES, 32),
    ("y[t] = __ballot_sync(~0u, a > 3);", STORES, 32),
    ("y[t] = __any_sync(~0u, a > 63);", STORES, 32),
    ("y[t] = __syncthreads_or(a > 100);", RUNS, 63),
    ("atomicAdd(y, a);", ATOMIC, 63),
    ('printf("%d %d", t, a);', "printf of a value that is uninitialised", 63),
    ("atomicMax(z + t, t);", "uninitialised read: 4-byte atomic", 0),
    ("z[t] = a; __syncthreads(); y[t] = z[63 - t];", STORES, 0),
    ("z[t] = a; z[t] += 1; __syncthreads(); y[t] = z[63 - t];", STORES, 0),
    ("short* h = (short*)z; h[t] = a; __syncthreads(); y[t] = h[63 - t];", STORES, 0),
    ("int m[4]; for (int i = 0; i < 4; i++) m[i] = i; m[t & 3] = a; y[t] = m[x[t] & 3];", STORES, 63),
    ("y[t] = twice(a);", STORES, 63),
    ("y[t] = both(a, 1).y;", STORES, 63),
    ("y[t] = __half2int_rn(__ushort_as_half(a));", STORES, 63),
    (
        'asm("{.reg .pred p; setp.gt.s32 p, %1, 3; @p st.global.u32 [%0], %2;}" :: "l"(y + t), "r"(a), "r"(t));',
        RUNS,
        63,
    ),
]
#: Ends that discard the value, and what they write.
CLEAN = [
    ("y[t] = t < 63 ? a : -1;", [*range(1, 64), -1]),
    ("int b = a * 3 + 1; y[t] = t < 63 ? b : -1;", [*range(4, 193, 3), -1]),
    ("if (t < 63 && a > 3) y[t] = a;", [0, 0, 0, *range(4, 64), 0]),
    ("bool p = a > 3; if (t < 63 & p) y[t] = a;", [0, 0, 0, *range(4, 64), 0]),
    ("if (t > 62 || a > 3) y[t] = t;", [0, 0, 0, *range(3, 64)]),
    ("y[t] = a & (t < 63 ? -1 : 0);", [*range(1, 64), 0]),
    ("y[t] = a | (t < 63 ? 0 : -1);", [*range(1, 64), -1]),
    ("if (t == 63) a = 7; y[t] = a;", [*range(1, 64), 7]),
    ("y[t] = __shfl_sync(~0u, a, t & 30);", [(i & 32) + (i & 30) + 1 for i in range(64)]),
    ("y[t] = __shfl_up_sync(~0u, a, 1);", [1, *range(1, 32), 33, *range(33, 64)]),
    ("y[t] = __ballot_sync(~0u, t < 63 && a > 0) == (t < 32 ? ~0u : ~0u >> 1);", [1] * 64),
    ("z[t] = a; __syncthreads(); y[t] = t ? z[t - 1] : 0;", [0, *range(1, 64)]),
    ("z[t] = a; if (t == 63) z[t] = 9; __syncthreads(); y[t] = z[63 - t];", [9, *range(63, 0, -1)]),
    ("int m[4] = {1, 2, 3, 4}; m[x[t] & 3] = a; m[t & 3] = t; y[t] = m[x[t] & 3];", [*range(64)]),
    ("y[t] = t < 63 ? twice(a) : 0;", [*range(2, 128, 2), 0]),
    ("y[t] = both(a, t).x;", [*range(64)]),
    ("y[t] = (t == 63 || a > -1);", [1] * 64),
    ("y[t] = (t == 63) | (a & 1);", [*[1, 0] * 31, 1, 1]),
    ("y[t] = ((t == 63) | (a & 1)) != 0;", [*[1, 0] * 31, 1, 1]),
    ("y[t] = ((t == 63) | (a & 2)) != 2;", [int((i + 1) & 2 == 0 or i == 63) for i in range(64)]),
    ("int f = (t == 63); f |= (a < 0); y[t] = f;", [0] * 63 + [1]),
    ("if (((a >> 31) & 1) | (t == 63)) y[t] = 4;", [0] * 63 + [4]),
    ("y[t] = (t == 63 ? 0xff : 0) | (a & 0xff);", [*range(1, 64), 255]),
    ("y[t] = (t == 63 ? 0xff00 : 0) | ((a & 0xff) << 8);", [*range(256, 63 * 256 + 1, 256), 65280]),
    ("y[t] = (t == 63 ? 256 : 0) + 0 > (a & 0xff) || t < 63;", [1] * 64),
    ("y[t] = (a & 15) < 16 + (t & 1);", [1] * 64),
    ("y[t] = (a | -16) < 0;", [1] * 64),
    ("y[t] = (a ^ (a & -2)) >> 1;", [0] * 64),
    ("y[t] = (a << 4) & 15;", [0] * 64),
    ("y[t] = ((volatile unsigned char*)(s + t + 1))[0] >> 8;", [0] * 64),
    ("y[t] = (unsigned)a >> 28 >> 4;", [0] * 64),
    ("y[t] = __byte_perm(a, t, 0x7654);", [*range(64)]),
    ("y[t] = __funnelshift_r(t, a << 8, 4) & 0xff;", [i >> 4 for i in range(64)]),
    ("long long w = (long long)a << 32 | t; y[t] = w;", [*range(64)]),
    ("((short*)z)[t] = a << 16 | t; __syncthreads(); y[t] = ((short*)z)[63 - t];", [*range(63, -1, -1)]),
    ("y[t] = __any_sync(~0u, t == 63 || a > -1);", [1] * 64),
    ("y[t] = __all_sync(~0u, t == 63 || a > -1);", [1] * 64),
    ("y[t] = __any_sync(~0u, a > 62);", [0] * 32 + [1] * 32),
    ("y[t] = __all_sync(~0u, a > 62);", [0] * 64),
    ("y[t] = __ballot_sync(~0u, a == 63) >> 30 & 1;", [0] * 32 + [1] * 32),
    ("y[t] = __reduce_or_sync(~0u, a & 64) >> 7;", [0] * 64),
    ("y[t] = __shfl_down_sync(~0u, a << 1, 1) & 1;", [0] * 64),
    (SHUFFLE % "%1", [1] * 64),
]
FUNCTIONS = """
__device__ __noinline__ int twice(int a) { return 2 * a; }
__device__ __noinline__ int2 both(int a, int t) { return make_int2(t, a); }
"""


def run(body, **options):
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    launch(KERNEL % (FUNCTIONS, body), "k", 1, 64, (y, x), **options)
    return y


@pytest.mark.parametrize(("body", "use", "thread"), FOUND, ids=[body for body, *_ in FOUND])
def test_a_use_that_matters(body, use, thread):
    with pytest.raises(SanitizerError, match=re.escape(use)) as caught:
        run(body)
    assert caught.value.kind == "uninitialised read"
    message = str(caught.value)
    if use in (STORES, BRANCHES, ADDRESS, ATOMIC, RUNS):
        assert f"; block (0,0,0) thread ({thread},0,0) {use}" in message
        assert len(re.findall(r"at PTX line \d+: .*\n", message)) >= 2  # the use and the load


@pytest.mark.parametrize(("body", "expected"), CLEAN, ids=[body for body, _ in CLEAN])
def test_a_value_that_is_discarded(body, expected):
    np.testing.assert_array_equal(run(body), expected)
    np.testing.assert_array_equal(run(body, sanitize="collect"), expected)


def test_every_fault_of_a_launch():
    """With all faults collected, each load is one fault, counted once for each thread that uses the value."""
    with pytest.raises(SanitizerError) as caught:
        run("int b = z[t]; y[t] = b; y[63 - t] = b; y[t] += a;", sanitize="collect")
    assert [(f.kind, f.count) for f in caught.value.faults] == [
        ("uninitialised read", 64),
        ("uninitialised read", 1),
    ]


def test_a_loop_that_discards_keeps_little(monkeypatch):
    monkeypatch.setattr(undefined, "_LOADS", 10)
    seen = []
    prune = undefined._prune
    monkeypatch.setattr(undefined, "_prune", lambda m: (prune(m), seen.append(len(m.sanitizer.loads))))
    body = "for (int i = 0; i < x[63]; i++) { a += ((volatile int*)s)[t + 1]; } y[t] = %s;"
    assert run(body % "t < 63 ? a : 0")[:3].tolist() == [64, 128, 192]
    assert seen
    assert max(seen) < 10
    with pytest.raises(SanitizerError, match=f"which no thread has written; .* {STORES}"):
        run(body % "a")


def test_results_and_constants_without_a_value():
    source = """
    __constant__ int c[2];
    extern "C" __global__ void k(int* y, const int* old, int use) {
      int t = threadIdx.x, a = old[t], b = c[0];
      y[t] = use ? a + b : t;
    }
    """
    old, y = Buffer(np.zeros(64, np.int32), "old", written=False), np.zeros(64, np.int32)
    launch(source, "k", 1, 64, (y, old, 0))
    np.testing.assert_array_equal(y, np.arange(64))
    with pytest.raises(
        SanitizerError, match=r"uninitialised read: .*, of `old`: element 0 of 64.* stores the value"
    ):
        launch(source, "k", 1, 64, (y, old, 1), symbols={"c": np.zeros(2, np.int32)})
    with pytest.raises(
        SanitizerError, match=r"uninitialised read: .*pass symbols={'c': array}; .* stores the value"
    ):
        launch(source, "k", 1, 64, (y, old.array, 1))


#: The modifiers of each opcode.
FORMS = {
    "and": "b32 pred",
    "or": "b32 pred",
    "xor": "b32 pred",
    "not": "b32 pred",
    "lop3": "b32 or.b32",
    "selp": "b32",
    "slct": "s32.s32",
    "shl": "b32",
    "shr": "u32 s32 s64",
    "shf": "l.wrap.b32 r.clamp.b32",
    "prmt": "b32",
    "bfe": "u32 s32",
    "bfi": "b32",
    "cvt": "u32.u8 s32.s16",
    "setp": "eq.s32 ne.b32 lt.s32 ge.u32 hi.u32 le.s64 ne.and.s32 gt.or.s32 eq.xor.u32 lt.and.f32",
}


def _source(op, k, opcode, rng):
    """Values of a source, their unknown bits, and all possible values."""
    dtype, width, count = DTYPE[op.reads[k]], BITS[op.reads[k]], 300
    control, compared = k in flow.CONTROLS.get(opcode, ()), len(op.writes) == 2
    values = rng.integers(0, 4 if opcode == "lop3" else 40 if control or compared else 2**31, count)
    if opcode == "prmt" and control:
        values = rng.integers(0, 2**16, count)
    if opcode == "lop3" and control:
        values = np.full(count, 0xE8)
    values = (values & 1 if width == 1 else values - 20 * (dtype.kind == "i")).astype(dtype)
    flips = [np.zeros(count, np.uint64)]
    if not control:
        for _ in range(3):
            place = rng.integers(0, min(width, 6 if compared and rng.random() < 0.7 else 64), count)
            flips.append(
                np.where(rng.random(count) < 0.4, np.uint64(1) << place.astype(np.uint64), np.uint64(0))
            )
    elif opcode != "lop3":
        flips.append((rng.random(count) < 0.2).astype(np.uint64))
    unknown, raw = np.bitwise_or.reduce(flips), values.view(f"u{dtype.itemsize}")
    zero, *flips = flips
    sets = [c for n in range(len(flips) + 1) for c in combinations(flips, n)]
    chosen = [np.bitwise_or.reduce([zero, *c]).astype(raw.dtype) for c in sets]
    return values, unknown, [(raw & ~unknown.astype(raw.dtype) | some).view(dtype) for some in chosen]


@pytest.mark.parametrize(("opcode", "ending"), [(o, e) for o, ends in FORMS.items() for e in ends.split()])
def test_the_bits_of_a_result_that_change(opcode, ending):
    """All values of up to three unknown bits of each source determine which bits of a result change."""
    words, rng = tuple(ending.split(".")), np.random.default_rng(len(ending))
    op, controls = lookup(opcode, words), flow.CONTROLS.get(opcode, ())
    values, unknown, trials = zip(*(_source(op, k, opcode, rng) for k in range(len(op.reads))), strict=True)
    form = flow.Flow(0, -1, op=op, compares=opcode == "setp", words=set(words), controls=controls)
    results = [r if isinstance(r, tuple) else (r,) for r in (op.run(*trial) for trial in product(*trials))]
    known = ~np.logical_or.reduce([np.zeros(300, bool), *(unknown[k] != 0 for k in controls)])
    for k, changing in enumerate(bits.changing(form, list(values), list(unknown))):
        each = [r[k].view(f"u{r[k].itemsize}") for r in results]
        expected = np.bitwise_or.reduce([e ^ each[0] for e in each])
        assert expected.any()
        marked = changing.astype(expected.dtype)
        assert not (expected & ~marked).any()
        if "f32" not in words and not (opcode == "lop3" and k):  # otherwise the marks may be too many
            np.testing.assert_array_equal(marked[known], expected[known])


TILES = r"""
#include <cuda_fp16.h>
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void k(float* y, int rows, int use) {
  __shared__ __align__(32) half a[256], b[256];
  __shared__ __align__(32) float c[256];
  int t = threadIdx.x;
  for (int i = t; i < 256; i += 32) { if (i < 16 * rows) a[i] = __float2half(i % 7); b[i] = __float2half(i % 5); }
  __syncwarp();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
  wmma::fill_fragment(fc, 0.f);
  wmma::load_matrix_sync(fa, a, 16);
  wmma::load_matrix_sync(fb, b, 16);
  wmma::mma_sync(fc, fa, fb, fc);
  wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
  __syncwarp();
  unsigned r[4], at = (unsigned)__cvta_generic_to_shared(a + t % 16 * 16 + t / 16 * 8);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
  y[t] = use == 1 ? c[t] : use == 2 ? __int_as_float(r[0]) : use == 3 ? __int_as_float(r[1]) : c[128 + t];
}
"""


@pytest.mark.parametrize(("use", "wrong"), [(0, True), (1, False), (2, False), (3, True)])
def test_tiles(use, wrong):
    """Eight of sixteen rows of a tile have values; so do eight of the product and of what ``ldmatrix`` loads."""
    y = np.zeros(32, np.float32)
    if wrong:
        with pytest.raises(SanitizerError, match="uninitialised read"):
            launch(TILES, "k", 1, 32, (y, 8, use))
    else:
        launch(TILES, "k", 1, 32, (y, 8, use))
    launch(TILES, "k", 1, 32, (y, 16, use))


def test_the_other_arm_of_a_branch_has_the_value():
    """Lanes of two shuffles converge, each with its own registers."""
    body = """
    int v;
    if (t & 1) { v = __shfl_xor_sync(~0u, a, 1); y[t] = v + 1; }
    else { v = __shfl_xor_sync(~0u, t, 1); %s }
    """
    source = KERNEL % ("", body)
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    launch(source % "y[t] = t < 62 ? v : 0;", "k", 1, 64, (y, x))
    assert y[:62:2].tolist() == [*range(2, 64, 2)]
    with pytest.raises(SanitizerError, match=r"thread \(62,0,0\) stores the value in global memory"):
        launch(source % "y[t] = v;", "k", 1, 64, (y, x))


# Reads that only the compiler adds are not faults: copied padding, and unused lanes of wider loads.

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
