"""wmma: loads, products and stores of tiles against NumPy, for every shape, type and layout."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.emulator import PtxError, SanitizerError, UnknownInstruction, launch, profile

TYPES = {
    **{
        "f16": np.float16,
        "bf16": ml_dtypes.bfloat16,
        "tf32": np.float32,
        "f32": np.float32,
        "f64": np.float64,
    },
    **{"s8": np.int8, "u8": np.uint8, "s32": np.int32},
}
# Registers of the fragments of a, b and of an accumulator, as the PTX ISA lists them.
TILES = ((16, 16, 16), (8, 32, 16), (32, 8, 16))
REGISTERS = {
    **{("f16", tile): (8, 8) for tile in TILES},
    **{("bf16", tile): (m // 4, n // 4) for tile in TILES for m, n, _ in (tile,)},
    **{(s, tile): (m // 8, n // 8) for tile in TILES for m, n, _ in (tile,) for s in ("s8", "u8")},
    **{("tf32", (16, 16, 8)): (4, 4), ("f64", (8, 8, 4)): (1, 1)},
    **{("s4", (8, 8, 32)): (1, 1), ("u4", (8, 8, 32)): (1, 1), ("b1", (8, 8, 128)): (1, 1)},
}
ACCUMULATORS = {"f32": "f32", "s32": "b32", "f16": "b32", "f64": "f64"}
CASES = [
    *((dtype, tile) for dtype, tile in REGISTERS if dtype not in ("f16", "s4", "u4", "b1")),
    *(("f16", tile, c, d) for tile in TILES for c in ("f16", "f32") for d in ("f16", "f32")),
]


def kernel(element, tile, c_type, d_type, layouts, stride="%r1", space=""):
    """PTX of ``d = a b + c`` for one tile."""
    shape = "m{}n{}k{}".format(*tile)
    la, lb, lc = layouts
    words = "b64" if element == "f64" else "b32"
    results = [tile[0] * tile[1] // (64 if t == "f16" else 32) for t in (c_type, d_type)]
    counts = (*REGISTERS[element, tile], *results)
    held = (words, words, ACCUMULATORS[c_type], ACCUMULATORS[d_type])
    a, b, c, d = (
        "{" + ", ".join(f"%{x}{i}" for i in range(n)) + "}" for x, n in zip("abcd", counts, strict=True)
    )
    declared = "\n".join(f".reg .{t} %{x}<{n}>;" for x, t, n in zip("abcd", held, counts, strict=True))
    product = f"{d_type}.{c_type}" if element == "f16" else f"{d_type}.{element}.{element}.{c_type}"
    strides = [f", {stride.replace('1', str(i))}" if stride else "" for i in range(3)]
    loads = "\n".join(
        f"wmma.load.{x}.sync.aligned.{layout}.{shape}.global.{t} {registers}, [%rd{i}]{strides[i]};"
        for i, (x, layout, t, registers) in enumerate(
            [("a", la, element, a), ("b", lb, element, b), ("c", lc, c_type, c)]
        )
    )
    return f"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3, .param .u32 s0, .param .u32 s1,
                  .param .u32 s2)
{{
{declared}
.reg .b32 %r<3>;
.reg .b64 %rd<4>;
ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; ld.param.u64 %rd2, [p2]; ld.param.u64 %rd3, [p3];
ld.param.u32 %r0, [s0]; ld.param.u32 %r1, [s1]; ld.param.u32 %r2, [s2];
{loads}
wmma.mma.sync.aligned.{la}.{lb}.{shape}.{product} {d}, {a}, {b}, {c};
wmma.store.d.sync.aligned.{lc}.{shape}.global.{d_type} [%rd3], {d}{strides[2]};
ret;
}}
"""


def matrix(rng, rows, columns, dtype, layout, padding):
    """Values, and the array in memory, whose rows or columns have the padded width as stride."""
    low, high = (0, 8) if dtype == "u8" else (-8, 8)
    values = rng.integers(low, high, (rows, columns)).astype(TYPES[dtype])
    lines = values if layout == "row" else values.T
    memory = np.zeros((lines.shape[0], lines.shape[1] + padding), values.dtype)
    memory[:, : lines.shape[1]] = lines
    return values, memory.view(np.uint16) if dtype == "bf16" else memory


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_product_of_tiles(case, rng):
    dtype, tile, *rest = case
    c_type, d_type = rest or 2 * [{"bf16": "f32", "tf32": "f32", "f64": "f64"}.get(dtype, "s32")]
    m, n, k = tile
    for layouts in itertools.product(("row", "col"), repeat=3):
        padding = 16 * (layouts.count("row") % 2)
        a, a_memory = matrix(rng, m, k, dtype, layouts[0], padding)
        b, b_memory = matrix(rng, k, n, dtype, layouts[1], padding)
        c, c_memory = matrix(rng, m, n, c_type, layouts[2], padding)
        d = np.zeros(c_memory.shape, TYPES[d_type])
        strides = [x.shape[1] for x in (a_memory, b_memory, c_memory)]
        text = kernel(dtype, tile, c_type, d_type, layouts, "%r1" if padding else "")
        launch(text, "k", 1, 32, (a_memory, b_memory, c_memory, d, *strides))
        expected = a.astype(np.float64) @ b.astype(np.float64) + c
        lines = expected if layouts[2] == "row" else expected.T
        np.testing.assert_array_equal(d[:, : lines.shape[1]], lines)


