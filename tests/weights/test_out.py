"""``out=`` may not share memory with the codes or the scale of a ternary matrix."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops import TernaryMatrix, ternary_matmul, ternary_matmul_backward
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import ShapeError
from tests.support.fake_cupy import FakeArray

N, K, TOKENS = 3, 64, 2
CODES, SCALE = 0, 64  # offsets in the memory of a test, in bytes
SHAPES = {"y": (TOKENS, N), "dx": (TOKENS, K), "dw": (N, K)}


def in_memory(rng):
    """Ternary matrix, and the bytes that hold its codes and scale."""
    packed = TernaryMatrix.from_trits(rng.integers(-1, 2, (N, K)).astype(np.int8))
    memory = np.zeros(4096, np.uint8)
    codes, scale = memory[CODES : CODES + 48].reshape(N, 16), memory[SCALE : SCALE + 4 * N].view(np.float32)
    codes[...], scale[...] = packed.codes, (0.5, 1.0, 1.5)
    return TernaryMatrix(codes, scale, (N, K), "w2"), memory


def result(name, memory, at):
    nbytes = 4 * np.prod(SHAPES[name])
    return memory[at : at + nbytes].view(np.float32).reshape(SHAPES[name])


def calls(rng, held):
    """Calls by name: functions of the memory for the result and of the offset of the result in it."""
    x, dy = rng.standard_normal((TOKENS, K), np.float32), rng.standard_normal((TOKENS, N), np.float32)
    t = TernaryMatrix.from_trits(rng.integers(-1, 2, (TOKENS, K)).astype(np.int8))
    x_matrix = TernaryMatrix.from_trits(rng.integers(-1, 2, (TOKENS, K)).astype(np.int8))
    separate = {name: np.empty(shape, np.float32) for name, shape in SHAPES.items()}

    def backward(dx, dw, **where):
        return ternary_matmul_backward(dy, x, held, out=(dx, dw), **where)

    return {
        "matmul": lambda m, at, **where: ternary_matmul(x, held, out=result("y", m, at), **where),
        "product": lambda m, at, **where: ternary_matmul(t, held, out=result("y", m, at), **where),
        "product, x": lambda m, at, **where: ternary_matmul(
            held, x_matrix, out=result("y", m, at).reshape(N, TOKENS), **where
        ),
        "dx": lambda m, at, **where: backward(result("dx", m, at), separate["dw"], **where),
        "dw": lambda m, at, **where: backward(separate["dx"], result("dw", m, at), **where),
    }


@pytest.mark.parametrize("at", [CODES, SCALE])
@pytest.mark.parametrize("name", ["matmul", "product", "product, x", "dx", "dw"])
def test_out_shares_no_memory_with_a_matrix(name, at, backend, rng):
    held, memory = in_memory(rng)
    call = calls(rng, held)[name]
    before = memory.copy()
    refused = pytest.raises(ShapeError, match=rf"shares memory with {'x' if name == 'product, x' else 'w'}")
    forget_calls()
    with refused:
        call(memory, at, **backend)
    call(memory, 2048, **backend)
    call(memory, 2048, **backend)
    with refused:  # a call of the same key is cached by now
        call(memory, at, **backend)
    np.testing.assert_array_equal(memory[:2048], before[:2048])


def test_a_call_with_out_on_a_gpu_is_remembered(cupy, rng):
    held, _ = in_memory(rng)
    x, out = (
        FakeArray(rng.standard_normal((TOKENS, K), np.float32)),
        FakeArray(np.zeros((TOKENS, N), np.float32)),
    )
    for _ in range(2):
        ternary_matmul(x, held, out=out, backend="raw")
    assert len(ternary_matmul.op.known) == 1
    np.testing.assert_array_equal(out.host, ternary_matmul(x.host, held, device="emulator", backend="raw"))
