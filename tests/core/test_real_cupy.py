"""Every host path up to a launch, with the real CuPy and no driver; scripts/test_cupy.sh runs it.

No number is computed: tests with the fake CuPy (fake_cupy.py) and tests marked ``gpu`` check numbers.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import memory
from gpu_ops.core import device as devices
from gpu_ops.core import dispatch
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import OutOfMemoryError
from gpu_ops.kernels.compiler import jit
from gpu_ops.kernels.compiler.kernel import NumbaKernel
from tests.gpu.driverless import Driverless, allocate, at_the_driver, cupy, on_device
from tests.support import fake_cupy
from tests.support.calls import OUT, VARIANTS, call, refusal
from tests.support.cuda_cases import CASES, NO_CAPTURE, case_id
from tests.support.fake_driver import FakeDriver, FakeEvent, FakeStream

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def driverless(monkeypatch):
    caches = (devices.cuda_missing, devices.cuda_device, dispatch.unavailable)

    def forget():
        for cached in caches:
            cached.cache_clear()
        forget_calls()
        jit.forget()

    stand_in = Driverless(monkeypatch)
    forget()
    load = jit.load
    monkeypatch.setattr(
        jit, "load", lambda kernel: _numba if isinstance(kernel, NumbaKernel) else load(kernel)
    )
    yield stand_in
    stand_in.close()
    forget()


class _Numba:
    """Launcher without Numba's, which needs a context. Its arguments are CuPy arrays and numbers."""

    def arguments(self, args):
        return list(args)

    def __call__(self, grid, block, args, shared):
        assert all(isinstance(a, cupy.ndarray | np.generic | int | float) for a in args)


_numba = _Numba()


# The op's other rows in the table of calls; one has no array but a TernaryMatrix, and so runs on the host.
OTHERS = [
    name
    for name in VARIANTS
    if " " in name
    and name != "ternary_matmul both"
    and dispatch.has_cuda_kernels(name.split()[0])
    and not refusal(call(name), "raw")
]


def of(case):
    return case.having(**{name: moved(x) for name, x in {**case.arrays, **case.options}.items()})


def moved(x):
    if isinstance(x, gpu_ops.BlockMask):
        return gpu_ops.BlockMask(on_device(x.visible), x.block_q, x.block_k)
    return on_device(x)


def results(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize(("op", "form", "kernels"), CASES, ids=map(case_id, CASES))
def test_calls_reach_the_driver(driverless, op, form, kernels):
    case = of(call(op).having(**form))
    first = results(case(backend=kernels))
    again = results(case(backend=kernels))  # the path of the call key
    assert kernels == "numba" or driverless.launches
    for x, y in zip(first, again, strict=True):
        if isinstance(x, cupy.ndarray):
            assert (type(x), x.dtype, x.shape, x.strides) == (type(y), y.dtype, y.shape, y.strides)
    if op in NO_CAPTURE or op not in OUT:
        return
    outs = tuple(cupy.ndarray(x.shape, x.dtype, allocate(x.nbytes)) for x in first)
    out = {OUT[op][0]: outs if len(outs) > 1 else outs[0]}
    size = gpu_ops.workspace_size(op, *case.arrays.values(), **case.options, backend=kernels)
    workspace = cupy.empty(size, np.uint8)
    driverless.capturing = True
    actual = results(case(backend=kernels, workspace=workspace, **out))
    assert all(g is o for g, o in zip(actual, outs, strict=True))
    assert str(gpu_ops.explain(op, *case.arrays.values(), **case.options, backend=kernels))


@pytest.mark.parametrize("name", OTHERS)
def test_the_options_of_the_table_reach_the_driver(driverless, name):
    case = of(call(name))
    for _ in range(2):
        case(backend="raw")
    assert driverless.launches


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=lambda d: np.dtype(d).name
)
def test_views_in_every_dtype(driverless, dtype):
    x = on_device(np.zeros((6, 4, 64), dtype))
    weight = on_device(np.zeros(64, dtype))
    for view in (x, x[::2], x[:, 1], x.transpose(1, 0, 2), x[1:]):
        y = gpu_ops.rmsnorm(view, weight, backend="raw")
        assert (y.shape, y.dtype) == (view.shape, dtype)
        assert gpu_ops.rmsnorm(view, weight, out=y, backend="raw") is y
    assert gpu_ops.rmsnorm(x[..., :32], weight[::2], backend="raw").shape == (6, 4, 32)  # copied
    assert len(driverless.launches) == 11


