"""Decoding as CUDA graphs: one launch for a pass of single tokens, instead of one for each kernel.

A graph holds addresses. So a pass reads its tokens and tables from the arrays of one :class:`Step`, padded to the
next power of two of sequences and of pages of the longest, and its ops allocate in an :class:`Arena`. The first pass
of such a size runs as usual, under a :class:`Recorder`, and is captured; each later one is a copy of its step to the
device and the launch.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.core.allocator import use_allocator
from gpu_ops.inference.forward import next_logits
from gpu_ops.inference.kv_cache import PagedKVCache
from gpu_ops.inference.step import Step
from gpu_ops.memory import Arena, Buffer
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.weights import Llama

__all__ = ["Graphs", "Recorder"]

_MOST_GRAPHS = 32  # limit of kept graphs; the oldest are dropped


class Recorder:
    """Allocator that records the allocations of running calls, for an arena; a trace does so without running them."""

    runs, on_gpu, from_device = True, True, False

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._now = 0

    def scratch(self, nbytes: int, op: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any], label: str, device: Any) -> Any:
        import cupy

        buffer = Buffer(label, math.prod(shape) * dtype.itemsize, self.moment())
        self.buffers.append(buffer)
        memory = device.empty((max(buffer.nbytes, 1),), np.dtype(np.uint8), label).data
        life, size = _Life(self, buffer, memory), max(buffer.nbytes, 1)
        owned = cupy.cuda.UnownedMemory(memory.ptr, size, life, memory.device_id)
        return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(owned, 0))

    def moment(self) -> int:
        self._now += 1
        return self._now - 1


class _Life:
    """Lifetime of a buffer, until its last array is freed."""

    def __init__(self, recorder: Recorder, buffer: Buffer, memory: Any) -> None:
        self._recorder, self._buffer, self._memory = recorder, buffer, memory

    def __del__(self) -> None:
        self._buffer.freed_at = self._recorder.moment()


@dataclass
class _Graph:
    step: Step
    launch: Any = None
    """Function that launches the graph; None before the first pass."""
    logits: Any = None
    arena: Arena | None = None


class Graphs:
    """Captured passes of one model over one cache."""

    def __init__(self, weights: Llama, config: LlamaConfig, cache: PagedKVCache, max_seqlen: int) -> None:
        self._model, self._cache, self._max_seqlen = (weights, config), cache, max_seqlen
        # CuPy's arithmetic allocates outside an arena: positions of layers without rotation, a softcap
        self._enabled = not config.logits_softcap and all(
            layer_config.theta is not None for layer_config in config.by_layer
        )
        self._kept: dict[tuple[int, int], _Graph] = {}

    def step_for(self, parts: dict[int, list[int]]) -> Step | None:
        """Step that ``reserve`` is to fill with these tokens; None if they do not run in a graph."""
        if not self._enabled or any(len(part) != 1 for part in parts.values()):
            return None
        longest = 1 + max(map(self._cache.length, parts))
        size = _padded(len(parts)), _padded(-(-longest // self._cache.page_size))
        if size not in self._kept:
            if len(self._kept) == _MOST_GRAPHS:
                del self._kept[next(iter(self._kept))]
            batch, width = size
            empty = self._cache.empty_step(tokens=batch, batch=batch, width=width, max_seqlen_q=1)
            self._kept[size] = _Graph(empty)
        return self._kept[size].step

    def logits(self, step: Step, count: int) -> Any:
        """Logits of the ``count`` sequences of a step that ``reserve`` has filled. The next pass overwrites them."""
        graph = next((g for g in self._kept.values() if g.step is step), None)
        if graph is None:
            return self._forward(step)
        if graph.launch is not None:
            graph.launch()
            return graph.logits[:count]
        recorder = Recorder()
        with use_allocator(recorder):
            logits = self._forward(step)
        # the logits stay in the arena, so no later buffer overlaps with them
        self._capture(graph, recorder)
        return logits[:count]

    def _forward(self, step: Step) -> Any:
        return next_logits(*self._model, self._cache, step, max_seqlen=self._max_seqlen)

    def _capture(self, graph: _Graph, recorder: Recorder) -> None:
        """Capture a pass without running it. If that fails, passes run without graphs from now on."""
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)  # the default one cannot be captured
        try:
            graph.arena = Arena(recorder, "cuda")
            with stream:
                stream.begin_capture()
                try:
                    with graph.arena:
                        graph.logits = self._forward(graph.step)
                finally:
                    captured = stream.end_capture()
            graph.launch = captured.launch
        except Exception as error:
            self._enabled, self._kept = False, {}
            cause = error.__context__ or error  # after an error, end_capture raises another one
            warnings.warn(f"gpu_ops: decoding runs without CUDA graphs: {cause}", stacklevel=2)


def _padded(n: int) -> int:
    """Round up to a power of two."""
    return 1 << (n - 1).bit_length()
