"""The gated MLP, forward and backward: one body over the backends, against the reference in float64."""

from __future__ import annotations

import tracemalloc
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from compare import random
from row_cases import close, views

import gpu_ops
from gpu_ops import memory_pool
from gpu_ops.core.device import EmulatorDevice, Recorder
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.reference import swiglu as reference
from gpu_ops.reference.tolerance import GRADIENT

DEVICES = ("cpu", "emulator", "cuda")
NAMES = ("dx", "dw_gate", "dw_up", "dw_down")
# tokens below and above the paths for few tokens, odd sizes, hidden_out != hidden
CASES = [
    ((1,), 1, 1, 1),
    ((5,), 7, 3, 9),
    ((1, 64), 64, 160, 64),
    ((4, 33), 33, 65, 17),
    ((8, 96), 96, 200, 96),
    ((9, 96), 96, 200, 96),
    ((17, 48), 48, 30, 48),
    ((2, 3, 40), 40, 123, 31),
    ((130, 24), 24, 50, 24),
]


def quick_on_emulator(raw):
    """Each behaviour once; the kernels have tests of their own, test_gemm_cuda."""
    dtypes = [ml_dtypes.bfloat16, np.float32] if raw else [np.float16, np.float64]
    return {
        "test_forward_and_backward": {
            "dtype": dtypes,
            "case": [CASES[i] for i in ((0, 1, 5, 7) if raw else (0, 7))],
        },
        "test_other_activations": {"dtype": dtypes[:1]},
        "test_empty": {"dtype": dtypes[:1]},
        "test_any_strides": {"dtype": dtypes[:1] * raw},
        "test_out": {"dtype": dtypes[:1]},
        "test_a_nan_stays_in_its_token": {"dtype": dtypes[:1]},
    }


def make(rng, shape, hidden, ffn, hidden_out, dtype):
    x = random(rng, (*shape[:-1], hidden), dtype)
    w_gate, w_up = (random(rng, (ffn, hidden), dtype, hidden**-0.5) for _ in range(2))
    w_down = random(rng, (hidden_out, ffn), dtype, ffn**-0.5)
    dy = random(rng, (*shape[:-1], hidden_out), dtype)
    return dy, x, w_gate, w_up, w_down


