"""What each PTX instruction computes, as pure functions on arrays; one module per family.

``lookup("fma", ("rn", "f32"))`` gives the :class:`Op` of one instruction form. It knows nothing of
threads: the machine hands it one array per source operand, viewed in the type the form names (see
:data:`~gpu_ops.emulator.types.DTYPE`), and stores the arrays that come back. Lengths broadcast: a value
that is the same for all threads arrives as an array of one element.

===============  ===================================================================================
``integer``      add ... dp4a on integers, carries
``bits``         popc ... bfind, bit fields
``logic``        and, or, xor, lop3, shifts, prmt; setp, set, selp, slct, testp
``floating``     add ... fma, div, rcp, sqrt, min, max on f16, bf16, f32, f64 and their pairs
``approximate``  ex2, lg2, sin, tanh, ...: forms with .approx or .full
``convert``      cvt
``matrix``       mma.sync, the fragments of ldmatrix, stmatrix and movmatrix
``warp``         shfl, vote, match, redux
``atomic``       what atom and red do to a value
===============  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["FLOAT", "INTEGER", "Op", "Unknown", "lookup", "semantics", "unknown"]

#: Types of the forms that two families share an opcode for: ``add.s32`` is integer, ``add.f32`` floating.
INTEGER = frozenset(("u16", "u32", "u64", "s16", "s32", "s64", "u16x2", "s16x2"))
FLOAT = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"))


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


def unknown(opcode: str, modifiers: tuple[str, ...]) -> Unknown:
    """The exception for a form that is not there, by its PTX name."""
    return Unknown(".".join((opcode, *modifiers)))


_Factory = Callable[[str, tuple[str, ...]], Op]
#: The factory of an opcode for forms that end in a type; under ``None`` the one for all forms.
_TABLE: dict[tuple[str, str | None], _Factory] = {}


def semantics(*opcodes: str, types: Iterable[str] | None = None) -> Callable[[_Factory], _Factory]:
    """Register ``factory(opcode, modifiers) -> Op``; it raises :class:`Unknown` for forms it has not.

    With ``types`` the factory gets only the forms whose last modifier is one of them.
    """
    endings: tuple[str | None, ...] = (None,) if types is None else tuple(types)

    def register(factory: _Factory) -> _Factory:
        for opcode in opcodes:
            for ending in endings:
                if _TABLE.setdefault((opcode, ending), factory) is not factory:
                    raise ValueError(f"{opcode} of type {ending} has a factory already")
        return factory

    return register


@cache
def lookup(opcode: str, modifiers: tuple[str, ...]) -> Op:
    """The semantics of ``opcode.modifiers``, for instance ``lookup("add", ("rn", "ftz", "f32"))``."""
    # Imported here because each family imports this module for `semantics`.
    from gpu_ops.emulator.instructions import approximate, bits, convert, floating, integer, logic  # noqa: F401

    factory = _TABLE.get((opcode, modifiers[-1] if modifiers else None)) or _TABLE.get((opcode, None))
    if factory is None:
        raise unknown(opcode, modifiers)
    return factory(opcode, modifiers)
