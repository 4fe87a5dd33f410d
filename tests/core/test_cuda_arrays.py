"""CUDA arrays as inputs and outputs: of CuPy, of other libraries, and NumPy arrays copied to the device; refusals.

Here CuPy is a fake over host memory and the kernels run on the emulator; see fake_cupy.py.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.core import dispatch
from gpu_ops.core.arrays import cast
from gpu_ops.errors import DeviceError, DTypeError, OutOfMemoryError, ShapeError
from tests.support.calls import OPS, call
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray, ForeignArray, ForeignDLPack

pytestmark = needs_nvrtc

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROWS, COLS = 3, 40


@pytest.fixture
def x(rng):
    return rng.standard_normal((ROWS, COLS)).astype(np.float32)


@pytest.fixture
def weight(rng):
    return rng.standard_normal(COLS).astype(np.float32)


def emulated(*arrays, **options):
    return gpu_ops.rmsnorm(*arrays, device="emulator", **options)


def test_cupy_arrays_run_on_their_device_and_come_back(cupy, x, weight):
    y, s, rstd = gpu_ops.rmsnorm(
        FakeArray(x, 1), FakeArray(weight, 1), residual=FakeArray(x, 1), return_rstd=True
    )
    for actual, expected in zip((y, s, rstd), emulated(x, weight, residual=x, return_rstd=True), strict=True):
        assert isinstance(actual, FakeArray)
        assert actual.device.id == 1
        assert actual.host.tobytes() == expected.tobytes()
    ((label, ordinal, stream),) = cupy.launched
    assert label.startswith("rmsnorm_forward[")
    assert (ordinal, stream) == (1, None)
    assert cupy.entered == []


def test_backward(cupy, x, weight):
    _, rstd = emulated(x, weight, return_rstd=True)
    expected = gpu_ops.rmsnorm_backward(x, x, weight, rstd, device="emulator")
    actual = gpu_ops.rmsnorm_backward(*map(FakeArray, (x, x, weight, rstd)))
    assert [g.host.tobytes() for g in actual] == [w.tobytes() for w in expected]


def test_no_rows(cupy, x, weight):
    none, rstd = FakeArray(x[:0]), FakeArray(np.zeros(0, np.float32))
    dx, dweight = gpu_ops.rmsnorm_backward(none, none, FakeArray(weight), rstd)
    assert dx.shape == (0, COLS)
    assert not dweight.host.any()
    assert cupy.launched == []


def test_out_is_written_and_returned(cupy, x, weight):
    buffer = np.full((ROWS, COLS + 8), 7, np.float32)
    out = FakeArray(buffer)[:, 4:-4]
    assert gpu_ops.rmsnorm(FakeArray(x), FakeArray(weight), out=out) is out
    assert out.host.tobytes() == emulated(x, weight).tobytes()
    assert (buffer[:, :4] == 7).all()
    assert (buffer[:, -4:] == 7).all()
    mine = FakeArray(x.copy())
    assert gpu_ops.rmsnorm(mine, FakeArray(weight), out=mine) is mine
    assert mine.host.tobytes() == out.host.tobytes()


def test_views_that_no_kernel_takes_are_copied_on_the_device(cupy, x, weight):
    turned = FakeArray(np.asfortranarray(x), 1)
    actual = gpu_ops.rmsnorm(turned, FakeArray(weight, 1))
    assert actual.host.tobytes() == emulated(x, weight).tobytes()


@pytest.mark.parametrize("make", [ForeignArray, ForeignDLPack])
def test_arrays_of_other_libraries_come_in_without_a_copy(cupy, make, x, weight):
    out = np.zeros_like(x)
    foreign = make(out)
    assert gpu_ops.rmsnorm(make(x), make(weight), out=foreign) is foreign
    assert out.tobytes() == emulated(x, weight).tobytes()
    assert isinstance(gpu_ops.rmsnorm(make(x), make(weight)), FakeArray)


def test_bfloat16_by_the_name_that_numpy_has_for_it(cupy, x, weight):
    x, weight = x.astype(BFLOAT16), weight.astype(BFLOAT16)
    actual = gpu_ops.rmsnorm(ForeignArray(x, typestr="<V2"), ForeignArray(weight, typestr="<V2"))
    assert actual.dtype == BFLOAT16
    assert actual.host.tobytes() == emulated(x, weight).tobytes()


@pytest.mark.parametrize(("number", "runs_on"), [(None, None), (1, 0), (2, 2), (77, 77)])
def test_the_call_runs_on_the_stream_that_the_first_array_names(cupy, x, weight, number, runs_on):
    gpu_ops.rmsnorm(ForeignArray(x, stream=number), ForeignArray(weight, stream=5))
    assert [stream for _, _, stream in cupy.launched] == [runs_on]
    assert cupy.streams == []


def test_numpy_arrays_are_copied_there_and_back(cupy, x, weight):
    before = x.copy()
    y, s = gpu_ops.rmsnorm(x, weight, residual=x, device="cuda")
    for actual, expected in zip((y, s), emulated(x, weight, residual=x), strict=True):
        assert isinstance(actual, np.ndarray)
        assert actual.tobytes() == expected.tobytes()
    assert len(cupy.launched) == 1
    assert np.array_equal(x, before)
    plan = gpu_ops.explain("rmsnorm", x, weight, device="cuda")
    assert "arrays are copied there and back" in str(plan)
    assert "NVIDIA A30" in str(plan)
    assert len(cupy.launched) == 1


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_numpy_results_go_where_the_caller_wants_them(cupy, x, weight, dtype):
    x, weight = x.astype(dtype), weight.astype(dtype)
    expected = emulated(x, weight)
    buffer = np.zeros((ROWS, 2 * COLS), dtype)
    out = buffer[:, :COLS]
    assert gpu_ops.rmsnorm(x, weight, out=out, device="cuda") is out
    assert out.tobytes() == expected.tobytes()
    assert not buffer[:, COLS:].any()
    assert gpu_ops.rmsnorm(x, weight, out=x, device="cuda") is x
    assert x.tobytes() == expected.tobytes()


def test_numpy_arrays_stay_on_the_cpu_unless_asked(cupy, x, weight):
    assert gpu_ops.explain("rmsnorm", x, weight).choice.device == "cpu"
    gpu_ops.rmsnorm(x, weight)
    assert cupy.launched == []


def test_arrays_on_two_sides_are_refused(cupy, x, weight):
    with pytest.raises(DeviceError, match="weight is in host memory but x on a CUDA device"):
        gpu_ops.rmsnorm(FakeArray(x), weight)
    with pytest.raises(DeviceError, match="weight is on a CUDA device but x in host memory"):
        gpu_ops.rmsnorm(x, FakeArray(weight))
    with pytest.raises(DeviceError, match="out is in host memory"):
        gpu_ops.rmsnorm(FakeArray(x), FakeArray(weight), out=x.copy())
    with pytest.raises(DeviceError, match="weight is on CUDA device 1 but x on 0"):
        gpu_ops.rmsnorm(FakeArray(x, 0), FakeArray(weight, 1))
    assert cupy.launched == []


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_cuda_arrays_are_not_moved_to_the_host(cupy, x, weight, device):
    with pytest.raises(
        DeviceError, match=f"device='{device}', but the arrays are on a CUDA device; copy them"
    ):
        gpu_ops.rmsnorm(FakeArray(x), FakeArray(weight), device=device)


def test_an_op_without_cuda_kernels_says_so(cupy):
    without = [name for name in OPS if not dispatch.has_cuda_kernels(name) and name != "ternary_unpack"]
    for op in without:
        case = call(op)
        name = next(iter(case.arrays))
        with pytest.raises(
            DeviceError, match=f"^{op}: {name} is on a CUDA device, but this op has no CUDA kernels"
        ):
            case.having(**{name: FakeArray(np.ones((3, 16), np.float32))})()


def test_overlaps_are_found_by_device_address(cupy, x, weight):
    memory = FakeArray(np.ones((4, 2 * COLS), np.float32))
    with pytest.raises(ShapeError, match="out shares memory with x"):
        gpu_ops.rmsnorm(memory[1:3, :COLS], FakeArray(weight), out=memory[0:2, :COLS])
    with pytest.raises(ShapeError, match="out shares memory with residual"):
        gpu_ops.rmsnorm(
            FakeArray(x), FakeArray(weight), residual=memory[:3, :COLS], out=memory[:3, COLS - 1 : -1]
        )
    left, right = memory[:, :COLS], memory[:, COLS:]  # interleaved rows, no byte in common
    assert gpu_ops.rmsnorm(left, FakeArray(weight), out=right) is right


def test_mistakes_in_out(cupy, x, weight):
    arrays = FakeArray(x), FakeArray(weight)
    with pytest.raises(ShapeError, match="out is read-only"):
        gpu_ops.rmsnorm(*arrays, out=ForeignArray(x.copy(), read_only=True))
    with pytest.raises(ShapeError, match="not contiguous"):
        gpu_ops.rmsnorm(*arrays, out=FakeArray(np.zeros((ROWS, 2 * COLS), np.float32))[:, ::2])
    cube = np.ones((3, 2, COLS), np.float32)
    with pytest.raises(ShapeError, match="do not merge into rows"):
        gpu_ops.rmsnorm(FakeArray(cube.swapaxes(0, 1)), arrays[1], out=FakeArray(0 * cube).swapaxes(0, 1))
    with pytest.raises(DTypeError, match="out is float64"):
        gpu_ops.rmsnorm(*arrays, out=FakeArray(x.astype(np.float64)))


def test_what_cannot_be_shared_is_refused(cupy, x, weight):
    with pytest.raises(DTypeError, match="weight cannot be shared with CuPy: it has a mask"):
        gpu_ops.rmsnorm(FakeArray(x), ForeignArray(weight, mask=weight))
    negated = ForeignDLPack(weight)
    negated.is_neg = lambda: True  # as in torch
    with pytest.raises(DTypeError, match=r"weight cannot be shared with CuPy: .*weight\.resolve_neg\(\)"):
        gpu_ops.rmsnorm(FakeArray(x), negated)
    with pytest.raises(DTypeError, match="weight is list, not an array"):
        gpu_ops.rmsnorm(x, [1.0], device="cuda")


def test_no_device_memory_for_a_result_is_a_typed_error(cupy, x, weight):
    def refuse(shape, dtype):
        raise MemoryError

    cupy.empty = refuse
    with pytest.raises(OutOfMemoryError, match="rmsnorm: no memory for a result of shape") as caught:
        gpu_ops.rmsnorm(FakeArray(x), FakeArray(weight))
    assert caught.value.required == x.nbytes
    assert cupy.entered == []


def test_without_cupy_a_cuda_array_says_what_to_install(monkeypatch, x, weight):
    monkeypatch.setattr(
        "gpu_ops.core.cuda_arrays.cuda_missing", lambda: "CuPy is not installed (pip install ...)"
    )
    with pytest.raises(DeviceError, match="x is on a CUDA device, and there is no usable one: CuPy is not"):
        gpu_ops.rmsnorm(ForeignArray(x), ForeignArray(weight))


def test_casts_of_bfloat16_are_those_of_numpy(cupy):
    """Casts, which CuPy lacks: every bfloat16, the numbers halfway between two, and NaN of any bits."""
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    every = np.arange(1 << 16, dtype=np.uint16).view(bfloat16)
    converted = cast(FakeArray(every), np.float32).host
    np.testing.assert_array_equal(converted.view(np.uint32), every.view(np.uint16).astype(np.uint32) << 16)
    bits = np.arange(0, 1 << 32, (1 << 15) - 7, dtype=np.uint64).astype(np.uint32)
    more = np.concatenate([bits, [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x3F808000, 0x3F818000, 0x7F7FFFFF]])
    x = np.concatenate([more.astype(np.uint32).view(np.float32), converted])
    with np.errstate(invalid="ignore"):
        expected = x.astype(bfloat16)
    actual = cast(FakeArray(x), bfloat16).host
    np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32))
