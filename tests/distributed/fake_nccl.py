"""Fake of the part of nccl4py that gpu_ops uses, between processes of MPI, for arrays of the fake CuPy.

Calls are queued on the streams they name, by the rules of the driver (fake_driver.py). ``CALLS`` has (name, stream,
dtype) of each call. It proves nothing about NCCL itself or its speed.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import sys
from types import ModuleType

import numpy as np
from mpi4py import MPI

from tests.support.fake_cupy import FakeArray

DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
SUM, MAX = 0, 2
CALLS: list[tuple[str, int, str]] = []
_open: list[list[tuple]] = []  # groups that have begun: their sends and receives


class NcclInvalid(Exception):
    """Argument that nccl4py refuses."""


class NCCLError(Exception):
    """Error of the library."""


class UniqueId:
    def __init__(self, words):
        self.words = words

    def __bytes__(self):
        return self.words

    @staticmethod
    def from_bytes(words):
        return UniqueId(bytes(words))


def get_unique_id(empty=False):
    """Random identifier that includes the rank of its process: the others connect to that rank."""
    return UniqueId(MPI.COMM_WORLD.rank.to_bytes(4) + secrets.token_bytes(2) + bytes(122))


def get_version():
    return "a stand-in"


def group_start():
    _open.append([])


def group_end(*, simulate=False):
    _exchange(_open.pop())


@contextlib.contextmanager
def group():
    group_start()
    try:
        yield
    finally:
        group_end()


class Communicator:
    """Communicator made by :meth:`init`, which returns when all ranks have called it."""

    def __init__(self, mpi):
        self.mpi, self.nranks, self.rank = mpi, mpi.size, mpi.rank
        self.device = sys.modules["cupy"].current_device()
        self.begun = self.ended = 0

    @classmethod
    def init(cls, nranks, rank, unique_id, config=None):
        words, world = bytes(unique_id), MPI.COMM_WORLD
        assert len(words) == 128
        root, tag = int.from_bytes(words[:4]), int.from_bytes(words[4:6]) % 32768
        if rank:
            world.send((rank, world.rank), root, tag)
            members = world.recv(source=root, tag=tag)
        else:
            assert world.rank == root
            world_ranks = dict(world.recv(tag=tag) for _ in range(nranks - 1)) | {0: root}
            members = [world_ranks[r] for r in range(nranks)]
            for other in members[1:]:
                world.send(members, other, tag)
        return cls(world.Create_group(world.group.Incl(members), tag))

    def allreduce(self, sendbuf, recvbuf, op, *, stream=None, config=None):
        sent, received = self._buffers(sendbuf, recvbuf)
        assert received.size >= sent.size
        self._run("allreduce", stream, sent, lambda: np.copyto(received, self._reduced(sent, op)))

    def reduce_scatter(self, sendbuf, recvbuf, op, *, stream=None, config=None):
        sent, received = self._buffers(sendbuf, recvbuf)
        n = sent.size // self.nranks
        if not n or received.size < n:
            raise NcclInvalid("Buffer count mismatch")
        mine = slice(self.rank * n, (self.rank + 1) * n)
        self._run("reduce_scatter", stream, sent, lambda: np.copyto(received, self._reduced(sent, op)[mine]))

    def allgather(self, sendbuf, recvbuf, *, stream=None, config=None):
        sent, received = self._buffers(sendbuf, recvbuf)
        self._run("allgather", stream, sent, lambda: np.copyto(received, self._gathered(sent).reshape(-1)))

    def broadcast(self, sendbuf, recvbuf, root, *, stream=None, config=None):
        sent, received = self._buffers(sendbuf, recvbuf)

        def work():
            if self.rank == root:
                received[...] = sent
            self.mpi.Bcast([received.view(np.uint8), MPI.BYTE], root)

        self._run("broadcast", stream, received, work)

    def send(self, sendbuf, peer, *, stream=None):
        self._message("send", sendbuf, peer, stream)

    def recv(self, recvbuf, peer, *, stream=None):
        self._message("recv", recvbuf, peer, stream)

    def _message(self, direction, buffer, peer, stream):
        assert _open, "alone it would wait for its peer, which waits for this rank"
        assert 0 <= peer < self.nranks
        _open[-1].append((self, direction, *self._buffers(buffer), peer, stream))

    def _run(self, name, stream, x, work):
        CALLS.append((name, stream, x.dtype.name))
        driver = sys.modules["cupy"]
        driver.streams.append(stream)
        try:
            driver.run(work if driver.capturing else self._in_turn(work))
        finally:
            driver.streams.pop()

    def _in_turn(self, work):
        """Wrap work with a check that earlier calls have ended: calls of a communicator never overtake each other."""
        number = self.begun
        self.begun += 1

        def checked():
            assert self.ended == number, f"call {number} of a communicator runs when {self.ended} have ended"
            work()
            self.ended += 1

        return checked

    def _buffers(self, *arrays):
        """Flat views that satisfy the rules of NCCL."""
        for x in arrays:
            if not isinstance(x, FakeArray) or x.dtype.name not in DTYPES:
                raise NcclInvalid(f"Unsupported data type: {x.dtype}")
            if x.device.id != self.device:
                raise NcclInvalid("Buffers must be on the same device as the communicator")
            assert x.flags.c_contiguous, "NCCL reads a pointer and a count"
        if len({x.dtype for x in arrays}) > 1:
            raise NcclInvalid("Dtype mismatch")
        return [x.host.reshape(-1) for x in arrays]

    def _gathered(self, sent):
        gathered = np.empty((self.nranks, sent.size), sent.dtype)
        self.mpi.Allgather([sent.view(np.uint8), MPI.BYTE], [gathered.view(np.uint8), MPI.BYTE])
        return gathered

    def _reduced(self, sent, op):
        parts = self._gathered(sent)
        terms = parts.astype(np.float32) if sent.dtype.name in ("float16", "bfloat16") else parts
        with np.errstate(invalid="ignore", over="ignore"):
            return functools.reduce(np.add if op == SUM else np.maximum, terms).astype(sent.dtype)


def _exchange(messages):
    """Run the sends and receives of a group together."""
    if not messages:
        return
    comm, stream = messages[0][0], messages[0][-1]
    assert {(message[0], message[-1]) for message in messages} == {(comm, stream)}

    def work():
        requests = []
        for expected in ("recv", "send"):
            for _, direction, x, peer, _ in messages:
                if direction == expected:
                    move = comm.mpi.Irecv if direction == "recv" else comm.mpi.Isend
                    requests.append(move([x.view(np.uint8), MPI.BYTE], peer))
        MPI.Request.Waitall(requests)

    comm._run("group", stream, messages[0][2], work)


def install():
    """Install this module in place of nccl4py."""
    core, nccl, bindings = (ModuleType(name) for name in ("nccl.core", "nccl", "nccl.bindings.nccl"))
    names = ("Communicator", "MAX", "NcclInvalid", "SUM", "UniqueId", "get_unique_id", "get_version", "group")
    vars(core).update({name: globals()[name] for name in names})
    bindings.NCCLError = NCCLError
    nccl.core, nccl.bindings = core, ModuleType("nccl.bindings")
    nccl.bindings.nccl = bindings
    for module in (nccl, core, nccl.bindings, bindings):
        module.__spec__ = object()  # importlib.util.find_spec looks for it
        sys.modules[module.__name__] = module
