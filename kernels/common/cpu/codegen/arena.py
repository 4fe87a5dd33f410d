"""Scratch memory of one thread: an arena of arrays, and named tuples of them that are passed by reference.

A kernel with many arrays makes one allocation. It runs the code that makes the arrays twice: with :func:`arena_size`,
which only counts bytes, and with an :func:`arena` of that size::

    def make(memory, n): return arena_array(memory, (n, 8), np.float32(0)), arena_array(memory, n, np.int64(0))

    size = arena_size()
    make(size, n)
    x, y = make(arena(size[0]), n)

The arrays borrow the arena's memory, so device functions that use them count no references.
"""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import number
from gpu_ops.kernels.common.cpu.codegen.memory import LINE_BYTES, allocate
from gpu_ops.kernels.common.cpu.codegen.numba_api import (
    AttributeTemplate,
    PrimitiveModel,
    cgutils,
    impl_ret_borrowed,
    infer_getattr,
    intrinsic,
    ir,
    lower_getattr_generic,
    populate_array,
    register_model,
    signature,
    types,
)


@intrinsic
def arena_size(typingctx):
    """Empty arena at address 0: element 0 counts the bytes of the arrays made from it."""

    def codegen(context, builder, sig, args):
        count = cgutils.alloca_once_value(builder, number(0))
        result = context.make_array(sig.return_type)(context, builder)
        populate_array(
            result, data=count, shape=[number(1)], strides=[number(8)], itemsize=number(8), meminfo=None
        )
        return result._getvalue()

    return signature(types.int64[::1]), codegen


@intrinsic
def arena(typingctx, size):
    """Memory for arrays of ``size`` bytes in all. Element 0 is the address of the next array."""

    def codegen(context, builder, sig, args):
        words = builder.add(builder.udiv(args[0], number(8)), number(LINE_BYTES // 8))
        memory = allocate(context, builder, sig.return_type, [words])
        start = builder.ptrtoint(memory.data, args[0].type)
        builder.store(builder.add(start, number(LINE_BYTES)), memory.data)
        return memory._getvalue()

    return signature(types.int64[::1], types.int64), codegen


@intrinsic
def arena_array(typingctx, memory, shape, of):
    """Uninitialised C-contiguous array of the type of ``of`` from an arena, on a cache line.

    Arrays are one line further apart than necessary: arrays whose size is a power of two would otherwise begin
    in one set of the first cache.
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
    """View of ``x`` (rows contiguous) as elements of the type of ``of``; a partial one is dropped."""
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


class ByReference(types.Type):
    """A pointer to a named tuple of type ``of``."""

    def __init__(self, of: Any) -> None:
        self.of = of
        super().__init__(f"ByReference({of})")

    def type_of(self, field: str) -> types.Type:
        return self.of[self.of.fields.index(field)]


@register_model(ByReference)
class _Model(PrimitiveModel):
    def __init__(self, manager: Any, reference: ByReference) -> None:
        super().__init__(manager, reference, manager[reference.of].get_value_type().as_pointer())


@infer_getattr
class _Fields(AttributeTemplate):
    key = ByReference

    def generic_resolve(self, reference: ByReference, name: str) -> types.Type | None:
        return reference.type_of(name) if name in reference.of.fields else None


def field(b: Any, reference: ByReference, pointer: Any, name: str) -> Any:
    """The value of one field, within an intrinsic."""
    i = ir.IntType(32)
    return b.load(b.gep(pointer, [i(0), i(reference.of.fields.index(name))], inbounds=True))


@lower_getattr_generic(ByReference)
def _field(context, b, reference, pointer, name):
    value = field(b, reference, pointer, name)
    return impl_ret_borrowed(context, b, reference.type_of(name), value)


@intrinsic
def by_reference(typingctx, fields):
    """A pointer to the named tuple ``fields``, read like the tuple; valid until the calling function returns.

    Numba passes a tuple by value, field by field: two tuples of 27 arrays and 22 numbers were over 200 arguments of
    each of a dozen functions, and were a sixth of the instructions that LLVM was given.
    """

    def codegen(context, builder, sig, args):
        return cgutils.alloca_once_value(builder, args[0])

    return ByReference(fields)(fields), codegen