@pytest.mark.parametrize(("kind", "k"), [("s4", 32), ("u4", 32), ("b1", 128)])
def test_a_product_of_narrow_elements(kind, k, rng):
    """4-bit and 1-bit elements, packed in bytes, the first in the low bits; rows of a, columns of b."""
    bits = 128 // k
    a, b = rng.integers(0, 1 << bits, (2, 8, k))
    packed = (a, b)
    if kind == "s4":
        a, b = (np.where(x > 7, x - 16, x) for x in (a, b))
    memory = [
        (x.reshape(8, -1, 8 // bits) << bits * np.arange(8 // bits)).sum(-1).astype(np.uint8) for x in packed
    ]
    c, d = rng.integers(-9, 9, (8, 8)).astype(np.int32), np.zeros((8, 8), np.int32)
    text = kernel(kind, (8, 8, k), "s32", "s32", ("row", "col", "row"))
    if kind == "b1":
        text = text.replace("wmma.mma.sync", "wmma.mma.xor.popc.sync")
    launch(text, "k", 1, 32, (*memory, c, d, k, k, 8))
    products = (a[:, None] ^ b) if kind == "b1" else a[:, None] * b
    np.testing.assert_array_equal(d, products.sum(-1) + c)


def test_the_header(rng):
    """Test <mma.h>: four warps, shared memory, values of fragments, and an accumulator converted to f16."""
    pytest.importorskip("cuda.bindings.nvrtc")
    source = r"""
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void k(const __half* a, const __half* b, __half* c, float* f) {
  __shared__ __half s[4][16][24];
  int w = threadIdx.x / 32;
  for (int i = threadIdx.x % 32; i < 256; i += 32) s[w][i / 16][i % 16] = a[256 * w + i];
  __syncwarp();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> x;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major> y;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
  wmma::fragment<wmma::accumulator, 16, 16, 16, __half> half;
  wmma::fill_fragment(sum, 1.f);
  wmma::load_matrix_sync(x, &s[w][0][0], 24);
  wmma::load_matrix_sync(y, b, 16);
  for (int i = 0; i < 3; i++) wmma::mma_sync(sum, x, y, sum);
  for (int i = 0; i < sum.num_elements; i++) half.x[i] = __float2half(2 * sum.x[i]);
  wmma::store_matrix_sync(c + 256 * w, half, 16, wmma::mem_col_major);
  wmma::store_matrix_sync(f + 256 * w, sum, 16, wmma::mem_row_major);
}
"""
    a, b = (
        rng.integers(-4, 5, (4, 16, 16)).astype(np.float16),
        rng.integers(-4, 5, (16, 16)).astype(np.float16),
    )
    c, f = np.zeros((4, 16, 16), np.float16), np.zeros((4, 16, 16), np.float32)
    p = profile(source, "k", 1, 128, (a, b, c, f))
    expected = 1 + 3 * (a.astype(np.float64) @ b.T.astype(np.float64))
    np.testing.assert_array_equal(f, expected)
    np.testing.assert_array_equal(c.swapaxes(1, 2), 2 * expected)
    assert p.multiply_adds == {"f16": 4 * 3 * 16**3}


def test_a_tile_past_the_end():
    text = kernel("f16", (16, 16, 16), "f32", "f32", ("row", "col", "row"))
    a, d = np.zeros(256, np.float16), np.zeros(256, np.float32)
    with pytest.raises(
        SanitizerError, match="4-byte read past the end of argument 0: element 264 of 256"
    ) as caught:
        launch(text, "k", 1, 32, (a, a.copy(), d.copy(), d, 24, 16, 16))
    assert caught.value.kind == "out of bounds"
    assert "wmma.load.a" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("m16n16k16", "m16n16k8", UnknownInstruction),
        (".f32.f32 ", ".f32.s8.s8.f32 ", UnknownInstruction),
        ("%a0, %a1,", "%a1,", PtxError),
    ],
)
def test_forms_that_do_not_exist(old, new, error):
    text = kernel("f16", (16, 16, 16), "f32", "f32", ("row", "col", "row"))
    a = np.zeros(256, np.float16)
    with pytest.raises(error, match=r"wmma\."):
        launch(text.replace(old, new), "k", 1, 32, (a, a, a, a, 16, 16, 16))
