"""AdamW: every backend has the bits of the reference rounded after every operation; and laws over many steps."""

from __future__ import annotations

import math

import numpy as np
import pytest

import gpu_ops
from gpu_ops.reference.rows import adamw as reference
from tests.rows.cases import BF16, F32, F64, FORMS, made, same_bits
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray
from tests.support.processes import python

DEVICES = ("cpu", "emulator", "cuda")
EMULATED = ("float32, bfloat16 gradients", "bfloat16 of master, stochastic", "bfloat16 alone")


def quick_on_emulator(raw):
    return {"*": {"form": EMULATED if raw else ("float64", "bfloat16 alone"), "size": [1300]}}


def runs(case):
    return case["backend"]["backend"] != "raw" or case.get("form") != "float64"


def stepped(arrays, **options):
    """New params, m, v, and master if present; the arrays do not change."""
    copies = {name: x.copy() for name, x in arrays.items()}
    assert gpu_ops.adamw_step(**copies, **options) is None
    assert copies.pop("grads").tobytes() == arrays["grads"].tobytes()
    return tuple(copies.values())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 7, 1300, 5000])
def test_bits_of_the_reference(backend, form, size, rng):
    """Kernels compute as the reference rounded after every operation; the default reference is close."""
    arrays, rounding = made(rng, form, size)
    options = {"step": 7, "lr": 1e-3, "weight_decay": 0.1, "grad_scale": 0.5, "seed": 2**40 + 3, **rounding}
    for mask in (None, rng.random(size) < 0.5):
        expected = reference.adamw_step(**arrays, **options, decay_mask=mask, precision="naive")
        actual = stepped(arrays, **options, decay_mask=mask, **backend)
        if backend["backend"] == "reference" or form == "float64":
            for f, w in zip(actual[1:], expected[1:], strict=True):
                np.testing.assert_allclose(f, w, rtol=1e-14 if form == "float64" else 1e-6, atol=1e-8)
        else:
            same_bits(actual, expected)


def test_blocks_draw_different_bits(rng):
    """The CPU takes 1024 elements at a time; the last block is a part."""
    arrays, rounding = made(rng, "bfloat16 of master, stochastic", 5000)
    options = {"step": 7, "lr": 1e-3, "weight_decay": 0.1, "seed": 2**40 + 3, **rounding}
    expected = reference.adamw_step(**arrays, **options, precision="naive")
    same_bits(stepped(arrays, **options, device="cpu", backend="numba"), expected)


def test_numbers_in_arrays(backend, rng):
    """Numbers in arrays give the bits of plain numbers, call after call; skip changes no bit."""
    arrays, options = made(rng, "bfloat16 of master, stochastic", 1300)
    skip = np.zeros((), np.float32)
    for step in (1, 40):
        numbers = {"step": step, "lr": 0.001 * step, "grad_scale": 1 / step}
        number_arrays = {
            "step": np.array(step),
            "lr": np.array(0.001 * step),
            "grad_scale": np.array(1 / step),
        }
        expected = stepped(arrays, **numbers, **options, **backend)
        same_bits(stepped(arrays, **number_arrays, skip=skip, **options, **backend), expected)
        assert expected[0].tobytes() != arrays["params"].tobytes()
    for value in (1.0, np.nan):
        skipped = stepped(arrays, **number_arrays, skip=np.array(value, np.float32), **options, **backend)
        same_bits(skipped, [x for name, x in arrays.items() if name != "grads"])


@pytest.mark.parametrize(
    ("name", "wrong"), [("step", 0), ("lr", 1e39), ("lr", -1.0), ("lr", math.inf), ("grad_scale", 1e39)]
)
def test_numbers_in_host_arrays_have_the_rules_of_plain_numbers(backend, name, wrong, rng):
    """The rules hold in a later call too."""
    arrays, _ = made(rng, "float32", 20)
    numbers = {"step": np.array(1), "lr": np.array(0.1), "grad_scale": np.array(1.0)}
    stepped(arrays, **numbers, **backend)
    for value in (wrong, np.array(wrong)):
        with pytest.raises(gpu_ops.errors.OptionError, match=f"{name} must"):
            stepped(arrays, **numbers | {name: value}, **backend)


def test_numbers_that_change_keep_the_program(rng):
    """A schedule of learning rates does not compile a new program each step."""
    arrays, _ = made(rng, "float32", 50)
    known = gpu_ops.adamw_step.op.known
    stepped(arrays, step=1, lr=0.1, grad_scale=1.0, betas=(0.9, 0.98))
    before = len(known)
    results = [
        stepped(arrays, step=t, lr=0.1 / t, grad_scale=1.0 / t, betas=(0.9, 0.98)) for t in range(2, 9)
    ]
    assert len(known) == before
    for t, actual in zip(range(2, 9), results, strict=True):
        same_bits(
            actual,
            stepped(arrays, step=t, lr=np.array(0.1 / t), grad_scale=np.array(1.0 / t), betas=[0.9, 0.98]),
        )
    with pytest.raises(gpu_ops.errors.OptionError, match="lr must be finite"):
        stepped(arrays, step=1, lr=math.nan, grad_scale=1.0, betas=(0.9, 0.98))
    with pytest.raises(gpu_ops.errors.OptionError, match="step must lie in"):
        stepped(arrays, step=0, lr=0.1, grad_scale=1.0, betas=(0.9, 0.98))


