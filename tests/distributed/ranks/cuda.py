"""CuPy arrays sent by NCCL, on fakes of both: a GPU for each rank, in host memory."""

from __future__ import annotations

import contextlib
import functools
import sys

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import distributed, models
from gpu_ops.core.device import compiler_missing
from gpu_ops.distributed.engine import Pending
from gpu_ops.distributed.nccl import Nccl
from gpu_ops.distributed.stream import Stream
from gpu_ops.distributed.tensor_parallel import ColumnParallel, RowParallel
from gpu_ops.errors import CommError, DeviceError, DTypeError, ShapeError
from gpu_ops.kernels.compiler import jit
from tests.distributed import fake_nccl
from tests.distributed.ranks import collectives, context
from tests.distributed.ranks.collectives import draw, in_rank_order, same
from tests.support.fake_cupy import FakeArray, FakeCupy, ForeignArray

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift")
OPS += ("start_all_gather", "start_reduce_scatter")


def prepare():
    """Install the fakes before the world is made."""
    sys.modules["cupy"] = fake = FakeCupy(devices=4)
    jit.load = fake.load
    fake_nccl.install()


class OnCuda:
    """Communicator that passes NumPy arrays on as CuPy arrays."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        attribute = getattr(self._comm, name)
        return functools.partial(self._call, attribute) if name in OPS else attribute

    def _call(self, method, *arguments, **options):
        fake = sys.modules["cupy"]
        copies = {id(x): (on_gpu(x), x) for x in (*arguments, *options.values()) if isinstance(x, np.ndarray)}

        def there(x):
            return copies[id(x)][0] if id(x) in copies else x

        def back(x):
            if isinstance(x, FakeArray):
                return next((host for gpu, host in copies.values() if gpu is x), x.host)
            return tuple(map(back, x)) if isinstance(x, tuple) else x

        with fake.cuda.Device(fake.current_device()):
            result = method(*map(there, arguments), **{name: there(x) for name, x in options.items()})
        return _Waits(result, back) if isinstance(result, Pending) else back(result)


class _Waits:
    def __init__(self, pending, back):
        self._pending, self.poll = pending, pending.poll
        self.wait = functools.cache(lambda: back(pending.wait()))


def on_gpu(x):
    return FakeArray(x, sys.modules["cupy"].current_device())


@contextlib.contextmanager
def deferred():
    """Run the work of a stream as late as its order allows."""
    fake = sys.modules["cupy"]
    fake.deferred = True
    try:
        yield fake
    finally:
        fake.deferred = False


def check_the_world(comm):
    """Every rank has a separate device, which it uses by default."""
    assert isinstance(comm, Nccl)
    assert sys.modules["cupy"].current_device() == comm.rank
    assert repr(comm) == f"<Nccl 'world': rank {comm.rank} of {comm.size}>"


def check_as_in_host_memory(comm):
    """Repeat the checks of NumPy arrays with CuPy arrays."""
    for name in (
        *("all_reduce", "all_reduce_special_values", "layouts", "results_are_new", "shift", "in_place"),
        *("several_under_way", "a_different_call", "uneven_lengths"),
    ):
        getattr(collectives, f"check_{name}")(OnCuda(comm))
    assert {name for name, _, _ in fake_nccl.CALLS} == {
        *("allreduce", "allgather", "reduce_scatter", "broadcast", "group")
    }
    assert not sys.modules["cupy"].waits


def check_results_are_cupy_arrays(comm):
    x = on_gpu(draw(comm, (2 * comm.size, 3), "bfloat16")[comm.rank])
    for result in (comm.all_reduce(x), comm.all_gather(x, 1), comm.reduce_scatter(x), *comm.shift(x).wait()):
        assert isinstance(result, FakeArray)
        assert (result.dtype, result.device.id) == (x.dtype, comm.rank)
    out = on_gpu(np.empty((2 * comm.size, 5), x.dtype))[:, :3]
    assert comm.all_reduce(x, out=out) is out
    same(out.host, comm.all_reduce(x).host)


def check_host_arrays_go_by_mpi(comm):
    calls = len(fake_nccl.CALLS)
    xs = draw(comm, (5,), "int16")
    same(comm.all_reduce(xs[comm.rank]), in_rank_order(xs))
    comm.barrier()
    assert len(fake_nccl.CALLS) == calls


def check_streams(comm):
    """A blocking call runs on the current stream; a started one on another stream, ordered after the current one."""
    fake, x = sys.modules["cupy"], on_gpu(np.ones(comm.size, np.float32))
    mine = fake.cuda.Stream(non_blocking=True)
    for call, beside in (
        *((lambda: comm.all_reduce(x), False), (lambda: comm.all_gather(x), False)),
        *((lambda: comm.reduce_scatter(x), False), (lambda: comm.all_to_all(x, 0, 0), False)),
        *((lambda: comm.broadcast(x), False), (lambda: comm.start_all_gather(x).wait(), True)),
        *((lambda: comm.start_reduce_scatter(x).wait(), True), (lambda: comm.shift(x).wait(), True)),
    ):
        with mine:
            call()
        assert (fake_nccl.CALLS[-1][1] != mine.ptr) == beside
        assert fake_nccl.CALLS[-1][1] != 0


def check_order(comm):
    """A transfer sees earlier writes of the current stream, and later work of that stream sees its result."""
    p, r = comm.size, comm.rank
    with deferred() as fake:
        x, sent = (fake.empty((4,), np.float32) for _ in range(2))
        x.fill(r)
        gather = comm.start_all_gather(x)
        sent.fill(r)
        ring = comm.shift(sent)
        with fake.cuda.Stream(non_blocking=True):  # the host waits for it and not for the stream that wrote x
            same(fake.asnumpy(gather.wait()), np.repeat(np.arange(p, dtype=np.float32), 4))
        fake.waits.clear()
        y = comm.start_all_gather(x).wait() - 1
        x.fill(10 + r)
        total = comm.all_reduce(x)
        arrived = ring.wait()[0] - 2
        comm.shift(total)
        again = comm.all_reduce(x)  # after the shift, on every rank
        assert not fake.waits
        same(fake.asnumpy(y), np.repeat(np.arange(p, dtype=np.float32), 4) - 1)
        for result in (again, total):
            same(fake.asnumpy(result), np.full(4, sum(range(10, 10 + p)), np.float32))
        same(fake.asnumpy(arrived), np.full(4, (r - 1) % p - 2, np.float32))
    fake.waits.clear()


def check_arrays_live_until_sent(comm):
    """Arrays of a transfer without a wait stay alive: CuPy's pool would give their memory to the next array."""
    with deferred() as fake:
        x = fake.empty((64,), np.float32)
        x.fill(comm.rank)
        comm.shift(x)
        kept = comm._by_nccl._kept
        del x
        assert any((a.shape, a.dtype) == ((64,), np.float32) for _, arrays in kept for a in arrays)
        y = comm.shift(fake.zeros((1,), np.float32)).wait()[0]
        fake.asnumpy(y)
        comm.shift(y).wait()
        assert len(kept) == 1
    fake.waits.clear()


