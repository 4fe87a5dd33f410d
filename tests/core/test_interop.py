"""Other kinds of arrays: read-only, strided, unaligned, foreign through DLPack, torch, JAX; and refusals."""

from __future__ import annotations

import datetime

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import errors
from tests.support.calls import OPS, WRITTEN, call, results

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Ops whose first array is one of floats, and the name of that array.
FLOAT_OPS = [op for op in OPS if op not in ("ternary_pack", "ternary_unpack")]


def plain_arrays(case):
    """NumPy arrays among a call's arguments and options that the op only reads."""
    arrays = {n: x for n, x in {**case.arrays, **case.options}.items() if isinstance(x, np.ndarray)}
    return {n: x for n, x in arrays.items() if n not in WRITTEN.get(case.op, ())}


def every_array(case, change):
    return case.having(**{name: change(x) for name, x in plain_arrays(case).items()})


def assert_same(actual, expected):
    for f, e in zip(results(actual), results(expected), strict=True):
        assert np.array_equal(np.asarray(f), np.asarray(e))


class DLPackOnly:
    """Array of an unknown library: it has only the two protocol methods."""

    def __init__(self, x, device=(1, 0)):
        self._x, self._device = x, device

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._device


@pytest.mark.parametrize("op", [op for op in OPS if op != "ternary_matmul"])
def test_objects_that_only_speak_dlpack(op):
    """They are taken without a copy; results are NumPy arrays, since the library is unknown."""
    case = call(op)
    result = every_array(case, DLPackOnly)()
    assert_same(result, case())
    assert all(isinstance(r, np.ndarray) for r in results(result))


def test_dlpack_shares_memory():
    """``out=`` through DLPack is written in place, so no copy can have been made."""
    case = call("rmsnorm")
    buffer = np.zeros((3, 16), np.float32)
    out = DLPackOnly(buffer)
    assert case(out=out) is out
    assert np.array_equal(buffer, case())


