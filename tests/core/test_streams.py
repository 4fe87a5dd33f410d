"""Waits of the host, order of streams, and CUDA graph capture, on a fake of CuPy and its driver (fake_driver.py)."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import gpu_ops
from gpu_ops import RopeScaling
from gpu_ops.core import device as devices
from gpu_ops.errors import DeviceError, DTypeError, ShapeError
from tests.support.calls import ADDED, OUT, call, results
from tests.support.compilers import needs_nvrtc
from tests.support.cuda_cases import CAPTURED, CASES, case_id
from tests.support.fake_cupy import FakeArray, ForeignArray

pytestmark = needs_nvrtc

# Options that avoid reads from the device. Without these the host waits once per call, as the docstrings say.
WITHOUT_CHECKS = {"ternary_pack": {"check": False}, "ternary_unpack": {"strict": False}}
SCALE_ON_HOST = ("ternary_quantize",)  # its result holds its scale in host memory


def there(x, ordinal=0):
    return FakeArray(x.copy(), ordinal) if isinstance(x, np.ndarray) else x


def of(case):
    return case.having(**{name: there(x) for name, x in {**case.arrays, **case.options}.items()})


def uploads(device):
    """Stream of the device for constants; the host waits for copies there, never for a caller's work."""
    return device._uploads and device._uploads.ptr


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[0] not in SCALE_ON_HOST], ids=map(case_id, CASES)
)
def test_the_host_waits_for_nothing_that_is_queued(cupy, case):
    op, form, kernels = case
    prepared = of(call(op).having(**form, **WITHOUT_CHECKS.get(op, {})))
    prepared(backend=kernels)
    assert {stream for _, stream in cupy.waits} <= {uploads(devices.cuda_device(0))}
    cupy.waits.clear()
    prepared(backend=kernels)
    assert cupy.waits == []


def test_checks_that_ask_the_device_are_options(cupy, rng):
    trits = rng.integers(-1, 2, (4, 256)).astype(np.int8)
    packed = gpu_ops.ternary_pack(there(trits), "w2")
    gpu_ops.ternary_unpack(packed, trits.shape, "w2")
    assert len(cupy.waits) == 2
    trits[0, 0] = 5
    assert gpu_ops.ternary_pack(there(trits), "w2", check=False).shape == packed.shape
    with pytest.raises(gpu_ops.errors.FormatError, match=r"trits\[0, 0\] is 5"):
        gpu_ops.ternary_pack(trits, "w2", check=False, device="cuda")


ROPE = {"theta": 1e4, "backend": "raw"}


@pytest.mark.parametrize("dtype", [np.int64, np.uint8], ids=str)
def test_rope_with_positions_on_the_device(cupy, rng, dtype):
    q, positions = there(rng.standard_normal((1, 5, 2, 8), np.float32)), there(np.arange(5, dtype=dtype))
    scaling = RopeScaling.dynamic(2.0, 64)
    for options in ({}, {"scaling": scaling, "seqlen": 100}):
        gpu_ops.rope(q, positions=positions, **options, **ROPE)
        cupy.waits.clear()
        gpu_ops.rope(q, positions=positions, **options, **ROPE)
        assert cupy.waits == []
    gpu_ops.rope(q, positions=positions, scaling=scaling, **ROPE)
    assert ("copy to the host", 0) in cupy.waits, "their largest decides, and seqlen= is not given"


def test_arrays_of_numba_come_and_go_without_a_wait(cupy, rng, monkeypatch):
    class NumbaArray(ForeignArray):
        __module__ = "numba.cuda"

    waits = []
    cuda = SimpleNamespace(as_cuda_array=lambda x, sync=True: waits.append(sync) or x)
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(cuda=cuda))
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 64), (64,)))
    for _ in range(2):
        gpu_ops.rmsnorm(NumbaArray(x, stream=77), NumbaArray(weight, stream=77), backend="raw")
    assert waits == [False, False]
    assert cupy.waits == []


def late(cupy, stream, array, values):
    """Write ``values`` into an array by pending work of a stream."""
    with cupy.cuda.Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, stream))):
        cupy.run(lambda: np.copyto(array, values))


def test_a_call_follows_the_streams_that_its_arrays_name(cupy, rng):
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 64), (64,)))
    expected = gpu_ops.rmsnorm(x, weight, device="emulator")
    for _ in range(2):  # the path of the call key too
        a, b = np.zeros_like(x), np.zeros_like(weight)
        cupy.deferred = True
        late(cupy, 77, a, x)
        late(cupy, 5, b, weight)
        y = gpu_ops.rmsnorm(ForeignArray(a, stream=77), ForeignArray(b, stream=5), backend="raw")
        assert cupy.waits == []
        cupy.wait("the test", 77)
        np.testing.assert_array_equal(y.host, expected)
        cupy.deferred = False
        cupy.waits.clear()


def test_constants_are_there_for_every_stream(cupy, rng):
    q = rng.standard_normal((1, 5, 2, 8), np.float32)
    expected = gpu_ops.rope(q, device="emulator", **ROPE)
    cupy.deferred = True
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    results = []
    for stream in streams:
        with stream:
            results.append(gpu_ops.rope(there(q), **ROPE))
    cupy.wait("the test", streams[1].ptr)  # the first stream, which needed the constant first, is not done
    np.testing.assert_array_equal(results[1].host, expected)


