"""The arrays of a thread in one piece of memory, and the same memory as arrays of another type."""

from __future__ import annotations

from numba.core import cgutils, types
from numba.core.typing.templates import signature
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from gpu_ops.kernels.numba_cpu.ir.build import number
from gpu_ops.kernels.numba_cpu.ir.memory import LINE_BYTES, allocate


@intrinsic
def tally(typingctx):
    """Memory of which :func:`carve` counts the bytes in tally[0]: at address 0, and not to be used."""

    def codegen(context, builder, sig, args):
        count = cgutils.alloca_once_value(builder, number(0))
        result = context.make_array(sig.return_type)(context, builder)
        populate_array(
            result, data=count, shape=[number(1)], strides=[number(8)], itemsize=number(8), meminfo=None
        )
        return result._getvalue()

    return signature(types.int64[::1]), codegen


@intrinsic
def room(typingctx, size):
    """Memory for arrays of ``size`` bytes in all, whole lines, that :func:`carve` makes."""

    def codegen(context, builder, sig, args):
        words = builder.add(builder.udiv(args[0], number(8)), number(LINE_BYTES // 8))
        memory = allocate(context, builder, sig.return_type, [words])
        start = builder.ptrtoint(memory.data, args[0].type)
        builder.store(builder.add(start, number(LINE_BYTES)), memory.data)  # where the first array goes
        return memory._getvalue()

    return signature(types.int64[::1], types.int64), codegen


@intrinsic
def carve(typingctx, memory, shape, of):
    """Uninitialised array of the type of ``of``, in C order, at address memory[0], which moves on.

    It moves by whole lines, and by one more: arrays of powers of two of bytes would begin in one set of the first
    cache. The array borrows the memory. So a kernel with many arrays keeps one: it counts their bytes by carving them
    out of a :func:`tally`, makes :func:`room`, and carves them there, in code that counts no references.
    """
    sizes = (shape,) if isinstance(shape, types.Integer) else shape
    array = types.Array(of, len(sizes), "C")
    width = of.bitwidth // 8

    def codegen(context, builder, sig, args):
        place = context.make_array(sig.args[0])(context, builder, args[0]).data
        address = builder.load(place)
        lengths = [args[1]] if isinstance(shape, types.Integer) else cgutils.unpack_tuple(builder, args[1])
        strides, size = [], number(width)
        for length in reversed(lengths):
            strides.insert(0, size)
            size = builder.mul(size, length)
        lines = builder.and_(builder.add(size, number(2 * LINE_BYTES - 1)), number(-LINE_BYTES))
        builder.store(builder.add(address, lines), place)
        result = context.make_array(array)(context, builder)
        populate_array(
            result,
            data=builder.inttoptr(address, result.data.type),
            shape=lengths,
            strides=strides,
            itemsize=number(width),
            meminfo=None,
        )
        return result._getvalue()

    as_int64 = types.int64 if isinstance(shape, types.Integer) else types.UniTuple(types.int64, len(sizes))
    return signature(array, types.int64[::1], as_int64, of), codegen


@intrinsic
def as_type(typingctx, x, of):
    """The memory of ``x``, rows contiguous, with elements of the type of ``of``; of wider ones, whole ones."""
    array = x.copy(dtype=of, layout="A" if of.bitwidth > x.dtype.bitwidth else x.layout)

    def codegen(context, builder, sig, args):
        source = context.make_array(x)(context, builder, args[0])
        shape, strides = (cgutils.unpack_tuple(builder, t) for t in (source.shape, source.strides))
        columns = builder.udiv(builder.mul(shape[-1], number(x.dtype.bitwidth)), number(of.bitwidth))
        result = context.make_array(array)(context, builder)
        populate_array(
            result,
            data=builder.bitcast(source.data, result.data.type),
            shape=[*shape[:-1], columns],
            strides=[*strides[:-1], number(of.bitwidth // 8)],
            itemsize=number(of.bitwidth // 8),
            meminfo=None,
        )
        return result._getvalue()

    return signature(array, x, of), codegen
