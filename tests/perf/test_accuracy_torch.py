"""Float32 results are at most twice as far from float64 as torch's: the same formula in torch, in both dtypes."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops

F32 = np.float32


def normal(*shape):
    return lambda rng: rng.standard_normal(shape)


def rotated(torch, x):
    """RoPE as Hugging Face models compute it, angles included, in the dtype of x."""
    at = torch.arange(x.shape[1], dtype=x.dtype)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, x.shape[3], 2, dtype=x.dtype) / x.shape[3])
    angles = torch.cat([at[:, None] * inv_freq] * 2, -1)[:, None]
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def gated(act):
    return lambda torch, gate, up: act(torch.nn.functional, gate) * up


def attended(**options):
    return lambda torch, q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def attention(**options):
    return lambda *arrays: gpu_ops.attention(*arrays, layout="bhsd", **options)


HEADS = [normal(2, 4, 300, 64)] * 3
ROWS, WEIGHT = normal(64, 4096), normal(4096)
CASES = {  # inputs, torch, ours
    "attention": (HEADS, attended(), attention()),
    "attention causal": (HEADS, attended(is_causal=True), attention(causal=True)),
    "attention grouped": ([normal(1, 8, 128, 128), *[normal(1, 2, 700, 128)] * 2], attended(enable_gqa=True),
     attention()),
    "attention of one query": ([normal(2, 4, 1, 128), *[normal(2, 4, 1000, 128)] * 2], attended(), attention()),
    "rmsnorm": ([ROWS, WEIGHT], lambda torch, x, w: torch.nn.functional.rms_norm(x, w.shape, w, eps=1e-6),
     gpu_ops.rmsnorm),
    "layernorm": (
        [lambda rng: 3 + rng.standard_normal((64, 4096)), WEIGHT, WEIGHT],
        lambda torch, x, w, b: torch.nn.functional.layer_norm(x, w.shape, w, b, eps=1e-5),
        lambda x, w, b: gpu_ops.layernorm(x, w, b, eps=1e-5),
    ),
    "swiglu": ([ROWS, ROWS], gated(lambda f, g: f.silu(g)), gpu_ops.swiglu),
    "geglu": ([ROWS, ROWS], gated(lambda f, g: f.gelu(g)), lambda gate,
     up: gpu_ops.swiglu(gate, up, activation="gelu")),
    "geglu tanh": ([ROWS, ROWS], gated(lambda f, g: f.gelu(g, approximate="tanh")), lambda gate,
     up: gpu_ops.swiglu(gate, up, activation="gelu_tanh")),
    "rope": ([normal(1, 500, 4, 128)], rotated, gpu_ops.rope),
}  # fmt: skip


@pytest.mark.peers
@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_torch(name, rng):
    torch = pytest.importorskip("torch", reason="pip install torch (CPU) to compare with it")
    make, of_torch, ours = CASES[name]
    arrays = [m(rng).astype(F32) for m in make]
    exact, theirs = (
        of_torch(torch, *(torch.from_numpy(x).to(dtype) for x in arrays)).numpy()
        for dtype in (torch.float64, torch.float32)
    )
    errors = [np.abs(y.astype(np.float64) - exact) for y in (ours(*arrays), theirs)]
    for measure in (np.max, np.mean):
        mine, torchs = map(measure, errors)
        print(f"{name}: {measure.__name__} error {mine:.2e}, torch {torchs:.2e}")  # pytest -rP shows it
        assert mine <= 2 * torchs, measure.__name__
