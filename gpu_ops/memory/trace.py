"""Memory of a function of ops, found by tracing its calls without running them.

Under a :class:`Trace` every op validates its arguments, is lowered to its program, and returns arrays of the right
shape that take no memory. Its allocations, results and workspaces, are recorded, and so is the moment when each array
is freed. The plan is that of the function itself, not of a separate formula.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.allocator import use_allocator
from gpu_ops.core.defaults import default, use_defaults
from gpu_ops.core.device import cuda_missing, current_device
from gpu_ops.errors import DeviceError, OptionError, OutOfMemoryError
from gpu_ops.presets import select_preset

__all__ = ["Buffer", "Trace"]

_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # the system reserves no memory for a mapping
_SCRATCH = "scratch of the CPU's kernels"


@dataclass
class Buffer:
    """One allocation, with the moments when it is allocated and freed, counted from 0 in a trace.

    ``freed_at`` is None if the buffer outlived the trace.
    """

    label: str
    nbytes: int
    allocated_at: int
    freed_at: int | None = None
    given: bool = False
    """Whether it was allocated by :meth:`Trace.empty`, not by an op."""

    @property
    def is_workspace(self) -> bool:
        """Whether the buffer is freed when its call returns."""
        return " workspace: " in self.label or self.label == _SCRATCH

    @property
    def came(self) -> int:
        """Earlier name of ``allocated_at``."""
        warnings.warn("memory.Buffer.came is now allocated_at", DeprecationWarning, stacklevel=2)
        return self.allocated_at

    @property
    def went(self) -> int | None:
        """Earlier name of ``freed_at``."""
        warnings.warn("memory.Buffer.went is now freed_at", DeprecationWarning, stacklevel=2)
        return self.freed_at


@dataclass
class Trace:
    """Trace of the allocations that calls would make, in order. The calls neither run nor allocate.

    Parameters
    ----------
    device : str, optional
        ``"cpu"``, the default, or a card of the presets such as ``"H100 SXM"``: its kernels' workspaces are planned,
        without the card. ``"cuda"`` is the installed card. Calls of other threads are not traced.

    Notes
    -----
    Index arrays whose values a call checks (``cu_seqlens``) must be real arrays. Only arrays of ops and of
    :meth:`empty` are recorded, not those of NumPy or CuPy. On the CPU the plan has scratch for every thread that may
    take part; one that wakes up late takes none.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> from gpu_ops import memory
    >>> with memory.Trace() as trace:
    ...     x = trace.empty((1 << 20, 1024), np.float32)
    ...     y = gpu_ops.rmsnorm(x, np.ones(1024, np.float32))
    >>> trace.peak_bytes >> 30
    8
    """

    device: str | None = None
    buffers: list[Buffer] = field(default_factory=list, init=False)
    checks_itself = ("allocate", "scratch")

    runs: bool = field(default=False, init=False)
    on_gpu: bool = field(default=False, init=False)
    from_device: bool = field(default=False, init=False)
    _now: int = field(default=0, init=False)
    _live: int = field(default=0, init=False)
    _peak: int = field(default=0, init=False)
    _peak_at: int = field(default=0, init=False)
    _scratch: int = field(default=0, init=False)

    def __enter__(self) -> Trace:
        self.on_gpu = self.device not in (None, "cpu")
        with contextlib.ExitStack() as stack:
            stack.enter_context(_running_on(self.device))
            stack.enter_context(use_allocator(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, label: str = "array") -> Any:
        """Make an array without memory for an argument: weights, tokens. It reads as zeros; do not write to it."""
        return self._reserve(shape, np.dtype(dtype), label, given=True)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any], label: str, device: Any) -> Any:
        """Allocate an op's result or workspace."""
        return self._reserve(shape, dtype, label, given=False)

    def _reserve(self, shape: tuple[int, ...], dtype: np.dtype[Any], label: str, *, given: bool) -> Any:
        buffer = Buffer(label, math.prod(shape) * dtype.itemsize, self._now, given=given)
        memory = _reserved(buffer.nbytes)
        self._now += 1
        self.buffers.append(buffer)
        self._live += buffer.nbytes
        if self._live > self._peak:
            self._peak, self._peak_at, self._scratch = self._live, buffer.allocated_at, 0
        array = np.asarray(_Reserved(self, buffer, memory))
        return array[: buffer.nbytes].view(dtype).reshape(shape)

    def scratch(self, nbytes: int, op: str) -> AbstractContextManager[None]:
        """Count memory that CPU kernels take for the length of a call."""
        if self._live + nbytes > self._peak:
            self._peak, self._peak_at, self._scratch = self._live + nbytes, self._now - 1, nbytes
        return contextlib.nullcontext()

    def free(self, buffer: Buffer) -> None:
        """Record that a buffer's last array is freed."""
        buffer.freed_at = self._now
        self._now += 1
        self._live -= buffer.nbytes

    @property
    def peak_bytes(self) -> int:
        """Maximum of bytes alive at one time."""
        return self._peak

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        return self._live

    def at_peak(self) -> list[Buffer]:
        """Buffers alive at the peak, the largest first."""
        at = self._peak_at
        alive = [b for b in self.buffers if b.allocated_at <= at and (b.freed_at is None or b.freed_at > at)]
        alive += [Buffer(_SCRATCH, self._scratch, at)] * (self._scratch > 0)
        return sorted(alive, key=lambda b: -b.nbytes)


def _reserved(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, OverflowError, ValueError) as error:
        raise OutOfMemoryError(f"memory.Trace: {nbytes} bytes have no addresses: {error}", nbytes) from error


class _Reserved:
    """Addresses without memory behind them, valid as long as an array uses them."""

    def __init__(self, trace: Trace, buffer: Buffer, memory: mmap.mmap) -> None:
        self._trace, self._buffer, self._map = trace, buffer, memory
        self.__array_interface__ = dict(np.frombuffer(self._map, np.uint8).__array_interface__)

    def __del__(self) -> None:
        self._trace.free(self._buffer)


def _running_on(device: str | None) -> AbstractContextManager[None]:
    """A context in which ops choose the programs of a device, without it."""
    chosen = {"GPU_OPS_DEVICE": "cpu"}
    if device == "cuda":
        if missing := cuda_missing():
            raise DeviceError(
                f"memory.Trace: device='cuda': {missing}; name a card, such as device='H100 SXM'"
            )
        device = current_device("cuda").limits.preset
    if device not in (None, "cpu"):
        preset = select_preset(device)  # OptionError for an unknown card
        backend = "numba" if preset.arch.compute_capability < (8, 0) else "raw"
        chosen = {"GPU_OPS_DEVICE": "emulator", "GPU_OPS_BACKEND": backend, "GPU_OPS_ARCH": str(device)}
    elif default("GPU_OPS_BACKEND") == "raw":
        raise OptionError(
            "memory.Trace: GPU_OPS_BACKEND=raw does not run on the CPU; unset it, or pass a card, such as "
            "device='H100 SXM'"
        )
    return use_defaults(chosen)
