"""Leave to use x86's tile registers (AMX): a process on Linux has to ask for them once, before the first use."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from numba.core.registry import cpu_target

_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


@cache
def tiles_allowed() -> bool:
    """Whether the CPU that Numba compiles for has tile registers, and the system lets this process use them.

    Threads and forks inherit it. Linux refuses, for one, where a thread has too small a stack for its signals.
    """
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    if sys.platform != "linux" or not {"+amx-tile", "+amx-bf16", "+amx-int8"} <= set(features):
        return False
    return ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0
