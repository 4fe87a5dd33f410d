"""CUDA graphs: a captured call allocates nothing, and replays after other arrays were allocated and freed.

The tests run on a fake of CuPy (fake_cupy.py) that refuses allocations, copies and waits while a stream is captured,
records launches, and runs kernels on the emulator.
"""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import DeviceError, DTypeError, ShapeError
from tests.support.calls import ADDED, OUT, call, results
from tests.support.compilers import needs_nvrtc
from tests.support.cuda_cases import CAPTURED, case_id
from tests.support.fake_cupy import FakeArray

pytestmark = needs_nvrtc


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