def textbook(params, gradients, lr, decay, beta1=0.9, beta2=0.999, eps=1e-8):
    """Algorithm 1 of Kingma and Ba with decoupled decay, written independently of the reference."""
    p, first, second = params.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(gradients.astype(np.float64), 1):
        first += (1 - beta1) * (g - first)
        second += (1 - beta2) * (g**2 - second)
        unbiased = second / (1 - beta2**t)
        p = p - lr * decay * p - lr * (first / (1 - beta1**t)) / (np.sqrt(unbiased) + eps)
    return p


@pytest.mark.parametrize(
    ("dtype", "decay", "close"), [("f4", 0.01, 200 / 2**24), ("f4", 0.0, 100 / 2**24), ("f8", 0.01, 1e-14)]
)
def test_a_hundred_steps(dtype, decay, close, rng):
    """Each step rounds p twice, or once without decay, by at most 2^-24 of p."""
    start = rng.uniform(0.5, 2.0, 2000).astype(dtype)
    gradients = rng.standard_normal((100, 2000)).astype(dtype)
    p, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for t, g in enumerate(gradients, 1):
        gpu_ops.adamw_step(p, g, m, v, step=t, lr=1e-3, weight_decay=decay)
    expected = textbook(start, gradients, 1e-3, decay)
    assert np.max(np.abs(p - expected) / np.abs(expected)) < close


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_hundred_steps_of_torch(dtype, rng):
    """float64 agrees; in float32 both round at each step, and the error is at most twice that of torch."""
    torch = pytest.importorskip("torch")
    start = rng.uniform(0.5, 2.0, 2000).astype(dtype)
    gradients = rng.standard_normal((100, 2000)).astype(dtype)
    p, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    weights = torch.from_numpy(start.copy())
    optimizer = torch.optim.AdamW([weights], lr=1e-3, weight_decay=0.01, fused=True)
    for t, g in enumerate(gradients, 1):
        gpu_ops.adamw_step(p, g, m, v, step=t, lr=1e-3, weight_decay=0.01)
        weights.grad = torch.from_numpy(g)
        optimizer.step()
    theirs = weights.numpy()
    if dtype == "float64":
        assert np.max(np.abs(p - theirs) / np.abs(p)) < 1e-14
        return
    expected = textbook(start, gradients, 1e-3, 0.01)
    ours, torchs = (np.max(np.abs(x - expected) / np.abs(expected)) for x in (p, theirs))
    assert ours <= 2 * torchs


def test_stochastic_rounding_has_no_bias(rng):
    """0.5 - 500 * 3e-4 = 0.35: rounding to the nearest bfloat16 keeps 0.5. The error of each step is random."""
    n, steps, lr = 4096, 500, 3e-4
    p, g = np.full(n, 0.5, BF16), np.ones(n, F32)
    m, v = np.ones(n, F32), np.ones(n, F32)  # the update is lr
    for t in range(1, steps + 1):
        gpu_ops.adamw_step(p, g, m, v, step=10**6 + t, lr=lr, rounding="stochastic", seed=3)
    error = p.astype(F64) - (0.5 - steps * lr)
    assert abs(error.mean()) <= 4 * error.std() / math.sqrt(n)
    assert 0.005 < error.std() < 0.05
    x = rng.standard_normal(1 << 16).astype(F32)
    rounded = reference.round_stochastic(x, seed=1, step=2)
    ulp = np.spacing(np.abs(x)) * 2.0**16
    error = (rounded.astype(F64) - x) / ulp
    assert abs(error.mean()) <= 4 * error.std() / math.sqrt(x.size)
    assert np.abs(error).max() < 1


def test_what_stochastic_rounding_leaves_alone(backend):
    """Exact values, infinities and NaN are kept; the largest numbers stay finite. No update and no decay."""
    largest = float(np.finfo(F32).max)
    near = [largest, -largest, 3.39e38]
    special = np.array([1.0, -1.5, 2.0**-130, np.inf, -np.inf, np.nan, *near] * 40, F32)
    zeros = np.zeros(special.size, F32)
    params = np.zeros(special.size, BF16)
    gpu_ops.adamw_step(
        params,
        zeros,
        zeros.copy(),
        zeros.copy(),
        step=1,
        lr=0.0,
        master=special,
        rounding="stochastic",
        **backend,
    )
    result = params.astype(F32).reshape(40, -1)
    np.testing.assert_array_equal(result[:, :6], special.reshape(40, -1)[:, :6])
    assert np.isfinite(result[:, 6:]).all()
    assert np.abs(result[:, 6:]).min() > 3.38e38


