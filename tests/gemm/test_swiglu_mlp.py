"""Gated MLP, forward and backward: one test body over the backends, against the reference in float64."""

from __future__ import annotations

import tracemalloc
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import memory_pool
from gpu_ops.core.device import EmulatorDevice
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.kernels.program import Layout, Spec, lower
from gpu_ops.reference.gemm import swiglu as reference
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.cases import close
from tests.support.compare import random

DEVICES = ("cpu", "emulator", "cuda")
NAMES = ("dx", "dw_gate", "dw_up", "dw_down")
SUMS = NAMES[1:]
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
    """Run each behaviour once; the kernels have separate tests, test_gemm_cuda."""
    dtypes = [ml_dtypes.bfloat16, np.float32] if raw else [np.float16, np.float64]
    return {
        "test_forward_and_backward": {
            "dtype": dtypes,
            "case": [CASES[i] for i in ((0, 1, 5, 7) if raw else (0, 7))],
        },
        "test_other_activations": {"dtype": dtypes[:1]},
        "test_what_is_kept_is_gate_and_up": {"dtype": dtypes[:1]},
        "test_gradients_of_parts_add_up": {"dtype": dtypes[:1], "given": [SUMS]},
    }


def make(rng, shape, hidden, ffn, hidden_out, dtype):
    x = random(rng, (*shape[:-1], hidden), dtype)
    w_gate, w_up = (random(rng, (ffn, hidden), dtype, hidden**-0.5) for _ in range(2))
    w_down = random(rng, (hidden_out, ffn), dtype, ffn**-0.5)
    dy = random(rng, (*shape[:-1], hidden_out), dtype)
    return dy, x, w_gate, w_up, w_down


def sums_dtype(dtype):
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def same_bits(actual, expected):
    return [f.tobytes() for f in actual] == [w.tobytes() for w in expected]


def check(inputs, activation, backend):
    """Check forward and backward; keeping gate and up does not change the bits."""
    dy, *arguments = inputs
    dtype = dy.dtype
    y = gpu_ops.swiglu_mlp(*arguments, activation=activation, **backend)
    expected, naive = (
        reference.swiglu_mlp(*arguments, activation=activation, precision=p) for p in ("float64", "naive")
    )
    assert (y.dtype, y.shape) == (dtype, dy.shape)
    close(y, expected, naive, dtype, what="y")
    actual = gpu_ops.swiglu_mlp_backward(*inputs, activation=activation, **backend)
    expected, naive = (
        reference.swiglu_mlp_backward(*inputs, activation=activation, precision=p)
        for p in ("float64", "naive")
    )
    for name, tensor, g, w, n in zip(NAMES, arguments, actual, expected, naive, strict=True):
        result_dtype = dtype if name == "dx" else sums_dtype(dtype)
        assert (g.dtype, g.shape) == (result_dtype, tensor.shape)
        close(g, w, n, dtype, GRADIENT, what=name)
    again, gate_up = gpu_ops.swiglu_mlp(*arguments, activation=activation, keep="gate_up", **backend)
    assert (gate_up.dtype, gate_up.shape) == (dtype, (*dy.shape[:-1], 2 * len(arguments[1])))
    kept = gpu_ops.swiglu_mlp_backward(*inputs, activation=activation, gate_up=gate_up, **backend)
    if backend.get("backend") == "reference":  # BLAS: its sums depend on alignment
        np.testing.assert_allclose(again.astype(float), y.astype(float), rtol=1e-12, atol=1e-12)
    else:
        assert same_bits((again, *kept), (y, *actual))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(backend, dtype, case, rng):
    check(make(rng, *case, dtype), "silu", backend)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2"])
def test_other_activations(backend, dtype, activation, rng):
    check(make(rng, (9, 32), 32, 50, 32, dtype), activation, backend)


