"""The real nccl4py without a driver: what gpu_ops uses of it, and calls that reach the library; scripts/test_nccl.sh.

Nothing is sent: :class:`Library` replaces the calls of libnccl on a communicator. fake_nccl.py tests the numbers.
"""

from __future__ import annotations

import inspect
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from tests.support.fake_cupy import FakeArray

if not find_spec("nccl") or not find_spec("mpi4py"):
    pytest.skip("needs the real nccl4py and mpi4py: scripts/test_nccl.sh", allow_module_level=True)

import nccl.bindings.nccl
import nccl.core
import nccl.core.interop.cupy

from gpu_ops.core.device import cuda_missing
from gpu_ops.distributed.nccl import _ID_BYTES, _SUMS, Nccl, NcclTransport
from gpu_ops.errors import CommError
from tests.distributed import fake_nccl

SIZE, RANK = 3, 1
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Library:
    """Functions of libnccl by name, as the binding has them: calls are recorded, and none is made."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        assert callable(getattr(nccl.bindings.nccl, name))  # the real binding has it
        answers = {"comm_count": SIZE, "comm_user_rank": RANK, "comm_cu_device": 0}
        if name in answers:
            return lambda comm: answers[name]
        return lambda *args: self.calls.append((name, *args))


class Communicator(nccl.core.Communicator):
    device = SimpleNamespace(device_id=0)


@pytest.fixture
def library(cupy, monkeypatch):
    """Python part of nccl4py over a library that only records calls, for arrays of the fake CuPy."""
    fake = Library()
    for module in ("communicator", "group"):  # nccl.core.group is the function
        monkeypatch.setattr(sys.modules[f"nccl.core.{module}"], "_nccl_bindings", fake)
    monkeypatch.setattr(nccl.core.interop.cupy, "_cupy_enabled", True)
    monkeypatch.setattr(nccl.core.interop.cupy, "cupy", cupy, raising=False)
    return fake


@pytest.fixture
def transport(library):
    comm = Nccl.__new__(Nccl)
    comm.size, comm.rank, comm.name = SIZE, RANK, "world"
    result = NcclTransport(comm, 0)
    result._nccl = Communicator()
    result._nccl._comm = 1
    library.calls.clear()
    return result


def array(shape, dtype=np.float32):
    return FakeArray(np.zeros(shape, dtype))


def test_the_stand_in_is_like_nccl4py():
    core = nccl.core
    assert [int(core.SUM), int(core.MAX)] == [fake_nccl.SUM, fake_nccl.MAX]
    assert issubclass(nccl.bindings.nccl.NCCLError, Exception)
    assert issubclass(core.NcclInvalid, Exception)
    names = ("init", "allreduce", "reduce_scatter", "allgather", "broadcast", "send", "recv")
    pairs = [(getattr(x.Communicator, name) for x in (core, fake_nccl)) for name in names]
    pairs += [
        (getattr(x, name) for x in (core, fake_nccl)) for name in ("get_unique_id", "group", "group_end")
    ]
    for real, ours in pairs:
        same = [[(p.name, p.kind) for p in inspect.signature(f).parameters.values()] for f in (real, ours)]
        assert same[0] == same[1], real
    for dtype in fake_nccl.DTYPES:
        assert core.NcclDataType(dtype).numpy_dtype.name == dtype
    assert set(_SUMS) == set(fake_nccl.DTYPES)


def test_the_library_loads_without_a_driver():
    assert "libnccl" in str(nccl.core.get_version())
    words = bytes(nccl.core.get_unique_id())
    assert len(words) == _ID_BYTES
    assert bytes(nccl.core.UniqueId.from_bytes(words)) == words


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_reductions(transport, library, cupy, dtype, op):
    x, whole, part = array((SIZE, 4), dtype), array((SIZE, 4), dtype), array(4, dtype)
    number, code = int(nccl.core.NcclDataType(dtype)), {"sum": 0, "max": 2}[op]
    stream = cupy.cuda.get_current_stream().ptr
    transport.all_reduce(x, whole, op, "a call")
    transport.reduce_scatter(x, part, op, beside=False)
    assert library.calls == [
        ("all_reduce", x.data.ptr, whole.data.ptr, 12, number, code, 1, stream),
        ("reduce_scatter", x.data.ptr, part.data.ptr, 4, number, code, 1, stream),
    ]


def test_what_moves_as_bytes(transport, library, cupy):
    """Any dtype moves as bytes, even 16-bit integers, which NCCL does not support."""
    x, whole = array(4, np.int16), array((SIZE, 4), np.int16)
    stream, byte = cupy.cuda.get_current_stream().ptr, int(nccl.core.NcclDataType.UINT8)
    transport.all_gather(x, whole, beside=False)
    transport.broadcast(x, 2)
    assert library.calls == [
        ("all_gather", x.data.ptr, whole.data.ptr, 8, byte, 1, stream),
        ("broadcast", 0, x.data.ptr, 8, byte, 2, 1, stream),  # only rank 2 sends
    ]


def test_messages_are_in_groups(transport, library):
    x, y = array((SIZE, 4), BFLOAT16), array((SIZE, 4), BFLOAT16)
    transport.all_to_all(x, y)
    transport.shift([x], [y], 2, 0)
    names = ["group_start", *["send", "recv"] * SIZE, "group_end", "group_start", "send", "recv", "group_end"]
    assert [name for name, *_ in library.calls] == names
    sizes = {(name, args[1], args[3]) for name, *args in library.calls if args}
    assert sizes == {(name, 8, r) for name in ("send", "recv") for r in range(SIZE)} | {
        ("send", 24, 2),
        ("recv", 24, 0),
    }
    shifted = [args[-1] for name, *args in library.calls[-3:-1]]
    assert shifted == [transport._side.ptr] * 2


def test_what_nccl4py_refuses_is_a_comm_error(transport):
    with pytest.raises(CommError, match="NCCL: Dtype mismatch"):
        transport.reduce_scatter(array((SIZE, 4)), array(4, np.float64), "sum", beside=False)


@pytest.mark.skipif(cuda_missing() is None, reason="has a driver")
def test_a_library_without_a_driver_is_a_comm_error(cupy):
    comm = Nccl.__new__(Nccl)
    comm.size, comm.rank, comm.name = 1, 0, "world"
    comm._finish = comm._broadcast = lambda *words: None  # the communicator has one rank
    with pytest.raises(CommError, match="NCCL: UnhandledCudaError"):
        NcclTransport(comm, 0).all_reduce(array(3), array(3), "sum", "a call")
