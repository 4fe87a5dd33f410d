"""Accesses that Numba's array indexing cannot express: global to shared memory, and shared memory to registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import cuda, uint32
from numba.cuda import types
from numba.cuda.extending import intrinsic

from gpu_ops.kernels.common.numba_cuda.dtype import LARGEST, functions

__all__ = ["fetch", "load_at", "stager", "store_at", "take"]

_GLOBAL, _SHARED = 1, 3  # address spaces


def _first(context: Any, builder: Any, array_type: Any, array: Any, space: int) -> Any:
    """A pointer to an array's first element, in its address space."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.addrspacecast(data, ir.PointerType(data.type.pointee, space)) if space else data


def _element(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """A pointer to the element ``offset`` bytes past the first one of an array in global memory."""
    first = _first(context, builder, array_type, array, _GLOBAL)
    address = builder.gep(builder.bitcast(first, ir.PointerType(ir.IntType(8), _GLOBAL)), [offset])
    return builder.bitcast(address, first.type)


@intrinsic
def load_at(typingctx, array, offset):
    """The element ``offset`` bytes past the first one of an array in global memory."""

    def generate(context, builder, signature, args):
        array_type = signature.args[0]
        element = _element(context, builder, array_type, *args)
        value = builder.load(element, align=array_type.dtype.bitwidth // 8)
        return context.data_model_manager[array_type.dtype].from_data(builder, value)

    return array.dtype(array, types.int64), generate


@intrinsic
def store_at(typingctx, array, offset, value):
    """Write the element ``offset`` bytes past the first one of an array in global memory."""

    def generate(context, builder, signature, args):
        array_type = signature.args[0]
        element = _element(context, builder, array_type, *args[:2])
        data = context.data_model_manager[array_type.dtype].as_data(builder, args[2])
        builder.store(data, element, align=array_type.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), generate


@intrinsic
def take(typingctx, array, i):
    """``array[i]`` for a 1-D array in shared memory and ``i >= 0``. Plain indexing would test for negative ``i``."""

    def generate(context, builder, signature, args):
        pointer = builder.gep(_first(context, builder, signature.args[0], args[0], _SHARED), [args[1]])
        return builder.load(pointer, align=signature.args[0].dtype.bitwidth // 8)

    return array.dtype(array, types.int64), generate


@intrinsic
def fetch(typingctx, target, i, source, at):
    """``target[i, :] = source[at : at + n]`` in one access; the n elements are 16 bytes.

    ``target`` (…, n) is a local array; ``source`` is a 1-D array in shared memory, aligned to 16 bytes, and ``at`` a
    multiple of n.
    """

    def generate(context, builder, signature, args):
        width = 128 // signature.args[2].dtype.bitwidth
        source = _first(context, builder, signature.args[2], args[2], _SHARED)
        vector = ir.VectorType(source.type.pointee, width)
        pointer = builder.bitcast(builder.gep(source, [args[3]]), ir.PointerType(vector, _SHARED))
        loaded = builder.load(pointer, align=16)
        row = builder.mul(args[1], ir.Constant(args[1].type, width))
        target = _first(context, builder, signature.args[0], args[0], 0)
        for e in range(width):
            element = builder.extract_element(loaded, ir.Constant(ir.IntType(32), e))
            builder.store(element, builder.gep(target, [builder.add(row, ir.Constant(row.type, e))]))
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), generate


@cache  # shared by kernel variants, so that each is compiled once
def stager(dtype: str, threads: int, rows: int, columns: int, stride: int) -> Callable[..., bool]:
    """Device function that copies ``rows`` x ``columns`` elements of an array to shared memory."""
    lanes = 32 if columns % 32 == 0 else 16  # adjacent threads along a row
    step = threads // lanes
    my_rows, my_columns = rows // step, columns // lanes
    load, number, infinity = functions(dtype).load, functions(dtype).compute, float("inf")
    scaled = dtype in LARGEST

    @cuda.jit(device=True)
    def stage(target, start, source, offsets, first_row, first_column, end, column_stride, *scales):
        """``target[start + y * stride + x]`` = column ``first_column + x`` of the row that begins at byte
        ``offsets[first_row + y]``; 0 from column ``end`` on. Codes of quantized pages are multiplied by
        ``scales[0][first_row + y]``. Returns whether all values are finite.

        All loads come before all stores, and none is conditional, so that they wait for memory together.
        """
        values = cuda.local.array((my_rows, my_columns), number)
        x, y = uint32(cuda.threadIdx.x) % uint32(lanes), uint32(cuda.threadIdx.x) // uint32(lanes)
        finite = True
        for j in range(my_columns):
            column = first_column + x + j * lanes
            at = min(column, end - 1) * column_stride
            for i in range(my_rows):
                value = load(load_at(source, take(offsets, first_row + y + i * step) + at))
                if scaled:
                    value *= take(scales[0], first_row + y + i * step)
                values[i, j] = value if column < end else number(0.0)
                finite = finite and abs(value) < infinity
        for j in range(my_columns):
            for i in range(my_rows):
                target[start + (y + i * step) * stride + x + j * lanes] = values[i, j]
        return finite

    return stage
