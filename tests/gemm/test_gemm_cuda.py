"""Matrix products alone: every layout, size and epilogue on the emulator; their traffic and arithmetic."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import emulator
from gpu_ops.core.device import EmulatorDevice
from gpu_ops.core.run import Linked
from gpu_ops.kernels.compiler import cubin
from gpu_ops.kernels.compiler.jit import compile_kernel
from gpu_ops.kernels.gemm import args, gemm
from gpu_ops.kernels.gemm import config as gemm_config
from gpu_ops.kernels.gemm.args import Operand
from gpu_ops.kernels.gemm.config import (
    DeviceLimits,
    FewConfig,
    MatmulProblem,
    MatmulTile,
    select_config,
    select_few,
)
from gpu_ops.kernels.program import Builder, Tensor
from gpu_ops.presets import ARCHES
from gpu_ops.reference.gemm.swiglu import swiglu, swiglu_backward
from tests.support.compare import random
from tests.support.programs import device_with, layout_of

F16, BF16, F32, F64 = (np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
# Relative to the sum of |a b|: one rounding of the result, and those of the sum; float32 drops 2^-22 of each product.
ROUNDING = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-20, F64: 2.0**-49}
LAYOUTS = {"NT": (False, False), "NN": (False, True), "TN": (True, True), "TT": (True, False)}


def matrix(rng, rows, cols, dtype, across=False):
    """Operand, and its values as (rows, k) in float64."""
    x = np.zeros((cols, rows) if across else (rows, cols), dtype)
    x[...] = random(rng, x.shape, dtype)
    return Operand(x, across), (x.T if across else x).astype(float)


LAUNCH = {"raw": gemm.launch_raw, "numba": gemm.launch_numba}


def multiply(device, which, make, *arguments, **options):
    """Run a GEMM of NumPy arrays; ``make`` is a function of kernels/gemm/args.py."""
    views = {}

    def tensor(x):
        if isinstance(x, tuple):
            return tuple(map(tensor, x))
        if isinstance(x, Operand):
            return Operand(tensor(x.array), x.across)
        if not isinstance(x, np.ndarray):
            return x
        name = next((name for name, known in views.items() if known is x), f"array {len(views)}")
        views[name] = x
        return Tensor.of(name, layout_of(x))

    builder = Builder(device.limits)
    LAUNCH[which](builder, make(*map(tensor, arguments), **{name: tensor(x) for name, x in options.items()}))
    Linked(builder.program(), device)(views)


def check(c, want, magnitude, dtype):
    error = np.abs(c.astype(float) - want)
    bound = ROUNDING[dtype] * magnitude + 1e-30
    worst = np.unravel_index(np.argmax(error / bound), error.shape)
    assert (error <= bound).all(), f"worst at {worst}: got {c[worst]}, expected {want[worst]}"


# rows, columns, k: remainders on every side; aligned and not; one element
SIZES = [(72, 136, 104), (49, 33, 69), (1, 1, 1)]


@pytest.mark.parametrize(
    ("which", "dtype", "layout"),
    [
        *itertools.product(["raw"], [BF16, F32], LAYOUTS),
        *itertools.product(["numba"], [F16], ["NT", "NN"]),
        *itertools.product(["numba"], [F64], ["TN", "TT"]),
    ],
    ids=str,
)
def test_layouts(which, dtype, layout, rng):
    a_across, b_across = LAYOUTS[layout]
    for m, n, k in SIZES:
        a, wide_a = matrix(rng, m, k, dtype, a_across)
        b, wide_b = matrix(rng, n, k, dtype, b_across)
        device = device_with(a=a.array, b=b.array)
        c = device.empty((m, n), dtype, "c")
        multiply(device, which, args.product, a, b, c)
        check(c, wide_a @ wide_b.T, np.abs(wide_a) @ np.abs(wide_b).T, dtype)


@pytest.mark.parametrize("which", ["raw", "numba"])
@pytest.mark.parametrize("offset", [1, 8])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_views(which, offset, dtype, rng):
    """Strided rows, at aligned and unaligned addresses; no element outside the view is read or written."""
    m, n, k = 70, 48, 40
    padded = {
        name: np.zeros((rows, cols + 16), dtype)
        for name, rows, cols in (("a", m, k), ("b", n, k), ("c", m, n))
    }
    inside = {name: x[:, offset : x.shape[1] - 16 + offset] for name, x in padded.items()}
    for name in "ab":
        padded[name].fill(np.nan)
        inside[name][...] = random(rng, inside[name].shape, dtype)
    device = device_with(**inside)
    multiply(device, which, args.product, Operand(inside["a"]), Operand(inside["b"]), inside["c"])
    a, b = inside["a"].astype(float), inside["b"].astype(float)
    check(inside["c"], a @ b.T, np.abs(a) @ np.abs(b).T, dtype)
    inside["c"].fill(0)
    assert not padded["c"].any()


@pytest.mark.parametrize(("which", "dtype"), [("raw", BF16), ("raw", F32), ("numba", BF16)], ids=str)
def test_pairs(which, dtype, rng):
    """Two products in a launch, their sum, and a sum added to the output; the second pair has separate strides."""
    m, n, k = 72, 40, 48
    (a0, x0), (a1, x1) = (matrix(rng, m, k, dtype) for _ in range(2))
    b0, y0 = matrix(rng, n, k, dtype)
    strided = np.zeros((n, k + 8), dtype)[:, :k]
    strided[...] = random(rng, (n, k), dtype)
    b1, y1 = Operand(strided), strided.astype(float)
    wants = x0 @ y0.T, x1 @ y1.T
    sizes = np.abs(x0) @ np.abs(y0).T, np.abs(x1) @ np.abs(y1).T
    device = device_with(a0=a0.array, a1=a1.array, b0=b0.array, b1=strided)
    out = device.empty((m, n), dtype, "c"), np.zeros((m, n + 8), dtype)[:, :n]
    multiply(device, which, args.two_products, (a0, a1), (b0, b1), out)
    for c, expected, size in zip(out, wants, sizes, strict=True):
        check(c, expected, size, dtype)
    total = device.empty((m, n), F32, "total")
    multiply(device, which, args.sum_of_products, (a0, a1), (b0, b1), total)
    check(total, sum(wants), sum(sizes), F32)
    multiply(device, which, args.sum_of_products, (a0, a1), (b0, b1), total, total=total)
    check(total, 2 * sum(wants), 2 * sum(sizes), F32)
    multiply(device, which, args.product, a0, b0, out[0], total=total)
    check(out[0], 2 * sum(wants) + wants[0], 3 * sum(sizes), dtype)


@pytest.mark.parametrize("which", ["raw", "numba"])
@pytest.mark.parametrize(("m", "activation"), [(3, "silu"), (20, "gelu"), (20, "gelu_tanh")])
def test_gates(which, activation, m, rng):
    """Gates in float32, against the activation of exact products."""
    n, k = 72, 40
    x, wide_x = matrix(rng, m, k, F32)
    (w_gate, g), (w_up, u) = (matrix(rng, n, k, F32) for _ in range(2))
    gate, up = (wide_x @ w.T / np.sqrt(k) for w in (g, u))
    for w in (w_gate, w_up):
        w.array[...] /= np.sqrt(np.float32(k))
    device = device_with(x=x.array, w_gate=w_gate.array, w_up=w_up.array)
    h = device.empty((m, n), F32, "h")
    multiply(device, which, args.gated, x, w_gate, w_up, h, activation=activation)
    np.testing.assert_allclose(h, swiglu(gate, up, activation=activation), rtol=1e-4, atol=2e-5)

    dh = wide_x @ g.T / np.sqrt(k)
    stored = [np.zeros((m, n), F32) for _ in range(2)]
    stored[0][...], stored[1][...] = gate, up
    dgate, dup = swiglu_backward(dh, gate, up, activation=activation)
    kept, out = tuple(stored), (*stored, h)
    multiply(device, which, args.gated_backward, x, w_gate, kept, out, activation=activation)
    for actual, expected in (
        (stored[0], dgate),
        (stored[1], dup),
        (h, swiglu(gate, up, activation=activation)),
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("m", [1, 40])
def test_divided_k(m, rng):
    """Few rows and columns, large k: several blocks each sum a part, in the same order every time."""
    n, k = 24, 4096
    a, wide_a = matrix(rng, m, k, BF16)
    b, wide_b = matrix(rng, n, k, BF16)
    bits = []
    for _ in range(2):
        device = device_with(a=a.array, b=b.array)
        c = device.empty((m, n), BF16, "c")
        with emulator.record() as profiles:
            multiply(device, "raw", args.product, a, b, c)
        assert [p.kernel for p in profiles][1:] == ["gemm_sum"]
        bits.append(c.tobytes())
    assert bits[0] == bits[1]
    check(c, wide_a @ wide_b.T, np.abs(wide_a) @ np.abs(wide_b).T, BF16)
    odd = np.zeros((m, n + 1), BF16)[:, 1:]
    multiply(device_with(a=a.array, b=b.array, c=odd), "raw", args.product, a, b, odd)
    assert odd.tobytes() == bits[0]


def conflicts(profile):
    return [i.ptx for i in profile.instructions if i.waves > i.phases]


def traffic(profile):
    return {b.name: (b.bytes_read, b.bytes_written) for b in profile.buffers}


def tile_cases():
    """Largest tile of each type in every layout; the others in the layout of the forward or of weight gradients."""
    for i, tile in enumerate(gemm_config._TILES):
        for dtype in (BF16, F32):
            legal = [t for t, *_ in gemm_config.legal_tiles(dtype.itemsize, False, 99 * 1024)]
            for layout in LAYOUTS if i < 2 and legal[0] is tile else ("NT",) if dtype == BF16 else ("TN",):
                # sm_90 has room for twice as much of K at a time
                for arch in ("sm_80", "sm_90") if i == 0 else ("sm_80",):
                    if tile in legal:
                        name = f"{tile.block_m}x{tile.block_n}-{tile.warps}-{dtype}-{layout}-{arch}"
                        yield pytest.param(tile, dtype, layout, arch, id=name)


@pytest.mark.parametrize(("tile", "dtype", "layout", "arch"), list(tile_cases()))
def test_whole_tiles(tile, dtype, layout, arch, rng, monkeypatch):
    """Whole tiles have no bank conflicts, whole sectors, and no needless products on the tensor cores."""
    monkeypatch.setenv("GPU_OPS_ARCH", arch)
    monkeypatch.setattr(gemm_config, "_TILES", (tile,))
    gemm_config.select_config.cache_clear()
    a_across, b_across = LAYOUTS[layout]
    m, n, k = 2 * tile.block_m, tile.block_n, 192
    a, wide_a = matrix(rng, m, k, dtype, a_across)
    b, wide_b = matrix(rng, n, k, dtype, b_across)
    device = device_with(a=a.array, b=b.array)
    c = device.empty((m, n), dtype, "c")
    with emulator.record() as profiles:
        multiply(device, "raw", args.product, a, b, c)
    gemm_config.select_config.cache_clear()
    (profile,) = profiles
    check(c, wide_a @ wide_b.T, np.abs(wide_a) @ np.abs(wide_b).T, dtype)
    assert not conflicts(profile)
    accesses = [i for i in profile.instructions if i.global_requests]
    assert accesses
    assert {i.sectors_per_128_bytes for i in accesses} == {4.0}
    assert traffic(profile)["c"] == (0, c.nbytes)
    asked = m * n * k * (3 if dtype == F32 else 1)  # float32: three products of halves
    assert sum(profile.multiply_adds.values()) == asked


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("m", [1, 5, 16])
def test_weights_are_read_once(m, dtype, rng):
    n, k = 64, 1024
    x, _ = matrix(rng, m, k, dtype)
    (w_gate, _), (w_up, _) = (matrix(rng, n, k, dtype) for _ in range(2))
    device = device_with(x=x.array, w_gate=w_gate.array, w_up=w_up.array)
    h = device.empty((m, n), dtype, "h")
    with emulator.record() as profiles:
        multiply(device, "raw", args.gated, x, w_gate, w_up, h, activation="silu")
    (profile,) = profiles
    moved = traffic(profile)
    assert moved["w_gate"] == moved["w_up"] == (w_gate.array.nbytes, 0)
    assert moved["h"] == (0, h.nbytes)
    assert not conflicts(profile)
    loads = [i for i in profile.instructions if i.global_requests and ".cs" in i.form]
    assert loads
    assert all(".v4" in i.form and i.sectors_per_128_bytes == 4 for i in loads)


class Sparse(EmulatorDevice):
    """Device that passes all of ``memory`` on for views of it: the sanitizer keeps no list of gaps between them."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def _buffer(self, array):
        return super()._buffer(self.memory if array.ctypes.data == self.memory.ctypes.data else array)


