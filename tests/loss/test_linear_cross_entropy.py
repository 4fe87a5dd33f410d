"""Cross-entropy of a linear layer: one test body over the backends, against the reference. The laws cover it too."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.kernels.common.cpu.parallel import thread_count
from gpu_ops.kernels.program import Layout, Limits, Spec, lower
from gpu_ops.memory_pool import POOL
from gpu_ops.reference.loss import linear_cross_entropy as reference
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.cases import close, emulator_dtypes
from tests.support.compare import random
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

DEVICES = ("cpu", "emulator", "cuda")
# (leading axes, hidden, vocab): one or two classes, odd sizes, several rounds of a block of threads, whole tiles
CASES = [((40,), 8, 1), ((3, 5), 7, 2), ((67,), 24, 127), ((2, 3), 40, 2600), ((64,), 64, 128)]
# "w": with class weights; "b": with a bias
OPTIONS = [
    {"b": True},
    {"reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "w": True},
    {"reduction": "sum", "softcap": 30.0, "chunk": 64},
    {"denominator": 7, "dloss": 3.0, "chunk": 1, "w": True, "b": True, "label_smoothing": 0.1},
]
F32 = np.dtype(np.float32)


def quick_on_emulator(raw):
    return {
        "test_loss_and_gradients": {
            "dtype": emulator_dtypes(raw)[:1],
            "case": [CASES[1], CASES[2]],
            "options": OPTIONS[:3],
        },
        "test_gradients_add_up": {"dtype": emulator_dtypes(raw)[1:]},
        "test_logits_far_from_zero_keep_their_digits": {"dtype": emulator_dtypes(raw)},
    }


def wide(dtype):
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def problem(rng, case, dtype):
    """x, weight, targets (the second is ignored) and a bias. Logits are of size 3."""
    lead, hidden, vocab = case
    x, weight = random(rng, (*lead, hidden), dtype), random(rng, (vocab, hidden), dtype, 3 * hidden**-0.5)
    targets = rng.integers(0, vocab, lead)
    targets.reshape(-1)[1:2] = -100
    return (x, weight, targets), random(rng, (vocab,), dtype)


def exact(actual, expected, dtype):
    """Check a loss to the accuracy of its dtype, whatever the dtype of x."""
    assert actual.dtype == wide(dtype)
    tolerance = 1e-13 if dtype == np.float64 else 2e-6
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def close_gradient(actual, expected, naive, dtype, what):
    assert actual.dtype == want_dtype(what, dtype)
    close(actual, expected, naive, dtype, GRADIENT, what=what)


def want_dtype(what, dtype):
    return dtype if what == "dx" else wide(dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(backend, dtype, case, options, rng):
    arrays, bias = problem(rng, case, dtype)
    options = {"grads": True, "return_lse": True, **options}
    options["bias"] = bias if options.pop("b", False) else None
    if options.pop("w", False):
        options["class_weight"] = rng.uniform(0.5, 2, len(bias)).astype(wide(dtype))
    if options.get("reduction") == "none":
        options["dloss"] = rng.standard_normal(case[0]).astype(wide(dtype))
    loss, *gradients, lse = gpu_ops.linear_cross_entropy(*arrays, **options, **backend)
    options.pop("chunk", None)
    expected, naive = (
        reference.linear_cross_entropy(*arrays, **options, precision=p) for p in ("float64", "naive")
    )
    exact(loss, expected[0], dtype)
    exact(lse, expected[-1], dtype)
    names = ("dx", "dweight", "dbias")[: len(gradients)]
    for name, g, w, n in zip(names, gradients, expected[1:-1], naive[1:-1], strict=True):
        assert g.shape == w.shape
        close_gradient(g, w, n, dtype, name)
    assert not gradients[0][arrays[2] == -100].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_far_from_zero_keep_their_digits(backend, dtype, smoothing):
    """Equal logits so large that float32 (float64) loses lse, and logits on both sides of a power of two."""
    vocab, steps = 200, np.resize([-2, -1, 0, 2, -1], 200)
    power = 2.0 ** (ml_dtypes.finfo(dtype).nmant + 1)
    weight = np.full((vocab, 3), {2: 2.0**14, 4: 2.0**30, 8: 2.0**60}[dtype.itemsize])
    weight[:, 1], weight[:, 2] = power + steps, (power + steps) / 128
    u = weight - weight.max(axis=0)
    log_sum = np.log(np.exp(u).sum(axis=0))
    shares = (1 - smoothing) * (np.arange(vocab) == 7)[:, None] + smoothing / vocab
    options = {"label_smoothing": smoothing, "reduction": "none", "grads": True, **backend}
    x, targets = np.eye(3, dtype=dtype), np.full(3, 7)  # a column of weight is a row of logits
    loss, _, dweight = gpu_ops.linear_cross_entropy(x, weight.astype(dtype), targets, **options)
    np.testing.assert_allclose(loss, np.sum(shares * (log_sum - u), axis=0), rtol=2e-6)
    tolerance = float(ml_dtypes.finfo(dtype).eps)  # dlogits are rounded to the dtype
    expected = np.exp(u - log_sum) - shares
    np.testing.assert_allclose(dweight[:, 0], expected[:, 0], rtol=tolerance, atol=1e-9)
    np.testing.assert_allclose(dweight[:, 1:], expected[:, 1:], rtol=tolerance, atol=1e-6)


def test_chunks_of_rows_and_blocks_of_classes(rng):
    """The CPU adds up dweight and dbias over chunks of rows, and dx over blocks of 512 classes."""
    arrays, bias = problem(rng, ((40,), 24, 1100), F32)
    options = {"bias": bias, "grads": True}
    loss, *gradients = gpu_ops.linear_cross_entropy(
        *arrays, **options, chunk=16, device="cpu", backend="numba"
    )
    expected, naive = (
        reference.linear_cross_entropy(*arrays, **options, precision=p) for p in ("float64", "naive")
    )
    exact(loss, expected[0], F32)
    for name, *results in zip(("dx", "dweight", "dbias"), gradients, expected[1:], naive[1:], strict=True):
        close_gradient(*results, F32, name)


def test_a_vocabulary_of_odd_length(dtype, rng):
    arrays, _ = problem(rng, ((5,), 48, 32001), dtype)
    loss, dx, dweight = gpu_ops.linear_cross_entropy(*arrays, grads=True)
    expected, naive = (
        reference.linear_cross_entropy(*arrays, grads=True, precision=p) for p in ("float64", "naive")
    )
    assert abs(loss - expected[0]) <= (1e-13 if dtype == np.float64 else 1e-6) * expected[0]
    close_gradient(dx, expected[1], naive[1], dtype, "dx")
    close_gradient(dweight, expected[2], naive[2], dtype, "dweight")


def test_without_gradients(backend, rng):
    """The loss has the same bits without gradients."""
    arrays, bias = problem(rng, ((9,), 16, 33), F32)
    for more in ({}, {"reduction": "none"}):
        loss, *_ = gpu_ops.linear_cross_entropy(*arrays, bias=bias, grads=True, **more, **backend)
        assert gpu_ops.linear_cross_entropy(*arrays, bias=bias, **more, **backend).tobytes() == loss.tobytes()


def test_gradients_add_up(backend, dtype, rng):
    """Gradients of two parts of a batch, added into the same arrays with the total count, are those of the whole."""
    (x, weight, targets), bias = problem(rng, ((48,), 24, 40), dtype)
    dweight, dbias = np.zeros(weight.shape, wide(dtype)), np.zeros(40, wide(dtype))
    options = {"bias": bias, "grads": True, "denominator": np.array(47)}
    losses = []
    for rows in (slice(0, 30), slice(30, 48)):
        sums = {"dweight": dweight, "dbias": dbias}
        loss, _, *sums_out = gpu_ops.linear_cross_entropy(
            x[rows], weight, targets[rows], **sums, **options, **backend
        )
        assert sums_out[0] is dweight
        assert sums_out[1] is dbias
        losses.append(loss)
    expected, naive = (
        reference.linear_cross_entropy(x, weight, targets, bias=bias, grads=True, precision=p)
        for p in ("float64", "naive")
    )
    exact(np.asarray(sum(losses)), expected[0], dtype)
    close_gradient(dweight, expected[2], naive[2], dtype, "dweight")
    close_gradient(dbias, expected[3], naive[3], dtype, "dbias")


@pytest.mark.parametrize("with_bias", [False, True])
def test_only_dx(backend, with_bias, rng):
    """dx alone has the same bits as with the other gradients."""
    (x, weight, targets), _ = problem(rng, ((6,), 16, 20), F32)
    options = {"grads": True, "return_lse": True, "bias": random(rng, (20,), F32) if with_bias else None}
    loss, dx, *_, lse = gpu_ops.linear_cross_entropy(x, weight, targets, **options, **backend)
    results = gpu_ops.linear_cross_entropy(x, weight, targets, only="dx", **options, **backend)
    assert [y.tobytes() for y in results] == [y.tobytes() for y in (loss, dx, lse)]
    empty = gpu_ops.linear_cross_entropy(x[:0], weight, targets[:0], only="dx", grads=True, **backend)
    assert empty[1].shape == (0, 16)


def test_dloss_in_every_form(backend, rng):
    """A number, an array without axes, and an array with a number per row give the same bits."""
    arrays, _ = problem(rng, ((6,), 16, 20), F32)
    results = [
        gpu_ops.linear_cross_entropy(*arrays, grads=True, reduction=reduction, dloss=dloss, **backend)[1:]
        for reduction, dloss in (
            ("sum", 0.5),
            ("sum", np.array(0.5, np.float32)),
            ("none", 0.5),
            ("none", np.full(6, 0.5, np.float32)),
        )
    ]
    for gradients in results[1:]:
        assert [g.tobytes() for g in gradients] == [g.tobytes() for g in results[0]]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_rows_that_count(backend, reduction, rng):
    """The loss is 0 with zero gradients; arrays of accumulated gradients do not change."""
    (x, weight, _), _ = problem(rng, ((4,), 8, 20), F32)
    dweight = np.ones((20, 8), np.float32)
    options = {"grads": True, "reduction": reduction, "dweight": dweight, "return_lse": True}
    loss, dx, _, lse = gpu_ops.linear_cross_entropy(x, weight, np.full(4, -100), **options, **backend)
    assert not loss.any()
    assert not dx.any()
    assert (dweight == 1).all()
    assert (lse == -np.inf).all()
    for rows, vocab in ((0, 20), (3, 0), (0, 0)):
        targets = np.full(rows, -100)
        loss, dx, dw = gpu_ops.linear_cross_entropy(x[:rows], weight[:vocab], targets, grads=True, **backend)
        assert (loss, dx.shape, dw.shape) == (0, (rows, 8), (vocab, 8))
        assert not dx.any()
        assert not dw.any()


def test_logits_that_are_the_bias(backend, rng):
    """With hidden 0, logits are a sum without terms plus the bias."""
    bias, targets = random(rng, (20,), F32), np.array([3, 19, -100])
    x, weight = np.zeros((3, 0), np.float32), np.zeros((20, 0), np.float32)
    for b in (bias, None):
        loss, dx, dweight, *_ = gpu_ops.linear_cross_entropy(
            x, weight, targets, bias=b, grads=True, **backend
        )
        logits = np.zeros((3, 20)) if b is None else np.broadcast_to(b, (3, 20)).astype(np.float64)
        assert loss == pytest.approx(gpu_ops.cross_entropy(logits, targets), rel=1e-6)
        assert (dx.shape, dweight.shape) == (x.shape, weight.shape)


def test_nan_stays_in_its_row(backend, rng):
    (x, weight, targets), _ = problem(rng, ((6,), 8, 20), F32)
    x[3, 2] = np.nan
    loss, dx, _ = gpu_ops.linear_cross_entropy(x, weight, targets, grads=True, reduction="none", **backend)
    rows = [False] * 3 + [True] + [False] * 2
    assert np.isnan(loss).tolist() == rows
    assert np.isnan(dx).any(axis=1).tolist() == rows


# ---- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dweight": np.zeros((20, 8), np.float32)}, "dweight= needs grads=True"),
        ({"dbias": np.zeros(20, np.float32), "grads": True}, "dbias= needs bias="),
        ({"dloss": 2.0}, "dloss= needs grads=True"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_arguments_of_gradients_that_are_not_asked_for(options, message, rng):
    arrays, _ = problem(rng, ((4,), 8, 20), F32)
    for _ in range(2):
        with pytest.raises(OptionError, match=message):
            gpu_ops.linear_cross_entropy(*arrays, **options)


def test_nothing_is_written_where_a_target_is_wrong(rng):
    (x, weight, targets), _ = problem(rng, ((4,), 8, 20), F32)
    outs = (np.full((), 7, np.float32), np.full_like(x, 7))
    dweight = np.full((20, 8), 7, np.float32)
    options = {"grads": True, "dweight": dweight, "out": outs}
    gpu_ops.linear_cross_entropy(x, weight, targets, **options)
    forget_calls()
    for wrong in (20, -1):
        targets[2] = wrong
        before = [a.tobytes() for a in (*outs, dweight)]
        for _ in range(2):
            with pytest.raises(OptionError, match=rf"targets\[2\] is {wrong}"):
                gpu_ops.linear_cross_entropy(x, weight, targets, **options)
        assert [a.tobytes() for a in (*outs, dweight)] == before


def test_places_of_losses_have_no_gaps(rng):
    (x, weight, targets), _ = problem(rng, ((2, 3), 8, 20), F32)
    place = np.zeros((2, 6), np.float32)[:, :3]
    with pytest.raises(ShapeError, match="out loss must be C-contiguous"):
        gpu_ops.linear_cross_entropy(x, weight, targets, reduction="none", out=place)


@needs_nvrtc
@pytest.mark.parametrize("kernels", ["raw", "numba"])
def test_a_target_on_a_gpu_that_is_no_class(cupy, kernels, rng):
    """Loss and gradient of the row are NaN: the host does not wait for targets."""
    (x, weight, _), _ = problem(rng, ((3,), 8, 20), F32)
    device_arrays = [FakeArray(a) for a in (x, weight, np.array([1, 20, -100]))]
    loss, dx, _ = gpu_ops.linear_cross_entropy(*device_arrays, grads=True, reduction="none", backend=kernels)
    assert np.isnan(loss.host).tolist() == [False, True, False]
    assert np.isnan(dx.host).all(axis=1).tolist() == [False, True, False]


# ---- the definition ----------------------------------------------------------------------------------------


def test_gradients_are_the_derivative(rng):
    (x, weight, targets), bias = problem(rng, ((2, 3), 5, 7), np.dtype(np.float64))
    arrays = {"x": x, "weight": weight, "bias": bias}
    ways = {name: rng.standard_normal(a.shape) for name, a in arrays.items()}
    options = {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0, "class_weight": rng.uniform(0.5, 2, 7)}

    def loss(step, **more):
        x, weight, bias = (a + step * ways[name] for name, a in arrays.items())
        return reference.linear_cross_entropy(x, weight, targets, bias=bias, **options, **more)

    for reduction in ("mean", "none"):
        dloss = rng.standard_normal((2, 3) if reduction == "none" else ())
        _, *grads = loss(0.0, reduction=reduction, grads=True, dloss=dloss)
        slope = (loss(1e-5, reduction=reduction) - loss(-1e-5, reduction=reduction)) / 2e-5
        expected = sum(np.sum(g * ways[name]) for name, g in zip(ways, grads, strict=True))
        assert np.sum(dloss * slope) == pytest.approx(expected, rel=1e-7)


@pytest.mark.peers
def test_agrees_with_torch(rng):
    torch = pytest.importorskip("torch")
    (x, weight, targets), bias = problem(rng, ((20,), 9, 37), np.dtype(np.float64))
    leaves = [torch.from_numpy(a).requires_grad_() for a in (x, weight, bias)]
    logits = torch.nn.functional.linear(*leaves)
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets), label_smoothing=0.1)
    expected.backward()
    loss, *grads = gpu_ops.linear_cross_entropy(
        x, weight, targets, bias=bias, grads=True, label_smoothing=0.1
    )
    assert loss == pytest.approx(float(expected.detach()), rel=1e-13)
    for g, leaf in zip(grads, leaves, strict=True):
        np.testing.assert_allclose(g, leaf.grad.numpy(), rtol=1e-11, atol=1e-14)


# Cross-entropy of a linear layer by chunks of rows: bits, accuracy of sums, memory, launches.

BF16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
A100, H100 = Limits("sm_80", 108, 166912), Limits("sm_90", 132, 232448, "NVIDIA H100", "H100 SXM")


def chunked_problem(rng, rows, hidden, vocab, dtype):
    """x, weight, targets, and a bias."""
    x, weight = random(rng, (rows, hidden), dtype), random(rng, (vocab, hidden), dtype, 3 * hidden**-0.5)
    return (x, weight, rng.integers(0, vocab, rows)), random(rng, (vocab,), dtype)


@pytest.mark.parametrize("case", [(200, 300, 1301), (70, 1100, 700)], ids=str)
def test_chunks_change_no_bits_of_rows(dtype, case, rng):
    """On the CPU, losses, lse and dx have the same bits for any chunk; dweight differs by roundings."""
    arrays, bias = chunked_problem(rng, *case, dtype)
    options = {"bias": bias, "grads": True, "return_lse": True, "softcap": 20.0}
    expected = gpu_ops.linear_cross_entropy(*arrays, **options)
    for chunk in (7, 64, 200):
        results = gpu_ops.linear_cross_entropy(*arrays, **options, chunk=chunk)
        for i in (0, 1, 4):
            assert results[i].tobytes() == expected[i].tobytes()
        scale = np.abs(expected[2]).max()
        np.testing.assert_allclose(
            results[2], expected[2], rtol=0, atol=(1e-13 if dtype == np.float64 else 1e-5) * scale
        )


def test_the_same_bits_for_any_number_of_threads(monkeypatch, rng):
    arrays, bias = chunked_problem(rng, 150, 130, 700, BF16)
    results = []
    for threads in (thread_count(), 1, 3, 7):
        for module in ("gemm.cpu.gemm", "common.cpu.parallel"):
            monkeypatch.setattr(f"gpu_ops.kernels.{module}.thread_count", lambda n=threads: n)
        gradients = gpu_ops.linear_cross_entropy(*arrays, bias=bias, grads=True, chunk=64)
        results.append([x.tobytes() for x in gradients])
    assert all(bits == results[0] for bits in results)


def test_chunks_cost_no_accuracy(rng):
    """In bfloat16, a gradient summed over 64 chunks errs at most by the sum of the roundings of its terms."""
    (x, weight, targets), _ = chunked_problem(rng, 512, 32, 100, BF16)
    arrays = x, weight, targets
    expected = reference.linear_cross_entropy(*arrays, grads=True, precision="float64")[2]
    exact_x, table = x.astype(np.float64), weight.astype(np.float64)
    probs = np.exp(exact_x @ table.T)
    dlogits = (probs / probs.sum(-1, keepdims=True) - np.eye(100)[targets]) / 512
    bound = 2.0**-8 * (np.abs(dlogits).T @ np.abs(exact_x)).max()
    for chunk in (8, 512):
        assert (
            np.abs(gpu_ops.linear_cross_entropy(*arrays, grads=True, chunk=chunk)[2] - expected).max()
            <= bound
        )
    rounded = np.zeros_like(weight)
    for rows in np.split(np.arange(512), 64):  # the fault: sums between chunks in bfloat16
        rounded = (rounded + dlogits[rows].T @ exact_x[rows]).astype(BF16)
    assert np.abs(rounded - expected).max() > bound


def test_memory_on_the_cpu(monkeypatch, rng):
    """Memory is the logits of a chunk and less than 2 MiB; all logits would take 128 MiB."""
    monkeypatch.setattr(POOL, "limit", 0)
    for dtype in (FLOAT32, BF16):
        (x, weight, targets), _ = chunked_problem(rng, 1024, 64, 32768, dtype)
        outs = (np.empty((), np.float32), np.empty_like(x), np.empty(weight.shape, np.float32))
        gpu_ops.linear_cross_entropy(x[:64], weight, targets[:64], grads=True)
        tracemalloc.start()
        try:
            gpu_ops.linear_cross_entropy(x, weight, targets, grads=True, out=outs)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= (16 << 20) + (2 << 20)


@pytest.mark.parametrize("kernels", ["raw", "numba"])
@pytest.mark.parametrize("dtype", [FLOAT32, BF16], ids=str)
def test_memory_on_a_gpu(kernels, dtype):
    program = program_of(kernels, dtype, 8192, 4096, 32768)
    assert program.workspace_bytes <= 1024 * 32768 * 4 + (2 << 20)


def program_of(kernels, dtype, rows, hidden, vocab, limits=A100, grads=True, bias=False, chunk=0):
    shapes = {"x": (rows, hidden), "weight": (vocab, hidden), "bias": (vocab,), "dx": (rows, hidden)}
    left_out = ("dx",) * (not grads) + ("bias",) * (not bias)
    arrays = {n: Layout.contiguous(shape, dtype) for n, shape in shapes.items() if n not in left_out}
    arrays |= {"targets": Layout.contiguous((rows,), np.int64), "loss": Layout.contiguous((), np.float32)}
    if grads:
        arrays["dweight"] = Layout.contiguous((vocab, hidden), np.float32)
    options = {"vocab": vocab, "ignore_index": -100, "chunk": chunk, "added": (), "dloss": 1.0}
    options |= {"rows": vocab, "cols": hidden, "packed_weight": None}
    options |= {
        "label_smoothing": 0.0,
        "z_loss": 0.0,
        "softcap": 0.0,
        "reduction": "mean",
        "denominator": None,
    }
    spec = Spec("linear_cross_entropy", tuple(arrays.items()), tuple(options.items()))
    return lower(spec, kernels, limits)[0]


def test_chunks_of_a_gpu():
    """A thousand rows or more fill a chunk; a program has a bounded number of launches."""
    steps = len(program_of("raw", BF16, 1024, 4096, 128256).steps)
    per_chunk = steps - 2  # the factor, and the mean
    assert len(program_of("raw", BF16, 8192, 4096, 128256).steps) == 2 + 8 * per_chunk
    assert len(program_of("raw", BF16, 8192, 4096, 4096).steps) == 2 + per_chunk
    products = [step for step in program_of("raw", BF16, 10**6, 64, 8, chunk=1).steps if "gemm" in str(step)]
    assert len(products) <= 256 * 5


def test_cublas_takes_the_products_and_no_more_memory():
    """cuBLAS is used with a bias too, which is added to its sums in place."""
    program = program_of("raw", BF16, 4096, 512, 32768, limits=H100, bias=True)
    assert sum("cublas" in str(step) for step in program.steps) == 4 * 3
    assert program.workspace_bytes <= 1024 * 32768 * 4 + (2 << 20)