def test_a_team_of_blocks_that_does_not_fit_is_refused(cupy, rng):
    x, weight = there(np.ones((1, 40000), np.float32)), there(np.ones(40000, np.float32))
    devices.cuda_device(0)  # its programs are for 56 SMs
    cupy.sms = 1
    with pytest.raises(DeviceError, match=r"rmsnorm_forward: its \d+ blocks wait for each other"):
        gpu_ops.rmsnorm(x, weight, backend="raw")
    assert cupy.launched == []


@pytest.mark.parametrize("what", ["empty", "asnumpy", "int"])
def test_a_capture_refuses_what_a_driver_refuses(cupy, what):
    x = there(np.ones(3, np.float32))
    refused = {
        "empty": lambda: cupy.empty(3, np.uint8),
        "asnumpy": lambda: cupy.asnumpy(x),
        "int": lambda: int(x),
    }
    with cupy.capture(), pytest.raises(RuntimeError, match="StreamCaptureUnsupported"):
        refused[what]()


# CUDA graphs: a captured call allocates nothing, and replays after other arrays were allocated and freed.
#
# The tests run on a fake of CuPy (fake_cupy.py) that refuses allocations, copies and waits while a stream is
# captured, records launches, and runs kernels on the emulator.


def on_device(x):
    return FakeArray(x.copy()) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize(("op", "form", "kernels"), CAPTURED, ids=map(case_id, CAPTURED))
def test_a_captured_call_replays(cupy, op, form, kernels):
    case = call(op)
    case = case.having(**{n: on_device(x) for n, x in {**case.arrays, **case.options, **form}.items()})
    state = {n: x.host.copy() for n, x in {**case.arrays, **case.options}.items() if isinstance(x, FakeArray)}
    eager = results(case(backend=kernels))
    want = [x.host.copy() for x in eager]
    named = {**case.arrays, **case.options}
    changed = {n: named[n].host.copy() for n in state}
    outs = tuple(FakeArray(np.zeros_like(x.host)) for x in eager)
    keyword = OUT[op][0] if op in OUT else ADDED.get(op, ("",))[0]
    out = {keyword: outs if len(outs) > 1 else outs[0]} if outs else {}
    size = gpu_ops.workspace_size(op, *case.arrays.values(), **case.options, backend=kernels)
    workspace = FakeArray(np.full(size, 0xFF, np.uint8))

    def restore():
        for name, x in state.items():
            named[name].host[...] = x

    restore()
    with cupy.capture():
        case(backend=kernels, workspace=workspace, **out)
    for _ in range(2):
        restore()
        workspace.host[:] = 0xFF  # clears data that a kernel does not write itself
        for x in outs:
            x.host.reshape(-1).view(np.uint8)[:] = 0xFF if op in OUT else 0x00
        cupy.replay()
        for x, expected in zip(outs, want, strict=True):
            assert x.host.tobytes() == expected.tobytes()
        for name, expected in changed.items():  # in place
            assert named[name].host.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kernels", ["raw", "numba"])
@pytest.mark.parametrize("op", sorted(ADDED))
def test_a_captured_call_adds_at_every_replay(cupy, op, kernels):
    case = call(f"{op} added")
    case = case.having(**{n: on_device(x) for n, x in {**case.arrays, **case.options}.items()})
    sums = [case.options[name] for name in case.added]
    before = [x.host.copy() for x in sums]
    first = results(case(backend=kernels))[0]
    once = [x.host.copy() for x in sums]
    case(backend=kernels)
    twice = [x.host.copy() for x in sums]
    out = {"out": FakeArray(np.zeros_like(first.host))} if op in OUT else {}
    size = gpu_ops.workspace_size(op, *case.arrays.values(), **case.options, backend=kernels)
    # the graph holds the addresses of this and of the results
    workspace = FakeArray(np.zeros(size, np.uint8))
    with cupy.capture():
        held = case(backend=kernels, workspace=workspace, **out)
    for x, start in zip(sums, before, strict=True):
        x.host[...] = start
    for state in (once, twice):
        cupy.replay()
        for x, expected in zip(sums, state, strict=True):
            assert x.host.tobytes() == expected.tobytes()
    del held


def test_a_captured_call_without_its_workspace_says_what_to_pass(cupy):
    x, w = FakeArray(np.ones((6, 64), np.float32)), FakeArray(np.ones(64, np.float32))
    y = FakeArray(np.zeros((6, 64), np.float32))
    gpu_ops.rmsnorm(x, w, out=y)
    size = gpu_ops.workspace_size("rmsnorm", x, w, out=y)
    with cupy.capture(), pytest.raises(DeviceError, match=f"needs {size} bytes of workspace.*workspace="):
        gpu_ops.rmsnorm(x, w, out=y)


def test_a_workspace_that_will_not_do_is_refused(cupy):
    x, w = FakeArray(np.ones((6, 64), np.float32)), FakeArray(np.ones(64, np.float32))
    need = gpu_ops.workspace_size("rmsnorm", x, w)
    assert need > 0
    for _ in range(2):
        with pytest.raises(ShapeError, match=rf"workspace has shape \(1,\), expected \({need},\) or more"):
            gpu_ops.rmsnorm(x, w, workspace=FakeArray(np.zeros(1, np.uint8)))
        with pytest.raises(DTypeError, match="workspace is float32, expected a uint8 array"):
            gpu_ops.rmsnorm(x, w, workspace=FakeArray(np.zeros(4096, np.float32)))
        with pytest.raises(DeviceError, match="workspace is in host memory"):
            gpu_ops.rmsnorm(x, w, workspace=np.zeros(4096, np.uint8))
        gpu_ops.rmsnorm(x, w, workspace=FakeArray(np.zeros(need, np.uint8)))
