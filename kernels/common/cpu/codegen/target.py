"""Features of the CPU that Numba compiles for. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES count, not only the host."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from gpu_ops.kernels.common.cpu.codegen.numba_api import llvm_version_info, target

TRIPLE, CPU_NAME, _FEATURES = target()
FEATURES = frozenset(_FEATURES.split(","))
VECTOR_BYTES = 64 if "+avx512f" in FEATURES else 32 if "+avx2" in FEATURES else 16
XEON = VECTOR_BYTES == 64 and not CPU_NAME.startswith("znver")
"""Whether the CPU is a Xeon. The two makes with vectors of 64 bytes differ in the best cache to prefetch into."""

NEAR = 2 if XEON else 3
"""Cache (3: first, 2: second) into which a loop prefetches data that it reads soon. A Xeon reads K, V rows into
the second at 84 to 91 % of memory bandwidth, into the first at 72 to 78 %; RMSNorm and SwiGLU gain 5 to 12 %."""

MAX_LANES = VECTOR_BYTES // 4
MR = 8 if VECTOR_BYTES == 64 else 4  # MR * 2 accumulators: half of the registers each width has
DOT_BFLOAT16 = VECTOR_BYTES == 64 and "+avx512bf16" in FEATURES and llvm_version_info >= (16,)
"""Whether one instruction adds two products of bfloat16 to a float32: twice the speed of float32. LLVM 15 (Numba
0.61) spells its operands differently."""

CONVERTS_FLOAT16 = "+f16c" in FEATURES or TRIPLE.startswith(("aarch64", "arm64"))
"""Whether there are instructions for float16 <-> float32. Elsewhere LLVM would call a library."""

SCALEF = VECTOR_BYTES == 64 and "+avx512dq" in FEATURES
"""Whether single instructions split numbers at an integer and multiply by powers of two."""

_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


@cache
def request_amx() -> bool:
    """Request AMX from Linux (arch_prctl), once per process. False without AMX, or where Linux refuses.

    Threads and forks inherit the permission. Linux refuses, for example, if a thread's signal stack is too small.
    """
    if sys.platform != "linux" or not {"+amx-tile", "+amx-bf16", "+amx-int8"} <= FEATURES:
        return False
    return ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0


TILES = DOT_BFLOAT16 and request_amx()
"""Whether bfloat16 is multiplied in tile registers: 16 times the speed of float32. See codegen/tiles.py."""