@pytest.mark.parametrize(("number", "ptr"), [(None, 0), (1, 0), (2, 2), (12345, 12345)])
def test_another_librarys_stream_is_taken(driverless, number, ptr):
    x = fake_cupy.ForeignArray(np.ones((3, 64), np.float32), stream=number)
    driverless.launches.clear()
    cuda_arrays = importlib.import_module("gpu_ops.core.cuda_arrays")
    taken = cuda_arrays.CudaArrays("rmsnorm", "x", x)
    with taken.active():
        view = taken.view("x", x)
        gpu_ops.rmsnorm(view, view[0], backend="raw")
    assert [stream for *_, stream in driverless.launches] == [ptr]


def test_dlpack_is_asked_for_as_cupy_takes_it(driverless):
    x, weight = (fake_cupy.ForeignDLPack(np.ones(shape, np.float32)) for shape in ((3, 64), (64,)))
    assert isinstance(gpu_ops.rmsnorm(x, weight), cupy.ndarray)


def test_cublas_is_there_and_takes_the_call(driverless):
    """cuBLAS functions on sm_90 stop at the driver after CuPy has accepted their arguments."""
    shapes = (136, 144), (288, 144), (288, 144), (128, 288)
    arrays = [cupy.empty(shape, np.float16) for shape in shapes]
    plan = str(gpu_ops.explain("swiglu_mlp", *arrays))
    assert "cublasGemmEx: 136 x 288 x 144, NT" in plan
    with pytest.raises(Exception, match=r"driver|libcuda|CUBLAS_STATUS") as caught:
        gpu_ops.swiglu_mlp(*arrays)
    assert at_the_driver(caught.value) or type(caught.value).__name__ == "CUBLASError"


def test_the_libraries_that_extras_bring():
    for name in ("cublas", "curand", "nvrtc"):
        assert getattr(importlib.import_module("cupy_backends.cuda.libs"), name)


def attributes():
    """Places and dotted names of all CuPy attributes that the sources use."""
    for folder in (
        "gpu_ops/core",
        "gpu_ops/ops",
        "gpu_ops/formats",
        "kernels",
        "perf",
        "tests/gpu/test_gpu.py",
    ):
        paths = sorted((ROOT / folder).rglob("*.py")) if not folder.endswith(".py") else [ROOT / folder]
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text())):
                words = []
                while isinstance(node, ast.Attribute):
                    words.append(node.attr)
                    node = node.value
                base = ast.unparse(node) if isinstance(node, ast.Name | ast.Call) else ""
                if words and base in ("cupy", "_cupy()"):
                    yield path.name, ".".join(reversed(words))
                if words[-1:] == ["_cupy"] and len(words) > 1:  # self._cupy.cuda....
                    yield path.name, ".".join(reversed(words[:-1]))


@pytest.mark.parametrize("name", sorted({name for _, name in attributes()}))
def test_cupy_has_what_is_used_of_it(name):
    value = cupy
    for word in name.split("."):
        value = getattr(value, word, None)
        assert value is not None, f"CuPy {cupy.__version__} has no {name}"
        if not (inspect.ismodule(value) or inspect.isclass(value)):
            return  # calls show the attributes of an object


def test_the_stand_in_has_nothing_that_cupy_has_not():
    fake = fake_cupy.FakeCupy()
    driver = {*vars(FakeDriver()), *vars(FakeDriver)}
    pairs = [
        (cupy, {*vars(fake), *vars(type(fake))} - driver),
        (cupy.cuda, vars(fake.cuda)),
        (cupy.cuda.runtime, vars(fake.cuda.runtime)),
        (cupy.cuda.driver, vars(fake.cuda.driver)),
        (cupy.cuda.Stream, {*vars(fake.cuda.Stream), *vars(type(fake.cuda.Stream)), *vars(FakeStream)}),
        (cupy.cuda.Event, vars(FakeEvent)),
        (cupy.ndarray, vars(fake_cupy.FakeArray)),
    ]
    missing = [n for where, names in pairs for n in names if not n.startswith("_") and not hasattr(where, n)]
    assert not missing


def test_a_pool_counts_what_cupy_allocates(driverless):
    x = on_device(np.ones((64, 512), np.float32))
    with memory.Pool(2 * x.nbytes, device="cuda") as pool:
        y = gpu_ops.softmax(x)
        extra = cupy.empty(10, np.float32)
        assert pool.holders == {"softmax: y": x.nbytes, "array": 512}
        with pytest.raises(OutOfMemoryError) as refused:
            gpu_ops.softmax(x)
        assert (refused.value.required, refused.value.available) == (x.nbytes, x.nbytes - 512)
    part = y[3:5]
    del y, extra
    assert pool.current == x.nbytes
    del part
    assert pool.current == 0
    assert isinstance(gpu_ops.softmax(x), cupy.ndarray)
