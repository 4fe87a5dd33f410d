"""What each PTX instruction computes, as pure functions on arrays; one module per family.

``lookup("fma", ("rn", "f32"))`` gives the :class:`Op` of one instruction form. It knows nothing of
threads: the machine hands it one array per source operand, viewed in the type the form names (see
:data:`~gpu_ops.emulator.types.DTYPE`), and stores the arrays that come back. Lengths broadcast: a value
that is the same for all threads arrives as an array of one element.

==============  ====================================================================================
``integer``     add ... dp4a on integers, carries
``logic``       and, or, xor, lop3, shifts, bit fields, prmt; setp, selp
``floating``    add ... fma, min, max on f16, bf16, f32, f64 and their pairs; rcp, ex2, tanh, ...
``convert``     cvt
``matrix``      mma.sync, the fragments of ldmatrix, stmatrix and movmatrix
``warp``        shfl, vote, match, redux
``atomic``      what atom and red do to a value
==============  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["Op", "Unknown", "lookup", "semantics"]


@dataclass(frozen=True)
class Op:
    """Pure semantics of one instruction form.

    ``writes`` and ``reads`` are PTX types in operand order; ``run`` takes one array per source and gives
    one array, or a tuple when there are several destinations. The pseudo type ``cc`` is the carry flag
    (bool): an instruction that uses it lists it last. A destination that the program leaves out
    (``setp`` without ``|q``) is dropped; sources are always all there.
    """

    writes: tuple[str, ...]
    reads: tuple[str, ...]
    run: Callable[..., Any]


class Unknown(LookupError):
    """No such instruction form."""


_Factory = Callable[[tuple[str, ...]], Op]
_TABLE: dict[str, _Factory] = {}


def semantics(*opcodes: str) -> Callable[[Callable[[str, tuple[str, ...]], Op]], Any]:
    """Register ``factory(opcode, modifiers) -> Op``; it raises :class:`Unknown` for forms it has not."""

    def register(factory: Callable[[str, tuple[str, ...]], Op]) -> Any:
        for opcode in opcodes:
            _TABLE[opcode] = lambda modifiers, opcode=opcode: factory(opcode, modifiers)  # type: ignore[misc]
        return factory

    return register


@cache
def lookup(opcode: str, modifiers: tuple[str, ...]) -> Op:
    """The semantics of ``opcode.modifiers``, for instance ``lookup("add", ("rn", "ftz", "f32"))``."""
    # Imported here because each family imports this module for `semantics`.
    from gpu_ops.emulator.instructions import convert, floating, integer, logic  # noqa: F401

    if opcode not in _TABLE:
        raise Unknown(opcode)
    return _TABLE[opcode](modifiers)
