"""Every operation of a communicator against NumPy over the arrays of all ranks."""

from __future__ import annotations

from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.errors import CommError, DeviceError, DTypeError, OptionError, ShapeError

DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "uint8")


def draw(comm, shape, dtype="float32", seed=0):
    """Arrays of all ranks."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((comm.size, *shape)) * 100
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def in_rank_order(xs):
    sum_dtype = np.float32 if xs.dtype.itemsize == 2 else xs.dtype
    total = xs[0].astype(sum_dtype)
    with np.errstate(over="ignore"):  # of uint8
        for x in xs[1:]:
            total = total + x.astype(sum_dtype)
    return total.astype(xs.dtype)


def same(actual, expected):
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


def sent_by(comm, op, call):
    """Result of ``call`` and the bytes that it sent as ``op``; check that it sent no others."""
    before = dict(comm.bytes_sent)
    result = call()
    grown = {name: n - before.get(name, 0) for name, n in comm.bytes_sent.items() if n != before.get(name, 0)}
    assert set(grown) <= {op}
    return result, grown.get(op, 0)


def check_all_reduce(comm):
    for dtype in DTYPES:
        for shape in ((), (0,), (1,), (7,), (5, comm.size), (3, 1, 101)):
            xs = draw(comm, shape, dtype)
            actual, sent = sent_by(comm, "all_reduce", lambda xs=xs: comm.all_reduce(xs[comm.rank]))
            same(actual, in_rank_order(xs))
            p, n = comm.size, xs[0].size
            lengths = [n * (r + 1) // p - n * r // p for r in range(p)]
            assert sent == (n - lengths[comm.rank] + (p - 1) * lengths[comm.rank]) * xs.itemsize
            same(comm.all_reduce(xs[comm.rank], "max"), xs.max(axis=0))


def check_all_reduce_special_values(comm):
    xs = np.tile(np.array([np.inf, -np.inf, 1.0, -0.0, 65504.0], np.float16), (comm.size, 1))
    xs[-1, 1:3] = np.inf, np.nan
    with np.errstate(invalid="ignore", over="ignore"):
        expected = in_rank_order(xs)
    for _ in range(2):
        actual = comm.all_reduce(xs[comm.rank])
        same(actual, expected)
        assert np.signbit(actual[3])
    same(comm.all_reduce(xs[comm.rank], "max"), xs.max(axis=0))


def check_out(comm):
    xs = draw(comm, (4, 6))
    x, expected = xs[comm.rank].copy(), in_rank_order(xs)
    for out in (np.empty((4, 6), np.float32), np.full((4, 12), 9, np.float32)[:, ::2][:, :6], x):
        if out.strides[-1] != 4:
            with pytest.raises(ShapeError, match="last axis"):
                comm.all_reduce(x, out=out)
            continue
        assert comm.all_reduce(x, out=out) is out
        same(out, expected)
    x = xs[comm.rank]
    gathered = np.full((4 * comm.size + 2, 8), 9, np.float32)
    assert comm.all_gather(x, out=gathered[1:-1, 1:-1]) is not None
    same(gathered[1:-1, 1:-1], xs.reshape(-1, 6))
    assert (gathered[[0, -1]] == 9).all()
    assert (gathered[:, [0, -1]] == 9).all()
    with pytest.raises(ShapeError, match="exactly"):
        comm.all_gather(x, out=np.empty((4, 6 * comm.size + 1), np.float32))
    with pytest.raises(DTypeError, match="exactly float32"):
        comm.all_reduce(x, out=np.empty((4, 6)))
    both = np.zeros(9, np.float32)
    with pytest.raises(ShapeError, match="shares memory"):
        comm.all_reduce(both[1:], out=both[:-1])
    locked = np.empty((4, 6), np.float32)
    locked.flags.writeable = False
    with pytest.raises(ShapeError, match="read-only"):
        comm.broadcast(x, out=locked)


def check_layouts(comm):
    """Check views of any strides, read-only arrays, and every axis."""
    p = comm.size
    for dtype in ("bfloat16", "float64"):
        xs = draw(comm, (2 * p, 3, 4 * p), dtype)
        xs.flags.writeable = False
        for make in (lambda x: x, lambda x: x.transpose(2, 1, 0), lambda x: x[::-1, :, ::-1]):
            all_ = np.stack([make(x) for x in xs])
            x = make(xs[comm.rank])
            for axis in (0, 1, 2, -1):
                actual, sent = sent_by(comm, "all_gather", lambda x=x, axis=axis: comm.all_gather(x, axis))
                same(actual, np.concatenate(list(all_), axis))
                assert sent == x.nbytes * (p - 1)
            for axis in (0, 2):
                actual, sent = sent_by(
                    comm, "reduce_scatter", lambda x=x, axis=axis: comm.reduce_scatter(x, axis)
                )
                same(actual, np.split(in_rank_order(all_), p, axis)[comm.rank])
                assert sent == x.nbytes * (p - 1) // p
                same(comm.reduce_scatter(x, axis, op="max"), np.split(all_.max(axis=0), p, axis)[comm.rank])
            for split, concat in ((0, 2), (2, 0), (2, 1), (0, 0), (2, 2)):
                actual, sent = sent_by(
                    comm, "all_to_all", lambda x=x, s=split, c=concat: comm.all_to_all(x, s, c)
                )
                same(actual, np.concatenate([np.split(y, p, split)[comm.rank] for y in all_], concat))
                assert sent == x.nbytes * (p - 1) // p
            root = p - 1
            actual, sent = sent_by(comm, "broadcast", lambda x=x, root=root: comm.broadcast(x, root))
            same(actual, all_[root])
            assert sent == (x.nbytes * (p - 1) if comm.rank == root else 0)


def check_results_are_new(comm):
    x = np.ones(4, np.float32)
    for result in (comm.all_reduce(x), comm.all_gather(x), comm.broadcast(x), *comm.shift(x).wait()):
        assert not np.shares_memory(result, x)


def check_shift(comm):
    xs, ys = draw(comm, (3, 5), "bfloat16"), draw(comm, (2,), "float64", seed=1)
    for by in (1, -1, 2, comm.size):
        source = (comm.rank - by) % comm.size
        handle, sent = sent_by(comm, "shift", lambda by=by: comm.shift(xs[comm.rank].T, ys[comm.rank], by=by))
        assert sent == (0 if source == comm.rank else xs[0].nbytes + ys[0].nbytes)
        x, y = handle.wait()
        same(x, xs[source].T)
        same(y, ys[source])
        assert handle.wait()[0] is x
        assert handle.poll()
    first, second = comm.shift(np.int32(1) * np.ones(1)), comm.shift(2 * np.ones(1))
    assert second.wait()[0][0] == 2
    assert first.wait()[0][0] == 1


def check_in_place(comm):
    """Check the operations that allow it with out being x."""
    xs = draw(comm, (2 * comm.size, 1 << 14), "bfloat16")
    expected = {
        "all_reduce": in_rank_order(xs),
        "broadcast": xs[0],
        "all_to_all": np.concatenate([np.split(x, comm.size)[comm.rank] for x in xs]),
    }
    for strided in (False, True):
        for name, arguments in (("all_reduce", ()), ("broadcast", ()), ("all_to_all", (0, 0))):
            x = np.zeros((2 * comm.size, 1 << 15), xs.dtype)[:, : 1 << 14]
            x = x if strided else x.copy()
            x[...] = xs[comm.rank]
            assert getattr(comm, name)(x, *arguments, out=x) is x
            same(x, expected[name])


def check_send_and_recv(comm):
    """Send along a line, as pipelines do. A shift has a separate channel, so its order among sends is free."""
    big, handles = 1 << 18, []
    if comm.rank + 1 < comm.size:
        handles = [comm.send(np.full(big, 10 * comm.rank + i, np.float32), comm.rank + 1) for i in range(3)]
    ring = comm.shift(np.full(3, comm.rank))
    if comm.rank > 0:
        for i in range(3):
            message = comm.recv((big,), np.float32, comm.rank - 1).wait()
            assert (message == 10 * (comm.rank - 1) + i).all()
    assert [handle.wait() for handle in handles] == [None] * len(handles)
    assert (ring.wait()[0] == (comm.rank - 1) % comm.size).all()
    for mistake in (comm.rank, comm.size, -1, 0.5):
        with pytest.raises(OptionError):
            comm.send(np.ones(1), mistake)


def check_several_under_way(comm):
    """Collectives may be started together and end in any order; results equal those of the blocking calls."""
    xs = draw(comm, (3 * comm.size, 512 * comm.size), "bfloat16")
    x = xs[comm.rank]
    out = np.empty((3 * comm.size**2, 512 * comm.size), x.dtype)
    sums = [comm.start_reduce_scatter(x, axis) for axis in (0, 1)]
    gathers = [comm.start_all_gather(x, out=out), comm.start_all_gather(x, 1)]
    largest = comm.start_reduce_scatter(x, op="max")
    same(largest.wait(), np.split(xs.max(axis=0), comm.size)[comm.rank])
    assert gathers[0].wait() is out
    same(out, np.concatenate(list(xs)))
    same(gathers[1].wait(), np.concatenate(list(xs), 1))
    for axis, handle in enumerate(sums):
        same(handle.wait(), np.split(in_rank_order(xs), comm.size, axis)[comm.rank])


def check_tags(comm):
    """Messages of one tag arrive in order, whatever the order of other tags."""
    target, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    handles = [comm.send(np.array([10 * tag + i]), target, tag=tag) for i in range(2) for tag in (0, 7, 999)]
    for tag in (999, 0, 7):
        assert [comm.recv((1,), np.int64, source, tag=tag).wait()[0] for _ in range(2)] == [
            10 * tag,
            10 * tag + 1,
        ]
    for handle in handles:
        handle.wait()
    with pytest.raises(OptionError, match="tag"):
        comm.send(np.ones(1), target, tag=1000)


def check_sends_that_nobody_waits_for(comm):
    """Arrays of a send stay alive until they have arrived."""
    target, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for _ in range(3):
        comm.send(np.full(1 << 16, 7.0), target)
    others = [np.full(1 << 16, 9.0) for _ in range(6)]
    comm.barrier()
    for _ in range(3):
        assert (comm.recv((1 << 16,), np.float64, source).wait() == 7).all()
    assert all((x == 9).all() for x in others)
    comm.barrier()


def check_a_message_of_another_size(comm):
    if comm.rank == 0:
        comm.send(np.ones(3), 1).wait()
    if comm.rank == 1:
        with pytest.raises(CommError, match="sent 24 bytes where 32"):
            comm.recv((4,), np.float64, 0).wait()


def check_a_different_call(comm):
    """Every rank gets the error, and may continue."""
    last = comm.rank == comm.size - 1
    calls = (
        lambda: comm.all_reduce(np.ones(1024 if last else 1000)),
        lambda: comm.all_reduce(np.ones(8), "max" if last else "sum"),
        lambda: comm.all_gather(np.ones(8, np.float32 if last else np.float64)),
        lambda: comm.barrier() if last else comm.all_gather(np.ones(8)),
        lambda: comm.shift(np.ones(8), by=2 if last else 1),
    )
    for call in calls:
        with pytest.raises(CommError, match=rf"rank 0 .*; rank {comm.size - 1} .*call \d+ of 'world'"):
            call()
    assert comm.all_reduce(np.ones(1))[0] == comm.size


class OnCuda:
    __cuda_array_interface__: ClassVar = {"shape": (1,), "typestr": "<f4", "data": (0, False), "version": 3}


def check_mistakes(comm):
    x = np.ones((comm.size, 3), np.float32)
    mistakes = (
        (OptionError, "did you mean", lambda: comm.all_reduce(x, "sun")),
        (DTypeError, "bool", lambda: comm.all_reduce(x > 0)),
        (DTypeError, "byte-swapped", lambda: comm.all_reduce(x.astype(">f4"))),
        (DTypeError, "not an array", lambda: comm.all_reduce(1.0)),
        (DeviceError, "x is on a CUDA device", lambda: comm.all_reduce(OnCuda())),
        (DTypeError, "objects", lambda: comm.broadcast(np.array([None]))),
        (OptionError, "root", lambda: comm.broadcast(x, comm.size)),
        (OptionError, "axis", lambda: comm.all_gather(x, 2)),
        (ShapeError, "no axes", lambda: comm.all_gather(x[0, 0].reshape(()))),
    )
    for error, message, call in mistakes:
        for _ in range(2):
            with pytest.raises(error, match=message):
                call()
    comm.barrier()


def check_uneven_lengths(comm):
    uneven = np.ones((comm.size + 1, 2 * comm.size - 1), np.float32)
    for call in (lambda: comm.reduce_scatter(uneven), lambda: comm.all_to_all(uneven, 1, 0)):
        with pytest.raises(
            ShapeError, match=f"{comm.size} ranks do not divide evenly; pad it to {2 * comm.size}"
        ):
            call()
