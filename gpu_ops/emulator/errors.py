"""Errors of the emulator: :class:`SanitizerError` reports a fault of the kernel, the others a bad call or bad PTX."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from gpu_ops.errors import GpuOpsError


class EmulatorError(GpuOpsError, RuntimeError):
    """The launch is impossible: no such entry, wrong arguments, not enough memory."""


class PtxError(EmulatorError):
    """The PTX text cannot be parsed; the message names the line."""


class UnknownInstruction(PtxError):
    """The emulator does not implement this instruction form; the message names the form and its line."""


class SanitizerError(EmulatorError):
    """Fault of the kernel. ``kind`` is one of ``gpu_ops.emulator.sanitizer.KINDS``.

    With ``sanitize="collect"`` it represents all faults of a launch: ``faults`` has an error for each of them, whose
    ``count`` is the number of times it was found. ``kind`` is that of the first.
    """

    def __init__(self, kind: str, message: str, faults: Sequence[SanitizerError] = ()) -> None:
        super().__init__(message if faults else f"{kind}: {message}")
        self.kind = kind
        self.count = 1
        self._faults = tuple(faults)

    @property
    def faults(self) -> tuple[SanitizerError, ...]:
        """All faults found: only this one, unless the launch collected them."""
        return self._faults or (self,)


class SanitizerNote(UserWarning):
    """Warning of a launch with ``sanitize="collect"``: worth knowing, although it is no fault."""


# Names of PTX features that the emulator lacks, for error messages.
#
# The parser skips the operands of these instructions, and the machine refuses a program that contains one.

# Opcodes by feature.
_OPCODES = {
    "texture and surface instructions": "tex tld4 txq suld sust sured suq istypep",
    "mbarrier objects": "mbarrier",
    "tensor memory (tcgen05)": "tcgen05",
    "warpgroup products (wgmma)": "wgmma",
    "tensor maps (TMA)": "tensormap",
    "thread block clusters": "mapa getctarank clusterlaunchcontrol",
    "stack allocation (alloca)": "alloca stacksave stackrestore",
    "the scalar and SIMD video instructions": (
        "vadd vsub vabsdiff vmin vmax vshl vshr vmad vset "
        "vadd2 vsub2 vavrg2 vabsdiff2 vmin2 vmax2 vset2 vadd4 vsub4 vavrg4 vabsdiff4 vmin4 vmax4 vset4"
    ),
}
_FEATURE = {opcode: feature for feature, opcodes in _OPCODES.items() for opcode in opcodes.split()}

#: State spaces of opaque handles, which PTX declares like types.
HANDLES = {".texref", ".samplerref", ".surfref"}


def feature(opcode: str, modifiers: Sequence[str]) -> str:
    """Name of the missing feature that an instruction belongs to; empty if there is none."""
    if opcode == "cp" and ("bulk" in modifiers or "reduce" in modifiers):
        return "bulk and tensor copies (cp.async.bulk, TMA)"
    if opcode == "cp" and "mbarrier" in modifiers:
        return _FEATURE["mbarrier"]
    if opcode in ("st", "red") and "async" in modifiers:
        return "asynchronous stores (st.async)"
    if opcode == "mma" and any(word.startswith("sp") for word in modifiers):
        return "sparse tensor-core products (mma.sp)"
    if opcode == "barrier" and "cluster" in modifiers:
        return _FEATURE["mapa"]
    return _FEATURE.get(opcode, "")


@dataclass(eq=False)
class Faults:
    """Faults by kind and instructions, and notes by instruction, in the order in which they were first found."""

    found: dict[Hashable, SanitizerError] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)

    def repeated(self, key: Hashable) -> bool:
        """Whether a fault is already known; if so, count it."""
        known = self.found.get(key)
        if known is not None:
            known.count += 1
        return known is not None

    def finish(self, title: str) -> None:
        """Raise the faults, with the notes below; without faults, warn of the notes."""
        if not self.found:
            for note in self.notes.values():
                warnings.warn(note, SanitizerNote, stacklevel=4)
            return
        faults = tuple(self.found.values())
        lines = [
            f"{len(faults)} faults in kernel {title}" if len(faults) > 1 else f"1 fault in kernel {title}"
        ]
        for i, fault in enumerate(faults, 1):
            times = f" ({fault.count} times; the first:)" if fault.count > 1 else ""
            lines.append(f"{i}.{times} {fault}")
        lines += self.notes.values()
        raise SanitizerError(faults[0].kind, "\n".join(lines), faults)
