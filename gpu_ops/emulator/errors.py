"""Errors of the emulator: :class:`SanitizerError` reports a fault in the kernel, the others a bad call or bad PTX."""

from __future__ import annotations

from gpu_ops.errors import GpuOpsError


class EmulatorError(GpuOpsError, RuntimeError):
    """The kernel cannot be run as asked: no such entry, wrong arguments, not enough memory."""


class PtxError(EmulatorError):
    """The PTX text cannot be parsed; the message names the line."""


class UnknownInstruction(PtxError):
    """The emulator does not implement this instruction form; the message names the form and its line."""


class SanitizerError(EmulatorError):
    """A fault in the kernel. ``kind`` is one of :data:`gpu_ops.emulator.sanitizer.KINDS`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
