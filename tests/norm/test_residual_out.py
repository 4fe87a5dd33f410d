"""``residual_out=`` and ``return_sum=`` of RMSNorm and LayerNorm, and a layer that runs without allocation."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import DTypeError, OptionError, ShapeError

DEVICES = ("cpu", "emulator", "cuda")


def quick_on_emulator(raw):
    dtypes = {"dtype": [np.float32, np.float16] if raw else [np.float32]}
    return {"test_residual_out": dtypes, "test_without_the_sum": dtypes}


@pytest.fixture(params=["rmsnorm", "layernorm"])
def op(request):
    return getattr(gpu_ops, request.param)


@pytest.mark.parametrize("shape", [(5, 1001), (2, 3, 128), (0, 8), (1, 1)], ids=str)
def test_residual_out(op, backend, dtype, shape, rng):
    x, residual = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    weight = rng.standard_normal(shape[-1:]).astype(dtype)
    expected = [a.tobytes() for a in op(x, weight, residual=residual, **backend)]

    y, s = np.full_like(x, 7), np.full_like(x, 7)
    actual = op(x, weight, residual=residual, out=y, residual_out=s, **backend)
    assert actual[0] is y
    assert actual[1] is s
    assert [a.tobytes() for a in actual] == expected

    padded = np.full((*shape[:-1], shape[-1] + 9), 7, dtype)
    inside = padded[..., 4:-5]
    _, actual = op(x, weight, residual=residual, residual_out=inside, **backend)
    assert actual is inside
    assert inside.tobytes() == expected[1]
    assert (padded[..., :4] == 7).all()
    assert (padded[..., -5:] == 7).all()

    mine, stream = x.copy(), residual.copy()  # in place, as a layer in a residual stream runs
    op(mine, weight, residual=stream, out=mine, residual_out=stream, **backend)
    assert [mine.tobytes(), stream.tobytes()] == expected


@pytest.mark.parametrize("shape", [(5, 1001), (0, 8), (2, 3, 128)], ids=str)
def test_without_the_sum(op, backend, dtype, shape, rng):
    x, residual = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    weight = rng.standard_normal(shape[-1:]).astype(dtype)
    expected = op(x, weight, residual=residual, **backend)[0].tobytes()
    y = op(x, weight, residual=residual, return_sum=False, **backend)
    assert y.tobytes() == expected
    statistics = {"return_rstd" if op is gpu_ops.rmsnorm else "return_stats": True}
    y, *statistics = op(x, weight, residual=residual, return_sum=False, **statistics, **backend)
    assert [a.shape for a in statistics] == [shape[:-1]] * len(statistics)

    mine, stream = x.copy(), residual.copy()
    assert op(mine, weight, residual=stream, return_sum=False, out=mine, **backend) is mine
    assert mine.tobytes() == expected
    assert stream.tobytes() == residual.tobytes()

    alone = op(x, weight, return_sum=False, **backend)  # without a residual there is no sum
    assert alone.tobytes() == op(x, weight, **backend).tobytes()


X = np.ones((2, 4), np.float32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"residual_out": np.zeros((2, 4), np.float32)}, OptionError, r"residual_out .* pass residual="),
        (
            {"residual": X, "residual_out": X, "return_sum": False},
            OptionError,
            r"residual_out .* return_sum=True",
        ),
        ({"residual": X, "return_sum": 0}, OptionError, "return_sum must be True or False"),
        ({"residual": X, "residual_out": np.zeros((2, 5), np.float32)}, ShapeError, "residual_out has shape"),
        ({"residual": X, "residual_out": np.zeros((2, 4))}, DTypeError, "residual_out is float64"),
        ({"residual": X.copy(), "residual_out": X}, ShapeError, "residual_out shares memory with x"),
    ],
)
def test_mistakes(op, options, error, message):
    with pytest.raises(error, match=message):
        op(X, X[0], **options)
    np.testing.assert_array_equal(X, 1)


def test_results_lie_apart(op):
    both = np.zeros((3, 4), np.float32)
    with pytest.raises(ShapeError, match="residual_out shares memory with out"):
        op(X, X[0], residual=X.copy(), out=both[:2], residual_out=both[1:])
    np.testing.assert_array_equal(both, 0)


def test_read_only(op):
    frozen = np.zeros_like(X)
    frozen.flags.writeable = False
    with pytest.raises(ShapeError, match="residual_out is read-only"):
        op(X, X[0], residual=X.copy(), residual_out=frozen)
