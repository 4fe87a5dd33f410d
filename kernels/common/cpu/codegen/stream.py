"""Non-temporal stores, by whole cache lines.

A cached store first reads its line (write-allocate): a third of a copy's traffic. Non-temporal stores of whole lines
avoid it; use them for results too large to stay cached.

    target    | ... a | a a a a | a a b | b b b b | b ...    consecutive pieces share a line: the part that the
                                                             first has of it *waits* for the second (``put``)

Arrays that NumPy allocates seldom begin with a line. Parts of lines, stored through a cache among lines that bypass
it, also fetch the rest of their line, which is then evicted: RMSNorm of rows of 8 KB took a fifth longer.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from gpu_ops.kernels.common.cpu.codegen.build import address, number, prefetch
from gpu_ops.kernels.common.cpu.codegen.memory import LINE_BYTES, place_of
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, intrinsic, ir, signature, types
from gpu_ops.kernels.common.cpu.codegen.target import NEAR
from gpu_ops.kernels.common.cpu.jit import device_function

_LINE = ir.VectorType(ir.IntType(32), LINE_BYTES // 4).as_pointer()


@device_function
def past_line(row):
    """Number of elements from the beginning of the line to that of the row."""
    return (place_of(row) & (LINE_BYTES - 1)) // row.itemsize


@device_function
def put(source, target, waits, where, following, start):
    """Copy as many elements of ``source`` as ``target`` has, past the caches.

    ``waits``: a line, in which the end of the last piece may be; ``where``: the address at which that ends, and the
    number of its elements. ``finish`` stores them. Meanwhile the cache fetches as many elements of the rows
    ``following``, a tuple, from element ``start`` on.
    """
    step, count, past, place = LINE_BYTES // target.itemsize, len(target), past_line(target), place_of(target)
    first = min((step - past) % step, count)
    if where[1] > 0 and where[0] == place:
        _copy(source, 0, waits, past, first)
        where[0] += first * target.itemsize
        where[1] += first
        if where[1] < step:
            return
        _stream(waits, 0, place - past * target.itemsize)
    else:
        finish(waits, where)
        _copy(source, 0, target, 0, first)
    last = first + (count - first) // step * step
    for i in range(first, last, step):
        _stream(source, i, place + i * target.itemsize)
        _fetch(following, start + i)
    _copy(source, last, waits, 0, count - last)
    where[0], where[1] = place + count * target.itemsize, count - last


@device_function
def finish(waits, where):
    """Store the waiting elements, through a cache."""
    if where[1] > 0:
        _copy_to(waits, where[0] - where[1] * waits.itemsize, where[1])
        where[1] = 0


@intrinsic
def _copy(typingctx, source, first, target, start, count):
    """``target[start : start + count] = source[first : first + count]``"""

    def codegen(context, builder, sig, args):
        places = [address(context, builder, sig.args[i], args[i], args[i + 1]) for i in (2, 0)]
        cgutils.raw_memcpy(builder, *places, args[4], sig.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    i = types.int64
    return signature(types.none, source, i, target, i, i), codegen


@intrinsic
def _copy_to(typingctx, source, place, count):
    """Copy the first elements of ``source`` to an address."""

    def codegen(context, builder, sig, args):
        start = address(context, builder, sig.args[0], args[0], number(0))
        size = sig.args[0].dtype.bitwidth // 8
        cgutils.raw_memcpy(builder, builder.inttoptr(args[1], start.type), start, args[2], size)
        return context.get_dummy_value()

    return signature(types.none, source, types.int64, types.int64), codegen


@intrinsic
def _stream(typingctx, source, i, place):
    """Stream one line from element ``i`` on to the address of a line."""

    def codegen(context, builder, sig, args):
        start = builder.bitcast(address(context, builder, sig.args[0], args[0], args[1]), _LINE)
        target = builder.inttoptr(args[2], _LINE)
        store = builder.store(builder.load(start, align=1), target, align=LINE_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return signature(types.none, source, types.int64, types.int64), codegen


@intrinsic
def _fetch(typingctx, rows, i):
    def codegen(context, builder, sig, args):
        for k, row in enumerate(sig.args[0]):
            array = builder.extract_value(args[0], k)
            prefetch(builder, address(context, builder, row, array, args[1]), NEAR)
        return context.get_dummy_value()

    return signature(types.none, rows, types.int64), codegen


@intrinsic
def fence(typingctx):
    """Make streamed results visible to other threads: before the end of a task."""

    def codegen(context, builder, sig, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return signature(types.none), codegen


def stays_in_cache(size: int) -> bool:
    """Whether results of ``size`` bytes, in addition to the operands, would still be in the last cache when read.

    RMSNorm and then a pass over its result, last cache of 32 MiB: 16 MiB 1.45 ms streamed and 1.69 not, 8 MiB 0.73
    and 0.49. With one of 480 MiB, which a server's cores share, 1.51 and 1.84, 1.06 and 1.05: no more counts.
    """
    return 2 * size < min(last_level_cache(), 32 << 20)


@cache
def last_level_cache() -> int:
    """Bytes; 32 MiB where the system does not say."""
    try:
        sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        return max(int(path.read_text().strip().removesuffix("K")) << 10 for path in sizes)
    except (OSError, ValueError):
        return 32 << 20
