"""2^x of attention's weights, as split on this CPU and on others; e^x and tanh of the other kernels."""

import numpy as np
import pytest

pytest.importorskip("numba")
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.typing.templates import signature
from numba.extending import intrinsic

from gpu_ops.kernels.common.cpu.codegen import exp2 as module
from gpu_ops.kernels.common.cpu.codegen.build import load_vector, store_vector
from gpu_ops.kernels.common.cpu.codegen.target import SCALEF, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.fastmath import exp, tanh_and_slope
from gpu_ops.kernels.common.cpu.jit import CONTRACT, REASSOC

# largest relative error: of the polynomial, and of its evaluation
ERRORS = {"PAIRS": (np.float32, 3.5e-6), "FLOAT32": (np.float32, 1.7e-7), "FLOAT64": (np.float64, 3e-16)}


def powers(dtype, emit):
    """Compiled function that sets every vector of ``y`` to 2 to the power of that of ``x``."""

    @intrinsic
    def vector(typingctx, y, x, i):
        def codegen(context, b, sig, args):
            y_, x_ = (
                b.gep(context.make_array(t)(context, b, a).data, [args[2]])
                for t, a in zip(sig.args, args[:2], strict=False)
            )
            element = ir.FloatType() if dtype == np.float32 else ir.DoubleType()
            lanes = ir.VectorType(element, VECTOR_BYTES // np.dtype(dtype).itemsize)
            store_vector(b, emit(b, load_vector(b, x_, lanes)), y_)
            return context.get_dummy_value()

        return signature(types.void, y, x, types.int64), codegen

    step = VECTOR_BYTES // np.dtype(dtype).itemsize

    @njit
    def every(y, x):
        for i in range(0, len(x), step):
            vector(y, x, i)

    def call(x):
        padded = np.resize(np.asarray(x, dtype), -(-len(x) // step) * step)
        y = np.empty_like(padded)
        every(y, padded)
        return y[: len(x)]

    return call


@pytest.mark.parametrize("form", ["_scalef", "_shift"])
@pytest.mark.parametrize("name", ERRORS)
def test_powers(form, name):
    if form == "_scalef" and not SCALEF:
        pytest.skip("needs a CPU with AVX-512")
    dtype, error = ERRORS[name]
    lowest = -126 if dtype == np.float32 else -1022
    power = powers(dtype, lambda b, x: getattr(module, form)(b, x, getattr(module, name)))
    x = np.concatenate(
        [np.linspace(lowest, 2, 100_003)[1:], -np.logspace(-30, 2, 1000), np.arange(lowest + 1, 3)]
    )
    x = x.astype(dtype)
    expected = np.exp2(x.astype(np.longdouble))
    assert np.abs(power(x) / expected - 1).max() <= error
    assert power([0.0, -0.0]).tolist() == [1, 1]
    assert np.isnan(power([np.nan, -np.nan])).all()
    assert power([-np.inf, np.finfo(dtype).min, 3.0 * lowest]).tolist() == [0, 0, 0]
    below = np.nextafter(dtype(0), dtype(-1)), np.nextafter(dtype(1), dtype(0)), dtype(-1e-6)
    assert np.abs(power(below) / np.exp2(below) - 1).max() <= 2e-7  # no step where the power of two changes
    small = np.linspace(lowest - 30, np.nextafter(dtype(lowest), dtype(-np.inf), dtype=dtype), 999)
    assert not power(small).any()


@pytest.mark.parametrize(("dtype", "ends"), [(np.float32, (-87.3, 88.3)), (np.float64, (-708.3, 709.3))])
@pytest.mark.parametrize("fastmath", [CONTRACT, REASSOC], ids=["contract", "reassoc"])
def test_exponential(dtype, ends, fastmath):
    """The exponential is accurate to one unit in the last place, for large arguments too."""

    @njit(fastmath=set(fastmath))
    def every(y, x):
        for i in range(len(x)):
            y[i] = exp(x[i])

    def power(x):
        x = np.asarray(x, dtype)
        y = np.empty_like(x)
        every(y, x)
        return y

    x = np.concatenate([np.linspace(*ends, 100_003), -np.logspace(-30, 1, 1000)]).astype(dtype)
    assert np.abs(power(x) / np.exp(x.astype(np.longdouble)) - 1).max() <= np.finfo(dtype).eps
    assert power([0.0, -0.0]).tolist() == [1, 1]
    assert np.isnan(power([np.nan, -np.nan])).all()
    assert power([-np.inf, np.finfo(dtype).min, 1.02 * ends[0], np.inf]).tolist() == [0, 0, 0, np.inf]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tanh_and_its_slope(dtype):
    """The slope keeps its digits where tanh is 1: 1 - tanh^2 would have none."""

    @njit(fastmath=set(CONTRACT))
    def every(y, slope, x):
        for i in range(len(x)):
            y[i], slope[i] = tanh_and_slope(x[i])

    def both(x):
        x = np.asarray(x, dtype)
        outputs = np.empty_like(x), np.empty_like(x)
        every(*outputs, x)
        return outputs

    x = np.concatenate([np.linspace(-40, 40, 100_003), np.linspace(-1, 1, 50_000), np.logspace(-30, 0, 1000)])
    x = x.astype(dtype)
    y, slope = both(x)
    expected = np.tanh(x.astype(np.longdouble))
    assert (np.abs(y - expected) <= 1.5 * np.spacing(np.abs(expected).astype(dtype))).all()
    assert np.abs(slope * np.cosh(x.astype(np.longdouble)) ** 2 - 1).max() <= 2.5 * np.finfo(dtype).eps
    y, slope = both([0.0, np.inf, -np.inf, 1e30, np.nan])
    assert y[:4].tolist() == [0, 1, -1, 1]
    assert slope[:4].tolist() == [1, 0, 0, 0]
    assert np.isnan([y[4], slope[4]]).all()
