"""Errors of the emulator: :class:`SanitizerError` reports a fault in the kernel, the others a bad call or bad PTX."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_ops.errors import GpuOpsError


class EmulatorError(GpuOpsError, RuntimeError):
    """The kernel cannot be run as asked: no such entry, wrong arguments, not enough memory."""


class PtxError(EmulatorError):
    """The PTX text cannot be parsed; the message names the line."""


class UnknownInstruction(PtxError):
    """The emulator does not implement this instruction form; the message names the form and its line."""


class SanitizerError(EmulatorError):
    """A fault in the kernel. ``kind`` is one of ``gpu_ops.emulator.sanitizer.KINDS``.

    With ``sanitize="collect"`` it stands for all faults of a launch: ``faults`` has an error for each of them, of
    which ``count`` is the number of times it was found. ``kind`` is that of the first.
    """

    def __init__(self, kind: str, message: str, faults: Sequence[SanitizerError] = ()) -> None:
        super().__init__(message if faults else f"{kind}: {message}")
        self.kind = kind
        self.count = 1
        self._faults = tuple(faults)

    @property
    def faults(self) -> tuple[SanitizerError, ...]:
        """Every fault that was found: only this one, unless the launch collected them."""
        return self._faults or (self,)


class SanitizerNote(UserWarning):
    """What is no fault, but worth knowing: a warning of a launch with ``sanitize="collect"`` that found no fault."""
