"""CUDA C++ kernels of RMSNorm and LayerNorm: every way to keep a row, traffic, and accuracy of dweight."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import emulator
from gpu_ops.reference.norm import layernorm as layernorm_reference
from gpu_ops.reference.norm import rmsnorm as rmsnorm_reference
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.cases import close
from tests.support.compare import random
from tests.support.programs import device_with, run_raw

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
EPS = 1e-5


OPTIONS = {
    "rmsnorm": {"eps": EPS, "weight_offset": 0.0, "casting": "fp32"},
    "layernorm": {"eps": EPS},
    "rmsnorm_backward": {"weight_offset": 0.0, "casting": "fp32", "added": ()},
    "layernorm_backward": {"added": ()},
}


def forward(norm, x, weight, residual=None, *, keep_sum=True, sms=None):
    """y, s or None, and the statistics: rstd, or mean and rstd of LayerNorm."""
    inputs = {"x": x, "weight": weight}
    if residual is not None:
        inputs["residual"] = residual
    device = device_with(sms, **inputs)
    if norm == "layernorm":
        inputs["bias"] = weight
    y, rstd = device.empty(x.shape, x.dtype, "y"), device.empty(x.shape[:1], np.float32, "rstd")
    s = None if residual is None or not keep_sum else device.empty(x.shape, x.dtype, "s")
    mean = device.empty(x.shape[:1], np.float32, "mean") if norm == "layernorm" else None
    run_raw(device, norm, OPTIONS[norm], inputs | {"y": y, "s": s, "mean": mean, "rstd": rstd})
    return y, s, *((rstd,) if mean is None else (mean, rstd))


def backward(norm, dy, x, weight, *statistics, dresidual=None, sms=None):
    """dx, dweight and, for LayerNorm, dbias."""
    *mean, rstd = statistics
    inputs = {"dy": dy, "x": x, "weight": weight, "rstd": rstd}
    if dresidual is not None:
        inputs["dresidual"] = dresidual
    device = device_with(sms, **inputs)
    if mean:
        inputs["mean"] = mean[0]
    dx, dweight = device.empty(x.shape, x.dtype, "dx"), device.empty(x.shape[1:], np.float32, "dweight")
    dbias = device.empty(x.shape[1:], np.float32, "dbias") if mean else None
    op = f"{norm}_backward"
    run_raw(device, op, OPTIONS[op], inputs | {"dx": dx, "dweight": dweight, "dbias": dbias})
    return (dx, dweight, dbias) if mean else (dx, dweight)


@pytest.mark.parametrize(
    ("norm", "arch", "dtype", "cols"),
    [
        ("rmsnorm", "sm_86", BF16, 8192),  # registers, the longest row there
        ("layernorm", "sm_86", BF16, 16384),  # forward in shared memory, backward by teams of 6 blocks
        ("rmsnorm", "sm_86", BF16, 65536),  # 22 blocks per row
        ("layernorm", "sm_90", F32, 32768),
        # backward in two blocks of 576 threads per SM, the longest row there
        ("layernorm", "sm_90", F32, 6912),
        ("rmsnorm", "sm_120", F32, 16383),  # single elements: 6 blocks per row, 8 elements per thread
    ],
)
def test_long_rows(norm, arch, dtype, cols, rng, monkeypatch):
    monkeypatch.setenv("GPU_OPS_ARCH", arch)
    x, residual, dy, ds = (random(rng, (2, cols), dtype) for _ in range(4))
    weight = random(rng, (cols,), dtype)
    _, s, *statistics = check_forward(norm, x, weight, residual)
    check_backward(norm, dy, s, weight, *statistics, dresidual=ds)


def check_forward(norm, x, weight, residual, *, sms=None):
    """Check against the reference, and without the sum; return the results."""
    y, s, *statistics = forward(norm, x, weight, residual, sms=sms)
    reference = vars({"rmsnorm": rmsnorm_reference, "layernorm": layernorm_reference}[norm])
    bias = {"bias": weight} if norm == "layernorm" else {}
    expected, naive = (
        reference[norm](x, weight, eps=EPS, residual=residual, **bias, precision=p)[0]
        for p in ("float64", "naive")
    )
    close(y, expected, naive, x.dtype, what="y")
    without, *_ = forward(norm, x, weight, residual, keep_sum=False, sms=sms)
    assert without.tobytes() == y.tobytes()
    return y, s, *statistics


def check_backward(norm, dy, x, weight, *statistics, dresidual=None, sms=None):
    """Check against the reference; return the gradients."""
    reference = vars({"rmsnorm": rmsnorm_reference, "layernorm": layernorm_reference}[norm])
    actual = backward(norm, dy, x, weight, *statistics, dresidual=dresidual, sms=sms)
    expected, naive = (
        reference[f"{norm}_backward"](dy, x, weight, *statistics, dresidual=dresidual, precision=p)
        for p in ("float64", "naive")
    )
    for g, w, n in zip(actual, expected, naive, strict=True):
        close(g, w, n, x.dtype, GRADIENT)
    return actual


@pytest.mark.parametrize(
    ("norm", "dtype", "shape", "sms"),
    [
        ("rmsnorm", F32, (60, 9220), 1),  # one team, with enough rows for two parts
        ("layernorm", BF16, (7, 14000), 4),  # two teams, several rows each
        ("layernorm", F32, (3, 6917), 1),  # single elements
        # more columns than the card can hold: sums of dweight in global memory
        ("rmsnorm", BF16, (4, 40968), 1),
        ("layernorm", BF16, (2, 10001), 1),  # the same, single elements
    ],
)
def test_teams_of_a_small_card(norm, dtype, shape, sms, rng):
    """Teams process many rows; two runs give the same bits whatever block comes first."""
    x, dy = random(rng, shape, dtype), random(rng, shape, dtype)
    weight = random(rng, shape[1:], dtype)
    _, _, *statistics = forward(norm, x, weight)
    actual = check_backward(norm, dy, x, weight, *statistics, sms=sms)
    again = backward(norm, dy.copy(), x.copy(), weight.copy(), *statistics, sms=sms)
    assert [a.tobytes() for a in actual] == [a.tobytes() for a in again]


@pytest.mark.parametrize(
    ("norm", "dtype", "shape", "sms"),
    [
        ("rmsnorm", F32, (5, 12288), 2),  # two teams of three blocks, several rows each
        ("layernorm", BF16, (3, 40968), 1),  # one team of two blocks
        ("layernorm", F32, (3, 17001), 1),  # single elements
        ("rmsnorm", BF16, (2, 60000), 1),  # more columns than the card can hold: some are read again
        ("layernorm", F32, (2, 30008), 1),
        ("layernorm", BF16, (2, 26001), 1),
    ],
)
def test_teams_of_a_small_card_in_the_forward(norm, dtype, shape, sms, rng, monkeypatch):
    """Rows are divided over blocks, with a residual; two runs give the same bits whatever block comes first."""
    monkeypatch.setenv("GPU_OPS_ARCH", "sm_86")
    x, residual = random(rng, shape, dtype), random(rng, shape, dtype)
    weight = random(rng, shape[1:], dtype)
    actual = check_forward(norm, x, weight, residual, sms=sms)
    again = forward(norm, x.copy(), weight.copy(), residual.copy(), sms=sms)
    assert [a.tobytes() for a in actual] == [a.tobytes() for a in again]


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_team_of_huge_numbers(norm, rng, monkeypatch):
    """Squares exceed the range of float, and so does the sum of a row: all blocks of a team sum it again."""
    monkeypatch.setenv("GPU_OPS_ARCH", "sm_86")
    x, weight = rng.uniform(1, 2, (3, 12288)).astype(F32), np.ones(12288, F32)
    scale = np.array([[1], [2.0**126], [1]], F32)
    y, _, *statistics = forward(norm, x, weight, sms=1)
    actual, _, *got_statistics = forward(norm, x * scale, weight, sms=1)
    np.testing.assert_allclose(actual, y, rtol=0, atol=3e-4)  # eps adds to the variance of the other rows
    for name, a, b in zip(("rstd", "mean"), statistics[::-1], got_statistics[::-1], strict=False):
        factor = 1 / scale[:, 0] if name == "rstd" else scale[:, 0]
        np.testing.assert_allclose(b, a * factor, rtol=1e-4)


@pytest.mark.parametrize(
    ("norm", "cols", "dtype"),
    [("rmsnorm", 8192, BF16), ("layernorm", 8192, F32), ("layernorm", 512, BF16), ("rmsnorm", 40960, F32)],
)
def test_misaligned_rows_give_the_same_bits(norm, cols, dtype, rng):
    x, dy = random(rng, (3, cols), dtype), random(rng, (3, cols), dtype)
    weight = random(rng, (cols,), dtype)
    padded = np.zeros((3, cols + 1), dtype)
    padded[:, 1:] = x
    y, _, *statistics = forward(norm, x, weight)
    got_y, _, *got_statistics = forward(norm, padded[:, 1:], weight)
    expected = y, *statistics, *backward(norm, dy, x, weight, *statistics)
    actual = got_y, *got_statistics, *backward(norm, dy, padded[:, 1:], weight, *statistics)
    assert [a.tobytes() for a in actual] == [a.tobytes() for a in expected]


@pytest.mark.parametrize("rows", [8192, 40_000])
def test_dweight_of_equal_products(rows):
    """Equal products are the worst case for a long sum of floats: each addition rounds the same way."""
    x = np.full((rows, 8), 1.7, np.float32)
    rstd = np.full(rows, 0.3, np.float32)
    _, dweight = backward("rmsnorm", np.ones_like(x), x, np.ones(8, np.float32), rstd)
    exact = rows * float(np.float32(1.7)) * float(np.float32(0.3))
    assert np.abs(dweight / exact - 1).max() <= 4e-6


@pytest.mark.parametrize(
    ("norm", "dtype", "shape"),
    [
        ("rmsnorm", BF16, (64, 128)),
        ("layernorm", F32, (16, 512)),
        ("rmsnorm", BF16, (4, 4096)),
        ("layernorm", BF16, (4, 4096)),
        ("rmsnorm", F32, (1, 16384)),
        ("layernorm", BF16, (2, 16384)),
    ],
    ids=str,
)
def test_each_element_moves_once(norm, dtype, shape, rng):
    """Traffic is whole sectors, no bank conflicts, and one pass over every array with rows."""
    x, residual, dy, ds = (random(rng, shape, dtype) for _ in range(4))
    weight = np.ones(shape[1], dtype)
    with emulator.record() as profiles:
        _, s, *statistics = forward(norm, x, weight, residual)
        backward(norm, dy, s, weight, *statistics, dresidual=ds)
    moved = [{b.name: (b.bytes_read, b.bytes_written) for b in p.buffers} for p in profiles]
    read, written = (x.nbytes, 0), (0, x.nbytes)
    for actual, expected in (
        (moved[0], {"x": read, "residual": read, "y": written, "s": written, "rstd": (0, 4 * shape[0])}),
        (moved[1], {"dy": read, "x": read, "dresidual": read, "dx": written}),
        (moved[2], {"dweight": (0, 4 * shape[1])}),
    ):
        for name in expected:
            assert actual[{"x": "s"}.get(name, name) if name not in actual else name] == expected[name], name
    for profile in profiles[:2]:
        vectors = [i for i in profile.instructions if i.global_requests and ".v4" in i.form]
        assert len(vectors) >= 4
        for i in vectors:  # rows in one warp share the weights they read: .nc
            assert i.sectors_per_128_bytes == 4 or (".nc" in i.form and i.sectors_per_128_bytes < 4), i.ptx


@pytest.mark.parametrize(("norm", "shape"), [("rmsnorm", (2, 4096)), ("layernorm", (8, 256))])
def test_what_an_add_and_a_norm_move(norm, shape, rng):
    """Two kernels move 5 arrays: x, residual and s, then s and y. One moves 4, or 3 if s is not requested."""
    x, residual = random(rng, shape, BF16), random(rng, shape, BF16)
    weight = np.ones(shape[1], BF16)
    with emulator.record() as profiles:
        for keep_sum in (True, False):
            forward(norm, x, weight, residual, keep_sum=keep_sum)
    moved = [
        sum(b.bytes_read + b.bytes_written for b in p.buffers if b.name in ("x", "residual", "s", "y"))
        for p in profiles
    ]
    assert moved[0] == 4 * x.nbytes
    assert moved[1] == 3 * x.nbytes <= 0.70 * (5 * x.nbytes)


@pytest.mark.parametrize(
    ("norm", "arch", "dtype"),
    [("rmsnorm", "sm_80", BF16), ("layernorm", "sm_86", BF16), ("layernorm", "sm_80", F32)],
)
def test_what_131072_columns_move(norm, arch, dtype, rng, monkeypatch):
    """Teams of blocks keep a whole row."""
    monkeypatch.setenv("GPU_OPS_ARCH", arch)
    monkeypatch.setenv("GPU_OPS_SANITIZE", "0")
    x, dy = (random(rng, (2, 131072), dtype) for _ in range(2))
    weight = np.ones(131072, dtype)
    with emulator.record() as profiles:
        _, _, *statistics = forward(norm, x, weight)
        backward(norm, dy, x, weight, *statistics)
    moved = [
        sum(b.bytes_read + b.bytes_written for b in p.buffers if b.name in ("x", "y", "dy", "dx"))
        for p in profiles
    ]
    assert moved[:2] == [2 * x.nbytes, 3 * x.nbytes]


def rows_of_all_lengths():
    """Each length with one norm and dtype; the other combinations are slow."""
    norms = (("rmsnorm", BF16), ("layernorm", F32), ("layernorm", BF16))
    for i, cols in enumerate((8, 17, 64, 100, 200, 257, 1000, 4096, 4099, 8192, 16384)):
        for j, norm in enumerate(norms):
            yield pytest.param(*norm, cols, marks=() if i % 3 == j else pytest.mark.slow)


@pytest.mark.parametrize(("norm", "dtype", "cols"), list(rows_of_all_lengths()))
def test_no_bank_conflicts(norm, dtype, cols, rng):
    """Sums of dweight have no conflicts: vectors of 1, 4 and 8 elements, one or several rows per block."""
    x, dy = random(rng, (5, cols), dtype), random(rng, (5, cols), dtype)
    weight = np.ones(cols, dtype)
    with emulator.record() as profiles:
        _, _, *statistics = forward(norm, x, weight)
        backward(norm, dy, x, weight, *statistics)
    for profile in profiles:
        shared = [i for i in profile.instructions if i.waves]
        assert shared or profile is profiles[0]  # short rows of the forward do without
        assert not [i.ptx for i in shared if i.waves > i.phases]