def check(inputs, activation, backend):
    dy, *arguments = inputs
    dtype = dy.dtype
    y = gpu_ops.swiglu_mlp(*arguments, activation=activation, **backend)
    want, naive = (
        reference.swiglu_mlp(*arguments, activation=activation, precision=p) for p in ("float64", "naive")
    )
    assert (y.dtype, y.shape) == (dtype, dy.shape)
    close(y, want, naive, dtype, what="y")
    got = gpu_ops.swiglu_mlp_backward(*inputs, activation=activation, **backend)
    want, naive = (
        reference.swiglu_mlp_backward(*inputs, activation=activation, precision=p)
        for p in ("float64", "naive")
    )
    for name, tensor, g, w, n in zip(NAMES, arguments, got, want, naive, strict=True):
        assert (g.dtype, g.shape) == (dtype, tensor.shape)
        close(g, w, n, dtype, GRADIENT, what=name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(backend, dtype, case, rng):
    check(make(rng, *case, dtype), "silu", backend)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_other_activations(backend, dtype, activation, rng):
    check(make(rng, (9, 32), 32, 50, 32, dtype), activation, backend)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_blocks_of_few_products(dtype, case, monkeypatch, rng):
    """The blocks for larger problems, at the sizes of smaller ones."""
    by_blocks(monkeypatch)
    check(make(rng, *case, dtype), "silu", {"backend": "numba"})


def by_blocks(monkeypatch):
    from gpu_ops.kernels.numba_cpu import swiglu_mlp

    monkeypatch.setattr(swiglu_mlp, "FEW", 0)
    monkeypatch.setattr(swiglu_mlp, "FEW_PRODUCTS", 0)


def test_many_blocks(dtype, monkeypatch, rng):
    """Small blocks, so that sums over blocks of tokens and of ffn, with remainders, are all taken."""
    from gpu_ops.kernels.numba_cpu import swiglu_mlp as kernels

    by_blocks(monkeypatch)
    monkeypatch.setattr(kernels, "TOKENS", 16)
    monkeypatch.setattr(kernels, "SCRATCH", 16 * 64)
    inputs = make(rng, (50, 40), 40, 200, 24, dtype)
    assert kernels.config(50, 40, 200, dtype) == "blocks of 16 tokens x 64 of ffn, tiles of 64 x 32"
    check(inputs, "silu", {"backend": "numba"})
    arguments = inputs[1:]
    wide = np.zeros((50, 100), dtype)  # a target whose rows lie apart
    gpu_ops.swiglu_mlp(*arguments, out=wide[:, 30:54])
    assert wide[:, 30:54].tobytes() == gpu_ops.swiglu_mlp(*arguments).tobytes()
    assert not wide[:, :30].any()
    assert not wide[:, 54:].any()


@pytest.mark.parametrize(
    ("which", "dtype"),
    [
        ("raw", ml_dtypes.bfloat16),
        ("raw", np.float32),
        ("numba", np.float32),
        pytest.param("numba", ml_dtypes.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_many_blocks_on_a_gpu(which, dtype, monkeypatch, rng):
    """Chunks of tokens, and blocks of ffn over which dx adds up; the last ones are shorter."""
    from gpu_ops.kernels.lower import swiglu_mlp as kernels

    for name, value in {"TOKENS": 32, "SCRATCH": 1, "FFN": 32, "_MULTIPLE": 16}.items():
        monkeypatch.setattr(kernels, name, value)
    inputs = make(rng, (50, 40), 40, 88, 24, np.dtype(dtype))
    how = {"device": "emulator", "backend": which}
    plan = str(gpu_ops.explain("swiglu_mlp", *inputs[1:], **how))
    assert plan.count("kGate") == 2
    plan = str(gpu_ops.explain("swiglu_mlp_backward", *inputs, **how))
    assert plan.count("kGateBackward") == 3
    check(inputs, "silu", how)


def test_matrices_of_different_strides(rng):
    """Gate and up as halves of one array, or not; gradients into halves of one."""
    dy, x, w_gate, w_up, w_down = make(rng, (20, 24), 24, 40, 16, np.dtype(np.float32))
    how = {"device": "emulator", "backend": "raw"}
    apart = np.zeros((40, 32), np.float32)
    apart[:, :24] = w_up
    weights = w_gate, apart[:, :24], w_down
    for rows in (20, 3):
        got = gpu_ops.swiglu_mlp(x[:rows], *weights, **how)
        assert got.tobytes() == gpu_ops.swiglu_mlp(x[:rows], w_gate, w_up, w_down, **how).tobytes()
    wants = gpu_ops.swiglu_mlp_backward(dy, x, w_gate, w_up, w_down, **how)
    wide = np.zeros((40, 48), np.float32)
    out = np.zeros_like(x), np.zeros_like(w_gate), wide[:, 8:32], np.zeros_like(w_down)
    gpu_ops.swiglu_mlp_backward(dy, x, *weights, out=out, **how)
    assert [o.tobytes() for o in out] == [w.tobytes() for w in wants]
    assert not wide[:, :8].any()
    assert not wide[:, 32:].any()


class Allocations(Recorder):
    """Counts bytes, and keeps all of them: the most that a call can hold at a time."""

    def __init__(self):
        super().__init__(EmulatorDevice())
        self.bytes = 0

    def empty(self, shape, dtype, name="workspace"):
        array = super().empty(shape, dtype, name)
        self.bytes += array.nbytes
        return array


@pytest.mark.parametrize("which", ["raw", "numba"])
def test_memory_of_a_gpu(which):
    """Llama-3-8B, 8192 tokens in bfloat16: results and workspace against the same in separate steps."""
    from gpu_ops.kernels.lower import swiglu_mlp as kernels

    tokens, hidden, ffn, dtype = 8192, 4096, 14336, np.dtype(ml_dtypes.bfloat16)
    imagined = Allocations()
    x, dy = (imagined.empty((tokens, hidden), dtype) for _ in range(2))
    weights = [imagined.empty(s, dtype) for s in ((ffn, hidden), (ffn, hidden), (hidden, ffn))]
    rows, wide, matrices = x.nbytes, tokens * ffn * 2, 3 * weights[0].nbytes

    forward = Allocations()
    y = forward.empty(x.shape, dtype)
    kernels.forward(forward, which, x, weights, y, activation="silu")
    assert forward.bytes <= 0.6 * (2 * wide + rows)  # gate, up; h in the place of gate; y
    assert forward.bytes == rows + kernels.scratch_bytes(tokens, hidden, ffn, 2)

    backward = Allocations()
    results = [backward.empty(a.shape, dtype) for a in (x, *weights)]
    kernels.backward(backward, which, dy, x, weights, results[0], results[1:], activation="silu")
    # gate, up, dh, h; dgate and dup in the place of two of them; dx once per product
    assert backward.bytes <= 0.6 * (4 * wide + 2 * rows + matrices)
    assert backward.bytes == rows + matrices + kernels.scratch_bytes(tokens, hidden, ffn, 2, gradients=True)

    many = Allocations()  # four times the tokens
    x, y = (imagined.empty((4 * tokens, hidden), dtype) for _ in range(2))
    kernels.forward(many, which, x, weights, y, activation="silu")
    assert many.bytes == forward.bytes - rows


@pytest.mark.parametrize("sizes", [(0, 8, 16, 8), (3, 0, 16, 8), (3, 8, 0, 8), (3, 8, 16, 0)], ids=str)
def test_empty(backend, dtype, sizes):
    tokens, hidden, ffn, hidden_out = sizes
    x, dy = np.ones((tokens, hidden), dtype), np.ones((tokens, hidden_out), dtype)
    weights = [np.ones(s, dtype) for s in ((ffn, hidden), (ffn, hidden), (hidden_out, ffn))]
    y = gpu_ops.swiglu_mlp(x, *weights, **backend)
    np.testing.assert_array_equal(y, np.zeros((tokens, hidden_out)))
    for gradient, tensor in zip(
        gpu_ops.swiglu_mlp_backward(dy, x, *weights, **backend), (x, *weights), strict=True
    ):
        np.testing.assert_array_equal(gradient, np.zeros(tensor.shape))


def test_any_strides(backend, dtype, rng):
    inputs = make(rng, (2, 4, 20), 20, 36, 20, dtype)
    dy, x, *weights = inputs
    want = gpu_ops.swiglu_mlp(x, *weights, **backend)
    wants = gpu_ops.swiglu_mlp_backward(*inputs, **backend)
    rounding = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5, "float64": 1e-13}[dtype.name]
    every = zip(views(x), views(dy), *map(views, weights), strict=True)
    for (name, vx), (_, vdy), *vws in every:
        ws = [w for _, w in vws]
        got = gpu_ops.swiglu_mlp(vx, *ws, **backend)
        # one token goes through BLAS, which may add up in another order for other strides
        np.testing.assert_allclose(
            got.astype(float), want.astype(float), rtol=rounding, atol=rounding, err_msg=name
        )
        for g, w in zip(gpu_ops.swiglu_mlp_backward(vdy, vx, *ws, **backend), wants, strict=True):
            np.testing.assert_allclose(
                g.astype(float), w.astype(float), rtol=rounding, atol=4 * rounding, err_msg=name
            )


def test_out(backend, dtype, rng):
    inputs = make(rng, (6, 24), 24, 50, 16, dtype)
    arguments = inputs[1:]
    want = gpu_ops.swiglu_mlp(*arguments, **backend)
    out = np.empty_like(want)
    assert gpu_ops.swiglu_mlp(*arguments, out=out, **backend) is out
    assert out.tobytes() == want.tobytes()
    wants = gpu_ops.swiglu_mlp_backward(*inputs, **backend)
    outs = tuple(np.empty_like(w) for w in wants)
    assert gpu_ops.swiglu_mlp_backward(*inputs, out=outs, **backend) is outs
    assert [o.tobytes() for o in outs] == [w.tobytes() for w in wants]


def test_a_nan_stays_in_its_token(backend, dtype, rng):
    _, x, *weights = make(rng, (6, 24), 24, 50, 16, dtype)
    clean = gpu_ops.swiglu_mlp(x, *weights, **backend)
    x[2, 5] = np.nan
    y = gpu_ops.swiglu_mlp(x, *weights, **backend)
    assert np.isnan(y[2].astype(float)).all()
    assert np.delete(y, 2, axis=0).tobytes() == np.delete(clean, 2, axis=0).tobytes()


def peak_memory(call):
    call()  # compiled beforehand
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scratch_does_not_grow_with_the_tokens(dtype, rng, monkeypatch):
    """At 4x the tokens the peak stays; the 16-bit backward adds dx in float32. A (tokens, ffn) array is 24 MiB."""
    monkeypatch.setattr(memory_pool.POOL, "limit", 0)  # scratch is NumPy's, which tracemalloc knows
    hidden, ffn = 8, 1024
    forward, backward = [], []
    for tokens in (2048, 8192):
        dy, x, *weights = make(rng, (tokens, hidden), hidden, ffn, hidden, np.dtype(dtype))
        y, gradients = np.empty_like(x), tuple(np.empty_like(a) for a in (x, *weights))
        forward.append(peak_memory(partial(gpu_ops.swiglu_mlp, x, *weights, out=y)))
        backward.append(peak_memory(partial(gpu_ops.swiglu_mlp_backward, dy, x, *weights, out=gradients)))
    for peaks, extra in ((forward, 0), (backward, 0 if dtype == "float32" else 6144 * hidden * 4)):
        assert peaks[0] > 1 << 20  # the measurement sees NumPy's buffers
        assert peaks[1] - peaks[0] < extra + (1 << 20)


def test_the_reference_and_torch_agree():
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: pip install torch (CPU build) runs this"
    )
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    dy, x, w_gate, w_up, w_down = normal(7, 6), normal(7, 12), normal(20, 12), normal(20, 12), normal(6, 20)
    leaves = [t.clone().requires_grad_() for t in (x, w_gate, w_up, w_down)]
    linear = torch.nn.functional.linear
    want = linear(
        torch.nn.functional.silu(linear(leaves[0], leaves[1])) * linear(leaves[0], leaves[2]), leaves[3]
    )
    want.backward(dy)
    y = gpu_ops.swiglu_mlp(x, w_gate, w_up, w_down)
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(y, want.detach(), rtol=1e-10, atol=1e-11)
    for got, leaf in zip(gpu_ops.swiglu_mlp_backward(dy, x, w_gate, w_up, w_down), leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, rtol=1e-10, atol=1e-10)


X, W, D = np.ones((2, 4), np.float32), np.ones((6, 4), np.float32), np.ones((4, 6), np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, W.T.copy(), W.T.copy(), D), {}, ShapeError, r"w_down has shape \(4, 6\)"),
        ((X, W, W[:5], D), {}, ShapeError, "w_up has shape"),
        ((X, W, W, W), {}, ShapeError, "w_down has shape"),
        ((X[:, :3], W, W, D), {}, ShapeError, r"x has shape \(2, 3\), expected \(..., hidden=4\)"),
        ((X, W, W, D.astype(np.float16)), {}, DTypeError, "w_down is float16 but x is float32"),
        ((X, W[None], W, D), {}, ShapeError, "w_gate has 3 axes"),
        ((X, W, W, D), {"activation": "gelu_erf"}, OptionError, "activation"),
        ((X, W, W, D), {"out": np.zeros((2, 6), np.float32)}, ShapeError, "out has shape"),
        ((X, W, W, D), {"out": X}, ShapeError, "shares memory with x"),
    ],
)
def test_mistakes(arguments, options, error, message):
    with pytest.raises(error, match=message):
        gpu_ops.swiglu_mlp(*arguments, **options)
    np.testing.assert_array_equal(X, 1)


def test_mistakes_of_the_backward():
    with pytest.raises(ShapeError, match="dy has shape"):
        gpu_ops.swiglu_mlp_backward(X[:1], X, W, W, D)
    with pytest.raises(OptionError, match="four arrays"):
        gpu_ops.swiglu_mlp_backward(X, X, W, W, D, out=np.zeros_like(X))
    with pytest.raises(ShapeError, match="out dw_gate shares memory with w_gate"):
        gpu_ops.swiglu_mlp_backward(X.copy(), X, W, W.copy(), D, out=(X * 1, W, W * 1, D * 1))
    twice = np.zeros_like(W)
    with pytest.raises(ShapeError, match="out dw_up shares memory with out dw_gate"):
        gpu_ops.swiglu_mlp_backward(X, X, W, W, D, out=(X * 1, twice, twice, D * 1))
    assert not twice.any()
