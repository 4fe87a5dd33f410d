"""CUDA arrays between ranks, on fakes of CuPy and nccl4py, since NCCL requires a GPU for each rank."""

from __future__ import annotations

import inspect
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from gpu_ops import distributed, models
from gpu_ops.distributed.comm import SingleProcess
from gpu_ops.errors import DeviceError, DTypeError, MissingPackageError, OptionError
from tests.distributed.test_distributed import needs_mpi, passes
from tests.support.fake_cupy import FakeArray, ForeignArray
from tests.support.processes import python

needs_mpi4py = pytest.mark.skipif(not find_spec("mpi4py"), reason="needs mpi4py: pip install '.[mpi]'")


@needs_mpi
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_with_gpus(ranks):
    passes(ranks, ["cuda"])


def test_one_rank_copies(cupy):
    comm = SingleProcess()
    x = FakeArray(np.arange(6, dtype=np.float32).reshape(2, 3))
    out = FakeArray(np.zeros((2, 3), np.float32))
    for result in (
        *(comm.all_reduce(x), comm.all_gather(x, 1), comm.reduce_scatter(x), comm.all_to_all(x, 1, 0)),
        *(comm.broadcast(x), *comm.shift(x).wait(), comm.all_reduce(x, out=out)),
        *(comm.start_all_gather(x).wait(), comm.start_reduce_scatter(x, 1).wait()),
    ):
        assert isinstance(result, FakeArray)
        assert result is out or not np.shares_memory(result.host, x.host)
        np.testing.assert_array_equal(result.host, x.host)
    assert not cupy.waits
    with pytest.raises(
        DTypeError, match=r"x is a CUDA array of type ForeignArray; pass .* cupy\.from_dlpack\(x\)"
    ):
        comm.all_reduce(ForeignArray(x.host))


@needs_mpi4py
def test_a_missing_package_names_its_extra(cupy, monkeypatch):
    from gpu_ops.distributed.mpi import Mpi
    from gpu_ops.distributed.nccl import Nccl, NcclTransport, nccl_missing

    monkeypatch.setitem(sys.modules, "nccl", None)
    monkeypatch.delitem(sys.modules, "nccl.core", raising=False)
    x = FakeArray(np.ones(3, np.float32))
    assert ".[nccl12]" in nccl_missing()
    mpi = Mpi.__new__(Mpi)
    with pytest.raises(
        DeviceError, match=r"Mpi sends arrays in host memory: pass x.get\(\), or .*\.\[nccl12\]"
    ):
        mpi.all_reduce(x)
    nccl_comm = Nccl.__new__(Nccl)
    super(Mpi, nccl_comm).__init__(0, [0, 1], "world", 1.0)
    with pytest.raises(MissingPackageError, match=r'nccl4py does not load .* pip install "\.\[nccl12\]"'):
        NcclTransport(nccl_comm, 0)


def test_without_a_device_host_arrays_need_no_cupy():
    code = "import sys; from gpu_ops import distributed; distributed.world(); print('cupy' in sys.modules)"
    assert python("-c", code).split() == ["False"]


def test_world_says_that_nccl_is_untested():
    assert "has not run on GPUs yet" in inspect.getdoc(distributed.world)


def test_parts_of_sequences_on_a_gpu(cupy):
    """On one rank, loss and gradients are those of whole sequences."""
    config = models.LlamaConfig(vocab=32, hidden=32, ffn=32, nlayers=1, nheads=2)
    arrays, ids = models.initial_weights(config, std=0.2), np.arange(16, dtype=np.int32).reshape(2, 8)

    def run(to, sequences, ids):
        weights, grads = (
            models.Llama.of({n: to(x) for n, x in of.items()}, config) for of in (arrays, zeros())
        )
        loss = models.loss_and_grads(ids, ids, weights, config, grads=grads, sequences=sequences)
        return [loss, *grads.arrays().values()]

    def zeros():
        return {n: np.zeros_like(x) for n, x in arrays.items()}

    expected = run(np.copy, None, ids)
    context = distributed.ContextParallel(SingleProcess(), 8, device="cuda")
    actual = run(lambda x: FakeArray(x.copy()), context, context.part(FakeArray(ids)))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x.host, y, rtol=1e-4, atol=1e-5)
    with pytest.raises(OptionError, match="device='gpu' is unknown"):
        distributed.ContextParallel(SingleProcess(), 8, device="gpu")
