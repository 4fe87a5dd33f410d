"""Limit on the memory of calls: checked before each allocation, with counts of the bytes of each holder."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.allocator import allocator, new_array, out_of_memory, size_text, use_allocator
from gpu_ops.core.checks import one_of
from gpu_ops.errors import OptionError, OutOfMemoryError
from gpu_ops.memory.sizes import read_size

__all__ = ["Pool", "limit"]

_CUDA_ROUNDS = 512  # CuPy's pool allocates multiples of it
_MOST_HOLDERS = 3  # number of holders that an error names

# lock of the counts of all pools: an allocation counts in every pool around it, or in none
_lock = threading.Lock()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    # a thread that the child does not have may hold the old lock
    os.register_at_fork(after_in_child=_new_lock)


class Pool:
    """Pool that counts allocations of calls while it is entered, and refuses those that would exceed a limit.

    On the CPU it counts results, workspaces and the scratch of kernels. On a GPU, ``device="cuda"``, it counts every
    array that CuPy allocates, in CuPy's multiples of 512 bytes; they come from a separate
    ``cupy.cuda.MemoryPool``, which has the same limit. Bytes are returned when their last array is freed.

    Parameters
    ----------
    limit : int or str, optional
        Limit in bytes, or as ``"8 GB"`` (of 1e9 bytes) or ``"8 GiB"`` (of 2^30). 0 refuses all allocations. None: no
        limit.
    device : str
        Device whose memory is counted, ``"cpu"`` or ``"cuda"``; the other's is not.
    name : str
        Name for messages.

    Raises
    ------
    OptionError
        The limit is not a size, or a trace or an arena is in use in this thread.
    OutOfMemoryError
        Raised by calls inside, before they write anything: ``required`` is the size of the allocation, ``available``
        the bytes left, ``holders`` the largest holders of the pool. The call can be repeated once memory is freed.

    Notes
    -----
    A pool applies to the threads that enter it; with several, the limit is on their sum. Pools nest: the tightest
    limit applies. Arrays may be freed in any thread. Freed memory that is kept for later results
    (``GPU_OPS_POOL_MB``, CuPy's pool) is not counted, nor are NumPy's allocations: copies of strided arguments, the
    codes of ``ternary_quantize`` on the CPU. An array that a traceback still refers to is alive. Counting takes 4 us
    per call, and no time if no pool is entered.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> from gpu_ops import memory
    >>> x = np.ones((256, 1024), np.float32)
    >>> with memory.Pool("1.5 MiB") as pool:
    ...     y = gpu_ops.softmax(x)
    ...     print(pool.current, pool.holders)
    ...     try:
    ...         z = gpu_ops.swiglu(x, x)
    ...     except MemoryError as error:
    ...         print(error)
    1048576 {'softmax: y': 1048576}
    swiglu: y needs 1048576 bytes, and the memory limit of 1572864 bytes has 524288 bytes left; the largest:
    softmax: y 1048576 bytes. Free some, raise the limit, or split the arrays into several calls
    """

    def __init__(self, limit: int | str | None = None, *, device: str = "cpu", name: str = "") -> None:
        self.limit = None if limit is None else read_size("memory.Pool", "limit", limit)
        self.device = one_of("memory.Pool", "device", device, ("cpu", "cuda"))
        self.name = name
        self._current = self._peak = 0
        self._holders: dict[str, int] = {}
        # Freed bytes, not yet subtracted: the garbage collector may run in the very thread that holds the lock.
        self._gone: deque[tuple[str, int]] = deque()
        self._entered = _Entries()
        self._memory: Any = _cupy_pool(self.limit) if device == "cuda" else None

    def __enter__(self) -> Pool:
        outer = allocator()
        around = outer.pools if isinstance(outer, _Entered) else ()
        entered = _Entered(around if self in around else (self, *around))
        with contextlib.ExitStack() as stack:
            stack.enter_context(use_allocator(entered))
            if entered.on_cuda:
                import cupy

                stack.enter_context(cupy.cuda.using_allocator(entered.cuda_memory))
            self._entered.stacks.append(stack.pop_all())
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.stacks.pop().close()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32, name: str = "array") -> Any:
        """Allocate an uninitialised array under a name, such as ``"KV cache"``. The pool must be entered."""
        entered = allocator()
        if not isinstance(entered, _Entered) or self not in entered.pools:
            raise OptionError(
                "memory.Pool.empty: the pool is not in use in this thread; enter it: with pool:"
            )
        return new_array(tuple(shape), np.dtype(dtype), name, on_host=self.device == "cpu")

    @property
    def current(self) -> int:
        """Bytes held now."""
        with _lock:
            self._settle()
            return self._current

    @property
    def peak(self) -> int:
        """Maximum of bytes held at one time."""
        return self._peak

    @property
    def holders(self) -> dict[str, int]:
        """Bytes by holder, the largest first: ``op: result``, ``op workspace: name``, ``op scratch``, or a name
        passed to :meth:`empty`; ``array`` for CuPy's allocations outside of ops."""
        with _lock:
            self._settle()
            return dict(sorted(self._holders.items(), key=lambda item: -item[1]))

    def _settle(self) -> None:
        while self._gone:
            label, nbytes = self._gone.popleft()
            self._current -= nbytes
            self._holders[label] -= nbytes
            if not self._holders[label]:
                del self._holders[label]

    def _left(self) -> float:
        return math.inf if self.limit is None else self.limit - self._current

    def _add(self, label: str, nbytes: int) -> None:
        self._current += nbytes
        self._peak = max(self._peak, self._current)
        self._holders[label] = self._holders.get(label, 0) + nbytes

    def _refusal(self, label: str, nbytes: int) -> OutOfMemoryError:
        left = int(self._left())
        largest = tuple(sorted(self._holders.items(), key=lambda item: -item[1])[:_MOST_HOLDERS])
        held = ", ".join(f"{name} {size_text(n)}" for name, n in largest)
        return OutOfMemoryError(
            f"{label} needs {size_text(nbytes)}, and the memory limit of {size_text(self.limit or 0)}"
            f"{f' of {self.name!r}' if self.name else ''} has {size_text(left)} left"
            f"{f'; the largest: {held}' if held else ''}. Free some, raise the limit, or split the arrays into "
            "several calls",
            nbytes,
            left,
            largest,
        )


def limit(size: int | str, *, device: str = "cpu") -> Pool:
    """Make a :class:`Pool` with this limit: ``with memory.limit("8 GB"):``.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> from gpu_ops import memory
    >>> x = np.ones((4, 8), np.float32)
    >>> with memory.limit(0):  # with out=, softmax allocates nothing
    ...     y = gpu_ops.softmax(x, out=x)
    """
    return Pool(read_size("memory.limit", "size", size), device=device)


class _Entries(threading.local):
    """Exits of the pools that a thread has entered."""

    def __init__(self) -> None:
        self.stacks: list[contextlib.ExitStack] = []


class _Entered:
    """Allocator of a thread: the pools that it is in, innermost first."""

    runs, on_gpu, from_device = True, False, True

    def __init__(self, pools: tuple[Pool, ...]) -> None:
        self.pools = pools
        self._on_host = tuple(pool for pool in pools if pool.device == "cpu")
        self.on_cuda = tuple(pool for pool in pools if pool.device == "cuda")
        self._label = "array"

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any], label: str, device: Any) -> Any:
        name = label.rpartition(": ")[2]
        if not device.on_host:  # CuPy will request the memory
            before, self._label = self._label, label
            try:
                return device.empty(shape, dtype, name)
            finally:
                self._label = before
        charge = _charged(self._on_host, label, math.prod(shape) * dtype.itemsize)
        try:
            array = device.empty(shape, dtype, name)
        except BaseException:
            del charge  # the traceback would keep it alive
            raise
        if charge is not None:
            _until_gone(array, charge)
        return array

    @contextlib.contextmanager
    def scratch(self, nbytes: int, op: str) -> Iterator[None]:
        charge = _charged(self._on_host, f"{op} scratch", nbytes)
        try:
            yield
        finally:
            del charge

    def cuda_memory(self, nbytes: int) -> Any:
        """Allocate CUDA memory, instead of CuPy's allocator."""
        import cupy

        charge = _charged(self.on_cuda, self._label, -(-nbytes // _CUDA_ROUNDS) * _CUDA_ROUNDS)
        try:
            memory = self.on_cuda[-1]._memory.malloc(nbytes)
        except MemoryError as error:  # CuPy's: the device has less than the limit, or the pool is fragmented
            del charge
            raise out_of_memory(self._label, error, required=nbytes) from error
        if charge is None:
            return memory
        charge.memory = memory
        owned = cupy.cuda.UnownedMemory(memory.ptr, nbytes, charge, memory.device_id)
        return cupy.cuda.MemoryPointer(owned, 0)


class _Charge:
    """Bytes that count until the charge is freed."""

    __slots__ = ("_label", "_nbytes", "_pools", "memory")

    def __init__(self, pools: tuple[Pool, ...], label: str, nbytes: int) -> None:
        self._pools, self._label, self._nbytes = pools, label, nbytes
        self.memory: Any = None
        """CuPy's memory, freed with the charge."""

    def __del__(self) -> None:
        for pool in self._pools:
            pool._gone.append((self._label, self._nbytes))


def _charged(pools: tuple[Pool, ...], label: str, nbytes: int) -> _Charge | None:
    """Charge an allocation to pools; None if there is nothing to count."""
    if not pools or not nbytes:
        return None
    with _lock:
        for pool in pools:
            pool._settle()
        tightest = min(pools, key=Pool._left)
        if nbytes > tightest._left():
            raise tightest._refusal(label, nbytes)
        for pool in pools:
            pool._add(label, nbytes)
    return _Charge(pools, label, nbytes)


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to an array that keeps its charge until the array is freed."""

    __slots__ = ("charge",)
    charge: _Charge


_WATCHES: dict[int, _Watch] = {}


def _forget(watch: Any) -> None:
    del _WATCHES[id(watch)]


def _until_gone(array: Any, charge: _Charge) -> None:
    owner = array
    while isinstance(
        owner.base, np.ndarray
    ):  # of a large result: views refer to it, not to the view that is given out
        owner = owner.base
    watch = _Watch(owner, _forget)
    watch.charge = charge
    _WATCHES[id(watch)] = watch


def _cupy_pool(limit: int | None) -> Any:
    import cupy

    pool = cupy.cuda.MemoryPool()
    if limit is not None:
        pool.set_limit(size=limit)
    return pool
