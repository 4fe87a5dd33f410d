"""Scratch memory of compiled code, and the way from there to results."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.core.typing.templates import signature
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from gpu_ops.kernels.numba_cpu.ir.build import address, number, prefetch
from gpu_ops.kernels.numba_cpu.ir.target import NEAR

# Elements added to the rows of a scratch tile: rows of a power of two of bytes would share a few sets of the
# first cache, and a panel of 256 of them would not stay in it (attention, seqlen 2048: 41 ms against 38).
SKEW = 16

LINE_BYTES = 64  # of a cache


def _emit_copy_row(context: Any, b: Any, arrays: Any, values: Any, count: Any) -> None:
    """Line by line: a call of memcpy for each row took a thirtieth of attention's time. Asks for a third array."""
    line = ir.VectorType(ir.IntType(32), LINE_BYTES // 4).as_pointer()
    to, row, *later = (
        b.bitcast(context.make_array(t)(context, b, x).data, line)
        for t, x in zip(arrays, values, strict=True)
    )
    size = b.mul(count, number(arrays[1].dtype.bitwidth // 8))
    lines, rest = b.udiv(size, number(LINE_BYTES)), b.urem(size, number(LINE_BYTES))
    with cgutils.for_range(b, lines) as loop:
        b.store(b.load(b.gep(row, [loop.index]), align=1), b.gep(to, [loop.index]), align=1)
        for pointer in later:
            prefetch(b, b.gep(pointer, [loop.index]))
    with b.if_then(b.icmp_unsigned("!=", rest, number(0))):
        target, source, *last = (
            b.bitcast(b.gep(p, [lines]), ir.IntType(8).as_pointer()) for p in (to, row, *later)
        )
        cgutils.raw_memcpy(b, target, source, rest, number(1))
        for pointer in last:
            prefetch(b, pointer)


@intrinsic
def copy_row(typingctx, to, row, count):
    """The first ``count`` elements of ``row`` as they are, into the memory of ``to`` (of another type, maybe)."""

    def codegen(context, builder, sig, args):
        _emit_copy_row(context, builder, sig.args[:2], args[:2], args[2])
        return context.get_dummy_value()

    return signature(types.void, to, row, types.intp), codegen


@intrinsic
def copy_row_asking(typingctx, to, row, later, count):
    """The same; meanwhile asks for as much of ``later``, which comes then."""

    def codegen(context, builder, sig, args):
        _emit_copy_row(context, builder, sig.args[:3], args[:3], args[3])
        return context.get_dummy_value()

    return signature(types.void, to, row, later, types.intp), codegen


@intrinsic
def prefetch_row(typingctx, row, count):
    """Ask for the cache lines of the first ``count`` elements of ``row``."""

    def codegen(context, builder, sig, args):
        data = context.make_array(row)(context, builder, args[0]).data
        line = 64 // (row.dtype.bitwidth // 8)
        lines = builder.sdiv(builder.add(args[1], number(line - 1)), number(line))
        with cgutils.for_range(builder, lines) as loop:
            prefetch(builder, builder.gep(data, [builder.mul(loop.index, number(line))]))
        return context.get_dummy_value()

    return signature(types.void, row, types.intp), codegen


def allocate(context: Any, builder: Any, array: types.Array, shape: list[Any]) -> Any:
    """Uninitialised array in C order that begins with a cache line."""
    size = number(array.dtype.bitwidth // 8)
    strides = [size]
    for length in reversed(shape):
        strides.insert(0, builder.mul(strides[0], length))
    meminfo = context.nrt.meminfo_alloc_aligned(builder, strides[0], LINE_BYTES)
    result = make_array(array)(context, builder)
    populate_array(
        result,
        data=builder.bitcast(context.nrt.meminfo_data(builder, meminfo), result.data.type),
        shape=shape,
        strides=strides[1:],
        itemsize=size,
        meminfo=meminfo,
    )
    return result


@intrinsic
def scratch(typingctx, rows, columns, of):
    """Uninitialised (rows, columns) array of the type of ``of`` on a 64-byte boundary, rows contiguous.

    It lives as long as its variable is used; the views of ``read_row`` and ``write_row`` do not keep it.
    """
    array = types.Array(of, 2, "C")

    def codegen(context, builder, sig, args):
        return allocate(context, builder, array, list(args[:2]))._getvalue()

    return signature(array, types.int64, types.int64, of), codegen


@intrinsic
def row_address(typingctx, x, row, column):
    """Of x[row, column], which need not exist."""

    def codegen(context, builder, sig, args):
        source = make_array(sig.args[0])(context, builder, args[0])
        stride = builder.extract_value(source.strides, 0)
        start = builder.ptrtoint(source.data, stride.type)
        inside = builder.mul(args[2], source.itemsize)
        return builder.add(start, builder.add(builder.mul(args[1], stride), inside))

    return signature(types.int64, x, types.int64, types.int64), codegen


@intrinsic
def past_line(typingctx, row):
    """Elements from the line's beginning to the row's."""

    def codegen(context, builder, sig, args):
        place = builder.and_(_address(context, builder, sig.args[0], args[0]), number(LINE_BYTES - 1))
        return builder.udiv(place, number(sig.args[0].dtype.bitwidth // 8))

    return signature(types.int64, row), codegen


@intrinsic
def from_beginning(typingctx, row, count):
    """As many elements of memory, from the row's first on."""

    def codegen(context, builder, sig, args):
        result = make_array(sig.return_type)(context, builder, args[0])
        result.shape = cgutils.pack_array(builder, [args[1]])
        return result._getvalue()

    return signature(row, row, types.int64), codegen


@intrinsic
def follows(typingctx, row, count, other):
    """Whether ``other`` begins where ``count`` elements from the row's beginning end."""

    def codegen(context, builder, sig, args):
        start, found = (_address(context, builder, sig.args[i], args[i]) for i in (0, 2))
        size = number(sig.args[0].dtype.bitwidth // 8)
        return builder.icmp_signed("==", found, builder.add(start, builder.mul(args[1], size)))

    return signature(types.boolean, row, types.int64, other), codegen


@intrinsic
def same(typingctx, x, y):
    """Whether rows begin at one address: the only way in which an input and a result may share memory."""

    def codegen(context, builder, sig, args):
        return builder.icmp_signed("==", *map(partial(_address, context, builder), sig.args, args))

    return signature(types.boolean, x, y), codegen


def _address(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return builder.ptrtoint(context.make_array(array_type)(context, builder, array).data, ir.IntType(64))


@njit(error_model="numpy")
def put(source, target, streaming, following, start):
    """Copy ``source`` to ``target``, which may be shorter; ``streaming``: past the caches.

    A line takes a store in a cache, where it first has to be read from memory: a third of the traffic of a copy, and
    in vain. Whole lines that go past the caches are not read. Who needs them next finds them in none, so this is for
    results that would not stay there. Meanwhile the cache fetches as much of the rows ``following``, a tuple, from
    element ``start`` on.
    """
    if streaming:
        step = LINE_BYTES // target.itemsize
        first = min((step - past_line(target)) % step, len(target))
        last = first + (len(target) - first) // step * step
        _copy(source, target, 0, first)
        for i in range(first, last, step):
            _stream(source, target, i)
            _fetch(following, start + i)
        _copy(source, target, last, len(target) - last)
    else:
        _copy(source, target, 0, len(target))


@intrinsic
def _copy(typingctx, source, target, first, count):
    """``target[first : first + count] = source[first : first + count]``"""

    def codegen(context, builder, sig, args):
        start, end = (address(context, builder, sig.args[i], args[i], args[2]) for i in (0, 1))
        cgutils.raw_memcpy(builder, end, start, args[3], sig.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return signature(types.none, source, target, types.int64, types.int64), codegen


@intrinsic
def _stream(typingctx, source, target, i):
    """One line from element ``i`` on, which in ``target`` begins a line."""

    def codegen(context, builder, sig, args):
        line = ir.VectorType(ir.IntType(32), LINE_BYTES // 4).as_pointer()
        start, end = (
            builder.bitcast(address(context, builder, sig.args[k], args[k], args[2]), line) for k in (0, 1)
        )
        store = builder.store(builder.load(start, align=1), end, align=LINE_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return signature(types.none, source, target, types.int64), codegen


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
    """What has been streamed is there for other threads: before the end of a task."""

    def codegen(context, builder, sig, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return signature(types.none), codegen


def stays_in_cache(size: int) -> bool:
    """Whether results of so many bytes, beside operands, would be in the last cache when somebody reads them.

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