class OnCuda:
    """Array that claims to be on a CUDA device; nothing may read it."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": (3, 16), "typestr": "<f4", "data": (0x7F0000000000, False), "version": 3}


# CUDA by two protocols, ROCm.
ELSEWHERE = (OnCuda(), DLPackOnly(None, device=(2, 0)), DLPackOnly(None, device=(10, 1)))


@pytest.mark.parametrize("op", [op for op in OPS if op != "ternary_unpack"])
def test_arrays_on_other_devices_are_refused_unread(op):
    case = call(op)
    for array in ELSEWHERE:
        with pytest.raises(errors.DeviceError, match=f"^{op}: .* is on "):
            case.having(**{next(iter(case.arrays)): array})()


NOT_ARRAYS = (
    ([[1.0, 2.0]], "is list, not an array"),
    (((1.0, 2.0),), "is tuple, not an array"),
    (3.0, "is float, not an array"),
    (None, "not an array"),
    ("x", "is str, not an array"),
    (memoryview(b"abcd"), "is memoryview, not an array"),
    (np.float32(1), "is a number of type float32, not an array"),
    (np.ma.masked_array([1.0], [True]), "masked array"),
)


@pytest.mark.parametrize("op", OPS)
def test_things_that_are_no_arrays_are_refused(op):
    case = call(op)
    for thing, says in NOT_ARRAYS:
        with pytest.raises(errors.DTypeError, match=says):
            case.having(**{next(iter(case.arrays)): thing})()


@pytest.mark.parametrize("op", FLOAT_OPS)  # one byte has no order
def test_swapped_bytes_are_refused_with_the_remedy(op):
    case = call(op)
    name, x = next(iter(case.arrays.items()))
    with pytest.raises(errors.DTypeError, match="byte-swapped") as caught:
        case.having(**{name: x.astype(x.dtype.newbyteorder(">"))})()
    assert "newbyteorder" in str(caught.value)


@pytest.mark.parametrize("op", OPS)
def test_dtypes_without_a_meaning_are_refused(op):
    case = call(op)
    name, x = next(iter(case.arrays.items()))
    for wrong in (np.complex64, bool, object, "U3", "M8[s]", [("a", np.float32)], np.longdouble):
        with pytest.raises(errors.DTypeError, match=op):
            case.having(**{name: np.zeros(x.shape, wrong)})()


# torch and JAX pass and get arrays of their type, sharing memory.


def torch_tensor(x):
    import torch

    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def torch_numpy(t):
    import torch

    return t.view(torch.int16).numpy().view(BFLOAT16) if t.dtype == torch.bfloat16 else t.numpy()


@pytest.mark.peers
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, BFLOAT16, np.float64], ids=lambda d: np.dtype(d).name
)
@pytest.mark.parametrize("op", [op for op in FLOAT_OPS if not op.startswith("ternary")])
def test_torch_in_torch_out(op, dtype):
    torch = pytest.importorskip("torch", reason="needs torch (pip install torch)")
    case = call(op, dtype)
    result = every_array(case, torch_tensor)()
    for f, e in zip(results(result), results(case()), strict=True):
        assert isinstance(f, torch.Tensor)
        assert np.array_equal(torch_numpy(f), e)
        assert torch_numpy(f).dtype == e.dtype


@pytest.mark.peers
def test_a_subclass_is_of_the_same_library():
    torch = pytest.importorskip("torch", reason="needs torch (pip install torch)")

    class Named(torch.Tensor):
        pass

    case = call("rmsnorm", BFLOAT16)
    result = every_array(case, lambda x: torch_tensor(x).as_subclass(Named))()
    assert isinstance(result, torch.Tensor)
    assert np.array_equal(torch_numpy(result), case())


@pytest.mark.peers
def test_torch_out_is_written_in_place():
    torch = pytest.importorskip("torch", reason="needs torch (pip install torch)")
    case = call("rmsnorm", BFLOAT16)
    out = torch.zeros(3, 16, dtype=torch.bfloat16)
    assert every_array(case, torch_tensor)(out=out) is out
    assert np.array_equal(torch_numpy(out), case())


@pytest.mark.peers
def test_torch_views():
    torch = pytest.importorskip("torch", reason="needs torch (pip install torch)")
    case = call("attention")
    swapped = {n: torch.from_numpy(x.swapaxes(1, 2).copy()).transpose(1, 2) for n, x in case.arrays.items()}
    assert np.array_equal(case.having(**swapped)().numpy(), case())


@pytest.mark.peers
def test_torch_that_requires_grad_is_refused_with_the_remedy():
    """Detaching silently would cut the graph without notice."""
    torch = pytest.importorskip("torch", reason="needs torch (pip install torch)")
    case = call("rmsnorm")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(3, 16, dtype=dtype, requires_grad=True)
        with pytest.raises(errors.DTypeError, match=r"x\.detach\(\)"):
            case.having(x=x, weight=torch.ones(16, dtype=dtype))()


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_parameters_are_arrays_where_grad_mode_is_off(dtype):
    """This covers forward passes under no_grad, results, and autograd.Function; also later calls."""
    torch = pytest.importorskip("torch", reason="needs torch (pip install torch)")
    torch_dtype = getattr(torch, dtype)
    x, weight = torch.randn(3, 16, dtype=torch_dtype), torch.nn.Parameter(torch.randn(16, dtype=torch_dtype))
    expected = call("rmsnorm").having(x=x, weight=weight.detach())()
    leaf, out = x.clone().requires_grad_(), torch.nn.Parameter(torch.zeros(3, 16, dtype=torch_dtype))
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(call("rmsnorm").having(x=leaf, weight=weight)(), expected)
            assert call("rmsnorm").having(x=leaf, weight=weight)(out=out) is out
            assert torch.equal(out, expected)
        with pytest.raises(errors.DTypeError, match=r"weight\.detach\(\), or compute under torch\.no_grad"):
            call("rmsnorm").having(x=x, weight=weight)()
        with pytest.raises(errors.DTypeError, match=r"out\.detach\(\)"):
            call("rmsnorm").having(x=x, weight=weight.detach())(out=out)

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            y, rstd = call("rmsnorm").having(x=x, weight=weight)(return_rstd=True)
            ctx.save_for_backward(x, weight, rstd)
            return y

        @staticmethod
        def backward(ctx, dy):
            return gpu_ops.rmsnorm_backward(dy, *ctx.saved_tensors)

    y = Norm.apply(leaf, weight)
    assert torch.equal(y, expected)
    y.sum().backward()
    dx, dweight = gpu_ops.rmsnorm_backward(
        torch.ones_like(expected),
        x,
        weight.detach(),
        call("rmsnorm").having(x=x, weight=weight.detach())(return_rstd=True)[1],
    )
    assert torch.equal(leaf.grad, dx)
    assert torch.equal(weight.grad, dweight.to(torch_dtype))


@pytest.mark.peers
def test_torch_that_is_negated_lazily_is_refused_with_the_remedy():
    """It is refused because its memory holds the opposite sign."""
    torch = pytest.importorskip("torch", reason="needs torch (pip install torch)")
    case = call("rmsnorm")
    x, weight = (torch_tensor(array) for array in case.arrays.values())
    for negated in (x._neg_view(), torch.complex(x, x).conj().imag, x.bfloat16()._neg_view()):
        with pytest.raises(errors.DTypeError, match=r"x cannot be shared .* first: x\.resolve_neg\(\)"):
            case.having(x=negated, weight=weight.to(negated.dtype))()
    with pytest.raises(errors.DTypeError, match=r"out\.resolve_neg\(\)"):
        case.having(x=x, weight=weight, out=torch.zeros(3, 16)._neg_view())()
    assert np.array_equal(case.having(x=x._neg_view().resolve_neg(), weight=weight)().numpy(), -case())


@pytest.mark.peers
def test_torch_meta_and_sparse_tensors_are_refused():
    torch = pytest.importorskip("torch", reason="needs torch (pip install torch)")
    case = call("rmsnorm")
    with pytest.raises(errors.GpuOpsError):
        case.having(x=torch.ones(3, 16, device="meta"))()
    with pytest.raises(errors.GpuOpsError):
        case.having(x=torch.ones(3, 16).to_sparse())()


@pytest.mark.peers
def test_libraries_mix_and_the_first_array_decides():
    torch = pytest.importorskip("torch", reason="needs torch (pip install torch)")
    case = call("rmsnorm")
    x, weight = case.arrays.values()
    assert isinstance(case.having(weight=torch_tensor(weight))(), np.ndarray)
    assert isinstance(case.having(x=torch_tensor(x))(), torch.Tensor)


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=lambda d: np.dtype(d).name)
def test_jax_in_jax_out(dtype):
    jax = pytest.importorskip("jax", reason="needs JAX (pip install jax)")
    case = call("rmsnorm", dtype)
    result = every_array(case, jax.numpy.asarray)()
    assert isinstance(result, jax.Array)
    assert np.array_equal(np.asarray(result), case())


@pytest.mark.parametrize("op", ["attention", "rmsnorm", "swiglu", "swiglu_mlp", "ternary_matmul"])
def test_no_memory_for_a_result_is_a_typed_error(op, monkeypatch):
    def refuse(shape, dtype):
        raise MemoryError

    case = call(op)
    case()  # compiled and cached before memory runs out
    with monkeypatch.context() as patch:
        patch.setattr("gpu_ops.core.arrays.np.empty", refuse)
        with pytest.raises(errors.OutOfMemoryError, match=f"{op}: no memory for a result of shape") as caught:
            case()
    assert caught.value.required > 0


# Objects whose DLPack methods break the protocol.


class Says:
    """Object whose DLPack methods do as configured."""

    def __init__(self, device, capsule):
        self._device, self._capsule = device, capsule

    def __dlpack__(self, **options):
        return self._capsule()

    def __dlpack_device__(self):
        return self._device()


class WithoutADevice:
    def __dlpack__(self, **options):
        raise AssertionError("nothing to ask for")


def lacking():
    raise AttributeError("no such thing")


@pytest.mark.parametrize(
    ("thing", "error"),
    [
        (WithoutADevice(), errors.DeviceError),
        (Says(lacking, lacking), errors.DeviceError),
        (Says(tuple, lacking), errors.DeviceError),
        (Says(lambda: (1, 0), lacking), errors.DTypeError),
        (Says(lambda: (1, 0), object), errors.DTypeError),
        # a capsule of something else
        (Says(lambda: (1, 0), lambda: datetime.datetime_CAPI), errors.DTypeError),
    ],
)
def test_objects_that_speak_dlpack_badly_are_refused(thing, error):
    with pytest.raises(error, match=r"^rmsnorm: x .*(shared|is on device \(\))"):
        call("rmsnorm").having(x=thing)()
