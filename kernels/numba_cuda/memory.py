"""Memory accesses that array indexing in Numba does not express: at a byte offset, and 16 bytes at once."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.cuda import types
from numba.cuda.extending import intrinsic

__all__ = ["load_at", "load_vector"]

_GLOBAL, _SHARED = 1, 3  # address spaces
_BYTE = ir.IntType(8)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, space: int) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.addrspacecast(data, ir.PointerType(data.type.pointee, space))


@intrinsic
def load_at(typingctx, array, offset):
    """The element ``offset`` bytes behind the first of an array in global memory."""

    def generate(context, builder, signature, args):
        element = signature.args[0].dtype
        first = _pointer(context, builder, signature.args[0], args[0], _GLOBAL)
        address = builder.gep(builder.bitcast(first, ir.PointerType(_BYTE, _GLOBAL)), [args[1]])
        value = builder.load(
            builder.bitcast(address, first.type), align=context.get_abi_sizeof(first.type.pointee)
        )
        return context.data_model_manager[element].from_data(builder, value)

    return array.dtype(array, types.int64), generate


@intrinsic
def load_vector(typingctx, array, row, column):
    """16 bytes of a row-major array in shared memory, as a tuple: ``column`` is a multiple of that many elements,
    and so is the length of a row."""
    width = 16 * 8 // array.dtype.bitwidth

    def generate(context, builder, signature, args):
        array_type, row_type, column_type = signature.args
        first = _pointer(context, builder, array_type, args[0], _SHARED)
        row_length = context.make_array(array_type)(context, builder, args[0]).shape
        strides = cgutils.unpack_tuple(builder, row_length)
        at = builder.add(builder.mul(args[1], strides[1]), args[2])
        vector = ir.VectorType(first.type.pointee, width)
        pointer = builder.bitcast(builder.gep(first, [at]), ir.PointerType(vector, _SHARED))
        loaded = builder.load(pointer, align=16)
        items = [builder.extract_element(loaded, ir.Constant(ir.IntType(32), i)) for i in range(width)]
        return context.make_tuple(builder, signature.return_type, items)

    return types.UniTuple(array.dtype, width)(array, types.int64, types.int64), generate
