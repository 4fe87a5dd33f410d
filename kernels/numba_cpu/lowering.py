"""What Numba emits in a part for loops, elements of arrays and arithmetic, in fewer instructions.

Numba's own code for ``for i in range(n)``, ``x[i, j]`` or ``a // b`` serves every array, bound and exception: 40 to
160 instructions each, of which LLVM leaves three. Making and folding that text was a third of what a kernel took to
compile. A part keeps to some rules instead:

- an index counts from the front;
- a slice of the first axis starts within the array and stops not before;
- no variable is read before it is written, and none holds a reference that is counted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.lowering import Lower

Emit = Callable[[Any, Any, Any], Any]  # of an IR builder and two values


def _compare(emit: str, sign: str) -> Emit:
    return lambda b, x, y: getattr(b, emit)(sign, x, y)


def _divided(b: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Python's quotient and remainder; 0 and 0 for a divisor 0, as in all kernels."""
    zero = x.type(0)
    nothing = b.icmp_signed("==", y, zero)
    divisor = b.select(nothing, y.type(1), y)
    quotient, rest = b.sdiv(x, divisor), b.srem(x, divisor)
    other_sign = b.icmp_signed("<", b.xor(rest, divisor), zero)
    below = b.and_(b.icmp_signed("!=", rest, zero), other_sign)
    quotient = b.sub(quotient, b.zext(below, x.type))
    rest = b.add(rest, b.select(below, divisor, zero))
    return b.select(nothing, zero, quotient), b.select(nothing, zero, rest)


_COMPARED = {
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}
_INTEGERS: dict[Any, Emit] = {
    operator.add: lambda b, x, y: b.add(x, y, flags=["nsw"]),
    operator.sub: lambda b, x, y: b.sub(x, y, flags=["nsw"]),
    operator.mul: lambda b, x, y: b.mul(x, y, flags=["nsw"]),
    operator.floordiv: lambda b, x, y: _divided(b, x, y)[0],
    operator.mod: lambda b, x, y: _divided(b, x, y)[1],
    **{op: _compare("icmp_signed", sign) for op, sign in _COMPARED.items()},
}
_REALS: dict[Any, Emit] = {
    operator.add: lambda b, x, y: b.fadd(x, y),
    operator.sub: lambda b, x, y: b.fsub(x, y),
    operator.mul: lambda b, x, y: b.fmul(x, y),
    **{op: _compare("fcmp_ordered", sign) for op, sign in _COMPARED.items()},
    operator.ne: _compare("fcmp_unordered", "!="),
}
_ARITHMETIC = {types.int64: _INTEGERS, types.float32: _REALS, types.float64: _REALS}

# Members of the struct that stands for an array; the first two belong to whoever counts references.
_MEMORY, _PARENT, _ITEMS, _ITEM_BYTES, _DATA, _SHAPE, _STRIDES = range(7)


