"""Cross-entropy: one test body over the backends, against the reference in float64. The laws cover it as well."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.reference.loss import cross_entropy as reference
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.cases import close, emulator_dtypes
from tests.support.compare import random
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

DEVICES = ("cpu", "emulator", "cuda")
# Rows in part of a warp or block, in several rounds of a block, and in blocks of columns; with and without vectors.
SHAPES = [(40, 1), (3, 3, 64), (5, 1003), (3, 16392)]
# "w": with class weights.
OPTIONS = [
    {},
    {"reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "w": True},
    {"reduction": "sum", "label_smoothing": 0.3},
    {"denominator": 7, "w": True, "ignore_index": 0},
]
BF16 = np.dtype(ml_dtypes.bfloat16)


def quick_on_emulator(raw):
    return {"*": {"dtype": emulator_dtypes(raw)}}


def loss_dtype(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def exact(actual, expected, dtype):
    """Check a loss to the accuracy of its dtype, whatever the dtype of the logits."""
    assert actual.dtype == loss_dtype(dtype)
    tolerance = 1e-13 if dtype == np.float64 else 1e-6
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def check(backend, logits, targets, dloss=None, w=False, **options):
    """Check forward and backward; return the loss and the gradient."""
    dtype, rng = logits.dtype, np.random.default_rng(5)
    if w:
        options["class_weight"] = rng.uniform(0.5, 2, logits.shape[-1]).astype(loss_dtype(dtype))
    loss, lse = gpu_ops.cross_entropy(logits, targets, return_lse=True, **options, **backend)
    expected = reference.cross_entropy(logits, targets, return_lse=True, precision="float64", **options)
    exact(loss, expected[0], dtype)
    exact(lse, expected[1], dtype)
    if dloss is None:
        dloss = np.asarray(rng.standard_normal(loss.shape), loss.dtype)
    arguments = dloss, logits, targets, lse
    dlogits = gpu_ops.cross_entropy_backward(*arguments, **options, **backend)
    expected = reference.cross_entropy_backward(*arguments, **options, precision="float64")
    if logits.shape[-1] == 1:  # textbook code has u == lse to the bit; in kernels lse is rounded
        arguments = *arguments[:3], lse * (1 + np.finfo(lse.dtype).eps)
    naive = reference.cross_entropy_backward(*arguments, **options, precision="naive")
    close(dlogits, expected, naive, dtype, GRADIENT, what="dlogits")
    assert not dlogits[targets == options.get("ignore_index", -100)].any()
    assert dlogits.dtype == dtype
    return loss, dlogits


def problem(rng, shape, dtype, integers=np.int64):
    targets = rng.integers(0, shape[-1], shape[:-1]).astype(integers)
    targets.reshape(-1)[1] = -100
    return random(rng, shape, dtype, 3), targets


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(backend, dtype, shape, options, rng):
    logits, targets = problem(rng, shape, dtype)
    if options.get("ignore_index") == 0:
        targets = np.maximum(targets, 0)
    check(backend, logits, targets, **options)


def test_targets_of_32_bits_and_every_kind_of_denominator(backend, rng):
    """Targets of 32 bits and every type of denominator give the same bits."""
    logits, targets = problem(rng, (6, 50), np.dtype(np.float32))
    loss, dlogits = check(backend, logits, targets, dloss=0.5, denominator=5)
    for denominator_dtype in (np.int32, np.int64, np.float32, np.float64):
        results = check(
            backend,
            logits,
            targets.astype(np.int32),
            np.array(0.5, np.float32),
            denominator=np.array(5, denominator_dtype),
        )
        assert results[0] == loss
        assert results[1].tobytes() == dlogits.tobytes()
    assert gpu_ops.cross_entropy(logits, targets, **backend) == loss  # five rows count


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_without_rows_that_count(backend, options, rng):
    """The loss is 0 with zero gradients; torch gives NaN. Ignored rows are not read."""
    logits = np.full((4, 33), np.nan, np.float32)
    loss, dlogits = check(backend, logits, np.full(4, -100), **options)
    assert not loss.any()
    assert not dlogits.any()
    assert check(backend, random(rng, (2, 9), np.dtype(np.float32)), np.array([1, 2]), denominator=0)[0] == 0


@pytest.mark.parametrize("cols", [9, 4100])
def test_nan_and_infinity(backend, cols, rng):
    """NaN and infinity stay in their rows, as in torch; a class of logit -inf has probability 0."""
    logits, targets = random(rng, (6, cols), np.dtype(np.float32)), np.full(6, 2)
    logits[1, 5], logits[2, 5], logits[3, 5], logits[4, 2], logits[5] = (
        np.nan,
        np.inf,
        -np.inf,
        -np.inf,
        -np.inf,
    )
    loss, dlogits = check(backend, logits, targets, reduction="none")
    assert np.isnan(loss).tolist() == [False, True, True, False, False, True]
    assert loss[4] == np.inf
    assert dlogits[3, 5] == 0
    assert np.isfinite(dlogits[[0, 3, 4]]).all()


def test_a_confident_row_keeps_its_digits(backend, dtype):
    """The loss is not computed as lse - u_y, which cancels: lse of 76 has an error of 4e-6 itself."""
    logits = np.zeros((1, 8), dtype)
    logits[0, 3], target = 12, np.array([3])
    logits += np.asarray(64, dtype)
    loss, lse = gpu_ops.cross_entropy(logits, target, return_lse=True, **backend)
    dlogits = gpu_ops.cross_entropy_backward(1.0, logits, target, lse, **backend)
    others = np.exp(-12.0)
    assert loss == pytest.approx(np.log1p(7 * others), rel=1e-2)
    # 1 - p is a difference of float32 numbers near 1
    expected = (others - 8 * others * (np.arange(8) == 3)) / (1 + 7 * others)
    np.testing.assert_allclose(dlogits[0].astype(np.float64), expected, rtol=2e-2)


def logits_with_an_offset(dtype, vocab):
    """Rows of equal logits, and of logits that differ by integers, as large as the dtype can distinguish; equal
    logits near its largest number; logits within two units in the last place of a power of two. With targets."""
    info = ml_dtypes.finfo(dtype)
    logits = np.full((6, vocab), 2.0**info.nmant)
    logits[1, ::3], logits[2, ::2], logits[3] = logits[0, 0] + 3, logits[0, 0] + 6, float(info.max) / 2
    logits[4] = 2 * logits[0, 0] + np.resize([-2, -1, 0, 2, -1], vocab)
    logits[5] = logits[4] / 128
    return logits.astype(dtype), np.array([0, 1, 1, vocab - 1, 1, 0])


@pytest.mark.parametrize("vocab", [2, 1000])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "w": True}], ids=str
)
def test_logits_far_from_zero_keep_their_digits(backend, dtype, vocab, options):
    """lse is then accurate to 0.5 or has no digits: neither losses nor gradients may depend on it."""
    logits, targets = logits_with_an_offset(dtype, vocab)
    smoothing, weight = options.get("label_smoothing", 0.0), np.ones(vocab)
    weighted, options = options.get("w"), {"label_smoothing": smoothing, "reduction": "none"}
    if weighted:
        weight = 0.5 + np.arange(vocab) / vocab
        options["class_weight"] = weight.astype(loss_dtype(dtype))
    u = (logits.astype(np.float64).T - logits.max(axis=1)).T
    log_sum = np.log(np.exp(u).sum(axis=1, keepdims=True))
    hit = np.arange(vocab) == targets[:, None]
    shares = ((1 - smoothing) * hit + smoothing / vocab) * weight
    expected = np.sum(shares * (log_sum - u), axis=1)
    want_dlogits = np.exp(u - log_sum) * shares.sum(axis=1, keepdims=True) - shares
    loss, lse = gpu_ops.cross_entropy(logits, targets, return_lse=True, **options, **backend)
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    dlogits = gpu_ops.cross_entropy_backward(np.ones_like(loss), logits, targets, lse, **options, **backend)
    rounding = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(dlogits.astype(np.float64), want_dlogits, rtol=rounding, atol=2e-6)


@needs_nvrtc
@pytest.mark.parametrize("kernels", ["raw", "numba"])
@pytest.mark.parametrize("wrong", [-1, 9, 2**40])
def test_a_target_on_a_gpu_that_is_no_class(cupy, kernels, wrong, rng):
    """Loss and gradient of the row are NaN: the host does not wait for targets."""
    logits, targets = random(rng, (3, 9), np.dtype(np.float32)), np.array([1, wrong, -100])
    weights = FakeArray(np.ones(9, np.float32))
    device_arrays, options = (
        [FakeArray(logits), FakeArray(targets)],
        {"reduction": "none", "class_weight": weights},
    )
    loss, lse = gpu_ops.cross_entropy(*device_arrays, return_lse=True, backend=kernels, **options)
    assert np.isnan(loss.host).tolist() == [False, True, False]
    dloss = FakeArray(np.ones(3, np.float32))
    dlogits = gpu_ops.cross_entropy_backward(dloss, *device_arrays, lse, backend=kernels, **options)
    assert np.isnan(dlogits.host).all(axis=1).tolist() == [False, True, False]


def test_gradients_that_are_streamed(rng, monkeypatch):
    """Streamed gradients, by blocks and in place, have the bits of cached ones. Some rows are ignored."""
    logits, targets = problem(rng, (9, 5003), BF16)
    _, lse = gpu_ops.cross_entropy(logits, targets, return_lse=True)
    cached = gpu_ops.cross_entropy_backward(1.0, logits, targets, lse)
    monkeypatch.setattr("gpu_ops.kernels.loss.cpu.cross_entropy.stays_in_cache", lambda nbytes: False)
    assert gpu_ops.cross_entropy_backward(1.0, logits, targets, lse).tobytes() == cached.tobytes()
    gpu_ops.cross_entropy_backward(1.0, logits, targets, lse, out=logits)
    assert logits.tobytes() == cached.tobytes()


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[2]], ids=["weighted", "sum"])
def test_smoothing_over_several_blocks_of_classes(options, rng):
    """The CPU reads classes by blocks of 2048: the largest logit is in the first, the second and the last."""
    logits, targets = problem(rng, (12, 5003), np.dtype(np.float32))
    logits[np.arange(12), np.resize([70, 2500, 4999], 12)] += 9
    check({"device": "cpu", "backend": "numba"}, logits, targets, **options)


def test_backward_is_the_derivative(rng):
    logits, targets = problem(rng, (2, 3, 9), np.dtype(np.float64))
    direction, weight = rng.standard_normal(logits.shape), rng.uniform(0.5, 2, 9)
    for reduction in ("mean", "none"):
        options = {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0, "reduction": reduction}
        options["class_weight"] = weight
        ahead, behind = (
            reference.cross_entropy(logits + step * direction, targets, **options) for step in (1e-5, -1e-5)
        )
        dloss = rng.standard_normal(ahead.shape)
        _, lse = reference.cross_entropy(logits, targets, return_lse=True, **options)
        dlogits = reference.cross_entropy_backward(dloss, logits, targets, lse, **options)
        expected = np.sum(dlogits * direction)
        assert np.sum(dloss * (ahead - behind)) / 2e-5 == pytest.approx(expected, rel=1e-7)


@pytest.mark.peers
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_agrees_with_torch(reduction, smoothing, weighted, rng):
    torch = pytest.importorskip("torch")
    logits, targets = problem(rng, (20, 37), np.dtype(np.float64))
    weight = rng.uniform(0.5, 2, 37) if weighted else None
    z = torch.from_numpy(logits).requires_grad_()
    w = None if weight is None else torch.from_numpy(weight)
    expected = torch.nn.functional.cross_entropy(
        z, torch.from_numpy(targets), weight=w, reduction=reduction, label_smoothing=smoothing
    )
    options = {"class_weight": weight, "label_smoothing": smoothing, "reduction": reduction}
    loss, lse = gpu_ops.cross_entropy(logits, targets, return_lse=True, **options)
    np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-13, atol=1e-14)
    dloss = np.asarray(rng.standard_normal(loss.shape))
    expected.backward(torch.from_numpy(dloss))
    dlogits = gpu_ops.cross_entropy_backward(dloss, logits, targets, lse, **options)
    np.testing.assert_allclose(dlogits, z.grad.numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.peers
def test_float32_is_as_near_to_float64_as_torch(rng):
    torch = pytest.importorskip("torch")
    logits, targets = problem(rng, (64, 8192), np.dtype(np.float32))
    float64_loss = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits.astype(np.float64)), torch.from_numpy(targets)
    )
    theirs = torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(targets))
    ours = gpu_ops.cross_entropy(logits, targets)
    ulp = float(np.spacing(np.float32(float64_loss)))
    assert abs(float(ours) - float(float64_loss)) <= max(2 * abs(float(theirs) - float(float64_loss)), ulp)
