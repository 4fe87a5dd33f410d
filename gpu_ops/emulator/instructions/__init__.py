"""Semantics of PTX instructions, as pure functions on arrays; one module per family.

``lookup("fma", ("rn", "f32"))`` returns an :class:`InstructionForm`, which is independent of threads. The
machine passes it one array per source operand, viewed in the type that the form names (see
:data:`~gpu_ops.emulator.syntax.DTYPE`), and stores the arrays that it returns. Lengths broadcast: a value that is the
same for all threads arrives as an array of one element.

===============  ===================================================================================
``integer``      add ... dp4a on integers, carries; popc ... bfind, bit fields
``logic``        and, or, xor, lop3, shifts, prmt; setp, set, selp, slct, testp
``floating``     add ... fma, div, rcp, sqrt, min, max; ex2, sin, ... with .approx or .full
``elements``     code shared by the floating-point families: packing, flushing, rounding
``convert``      cvt
``matrix``       mma.sync, the fragments of ldmatrix, stmatrix and movmatrix
``warp_ops``     shfl, vote, match, redux, elect
``atomic``       effect of atom and red on a value
===============  ===================================================================================
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

FLOAT = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"))


@dataclass(frozen=True)
class InstructionForm:
    """Semantics of one instruction form.

    ``writes`` and ``reads`` are PTX types in operand order. ``run`` takes one array per source and returns one
    array, or a tuple for several destinations. The pseudo type ``cc`` is the carry flag (bool); an instruction that
    uses it lists it last. The machine drops a destination that the program omits (``setp`` without ``|q``); sources
    are never omitted.
    """

    writes: tuple[str, ...]
    reads: tuple[str, ...]
    run: Callable[..., Any]


class Unknown(LookupError):
    """Error: no such instruction form exists."""


def unknown(opcode: str, modifiers: Iterable[str]) -> Unknown:
    """The exception for an unknown form, with its PTX name."""
    return Unknown(".".join((opcode, *modifiers)))


#: Factories of single forms, by PTX name.
_FORMS: dict[str, Callable[..., InstructionForm]] = {}

_Factory = Callable[[str, tuple[str, ...]], InstructionForm]
#: Factories of all other forms, by opcode and last modifier; ``None`` is for any form of the opcode.
_FAMILIES: dict[tuple[str, str | None], _Factory] = {}


def forms(*patterns: str) -> Callable[[Callable[..., InstructionForm]], Callable[..., InstructionForm]]:
    """Register ``factory(opcode, *modifiers)`` for forms in shell patterns: ``mul.{lo,hi}.u32``."""

    def register(factory: Callable[..., InstructionForm]) -> Callable[..., InstructionForm]:
        for pattern in patterns:
            pieces = re.split(r"\{([^}]*)\}", pattern)
            for chosen in itertools.product(*(piece.split(",") for piece in pieces)):
                form = "".join(chosen)
                if _FORMS.setdefault(form, factory) is not factory:
                    raise ValueError(f"{form} already has a factory")
        return factory

    return register


def family(*opcodes: str, types: Iterable[str | None] = (None,)) -> Callable[[_Factory], _Factory]:
    """Register ``factory(opcode, modifiers)`` for the forms of these opcodes whose last modifier is one of the types.

    The factory raises :class:`Unknown` for forms that do not exist.
    """

    def register(factory: _Factory) -> _Factory:
        for key in itertools.product(opcodes, types):
            if _FAMILIES.setdefault(key, factory) is not factory:
                raise ValueError(f"{key[0]} of type {key[1]} already has a factory")
        return factory

    return register


@cache
def lookup(opcode: str, modifiers: tuple[str, ...]) -> InstructionForm:
    """Semantics of ``opcode.modifiers``, for instance ``lookup("add", ("rn", "ftz", "f32"))``."""
    form = _FORMS.get(".".join((opcode, *modifiers)))
    if form is not None:
        return form(opcode, *modifiers)
    last = modifiers[-1] if modifiers else None
    factory = _FAMILIES.get((opcode, last)) or _FAMILIES.get((opcode, None))
    if factory is None:
        raise unknown(opcode, modifiers)
    return factory(opcode, modifiers)