def test_draws_differ_by_seed_step_and_place():
    bits = [reference.random_bits(4096, *key) for key in ((0, 1), (1, 1), (0, 2), (2**63, 1), (0, 2**40))]
    for i, a in enumerate(bits):
        assert abs(np.mean(a) - 32767.5) < 4 * 18919 / 64
        assert np.unique(a.reshape(-1, 8), axis=0).shape[0] == 512
        for b in bits[:i]:
            assert (a == b).mean() < 0.01
    assert (reference.random_bits(300, 5, 6) == reference.random_bits(4096, 5, 6)[:300]).all()


THREADS = """
import hashlib, ml_dtypes, numpy as np, gpu_ops
rng = np.random.default_rng(0)
p, g = (rng.standard_normal(300001).astype(np.float32) for _ in range(2))
low, m, v = p.astype(ml_dtypes.bfloat16), np.zeros_like(p), np.zeros_like(p)
for t in (1, 2, 3):
    gpu_ops.adamw_step(low, g, m, v, step=t, lr=0.1, weight_decay=0.1, rounding="stochastic")
    gpu_ops.adamw_step(p, g, m, v, step=t, lr=0.1, weight_decay=0.1)
print(hashlib.sha256(b"".join(x.tobytes() for x in (low, p, m, v))).hexdigest())
"""


def test_bits_for_any_number_of_threads():
    digests = {python("-c", THREADS, NUMBA_NUM_THREADS=str(n)) for n in (1, 2, 3, 7)}
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


@needs_nvrtc
@pytest.mark.parametrize("kernels", ["raw", "numba"])
def test_a_captured_step_counts_and_skips(cupy, kernels, rng):
    """A replayed graph reads the current step, learning rate and skip on the device."""
    arrays, _ = made(rng, "float32", 300)
    arrays = {name: FakeArray(x) for name, x in arrays.items()}
    numbers = {"step": np.array(1, np.int32), "lr": np.array(0.1), "skip": np.zeros((), F32)}
    numbers = {name: FakeArray(x) for name, x in numbers.items()}
    size = gpu_ops.workspace_size("adamw_step", **arrays, **numbers, backend=kernels)
    workspace = FakeArray(np.zeros(size, np.uint8))  # the graph holds its address
    before = {name: x.host.copy() for name, x in arrays.items()}
    with cupy.capture():
        gpu_ops.adamw_step(**arrays, **numbers, backend=kernels, workspace=workspace)
    for x, start in zip(arrays.values(), before.values(), strict=True):
        x.host[...] = start
    for step, lr, skip in ((1, 0.1, 0), (2, 0.05, 1), (2, 0.05, 0)):
        for x, value in zip(numbers.values(), (step, lr, skip), strict=True):
            x.host[...] = value
        cupy.replay()
        if not skip:
            before["params"], before["m"], before["v"] = reference.adamw_step(
                **before, step=step, lr=lr, precision="naive"
            )
        for name, x in arrays.items():
            assert x.host.tobytes() == before[name].tobytes(), (step, name)


def test_a_step_below_one_on_a_gpu_counts_as_one(cupy, rng):
    arrays, _ = made(rng, "float32", 20)
    expected = reference.adamw_step(**arrays, step=1, lr=0.1, precision="naive")
    device_arrays = {name: FakeArray(x) for name, x in arrays.items()}
    gpu_ops.adamw_step(**device_arrays, step=FakeArray(np.array(0)), lr=0.1, backend="numba")
    assert device_arrays["params"].host.tobytes() == expected[0].tobytes()


def test_nothing_is_written_before_all_is_checked(rng):
    """Nothing is written if a later argument is invalid; also in the second call."""
    arrays, _ = made(rng, "float32", 20)
    before = {name: x.tobytes() for name, x in arrays.items()}
    strided = np.zeros(40, F32)[::2]
    for change, error, message in (
        ({"v": np.zeros(20)}, gpu_ops.errors.DTypeError, "v is float64"),
        ({"v": strided}, gpu_ops.errors.ShapeError, "not contiguous"),
        ({"v": np.zeros((4, 5), F32)[:, ::-1].T}, gpu_ops.errors.ShapeError, "v"),
        ({"params": np.zeros((4, 10), F32)[:, :5]}, gpu_ops.errors.ShapeError, "params is not contiguous"),
    ):
        for _ in range(2):
            with pytest.raises(error, match=message):
                gpu_ops.adamw_step(**{**arrays, **change}, step=1, lr=0.1)
    assert {name: x.tobytes() for name, x in arrays.items()} == before


def test_no_rate_and_zeros_make_no_nan(backend):
    """eps=0 with moments of zero, as in the padding between parameters, gives no NaN."""
    params, grads, m, v = np.ones(5, F32), np.zeros(5, F32), np.zeros(5, F32), np.zeros(5, F32)
    gpu_ops.adamw_step(params, grads, m, v, step=1, lr=0.1, eps=0.0, **backend)
    assert (params == 1).all()
    assert not m.any()
    assert not v.any()