def test_what_is_kept_is_gate_and_up(backend, dtype, rng):
    _, x, *weights = make(rng, (3, 7, 32), 32, 50, 24, dtype)
    y, gate_up = gpu_ops.swiglu_mlp(x, *weights, keep="gate_up", **backend)
    wants, naives = (
        reference.swiglu_mlp(x, *weights, keep="gate_up", precision=p)[1] for p in ("float64", "naive")
    )
    close(gate_up, wants, naives, dtype, what="gate_up")
    padded = np.full((3, 7, 116), 7, dtype)
    outs = np.zeros_like(y), padded[..., 8:108]
    results = gpu_ops.swiglu_mlp(x, *weights, keep="gate_up", out=outs, **backend)
    assert results is outs
    assert same_bits(outs, (y, gate_up))
    padded[..., 8:108] = 7
    assert (padded == 7).all()


@pytest.mark.parametrize("given", [SUMS, ("dw_up",), ("dw_gate", "dw_down")], ids="-".join)
def test_gradients_of_parts_add_up(backend, dtype, given, rng):
    """Gradients are added to the arrays passed, which are returned; the other gradients do not change."""
    dy, x, *weights = make(rng, (21, 32), 32, 50, 24, dtype)
    halves = [(dy[part], x[part], *weights) for part in (slice(0, 11), slice(11, 21))]
    first, second = (gpu_ops.swiglu_mlp_backward(*half, **backend) for half in halves)
    sums = {name: first[NAMES.index(name)].copy() for name in given}
    fresh = [np.zeros_like(x) for name, x in zip(NAMES, second, strict=True) if name not in given]
    results = gpu_ops.swiglu_mlp_backward(
        *halves[1], **sums, out=tuple(fresh) if len(fresh) > 1 else fresh[0], **backend
    )
    again = {name: first[NAMES.index(name)].copy() for name in given}
    assert same_bits(results, gpu_ops.swiglu_mlp_backward(*halves[1], **again, **backend))
    for i, name in enumerate(NAMES):
        if name in given:
            assert results[i] is sums[name]
            size = np.abs(first[i]) + np.abs(second[i])
            np.testing.assert_array_less(np.abs(results[i] - (first[i] + second[i])), 1e-6 * size.max())
        else:
            assert results[i].tobytes() == second[i].tobytes()


def test_gate_and_up_of_another_call_are_refused(rng):
    inputs = make(rng, (5, 8), 8, 12, 6, np.dtype(np.float32))
    for gate_up, error, message in (
        (np.zeros((5, 12), np.float32), ShapeError, "gate_up has shape (5, 12), expected exactly (5, 24)"),
        (np.zeros((4, 24), np.float32), ShapeError, "expected exactly (5, 24)"),
        (np.zeros((5, 24), np.float16), DTypeError, "gate_up is float16 but x is float32"),
    ):
        with pytest.raises(error) as caught:
            gpu_ops.swiglu_mlp_backward(*inputs, gate_up=gate_up)
        assert message in str(caught.value)
    with pytest.raises(OptionError, match=r"keep='gate' is unknown; did you mean 'gate_up'\? allowed: 'gate_up'"):
        gpu_ops.swiglu_mlp(*inputs[1:], keep="gate")


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same_gradients(threads, monkeypatch, rng):
    from gpu_ops.kernels.common.cpu import parallel
    from gpu_ops.kernels.gemm.cpu import gemm, swiglu_mlp_few

    inputs = make(rng, (300, 96), 96, 200, 64, np.dtype(np.float16))
    expected = gpu_ops.swiglu_mlp_backward(*inputs)
    for module in (gemm, parallel, swiglu_mlp_few):
        monkeypatch.setattr(module, "thread_count", lambda: threads)
    assert same_bits(gpu_ops.swiglu_mlp_backward(*inputs), expected)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_blocks_of_few_products(dtype, case, monkeypatch, rng):
    """Run the blocks for large problems at small sizes."""
    by_blocks(monkeypatch)
    check(make(rng, *case, dtype), "silu", {"backend": "numba"})


