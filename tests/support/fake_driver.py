"""Driver's rules for the fake of CuPy (fake_cupy.py): streams and events, captures, launches.

Work runs when it is enqueued; with ``deferred`` only when something waits for it, as late as the order allows: work
that is not ordered after another stream's work runs before it. In a capture, work is recorded and not run, and calls
that a driver refuses there raise :class:`DriverError`.
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import numpy as np

from gpu_ops.core.device import EmulatorDevice
from gpu_ops.kernels.compiler import cubin, jit
from gpu_ops.kernels.compiler.kernel import NumbaKernel
from gpu_ops.kernels.compiler.launch import CudaLauncher
from gpu_ops.kernels.program import Launch
from gpu_ops.presets import ARCHES

MAX_BLOCK, MAX_GRID, MAX_THREADS = (1024, 1024, 64), (2**31 - 1, 65535, 65535), 1024
UNASKED_SHARED = 48 << 10  # bytes of dynamic shared memory that a kernel may have without asking


class DriverError(RuntimeError):
    """Refusal of a driver."""


class FakeDriver:
    """Fake driver. ``streams``: streams entered. ``launched``: (kernel label, device, stream) of each launch.
    ``waits``: (reason, stream) of each wait of the host. ``sms``: number of SMs of the device."""

    def __init__(self):
        self.streams, self.entered, self.launched, self.waits = [], [], [], []
        self.capturing, self.deferred, self.sms = False, False, 56
        # records of a captured stream: functions, and launched FakeGraphs
        self.graph, self.graphs = (
            [],
            [],
        )
        self._queues, self._done = {}, {}
        self.default_device = 0

    def current_device(self):
        return self.entered[-1] if self.entered else self.default_device

    def current_stream(self):
        return self.streams[-1] if self.streams else 0

    def run(self, work):
        """Enqueue work on the current stream."""
        if self.capturing:
            self.graph.append(work)
        elif self.deferred:
            self._queues.setdefault(self.current_stream(), []).append(work)
        else:
            work()

    def refuse_in_capture(self, what):
        if self.capturing:
            raise DriverError(f"cudaErrorStreamCaptureUnsupported: {what} while the stream is captured")

    def wait(self, why, stream=None):
        """Let the host wait for a stream."""
        self.refuse_in_capture(why)
        stream = self.current_stream() if stream is None else stream
        self.waits.append((why, stream))
        self.drain(stream)

    def drain(self, stream, upto=None):
        """Run the work of a stream up to a position."""
        queue = self._queues.get(stream, [])
        while self.done(stream) < (len(queue) if upto is None else upto):
            self._done[stream] = self.done(stream) + 1
            queue[self._done[stream] - 1]()

    def done(self, stream):
        return self._done.get(stream, 0)

    def enqueued(self, stream):
        return len(self._queues.get(stream, []))

    @contextlib.contextmanager
    def capture(self):
        self.capturing, self.graph = True, []
        try:
            yield
        finally:
            self.capturing = False

    def replay(self):
        for work in self.graph:
            work()

    def load(self, kernel):
        """Replace gpu_ops.kernels.compiler.jit.load: CUDA C++ kernels keep their real launcher."""
        if isinstance(kernel, NumbaKernel):
            return _NumbaLauncher(self, kernel)
        compiled = jit.compile_kernel(kernel, EmulatorDevice().limits.arch)
        self._loading = kernel, compiled
        return CudaLauncher(compiled.cubin, compiled.entry, cooperative=kernel.cooperative)

    def module(self, *, path, enable_cooperative_groups=False):
        """Fake cupy.RawModule of the kernel that is being loaded."""
        kernel, compiled = self._loading
        assert enable_cooperative_groups == kernel.cooperative
        return SimpleNamespace(get_function=lambda entry: FakeKernel(self, kernel, compiled))

    def occupancy(self, kernel, threads, shared):
        """Fake cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor; a kernel is used as its address."""
        compiled = kernel.compiled
        needs = cubin.resources(compiled.cubin, compiled.entry, compiled.log)
        return cubin.occupancy(needs, threads, shared, ARCHES[EmulatorDevice().limits.arch]).blocks

    def launch(self, kernel, grid, block, args, shared):
        """Launch on the emulator, in the order of the current stream."""
        arrays = [a for a in args if hasattr(a, "host")]
        assert not any(isinstance(a, np.ndarray) and a.ndim for a in args), "host memory does not reach a GPU"
        assert all(a.device.id == self.current_device() for a in arrays)
        self.launched.append(
            (kernel.label, self.current_device(), self.streams[-1] if self.streams else None)
        )
        host = [np.atleast_1d(a.host) if hasattr(a, "host") else a for a in args]
        if self.capturing:
            host = [_at_the_address(a) if isinstance(a, np.ndarray) and a.ndim else a for a in host]
        host = [a[()] if isinstance(a, np.ndarray) and not a.ndim else a for a in host]  # structures
        launched = Launch(kernel, grid, block, tuple(host), shared)
        self.run(lambda: EmulatorDevice().link(launched)({}))


def _at_the_address(a):
    """View of an array that does not keep it alive, as a graph holds it."""
    return np.asarray(SimpleNamespace(__array_interface__=a.__array_interface__)).view(a.dtype)


class FakeKernel:
    """Fake cupy.RawKernel."""

    def __init__(self, driver, kernel, compiled):
        self.driver, self.described, self.compiled = driver, kernel, compiled
        self.max_dynamic_shared_size_bytes = UNASKED_SHARED
        self.kernel = SimpleNamespace(ptr=self)

    def __call__(self, grid, block, args, *, shared_mem=0):
        for name, size, limit in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
            if any(n < 1 or n > m for n, m in zip(size, limit, strict=False)):
                raise DriverError(f"cudaErrorInvalidValue: {name} {size}")
        threads = math.prod(block)
        if threads > MAX_THREADS or shared_mem > self.max_dynamic_shared_size_bytes:
            raise DriverError(
                f"cudaErrorInvalidValue: {threads} threads, {shared_mem} bytes of shared memory"
            )
        if self.described.cooperative:
            limit = self.driver.occupancy(self, threads, shared_mem) * self.driver.sms
            assert math.prod(grid) <= limit, f"CuPy shrinks {grid} to {limit} blocks, which wait for ever"
        self.driver.launch(self.described, grid, block, args, shared_mem)


class _NumbaLauncher:
    """Launcher of a Numba kernel; numba-cuda's launcher requires a context."""

    def __init__(self, driver, kernel):
        self.driver, self.kernel = driver, kernel

    def arguments(self, args):
        return list(args)

    def __call__(self, grid, block, args, shared):
        self.driver.launch(self.kernel, grid, block, args, shared)


