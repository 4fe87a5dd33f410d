"""TernaryLinear and its gradients."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import TernaryLinear, TernaryMatrix, ternary_matmul_backward
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import DeviceError, DTypeError, OptionError, ShapeError
from gpu_ops.kernels.weights.cpu import ternary_backward as kernels
from gpu_ops.reference.tolerance import GRADIENT
from gpu_ops.reference.weights import ternary as reference
from tests.support.compare import assert_close, random
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

DEVICES = ("cpu", "emulator", "cuda")
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BF16]
SCALES = {
    "tensor": lambda n, k: (),
    "row": lambda n, k: (n,),
    "group": lambda n, k: (n, k // 4),
    "group64": lambda n, k: (n, k // 64),
}


def quick_on_emulator(raw):
    """Levels to run on the emulator by default; test_backward_cuda.py tests more of the CUDA C++ kernels."""
    dtypes = {"float32", "bfloat16"} if raw else {"float32"}
    quick = {dtype for dtype in DTYPES if np.dtype(dtype).name in dtypes}
    return {"test_gradients": {"m": {7, 9}, "activations": {"int8"}, "dtype": quick}}


def matrix(rng, n, k, scale_kind="tensor", format="w2"):
    scale = rng.uniform(0.5, 1.5, SCALES[scale_kind](n, k)).astype(np.float32)
    return TernaryMatrix.from_trits(rng.integers(-1, 2, (n, k)).astype(np.int8), scale, format=format)


# ---- gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "kind"),
    [(1, 1, 4, "tensor"), (7, 33, 68, "row"), (3, 130, 64, "group"), (9, 40, 128, "group64")],
)
@pytest.mark.parametrize("activations", ["int8", "native"])
def test_gradients(backend, dtype, m, n, k, kind, activations, rng):
    w = matrix(rng, n, k, kind)
    dy, x = random(rng, (m, n), dtype), random(rng, (m, k), dtype)
    if kind == "group" and backend["backend"] == "raw":
        with pytest.raises(DeviceError, match="raw: group_size 4 is not a multiple of 64"):
            ternary_matmul_backward(dy, x, w, **backend)
        return
    dx, dw = ternary_matmul_backward(dy, x, w, activations=activations, **backend)
    assert dx.dtype == dtype
    assert dw.dtype == (np.float64 if dtype == np.float64 else np.float32)
    inputs = (dy, x, w.trits(), w.scale)
    exact = reference.ternary_matmul_backward(*inputs, activations=activations, precision="float64")
    naive = reference.ternary_matmul_backward(*inputs, activations=activations, precision="naive")
    if dtype == np.float64:  # neither of two float64 sums is exact: compare both with a wider one
        xq = x.astype(np.longdouble)
        if activations == "int8":
            q, step = reference.quantize_activations(x)
            xq = (q * step[:, None]).astype(np.longdouble)
        exact = (dy.astype(np.longdouble) @ w.dequantize(np.float64), dy.astype(np.longdouble).T @ xq)
    for actual, expected, textbook, what in zip((dx, dw), exact, naive, ("dx", "dw"), strict=True):
        assert_close(actual, expected, textbook, dtype, factor=GRADIENT, what=what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activations", ["int8", "native"])
def test_gradients_by_blocks(dtype, activations, rng, monkeypatch):
    """Run the products for large problems at small sizes."""
    monkeypatch.setattr(kernels, "SMALL", 0)
    for case in ((7, 33, 68, "row"), (3, 130, 64, "group"), (9, 40, 128, "tensor")):
        test_gradients({"backend": "numba"}, dtype, *case, activations, rng)


def test_gradients_are_those_of_the_product(backend, rng):
    """Gradients of dy . (xq @ W.T) by definition, with W dense in float64; with integers almost nothing rounds."""
    dtype, rtol = (np.float32, 1e-6) if backend["backend"] == "raw" else (np.float64, 1e-12)
    w = matrix(rng, 5, 12)
    x = rng.integers(-127, 128, (2, 3, 12)).astype(dtype)
    x[..., 0] = 127
    dy = rng.integers(-9, 10, (2, 3, 5)).astype(dtype)
    dx, dw = ternary_matmul_backward(dy, x, w, **backend)
    dense = w.dequantize(np.float64)
    np.testing.assert_allclose(dx, np.einsum("abn,nk->abk", dy, dense), rtol=rtol, atol=9 * rtol)
    np.testing.assert_allclose(dw, np.einsum("abn,abk->nk", dy, x), rtol=rtol, atol=999 * rtol)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 8, 64), (150, 70, 128)])
def test_only_one_gradient(backend, m, n, k, rng):
    """One gradient alone has the same bits as both; the CPU has another kernel for small products."""
    w = TernaryMatrix.from_trits(rng.integers(-1, 2, (n, k)).astype(np.int8), 0.5)
    dy, x = rng.standard_normal((m, n), np.float32), rng.standard_normal((m, k), np.float32)
    both = ternary_matmul_backward(dy, x, w, **backend)
    for part, expected in zip(("dx", "dw"), both, strict=True):
        assert ternary_matmul_backward(dy, x, w, only=part, **backend).tobytes() == expected.tobytes()
        place = np.empty_like(expected)
        assert ternary_matmul_backward(dy, x, w, only=part, out=place, **backend) is place


def test_the_reference_is_the_derivative(rng):
    """Compare ``precision="float64"`` with native activations to differences of the forward."""
    w = matrix(rng, 3, 8, "group")
    x, dy = rng.standard_normal((2, 8)), rng.standard_normal((2, 3))

    def loss(x):
        return (dy * reference.ternary_matmul(x, w.trits(), w.scale, activations="native")).sum()

    dx, _ = reference.ternary_matmul_backward(
        dy, x, w.trits(), w.scale, activations="native", precision="float64"
    )
    step = 1e-4 * np.eye(x.size).reshape(x.size, *x.shape)
    slopes = [(loss(x + s) - loss(x - s)) / 2e-4 for s in step]
    np.testing.assert_allclose(dx.reshape(-1), slopes, rtol=1e-8, atol=1e-9)


def test_a_token_that_is_not_finite_shows(rng):
    w = matrix(rng, 3, 8)
    x = random(rng, (2, 8), np.float32)
    x[1, 3] = np.inf
    dx, dw = ternary_matmul_backward(np.ones((2, 3), np.float32), x, w)
    assert np.isfinite(dx).all()  # dx does not depend on x
    assert np.isnan(dw).all()


def test_tiles_make_no_difference(rng, monkeypatch):
    w = matrix(rng, 50, 300, "group")
    dy, x = random(rng, (9, 50), np.float16), random(rng, (9, 300), np.float16)
    monkeypatch.setattr(kernels, "SMALL", 0)
    whole = ternary_matmul_backward(dy, x, w)
    monkeypatch.setattr(kernels, "TOKENS", 4)
    monkeypatch.setattr(kernels, "COLUMNS", 64)
    forget_calls()
    said = gpu_ops.explain("ternary_matmul_backward", dy, x, w)
    assert "tiles of 4 tokens x 64 columns" in str(said)
    for gradient, expected in zip(ternary_matmul_backward(dy, x, w), whole, strict=True):
        np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 8, 33, 64])
def test_tiles(m, dtype, rng, monkeypatch):
    """Test unequal last tiles and blocks of W, a last row without a neighbour, every kind of scale."""
    monkeypatch.setattr(kernels, "SMALL", 0)
    monkeypatch.setattr(kernels, "TOKENS", 16)
    cases = (
        (300, 600, "group"),
        (130, 640, "group64"),
        (129, 257, "row"),
        (301, 257, "tensor"),
        (128, 256, "row"),
    )
    for n, k, scale_kind in cases:
        test_gradients({"backend": "numba"}, dtype, m, n, k, scale_kind, "int8", rng)


# ---- the layer ---------------------------------------------------------------------------------------------


QUICK_FIRST = [
    pytest.param(d, marks=() if np.dtype(d).name in ("float32", "bfloat16") else pytest.mark.slow)
    for d in DTYPES
]


@pytest.mark.parametrize("dtype", QUICK_FIRST, ids=str)
@pytest.mark.parametrize("activations", ["int8", "native"])
def test_the_layer_is_the_product_and_the_bias(dtype, activations, rng):
    w, bias = matrix(rng, 5, 64), random(rng, (5,), np.float32)
    x = random(rng, (2, 3, 64), dtype)
    product = gpu_ops.ternary_matmul(x, w, activations=activations)
    y = TernaryLinear(w, bias, activations=activations)(x)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, product + bias.astype(dtype))
    np.testing.assert_array_equal(TernaryLinear(w, activations=activations).forward(x), product)
    out = np.empty_like(y)
    assert TernaryLinear(w, bias, activations=activations)(x, out=out) is out
    np.testing.assert_array_equal(out, y)


def test_the_layer_runs_on_the_emulator(rng):
    layer = TernaryLinear(matrix(rng, 5, 64), random(rng, (5,), np.float32))
    x = rng.integers(-127, 128, (2, 64)).astype(np.float32)
    x[:, 0] = 127
    np.testing.assert_allclose(layer(x, device="emulator"), layer(x), rtol=1e-6)


@needs_nvrtc
def test_a_bias_is_added_on_the_arrays_device(rng, monkeypatch, cupy):
    """The bias is added on device 1 and the current stream of the caller; CuPy is a fake, see fake_cupy.py."""
    added = []

    def add(y, bias):
        added.append((cupy.current_device(), bias.device.id, cupy.streams[-1:]))
        y.host += bias.host
        return y

    monkeypatch.setattr(FakeArray, "__iadd__", add, raising=False)
    layer = TernaryLinear(matrix(rng, 5, 64), random(rng, (5,), np.float32))
    x = random(rng, (2, 64), np.float32)
    y = layer(FakeArray(x, 1))
    ((_, launched_on, stream),) = cupy.launched
    assert added == [(1, 1, [] if stream is None else [stream])]
    assert launched_on == y.device.id == 1
    np.testing.assert_array_equal(y.host, layer(x, device="emulator"))


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_the_layers_gradients(device, rng):
    layer = TernaryLinear(matrix(rng, 5, 64), random(rng, (5,), np.float32))
    x, dy = random(rng, (2, 3, 64), np.float32), random(rng, (2, 3, 5), np.float32)
    dx, dw, dbias = layer.backward(dy, x, device=device)
    for actual, expected in zip(
        (dx, dw), ternary_matmul_backward(dy, x, layer.weight, device=device), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(dbias, dy.sum(axis=(0, 1)), rtol=1e-6)
    assert dbias.dtype == np.float32
    assert len(TernaryLinear(layer.weight).backward(dy, x)) == 2


def test_latent_weights_learn_a_ternary_function(rng):
    """Training through the rounding moves trits of the latent weights towards those that made the data."""
    target = TernaryLinear(matrix(rng, 4, 32))
    latent = rng.standard_normal((4, 32)).astype(np.float32)
    x = random(rng, (256, 32), np.float32)
    y = target(x)

    def loss(layer):
        return float(np.square(layer(x) - y).mean())

    before = loss(TernaryLinear(latent))
    for _ in range(150):
        layer = TernaryLinear(latent)
        _, dw = layer.backward((layer(x) - y) / len(x), x)
        latent -= 0.1 * dw
    assert loss(TernaryLinear(latent)) < before / 10


def test_dense_weights_are_quantised_with_options(rng):
    w = random(rng, (8, 64), np.float32)
    layer = TernaryLinear(w, method="twn", group_size=-1)
    expected = gpu_ops.ternary_quantize(w, method="twn", group_size=-1)
    np.testing.assert_array_equal(layer.weight.trits(), expected.trits())
    np.testing.assert_array_equal(layer.weight.scale, expected.scale)
    assert (layer.in_features, layer.out_features, layer.nbytes) == (64, 8, expected.nbytes)


def test_bad_layers(rng):
    w = matrix(rng, 4, 8)
    for call, error, message in (
        (
            lambda: TernaryLinear(w, method="twn"),
            OptionError,
            "weight is packed already; method would",
        ),
        (
            lambda: TernaryLinear(w, np.ones(3, np.float32)),
            ShapeError,
            r"bias has shape \(3,\), expected",
        ),
        (lambda: TernaryLinear(w, np.ones(4, np.int32)), DTypeError, "bias is int32"),
        (lambda: TernaryLinear(w, activations="int4"), OptionError, "activations='int4'"),
        (lambda: TernaryLinear(np.ones(3, np.float32)), ShapeError, r"expected \(N, K\)"),
        (lambda: TernaryLinear(w)(np.ones((2, 7), np.float32)), ShapeError, "K=8"),
        (lambda: TernaryLinear(w)(np.ones((2, 8), np.int8)), DTypeError, "TernaryLinear: x is int8"),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("foreign", [False, True])
def test_the_layers_out_may_not_be_its_bias(foreign, rng):
    from tests.core.test_interop import DLPackOnly

    memory = np.arange(24, dtype=np.float32)
    layer = TernaryLinear(matrix(rng, 4, 8), memory[2:6])
    x, out = random(rng, (3, 8), np.float32), memory[:12].reshape(3, 4)
    with pytest.raises(ShapeError, match="TernaryLinear: out shares memory with bias"):
        layer(x, out=DLPackOnly(out) if foreign else out)
    np.testing.assert_array_equal(memory, np.arange(24))
    separate = memory[6:18].reshape(3, 4)
    np.testing.assert_array_equal(layer(x, out=separate), layer(x))
