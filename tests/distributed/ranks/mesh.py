"""Meshes, splits and the world."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops import distributed
from gpu_ops.distributed import Mesh
from gpu_ops.errors import OptionError


def members(comm):
    return comm.all_gather(np.array([distributed.world().rank])).tolist()


def check_the_world_is_one(comm):
    before = comm.timeout
    assert distributed.world() is comm
    assert distributed.world(timeout=50.0) is comm
    assert (comm.timeout, comm.name, comm.ranks) == (50.0, "world", tuple(range(comm.size)))
    distributed.world(timeout=before)
    with pytest.raises(OptionError, match="timeout"):
        distributed.world(timeout=0)


def check_axes(comm):
    n = comm.size
    mesh = Mesh(comm, dp=n)
    assert (mesh.dp.size, mesh.tp.size) == (n, 1)
    assert members(mesh.dp) == list(range(n))
    assert members(mesh.tp) == [comm.rank]
    if n % 2 == 0:
        mesh = Mesh(tp=2, pp=n // 2)
        first = comm.rank - comm.rank % 2
        assert members(mesh.tp) == [first, first + 1] == list(mesh.tp.ranks)
        assert members(mesh.pp) == list(range(comm.rank % 2, n, 2))
        assert mesh.coordinates == {"tp": comm.rank % 2, "cp": 0, "dp": 0, "pp": comm.rank // 2}
        assert members(mesh.group("pp", "tp")) == list(range(n))
        assert mesh.group("tp", "pp") is mesh.group("pp", "tp")
        assert members(mesh.group("cp", "dp")) == [comm.rank]
    with pytest.raises(OptionError, match=f"not {n}, the number of ranks"):
        Mesh(tp=n + 1)
    with pytest.raises(OptionError, match="axes"):
        mesh.group("ep")


def check_splits_are_apart(comm):
    """Counts, sums and messages of one group do not appear in another."""
    halves = comm.split(comm.rank % 2, name="halves")
    assert (halves.name, halves.timeout) == ("halves", comm.timeout)
    assert halves.ranks == tuple(range(comm.rank % 2, comm.size, 2))
    before = dict(comm.bytes_sent)
    total = halves.all_reduce(np.array([comm.rank + 1]))
    assert total[0] == sum(r + 1 for r in halves.ranks)
    assert comm.bytes_sent == before
    group_shift, world_shift = halves.shift(np.array([1.0])), comm.shift(np.array([2.0]))
    assert (world_shift.wait()[0][0], group_shift.wait()[0][0]) == (2.0, 1.0)