class FakeEvent:
    """Fake cupy.cuda.Event."""

    def __init__(self, driver, disable_timing=False):
        self.driver, self.stream, self.position, self.captured = driver, None, 0, False

    def record(self, stream=None):
        self.stream = self.driver.current_stream() if stream is None else stream.ptr
        self.position, self.captured = self.driver.enqueued(self.stream), self.driver.capturing

    @property
    def done(self):
        self.driver.refuse_in_capture("an event is queried")
        return self.driver.done(self.stream) >= self.position

    def synchronize(self):
        self.driver.wait("event", self.stream)


class FakeStream:
    """Fake cupy.cuda.Stream, identified by its address."""

    _made = 1000

    def __init__(self, driver, ptr=None):
        if ptr is None:
            FakeStream._made += 1
            ptr = FakeStream._made
        self.driver, self.ptr = driver, ptr

    def is_capturing(self):
        return self.driver.capturing

    def wait_event(self, event):
        if not event.captured:
            self.driver.refuse_in_capture("an event from before the capture is waited for")
        with self:
            self.driver.run(lambda: self.driver.drain(event.stream, event.position))

    def synchronize(self):
        self.driver.wait("stream", self.ptr)

    def begin_capture(self):
        assert self.ptr not in (0, 2), "cudaErrorStreamCaptureUnsupported: the default stream"
        assert not self.driver.capturing
        self.driver.capturing, self.driver.graph = True, []

    def end_capture(self):
        """End the capture and return a fake cupy.cuda.Graph."""
        self.driver.capturing = False
        return FakeGraph(self.driver, self.driver.graph)

    def __enter__(self):
        self.driver.streams.append(self.ptr)
        return self

    def __exit__(self, *_):
        self.driver.streams.pop()


class FakeGraph:
    """Recorded work of a stream. ``FakeDriver.graphs``: launched graphs in order."""

    def __init__(self, driver, works):
        self.driver, self.works = driver, works

    def launch(self):
        self.driver.graphs.append(self)
        for work in self.works:
            self.driver.run(work)