class PartLower(Lower):
    """For parts that count no references."""

    def alloca_lltype(self, name: str, lltype: Any, datamodel: Any = None) -> Any:
        with self.builder.goto_entry_block():
            return self.builder.alloca(lltype, name=name)

    def storevar(self, value: Any, name: str, argidx: int | None = None) -> None:
        self._alloca_var(name, self.typeof(name))
        if name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        else:
            self.builder.store(value, self.getvar(name))

    def lower_expr(self, resty: Any, expr: Any) -> Any:
        b = self.builder
        if expr.op == "call":
            function = self.typeof(expr.func.name)
            if isinstance(function, types.Function) and function.typing_key is range:
                return self._range(resty, expr.args)
        elif expr.op in ("getiter", "iternext", "pair_first", "pair_second", "getattr"):
            of, value = self.typeof(expr.value.name), self.loadvar(expr.value.name)
            if expr.op == "getiter" and isinstance(of, types.RangeType):
                return self._first(resty, value)
            if expr.op == "iternext" and isinstance(of, types.RangeIteratorType):
                return self._next(value)
            if expr.op.startswith("pair"):
                return b.extract_value(value, 0 if expr.op == "pair_first" else 1)
            if expr.op == "getattr" and isinstance(of, types.Array) and expr.attr in ("shape", "strides"):
                return b.extract_value(value, _SHAPE if expr.attr == "shape" else _STRIDES)
        return super().lower_expr(resty, expr)

    def _struct(self, of: Any, *members: Any) -> Any:
        value = ir.Constant(self.context.get_value_type(of), ir.Undefined)
        for i, member in enumerate(members):
            value = self.builder.insert_value(value, member, i)
        return value

    def _range(self, of: Any, given: Any) -> Any:
        one = self.context.get_constant(of.dtype, 1)
        bounds = [
            self.context.cast(self.builder, self.loadvar(each.name), self.typeof(each.name), of.dtype)
            for each in given
        ]
        if len(bounds) == 1:
            bounds.insert(0, one.type(0))
        return self._struct(of, *bounds[:2], *(bounds[2:] or [one]))

    def _first(self, of: Any, bounds: Any) -> Any:
        """The iterator of a range: where the next number is, stop, step, and where Numba would count."""
        b = self.builder
        start, stop, step = (b.extract_value(bounds, i) for i in range(3))
        with b.goto_entry_block():
            place = b.alloca(start.type)
        b.store(start, place)
        return self._struct(of, place, stop, step, place)

    def _next(self, iterator: Any) -> Any:
        """(number, whether there is one)"""
        b = self.builder
        place, stop, step = (b.extract_value(iterator, i) for i in range(3))
        value = b.load(place)
        b.store(b.add(value, step, flags=["nsw"]), place)
        upwards = b.icmp_signed(">", step, step.type(0))
        more = b.select(upwards, b.icmp_signed("<", value, stop), b.icmp_signed(">", value, stop))
        return cgutils.make_anonymous_struct(b, [value, more])

    def lower_binop(self, resty: Any, expr: Any, op: Any) -> Any:
        b, signature = self.builder, self.fndesc.calltypes[expr]
        kind, second = signature.args
        emit = _ARITHMETIC.get(kind, {}).get(op) if second == kind else None
        if emit is None:
            return super().lower_binop(resty, expr, op)
        values = (
            self.context.cast(b, self.loadvar(each.name), self.typeof(each.name), kind)
            for each in (expr.lhs, expr.rhs)
        )
        return self.context.cast(b, emit(b, *values), signature.return_type, resty)

    def lower_getitem(self, resty: Any, expr: Any, value: Any, index: Any, signature: Any) -> Any:
        of = self.typeof(value.name)
        part = self._part(of, value, index)
        if part is None:
            return super().lower_getitem(resty, expr, value, index, signature)
        if isinstance(resty, types.Array):
            return part
        return self.context.unpack_value(self.builder, of.dtype, part)

    def lower_setitem(self, target_var: Any, index_var: Any, value_var: Any, signature: Any) -> Any:
        b, of, kind = self.builder, self.typeof(target_var.name), self.typeof(value_var.name)
        part = self._part(of, target_var, index_var)
        several = part is not None and not isinstance(part.type, ir.PointerType)
        if part is None or (several and (of.layout != "C" or not isinstance(kind, types.Number))):
            return super().lower_setitem(target_var, index_var, value_var, signature)
        value = self.context.cast(b, self.loadvar(value_var.name), kind, of.dtype)
        if not several:
            self.context.pack_value(b, of.dtype, value, part)
            return None
        data = b.extract_value(part, _DATA)
        with cgutils.for_range(b, b.extract_value(part, _ITEMS)) as loop:
            self.context.pack_value(b, of.dtype, value, b.gep(data, [loop.index]))
        return None

    def _part(self, of: Any, array: Any, index: Any) -> Any:
        """The address of an element, or an array behind the first axes or of some rows. None if it is neither."""
        b, kind = self.builder, self.typeof(index.name)
        kinds = list(kind) if isinstance(kind, types.BaseTuple) else [kind]
        if not isinstance(of, types.Array):
            return None
        if kinds == [types.slice2_type]:
            return self._rows(of, self.loadvar(array.name), self.loadvar(index.name))
        if not all(isinstance(each, types.Integer) for each in kinds):
            return None
        given = self.loadvar(index.name)
        places = cgutils.unpack_tuple(b, given) if isinstance(kind, types.BaseTuple) else [given]
        places = [self.context.cast(b, *each, types.intp) for each in zip(places, kinds, strict=True)]
        value = self.loadvar(array.name)
        address = self._address(of, value, places)
        return address if len(places) == of.ndim else self._rest(of, value, address, len(places))

    def _address(self, of: Any, array: Any, places: list[Any]) -> Any:
        b, data = self.builder, self.builder.extract_value(array, _DATA)
        if of.layout == "C":
            offset = places[0]
            for axis in range(1, of.ndim):
                offset = b.mul(offset, b.extract_value(array, (_SHAPE, axis)))
                if axis < len(places):
                    offset = b.add(offset, places[axis])
            return b.gep(data, [offset])
        steps = [b.mul(place, b.extract_value(array, (_STRIDES, i))) for i, place in enumerate(places)]
        offset = steps[0]
        for step in steps[1:]:
            offset = b.add(offset, step)
        return b.bitcast(b.gep(b.bitcast(data, cgutils.voidptr_t), [offset]), data.type)

    def _rest(self, of: Any, array: Any, address: Any, given: int) -> Any:
        """The array at ``address`` behind the first axes."""
        b, axes = self.builder, range(given, of.ndim)
        lengths = [b.extract_value(array, (_SHAPE, axis)) for axis in axes]
        items = lengths[0]
        for length in lengths[1:]:
            items = b.mul(items, length)
        return self._struct(
            of.copy(ndim=len(axes)),
            b.extract_value(array, _MEMORY),
            b.extract_value(array, _PARENT),
            items,
            b.extract_value(array, _ITEM_BYTES),
            address,
            cgutils.pack_array(b, lengths),
            cgutils.pack_array(b, [b.extract_value(array, (_STRIDES, axis)) for axis in axes]),
        )

    def _rows(self, of: Any, array: Any, bounds: Any) -> Any:
        b, length = self.builder, self.builder.extract_value(array, (_SHAPE, 0))
        start, stop = b.extract_value(bounds, 0), b.extract_value(bounds, 1)
        # an omitted one is the largest number
        stop = b.select(b.icmp_signed("<", stop, length), stop, length)
        items = left = b.sub(stop, start)
        for axis in range(1, of.ndim):
            items = b.mul(items, b.extract_value(array, (_SHAPE, axis)))
        array = b.insert_value(array, left, (_SHAPE, 0))
        array = b.insert_value(array, items, _ITEMS)
        return b.insert_value(array, self._address(of, array, [start]), _DATA)