@pytest.mark.parametrize("which", ["a", "b", "c"])
@pytest.mark.parametrize(("m", "layout"), [(3, "NT"), (24, "NT"), (24, "TN")])
def test_offsets_have_64_bits(m, layout, which, rng):
    """The last row is more than 2^31 elements after the first; the gap is not touched."""
    (a, b), n = LAYOUTS[layout], 24
    shapes = {"a": (n, m) if a else (m, n), "b": (n, n), "c": (m, n)}
    near = {name: random(rng, shape, F16) for name, shape in shapes.items()}
    rows, cols = shapes[which]
    stride = 2**31 // (rows - 1) // 8 * 8 + 64
    memory = np.zeros((rows - 1) * stride + cols, F16)
    far = near | {which: np.lib.stride_tricks.as_strided(memory, (rows, cols), (2 * stride, 2))}
    far[which][...] = near[which]
    for device, arrays in ((Sparse(memory), far), (EmulatorDevice(), near)):
        multiply(device, "raw", args.product, Operand(arrays["a"], a), Operand(arrays["b"], b), arrays["c"])
    assert far["c"].tobytes() == near["c"].tobytes()


@pytest.mark.parametrize("arch", [name for name in ARCHES if name != "sm_75"])
def test_every_problem_has_a_tile_that_fits(arch):
    limits = DeviceLimits(20, ARCHES[arch].smem_per_block_optin)
    for itemsize, gated in itertools.product((2, 4), (False, True)):
        for m, n, k in itertools.product((17, 100, 4096), (1, 100, 14336), (1, 4096)):
            problem = MatmulProblem(itemsize, m, n, k, gated=gated, splittable=not gated)
            config = select_config(problem, limits)
            tile = config.tile
            assert config.stages >= 3
            assert (
                config.shared_bytes
                == config.stages * (tile.block_m + tile.block_n) * config.block_k * itemsize
            )
            assert config.shared_bytes <= limits.smem_per_block_optin
            assert config.blocks * tile.block_m * tile.block_n >= m * n * (2 if gated else 1)
            assert config.splits == 1 or config.splits * config.blocks <= 20 * 16