def by_blocks(monkeypatch):
    from gpu_ops.kernels.gemm.cpu import swiglu_mlp

    monkeypatch.setattr(swiglu_mlp, "FEW", 0)
    monkeypatch.setattr(swiglu_mlp, "FEW_PRODUCTS", 0)


def test_many_blocks(dtype, monkeypatch, rng):
    """Small blocks cover sums over blocks of tokens and of ffn, with remainders."""
    from gpu_ops.kernels.gemm.cpu import swiglu_mlp as kernels

    by_blocks(monkeypatch)
    monkeypatch.setattr(kernels, "TOKENS", 16)
    monkeypatch.setattr(kernels, "SCRATCH", 16 * 64)
    inputs = make(rng, (50, 40), 40, 200, 24, dtype)
    assert kernels.config(50, 40, 200, dtype) == "blocks of 16 tokens x 64 of ffn, tiles of 64 x 32"
    check(inputs, "silu", {"backend": "numba"})
    arguments = inputs[1:]
    padded = np.zeros((50, 100), dtype)  # an output with strided rows
    gpu_ops.swiglu_mlp(*arguments, out=padded[:, 30:54])
    assert padded[:, 30:54].tobytes() == gpu_ops.swiglu_mlp(*arguments).tobytes()
    assert not padded[:, :30].any()
    assert not padded[:, 54:].any()


@pytest.fixture
def small_blocks(monkeypatch):
    from gpu_ops.kernels.gemm import swiglu_mlp as kernels

    forget_calls()
    for name, value in {"TOKENS": 32, "SCRATCH": 1, "FFN": 32, "_MULTIPLE": 16}.items():
        monkeypatch.setattr(kernels, name, value)
    yield
    forget_calls()


