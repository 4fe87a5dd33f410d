"""Emulator of compiled GPU kernels (PTX) on the CPU, with sanitizer and profiler. See README.md in this folder."""
# ruff: noqa: E402  # Numba is imported before the modules that use it

from gpu_ops.kernels.compiler.numba_import import import_numba

import_numba()

from gpu_ops.emulator.buffers import Buffer, pointer
from gpu_ops.emulator.errors import EmulatorError, PtxError, SanitizerError, SanitizerNote, UnknownInstruction
from gpu_ops.emulator.profile import Profile
from gpu_ops.emulator.run import launch, profile, ptx_of, record
from gpu_ops.errors import suggest

__all__ = [
    "Buffer",
    "EmulatorError",
    "Profile",
    "PtxError",
    "SanitizerError",
    "SanitizerNote",
    "UnknownInstruction",
    "launch",
    "pointer",
    "profile",
    "ptx_of",
    "record",
]

suggest(globals(), __all__)