def check_capture(comm):
    """A call is recorded in the graph that its stream captures, and runs again with it."""
    fake = sys.modules["cupy"]
    x, out = on_gpu(np.full(3, comm.rank, np.float32)), on_gpu(np.zeros(3, np.float32))
    whole = on_gpu(np.zeros(3 * comm.size, np.float32))
    comm.shift(x).wait()
    with fake.capture():
        comm.all_reduce(x, out=out)
        comm.start_all_gather(out, out=whole).wait()
    assert (out.host == 0).all()
    for factor in (1, 10):
        x.host[...] = factor * comm.rank
        fake.replay()
        assert (out.host == factor * sum(range(comm.size))).all()
        assert (whole.host == out.host[0]).all()


def check_groups(comm):
    """Each group has a separate NCCL communicator, made at its first call; a group of one copies."""
    pair = comm.split(comm.rank // 2, name="pair")
    x = on_gpu(np.full(2, comm.rank, ml_dtypes.bfloat16))
    same(pair.all_reduce(x).host, np.full(2, sum(pair.ranks), ml_dtypes.bfloat16))
    calls, alone = len(fake_nccl.CALLS), comm.split(comm.rank)
    for result in (alone.all_reduce(x), alone.reduce_scatter(x), alone.all_gather(x), *alone.shift(x).wait()):
        same(result.host, x.host)
    assert len(fake_nccl.CALLS) == calls


def check_mistakes(comm):
    """Mistakes are reported before anything is sent."""
    x, calls = on_gpu(np.ones((comm.size, 2), np.float32)), len(fake_nccl.CALLS)
    mistakes = (
        (
            DTypeError,
            "int16, which NCCL does not add up",
            lambda: comm.all_reduce(on_gpu(np.ones(2, np.int16))),
        ),
        (
            DeviceError,
            "x and out are not both",
            lambda: comm.all_reduce(x, out=np.ones((comm.size, 2), "f4")),
        ),
        (DTypeError, "cupy.from_dlpack", lambda: comm.all_reduce(ForeignArray(x.host))),
        (DeviceError, "shift them apart", lambda: comm.shift(x, np.ones(2))),
        (DeviceError, "NCCL has no tags", lambda: comm.send(x, (comm.rank + 1) % comm.size)),
        (DeviceError, "a rank has one device", lambda: comm.all_gather(FakeArray(x.host, 3))),
        (ShapeError, "no axes", lambda: comm.all_gather(x[0, 0])),
        (CommError, "on CUDA.*call", lambda: comm.all_gather(x if comm.rank else x.host)),
    )
    for error, message, call in mistakes:
        with pytest.raises(error, match=message):
            call()
    assert len(fake_nccl.CALLS) == calls
    same(comm.all_gather(on_gpu(np.full(1, comm.rank, np.int16))).host, np.arange(comm.size, dtype=np.int16))


def check_an_error_of_nccl(comm):
    def refuses(*_, **__):
        raise fake_nccl.NCCLError("unhandled cuda error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_nccl.Communicator, "allreduce", refuses)
        with pytest.raises(CommError, match=r"NCCL: unhandled cuda error\. Two ranks on one GPU"):
            comm.all_reduce(on_gpu(np.ones(1, np.float32)))


def check_ring_attention(comm):
    """Check the GPU kernels to the same tolerances."""
    if compiler_missing("raw"):
        return
    for dtype in ("float32", "bfloat16"):
        arrays = context.draw(20 * comm.size, dtype)
        device = {"there": on_gpu, "back": from_gpu}
        context.compare(comm, arrays, "zigzag", context.OPTIONS["causal"], **device)
        out = distributed.ring_attention(comm, *(on_gpu(x[:, : 2 * comm.size]) for x in arrays[:3]))
        assert (type(out), out.dtype) == (FakeArray, arrays[0].dtype)


def from_gpu(x):
    assert isinstance(x, FakeArray)
    return x.host


def check_zero(comm):
    """Gradient sums have the same bits as in host memory, each rank updates its share, and all get the weights."""
    if compiler_missing("raw"):
        return
    config = models.LlamaConfig(vocab=16, hidden=8, ffn=16, nlayers=1, nheads=2, nheads_kv=1)
    for stage in (1, 2):
        results = []
        for device in (None, "cuda"):
            parallel = distributed.DataParallel(config, comm, stage=stage, bucket_mb=0.001, device=device)
            parallel.assign(models.initial_weights(config))
            for bucket in parallel._buckets:
                parallel._grads.open(bucket.number)
                rng = np.random.default_rng((comm.rank, bucket.number))
                grads = rng.standard_normal(bucket.size).astype(np.float32)
                whole = parallel._grads._whole[bucket.number]
                whole[...] = on_gpu(grads) if device else grads
                parallel._send(bucket.number)
            parallel.finish()
            sums = {
                name: from_gpu(x).copy() if device else x.copy() for name, x in parallel.flat.grads.items()
            }
            parallel.step(lr=1e-2)
            results.append(
                (sums, {n: from_gpu(x) if device else x for n, x in parallel.gather_weights().items()})
            )
        (sums, weights), (gpu_sums, gpu_weights) = results
        for name, x in sums.items():
            same(gpu_sums[name], x)
        for name, x in weights.items():
            np.testing.assert_allclose(gpu_weights[name], x, rtol=2e-6, atol=1e-7)


def check_tensor_parallel_projections(comm):
    """Check column then row projections against whole weights, with tokens on all ranks or divided."""
    if compiler_missing("raw"):
        return
    p, r = comm.size, comm.rank
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 1, 8 * p, 16)).astype(np.float32)
    up, down = (rng.standard_normal(shape).astype(np.float32) for shape in ((16 * p, 16), (16, 16 * p)))
    mine = slice(16 * r, 16 * (r + 1))
    for divided in (False, True):
        rows = slice(8 * r, 8 * (r + 1)) if divided else slice(None)
        stream = Stream(comm, divided)
        column = ColumnParallel(on_gpu(up[mine]), stream)
        row = RowParallel(on_gpu(np.ascontiguousarray(down[:, mine])), stream)
        gx, gdy = (on_gpu(np.ascontiguousarray(a[:, rows])) for a in (x, dy))
        hidden = column.project(gx, None, None)
        y = row.project(hidden, None, gx)
        gdown, gup = (on_gpu(np.zeros((16, 16), np.float32)) for _ in range(2))
        dx = column.project_backward(row.project_backward(gdy, hidden, gdown, None), gx, gup, None)
        h, dh = x @ up.T, dy @ down
        for actual, exact in (
            *((y, (h @ down.T + x)[:, rows]), (dx, (dh @ up)[:, rows])),
            *((gdown, (dy[0].T @ h[0])[:, mine]), (gup, (dh[0].T @ x[0])[mine])),
        ):
            np.testing.assert_allclose(from_gpu(actual), exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
