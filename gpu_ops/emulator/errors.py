"""Errors of the emulator: a :class:`SanitizerError` is a fault of the kernel, the others of the call or the PTX."""

from __future__ import annotations

from gpu_ops.errors import GpuOpsError

__all__ = ["EmulatorError", "PtxError", "SanitizerError", "UnknownInstruction"]


class EmulatorError(GpuOpsError, RuntimeError):
    """The kernel cannot be run as asked: no such entry, wrong arguments, not enough memory."""


class PtxError(EmulatorError):
    """PTX text that is not understood; the message names the line."""


class UnknownInstruction(PtxError):
    """An instruction form the emulator does not have; the message names it and its line."""


class SanitizerError(EmulatorError):
    """A fault the kernel made. ``kind`` is one of :data:`gpu_ops.emulator.sanitizer.KINDS`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