def test_tiles_of_a_large_model():
    """Llama-3-8B on an A100: 64 x 64 per warp for many tokens; few tokens divide K until the SMs are busy."""
    a100 = DeviceLimits(108, ARCHES["sm_80"].smem_per_block_optin)
    many = select_config(MatmulProblem(2, 2048, 14336, 4096, gated=True), a100)
    assert many.tile == MatmulTile(128, 128, 2, 2)
    assert 2 * (many.shared_bytes + 1024) <= ARCHES["sm_80"].smem_per_sm
    down = select_config(MatmulProblem(2, 32, 4096, 14336, splittable=True), a100)
    assert down.tile.block_m == 32
    assert down.splits * down.blocks >= 2 * 108
    assert select_few(1, 14336, 4096, 2, True, a100) == FewConfig(8, 8, 4, 1, 1792)
    assert select_few(16, 4096, 14336, 2, False, a100) == FewConfig(32, 16, 2, 3, 128)


def test_shapes_are_those_of_the_kernels():
    """The struct passed by value, as compiled, has the size of its NumPy twin."""
    seen = set()
    for variant in gemm.variants("sm_80"):
        kernel = variant.kernel
        if kernel.stem in seen or kernel.stem == "gemm/sum":
            continue
        seen.add(kernel.stem)
        compiled = compile_kernel(kernel, "sm_80")
        twin = {"gemm/gemm_sm80": gemm.GEMM_SHAPE, "gemm/gemv": gemm.GEMV_SHAPE}[kernel.stem]
        assert cubin.parameter_sizes(compiled.cubin, compiled.entry)[-1] == twin.itemsize
    assert seen == {"gemm/gemm_sm80", "gemm/gemv"}
