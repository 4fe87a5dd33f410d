"""Scratch memory and rows in compiled code, and the integers that size them."""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import number, prefetch
from gpu_ops.kernels.common.cpu.codegen.numba_api import (
    cgutils,
    intrinsic,
    ir,
    make_array,
    populate_array,
    signature,
    types,
)
from gpu_ops.kernels.common.cpu.codegen.target import VECTOR_BYTES
from gpu_ops.kernels.common.cpu.jit import constant, device_function

# Elements added to the rows of a scratch tile: rows of a power of two of bytes would share a few sets of the
# first cache, and a panel of 256 of them would not stay in it (attention, seqlen 2048: 41 ms against 38).
SKEW = 16

LINE_BYTES = 64  # of a cache


@intrinsic
def copy_row(typingctx, to, row, count):
    """Copy the first ``count`` elements of ``row``, without conversion, to the memory of ``to`` (of any type).

    Line by line: a call of memcpy per row took 3 % of attention's time.
    """

    def codegen(context, b, sig, args):
        line = ir.VectorType(ir.IntType(32), LINE_BYTES // 4).as_pointer()
        target, source = (
            b.bitcast(context.make_array(t)(context, b, x).data, line)
            for t, x in zip(sig.args[:2], args[:2], strict=True)
        )
        size = b.mul(args[2], number(row.dtype.bitwidth // 8))
        lines, rest = b.udiv(size, number(LINE_BYTES)), b.urem(size, number(LINE_BYTES))
        with cgutils.for_range(b, lines) as loop:
            b.store(b.load(b.gep(source, [loop.index]), align=1), b.gep(target, [loop.index]), align=1)
        with b.if_then(b.icmp_unsigned("!=", rest, number(0))):
            ends = (b.bitcast(b.gep(p, [lines]), ir.IntType(8).as_pointer()) for p in (target, source))
            cgutils.raw_memcpy(b, *ends, rest, number(1))
        return context.get_dummy_value()

    return signature(types.void, to, row, types.intp), codegen


@intrinsic
def prefetch_row(typingctx, row, count):
    """Prefetch the cache lines of the first ``count`` elements of ``row``."""

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
    """Address of x[row, column], which need not exist."""

    def codegen(context, builder, sig, args):
        source = make_array(sig.args[0])(context, builder, args[0])
        stride = builder.extract_value(source.strides, 0)
        start = builder.ptrtoint(source.data, stride.type)
        inside = builder.mul(args[2], source.itemsize)
        return builder.add(start, builder.add(builder.mul(args[1], stride), inside))

    return signature(types.int64, x, types.int64, types.int64), codegen


def _borrow(context: Any, builder: Any, row: Any, value: Any, start: Any, count: Any) -> Any:
    """View of ``count`` elements of a row from ``start`` that owns no reference."""
    result = make_array(row)(context, builder, value)
    result.data = builder.gep(result.data, [start])
    result.shape = cgutils.pack_array(builder, [count])
    result.meminfo = cgutils.get_null_value(result.meminfo.type)
    result.parent = cgutils.get_null_value(result.parent.type)
    return result._getvalue()


@intrinsic
def from_beginning(typingctx, row, count):
    """Row of ``count`` elements from the memory of the row's first element on."""

    def codegen(context, builder, sig, args):
        return _borrow(context, builder, row, args[0], number(0), args[1])

    return signature(row, row, types.int64), codegen


@intrinsic
def span(typingctx, row, start, count):
    """``row[start : start + count]`` without checks, which take longer than copying 32 elements."""

    def codegen(context, builder, sig, args):
        return _borrow(context, builder, row, args[0], args[1], args[2])

    return signature(row, row, types.int64, types.int64), codegen


@intrinsic
def place_of(typingctx, row):
    """Address of the first element. Inputs and results share memory only if their addresses are equal."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return signature(types.int64, row), codegen


@constant
def lanes(x):
    """Elements of array ``x`` in one vector."""
    return VECTOR_BYTES // (x.dtype.bitwidth // 8)


@device_function
def round_up(n, step):
    return (n + step - 1) // step * step


def _select(sign: str) -> Any:
    """``min`` or ``max`` of two numbers as one instruction: Numba's are function calls."""

    @intrinsic
    def choose(typingctx, x, y):
        result = typingctx.unify_types(types.unliteral(x), types.unliteral(y))

        def codegen(context, builder, sig, args):
            x, y = args
            if isinstance(result, types.Float):
                second = builder.fcmp_ordered(sign, y, x)
            else:
                second = (builder.icmp_signed if result.signed else builder.icmp_unsigned)(sign, y, x)
            return builder.select(second, y, x)

        return signature(result, result, result), codegen

    return choose


smaller, larger = _select("<"), _select(">")