@pytest.mark.parametrize(
    ("which", "dtype"),
    [
        ("raw", ml_dtypes.bfloat16),
        ("raw", np.float32),
        ("numba", np.float32),
        pytest.param("numba", ml_dtypes.bfloat16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_many_blocks_on_a_gpu(which, dtype, rng):
    """Chunks of tokens, and blocks of ffn over which dx is summed; the last ones are shorter."""
    inputs = make(rng, (50, 40), 40, 88, 24, np.dtype(dtype))
    how = {"device": "emulator", "backend": which}
    plan = str(gpu_ops.explain("swiglu_mlp", *inputs[1:], **how))
    gate, gate_backward = (" gate ", " gatebackward ") if which == "raw" else ("kGate", "kGateBackward")
    assert plan.count(gate) == 2
    plan = str(gpu_ops.explain("swiglu_mlp_backward", *inputs, **how))
    assert plan.count(gate_backward) == 3
    check(inputs, "silu", how)


def test_matrices_of_different_strides(rng):
    """Gate and up are halves of one array, or not; gradients are written to halves of one array."""
    dy, x, w_gate, w_up, w_down = make(rng, (20, 24), 24, 40, 16, np.dtype(np.float32))
    how = {"device": "emulator", "backend": "raw"}
    strided = np.zeros((40, 32), np.float32)
    strided[:, :24] = w_up
    weights = w_gate, strided[:, :24], w_down
    for rows in (20, 3):
        actual = gpu_ops.swiglu_mlp(x[:rows], *weights, **how)
        assert actual.tobytes() == gpu_ops.swiglu_mlp(x[:rows], w_gate, w_up, w_down, **how).tobytes()
    wants = gpu_ops.swiglu_mlp_backward(dy, x, w_gate, w_up, w_down, **how)
    padded = np.zeros((40, 48), np.float32)
    out = np.zeros_like(x), np.zeros_like(w_gate), padded[:, 8:32], np.zeros_like(w_down)
    gpu_ops.swiglu_mlp_backward(dy, x, *weights, out=out, **how)
    assert [o.tobytes() for o in out] == [w.tobytes() for w in wants]
    assert not padded[:, :8].any()
    assert not padded[:, 32:].any()


def workspace(op, which, results, inputs):
    """Workspace in bytes for bfloat16 arrays of these shapes."""
    kinds = dict.fromkeys(SUMS, np.float32)
    arrays = {
        name: Layout.contiguous(shape, kinds.get(name, ml_dtypes.bfloat16))
        for name, shape in {**inputs, **results}.items()
    }
    options = {f"packed_{name}": None for name in ("w_gate", "w_up", "w_down")}
    options |= {"activation": "silu", "added": ()}
    spec = Spec(op, tuple(arrays.items()), tuple(options.items()))
    program, _ = lower(spec, which, EmulatorDevice().limits)
    return sum(w.nbytes for w in program.workspaces)


@pytest.mark.parametrize("which", ["raw", "numba"])
def test_memory_of_a_gpu(which):
    """Results and workspace of Llama-3-8B with 8192 tokens in bfloat16, against separate steps."""
    tokens, hidden, ffn = 8192, 4096, 14336
    weights = {"w_gate": (ffn, hidden), "w_up": (ffn, hidden), "w_down": (hidden, ffn)}
    gradients = {f"d{name}": shape for name, shape in weights.items()}
    hidden_bytes, ffn_bytes = tokens * hidden * 2, tokens * ffn * 2

    def forward(tokens):
        shape = (tokens, hidden)
        return workspace("swiglu_mlp", which, {"y": shape}, {"x": shape, **weights})

    # gate, up; h in the place of gate; y
    assert hidden_bytes + forward(tokens) <= 0.6 * (2 * ffn_bytes + hidden_bytes)
    assert forward(tokens) == 2048 * ffn * 2  # h of a chunk
    assert forward(4 * tokens) == forward(tokens)

    x = (tokens, hidden)
    inputs = {"dy": x, "x": x, **weights}
    scratch = workspace("swiglu_mlp_backward", which, {"dx": x, **gradients}, inputs)
    # gate, up, dh, h; dgate and dup in the place of two of them; dx once per product
    assert hidden_bytes + scratch <= 0.25 * (4 * ffn_bytes + 2 * hidden_bytes)
    assert scratch == 3 * tokens * 1024 * 2 + tokens * hidden * 4  # gate, up and h of a block; dx in float32


def peak_memory(call):
    call()  # compiled beforehand
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scratch_does_not_grow_with_the_tokens(dtype, rng, monkeypatch):
    """The peak is equal at 4x the tokens; the 16-bit backward adds dx in float32. A (tokens, ffn) array is 24 MiB."""
    # scratch is then allocated by NumPy, and seen by tracemalloc
    monkeypatch.setattr(memory_pool.POOL, "limit", 0)
    hidden, ffn = 8, 1024
    forward, backward = [], []
    for tokens in (2048, 8192):
        dy, x, *weights = make(rng, (tokens, hidden), hidden, ffn, hidden, np.dtype(dtype))
        y, gradients = np.empty_like(x), (np.empty_like(x), *(np.empty_like(w, np.float32) for w in weights))
        forward.append(peak_memory(partial(gpu_ops.swiglu_mlp, x, *weights, out=y)))
        backward.append(peak_memory(partial(gpu_ops.swiglu_mlp_backward, dy, x, *weights, out=gradients)))
    for peaks, extra in ((forward, 0), (backward, 0 if dtype == "float32" else 6144 * hidden * 4)):
        assert peaks[0] > 1 << 20  # the measurement sees the buffers of NumPy
        assert peaks[1] - peaks[0] < extra + (1 << 20)


@pytest.mark.peers
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
    expected = linear(
        torch.nn.functional.silu(linear(leaves[0], leaves[1])) * linear(leaves[0], leaves[2]), leaves[3]
    )
    expected.backward(dy)
    y = gpu_ops.swiglu_mlp(x, w_gate, w_up, w_down)
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-10, atol=1e-11)
    for actual, leaf in zip(gpu_ops.swiglu_mlp_backward(dy, x, w_gate, w_up, w_down), leaves, strict=True):
        torch.testing.assert_close(actual, leaf.grad, rtol=1e-10, atol=1e-10)
