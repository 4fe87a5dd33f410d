"""A named tuple in memory, which functions take as one pointer.

Numba passes a tuple by value: each call takes it apart and puts it together again, number by number. Two tuples of
27 arrays and 22 numbers are over 200 arguments of each of a dozen functions, and every use of one field carries the
others along: a sixth of the instructions that LLVM was given. A held one is read like the tuple it was made of, and
never changes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import PrimitiveModel
from numba.core.imputils import impl_ret_borrowed, lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, register_model


class Held(types.Type):
    """``of``: the type of the named tuple."""

    def __init__(self, of: Any) -> None:
        self.of = of
        super().__init__(f"Held({of})")

    def type_of(self, field: str) -> types.Type:
        return self.of[self.of.fields.index(field)]


@register_model(Held)
class _Model(PrimitiveModel):
    def __init__(self, manager: Any, held: Held) -> None:
        super().__init__(manager, held, manager[held.of].get_value_type().as_pointer())


@infer_getattr
class _Fields(AttributeTemplate):
    key = Held

    def generic_resolve(self, held: Held, name: str) -> types.Type | None:
        return held.type_of(name) if name in held.of.fields else None


def field(b: Any, held: Held, pointer: Any, name: str) -> Any:
    """The value of one field, within an intrinsic."""
    i = ir.IntType(32)
    return b.load(b.gep(pointer, [i(0), i(held.of.fields.index(name))], inbounds=True))


@lower_getattr_generic(Held)
def _field(context, b, held, pointer, name):
    value = field(b, held, pointer, name)
    return impl_ret_borrowed(context, b, held.type_of(name), value)


@intrinsic
def held(typingctx, fields):
    """``fields`` in memory of the function that calls this: until it returns."""

    def codegen(context, builder, sig, args):
        return cgutils.alloca_once_value(builder, args[0])

    return Held(fields)(fields), codegen
