"""Errors of the emulator: :class:`SanitizerError` reports a fault of the kernel, the others a bad call or bad PTX."""

from __future__ import annotations

from collections.abc import Sequence

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
