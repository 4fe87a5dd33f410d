"""NCCL itself on one GPU: a communicator of one rank, whose messages go to that rank."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.distributed.comm import SingleProcess
from tests.support.cuda_cases import to_cupy, to_numpy

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "float64", "float16", ml_dtypes.bfloat16, "int32", "uint8")


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy", reason="needs CuPy: pip install '.[cuda13]'")


@pytest.fixture(scope="module")
def transport(cupy):
    for package in ("nccl.core", "mpi4py"):
        pytest.importorskip(package, reason="needs nccl4py and mpi4py: pip install '.[mpi,nccl13]'")
    from gpu_ops.distributed.nccl import Nccl, NcclTransport

    comm = Nccl.__new__(Nccl)
    comm.size, comm.rank, comm.name = 1, 0, "world"
    comm._finish = comm._broadcast = lambda *words: None  # for one rank, which needs no MPI
    return NcclTransport(comm, 0)


def numbers(dtype, shape=(1, 3, 5)):
    return np.random.default_rng(0).integers(0, 100, shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_collective_of_one_rank_is_a_copy(cupy, transport, dtype):
    x = numbers(dtype)
    calls = {
        "all_reduce": lambda a, b: transport.all_reduce(a, b, "sum", "a call"),
        "the largest": lambda a, b: transport.all_reduce(a, b, "max", "a call"),
        "in place": lambda a, b: (cupy.copyto(b, a), transport.all_reduce(b, b, "sum", "a call")),
        "all_gather": lambda a, b: transport.all_gather(a, b, beside=False),
        "beside": lambda a, b: transport.all_gather(a, b, beside=True).join(),
        "reduce_scatter": lambda a, b: transport.reduce_scatter(a, b, "sum", beside=False),
        "all_to_all": lambda a, b: transport.all_to_all(a, b),
        "shift": lambda a, b: transport.shift([a], [b], 0, 0).join(),
    }
    for name, run in calls.items():
        source, target = to_cupy(x), to_cupy(np.zeros_like(x))
        run(source, target)
        np.testing.assert_array_equal(to_numpy(target).view(np.uint8), x.view(np.uint8), err_msg=name)
        np.testing.assert_array_equal(to_numpy(source).view(np.uint8), x.view(np.uint8), err_msg=name)
    source = to_cupy(x)
    transport.broadcast(source, 0)
    np.testing.assert_array_equal(to_numpy(source).view(np.uint8), x.view(np.uint8))


def test_a_captured_sum_follows_its_input(cupy, transport):
    x, total = to_cupy(numbers("float32")), to_cupy(np.zeros((1, 3, 5), np.float32))
    transport.all_reduce(x, total, "sum", "a call")  # the first call makes the communicator
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        transport.all_reduce(x, total, "sum", "a call")
        graph = stream.end_capture()
    x += 1
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(to_numpy(total), numbers("float32") + 1)


def test_a_world_of_one_takes_cupys_arrays(cupy):
    x = to_cupy(numbers("float32"))
    np.testing.assert_array_equal(to_numpy(SingleProcess().all_reduce(x)), numbers("float32"))
