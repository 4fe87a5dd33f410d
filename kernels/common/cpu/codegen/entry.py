"""Entry of a kernel with its arguments in memory, for a caller that is compiled code: ``f(state, n_tasks, record)``.

All three are int64: the address of the counter of tasks, their number, and the address of a *record*, the arguments
one after the other in 8-byte words:

    array      address of the first element, shape, strides in bytes
    tuple      its items
    number     its value in the first bytes of a word
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import number
from gpu_ops.kernels.common.cpu.codegen.numba_api import Lower, ir, make_array, populate_array, types

_WORD = ir.IntType(64)


class KernelLower(Lower):
    """Lowering of a kernel to LLVM IR, with its entry."""

    def create_cpython_wrapper(self, release_gil: bool = False) -> None:
        super().create_cpython_wrapper(release_gil)
        _add_entry(self.context, self.library, self.fndesc)


def entry_of(compiled: Any) -> tuple[int, tuple[types.Type, ...]]:
    """Address of the entry of a compiled kernel, and the types of the arguments in its record."""
    (result,) = compiled.overloads.values()
    address = result.library.get_pointer_to_function(_name(result.fndesc))
    return address, result.signature.args[2:]


def record_of(argument_types: Sequence[types.Type], arguments: Iterable[Any]) -> list[int]:
    """Words of a record, as signed integers. TypeError if a type has no place in one."""
    words: list[int] = []
    for argument_type, argument in zip(argument_types, arguments, strict=True):
        if isinstance(argument_type, types.Array):
            words += [argument.ctypes.data, *argument.shape, *argument.strides]
        elif isinstance(argument_type, types.BaseTuple):
            words += record_of(tuple(argument_type), argument)
        elif isinstance(argument_type, types.Float):
            packed = struct.pack("<d", argument) if argument_type.bitwidth == 64 else struct.pack("<fi", argument, 0)
            words.append(struct.unpack("<q", packed)[0])
        elif isinstance(argument_type, (types.Integer, types.Boolean)):
            words.append(struct.unpack("<q", struct.pack("<Q", int(argument) % (1 << 64)))[0])
        else:
            raise TypeError(f"a record holds no {argument_type}")
    return words


def _name(fndesc: Any) -> str:
    return f"{fndesc.mangled_name}.entry"


def _add_entry(context: Any, library: Any, fndesc: Any) -> None:
    module = library.create_ir_module("entry")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_WORD] * 3), _name(fndesc))
    b = ir.IRBuilder(function.append_basic_block())
    state, n_tasks, record = function.args
    words = _Words(context, b, b.inttoptr(record, _WORD.as_pointer()))
    counter = make_array(fndesc.argtypes[0])(context, b)
    size, data = number(8), b.inttoptr(state, counter.data.type)
    populate_array(counter, data=data, shape=[number(1)], strides=[size], itemsize=size, meminfo=None)
    arguments = [words.next(argument_type) for argument_type in fndesc.argtypes[2:]]
    kernel = context.declare_function(module, fndesc)
    # kernels raise nothing
    context.call_conv.call_function(
        b, kernel, fndesc.restype, fndesc.argtypes, [counter._getvalue(), n_tasks, *arguments]
    )
    b.ret_void()
    library.add_ir_module(module)


class _Words:
    """Words of a record, read one after the other."""

    def __init__(self, context: Any, b: Any, start: Any) -> None:
        self._context, self._b, self._start, self._index = context, b, start, 0

    def next(self, argument_type: types.Type) -> Any:
        """Value of the next argument."""
        context, b = self._context, self._b
        if isinstance(argument_type, types.Array):
            array = make_array(argument_type)(context, b)
            data = b.inttoptr(b.load(self._word()), array.data.type)
            shape, strides = ([b.load(self._word()) for _ in range(argument_type.ndim)] for _ in range(2))
            itemsize = number(context.get_abi_sizeof(context.get_data_type(argument_type.dtype)))
            if argument_type.layout == "C" and argument_type.ndim:
                strides[-1] = itemsize
            populate_array(array, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
            return array._getvalue()
        if isinstance(argument_type, types.BaseTuple):
            return context.make_tuple(b, argument_type, [self.next(item) for item in argument_type])
        if isinstance(argument_type, types.Boolean):
            return b.icmp_unsigned("!=", b.load(self._word()), number(0))
        return b.load(b.bitcast(self._word(), context.get_value_type(argument_type).as_pointer()))

    def _word(self) -> Any:
        self._index += 1
        return self._b.gep(self._start, [number(self._index - 1)])
