"""Decoding as CUDA graphs: one launch for a pass of single tokens, instead of one for each kernel. On the CPU as
recordings: the launches of a pass, without what Python does between them.

A graph holds addresses. So a pass reads its tokens and tables from the arrays of one :class:`Step`, padded to the
next power of two of sequences and of pages of the longest, and its ops allocate in an :class:`Arena`. The first pass
of such a size runs as usual, under a :class:`Recorder`, and is captured; each later one is a copy of its step to the
device and the launch.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from gpu_ops.core.allocator import allocator, use_allocator
from gpu_ops.core.defaults import default
from gpu_ops.inference.forward import next_logits
from gpu_ops.inference.kv_cache import PagedKVCache
from gpu_ops.inference.step import Step
from gpu_ops.kernels.attention.cpu.config import select_config
from gpu_ops.kernels.common.cpu.replay import Replay
from gpu_ops.kernels.recording import recorded
from gpu_ops.memory import Arena, Buffer
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.weights import Llama

__all__ = ["Graphs", "Recorder", "Recordings", "runs_on_cpu"]

_MOST_GRAPHS = 32  # limit of kept graphs; the oldest are dropped
# Sequences of a recorded pass. Python's share of a pass of 16, of 100 M parameters, is an eighth. With more it is
# less, and lost again where sequences end one after the other, as each size is recorded and compared.
_MOST_RECORDED = 16
_MOST_SEQUENCES = 64  # of all kept recordings, which hold all arrays of their passes
_LONGEST_RECORDED = 1 << 15  # tokens: tables of angles are kept up to there


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
class _Pass:
    step: Step
    logits: Any = None
    cost: int = 1


AnyPass = TypeVar("AnyPass", bound=_Pass)


class _Passes(Generic[AnyPass]):
    """Passes of one model over one cache that are kept by their sizes, up to a limit on the sum of their costs."""

    def __init__(
        self, weights: Llama, config: LlamaConfig, cache: PagedKVCache, max_seqlen: int, limit: int
    ) -> None:
        self._model, self._cache, self._max_seqlen, self._limit = (weights, config), cache, max_seqlen, limit
        self._enabled = True
        self._kept: dict[Any, AnyPass] = {}

    def _pass_for(
        self, key: Any, batch: int, width: int, make: Callable[[Step], AnyPass], cost: int = 1
    ) -> AnyPass:
        """The pass of these sizes; beyond the limit the first ones kept are dropped."""
        if key not in self._kept:
            while sum(kept.cost for kept in self._kept.values()) + cost > self._limit:
                del self._kept[next(iter(self._kept))]
            empty = self._cache.empty_step(tokens=batch, batch=batch, width=width, max_seqlen_q=1)
            self._kept[key] = make(empty)
            self._kept[key].cost = cost
        return self._kept[key]

    def _pass_of(self, step: Step) -> AnyPass | None:
        return next((kept for kept in self._kept.values() if kept.step is step), None)

    def _forward(self, step: Step) -> Any:
        return next_logits(*self._model, self._cache, step, max_seqlen=self._max_seqlen)


@dataclass
class _Graph(_Pass):
    launch: Any = None
    """Function that launches the graph; None before the first pass."""
    arena: Arena | None = None


class Graphs(_Passes[_Graph]):
    """Captured passes of one model over one cache."""

    def __init__(self, weights: Llama, config: LlamaConfig, cache: PagedKVCache, max_seqlen: int) -> None:
        super().__init__(weights, config, cache, max_seqlen, _MOST_GRAPHS)
        # CuPy's arithmetic allocates outside an arena: positions of layers without rotation, a softcap
        self._enabled = not config.logits_softcap and all(
            layer_config.theta is not None for layer_config in config.by_layer
        )

    def step_for(self, parts: dict[int, list[int]]) -> Step | None:
        """Step that ``reserve`` is to fill with these tokens; None if they do not run in a graph."""
        if not self._enabled or any(len(part) != 1 for part in parts.values()):
            return None
        longest = 1 + max(map(self._cache.length, parts))
        size = _padded(len(parts)), _padded(-(-longest // self._cache.page_size))
        return self._pass_for(size, *size, _Graph).step

    def logits(self, step: Step, count: int) -> Any:
        """Logits of the ``count`` sequences of a step that ``reserve`` has filled. The next pass overwrites them."""
        graph = self._pass_of(step)
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


@dataclass
class _RecordedPass(_Pass):
    replay: Replay | None = None
    tokens: Any = None
    """Tokens of the recorded pass; None once the recording has been compared with a pass that ran as usual."""


class Recordings(_Passes[_RecordedPass]):
    """Recorded passes of one model over one cache, on the CPU.

    A pass has the bits that it would have without a recording: it is recorded anew where the number of sequences, of
    pages, the tiles of attention or the table of angles change. The second pass runs both ways and is compared.
    """

    def __init__(self, weights: Llama, config: LlamaConfig, cache: PagedKVCache, max_seqlen: int) -> None:
        super().__init__(weights, config, cache, max_seqlen, _MOST_SEQUENCES)
        self._reads_tokens = False

    def step_for(self, parts: dict[int, list[int]]) -> Step | None:
        """Step that ``reserve`` is to fill with these tokens; None if they run as usual."""
        batch, longest = len(parts), 1 + max(map(self._cache.length, parts))
        if not self._enabled or batch > _MOST_RECORDED or longest > _LONGEST_RECORDED:
            return None
        if any(len(part) != 1 for part in parts.values()) or self._share_pages(parts) or not runs_on_cpu():
            return None
        config, dtype = self._model[1], self._cache.keys[0].dtype
        width = _padded(-(-longest // self._cache.page_size))
        heads, dims = (config.nheads, config.nheads_kv), 2 * config.head_dim
        attention = select_config(batch, *heads, 1, longest, decode=True, dtype=dtype, dims=dims)
        key = batch, width, attention, (longest - 1).bit_length()
        passed = self._pass_for(key, batch, width, _RecordedPass, cost=batch)
        self._kept[key] = self._kept.pop(key)  # the last one used is the last one dropped
        return passed.step

    def logits(self, step: Step, count: int) -> Any:
        """Logits of a step that ``reserve`` has filled. The next pass overwrites them."""
        passed = self._pass_of(step)
        if passed is None:
            return self._forward(step)
        if passed.replay is None:
            with recorded() as recording:
                logits = self._forward(step)
            if not recording.refused:
                passed.replay, passed.logits, passed.tokens = Replay(recording), logits, step.tokens.copy()
            return logits
        if passed.tokens is None:
            passed.replay()
            return passed.logits
        if not self._reads_tokens and (passed.tokens == step.tokens).any():
            return self._forward(step)  # comparing would not tell whether the recording reads tokens anew
        passed.replay()
        logits, passed.tokens, self._reads_tokens = self._forward(step), None, True
        if logits.tobytes() != passed.logits.tobytes():
            self._enabled, self._kept = False, {}
            warnings.warn(
                "gpu_ops: decoding runs without recordings: they do not give the same logits", stacklevel=2
            )
        return logits

    def _share_pages(self, parts: dict[int, list[int]]) -> bool:
        """Whether sequences share pages, which a pass may then read once for all of them."""
        pages = [page for handle in parts for page in self._cache._sequences.alive[handle].pages]
        return self._cache.window < 0 and len(set(pages)) < len(pages)


def runs_on_cpu() -> bool:
    """Whether calls with NumPy arrays run compiled kernels, in memory that stays theirs."""
    device, backend = default("GPU_OPS_DEVICE"), default("GPU_OPS_BACKEND")
    return (
        device in (None, "", "auto", "cpu") and backend in (None, "", "auto", "numba") and allocator() is None
    )


def _padded(n: int) -> int:
    """Round up to a power of two."""
    return 1 << (n - 1).bit_length()
