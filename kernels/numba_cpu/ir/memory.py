"""Scratch memory of compiled code."""

from __future__ import annotations

import numpy as np
from numba.core import types
from numba.core.typing.templates import signature
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

# Elements added to the rows of a scratch tile: rows of a power of two of bytes would share a few sets of the
# first cache, and a panel of 256 of them would not stay in it (attention, seqlen 2048: 41 ms against 38).
SKEW = 16


@intrinsic
def scratch(typingctx, rows, columns, of):
    """Uninitialised (rows, columns) array of the type of ``of`` on a 64-byte boundary, rows contiguous."""
    array = types.Array(of, 2, "C")
    size = of.bitwidth // 8

    def allocate(n, m):
        flat = np.empty(n * m * size + 64, np.uint8)
        start = (-flat.ctypes.data) % 64
        return flat[start : start + n * m * size]

    def codegen(context, builder, sig, args):
        flat_type = types.Array(types.uint8, 1, "C")
        flat = context.compile_internal(
            builder, allocate, signature(flat_type, types.int64, types.int64), args[:2]
        )
        source = context.make_array(flat_type)(context, builder, flat)
        result = context.make_array(array)(context, builder)
        width = context.get_constant(types.intp, size)
        populate_array(
            result,
            data=builder.bitcast(source.data, result.data.type),
            shape=list(args[:2]),
            strides=[builder.mul(args[1], width), width],
            itemsize=width,
            meminfo=source.meminfo,
        )
        return result._getvalue()

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
