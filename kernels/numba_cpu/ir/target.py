"""What the CPU that Numba compiles for offers. Not only the host: NUMBA_CPU_NAME and NUMBA_CPU_FEATURES count too."""

from __future__ import annotations

from llvmlite.binding import llvm_version_info
from numba.core.registry import cpu_target

from gpu_ops.kernels.numba_cpu.jit import constant, uncounted
from gpu_ops.kernels.numba_cpu.permission import tiles_allowed

FEATURES = frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
VECTOR_BYTES = 64 if "+avx512f" in FEATURES else 32 if "+avx2" in FEATURES else 16
XEON = VECTOR_BYTES == 64 and not cpu_target.target_context.codegen().magic_tuple()[1].startswith("znver")
"""Of the two makes with vectors of 64 bytes: where it is best to ask memory for what comes next differs."""

NEAR = 2 if XEON else 3
"""Into which cache (3 the first, 2 the second) memory is asked for what a loop reads soon. A Xeon reads K and V rows
into its second at 84 to 91 % of what memory gives, into its first at 72 to 78 %; RMSNorm, SwiGLU gain 5 to 12 %."""

MAX_LANES = VECTOR_BYTES // 4
MR = 8 if VECTOR_BYTES == 64 else 4  # MR * 2 accumulators: half of the registers each width has
DOT_BFLOAT16 = VECTOR_BYTES == 64 and "+avx512bf16" in FEATURES and llvm_version_info >= (16,)
"""Whether one instruction adds two products of bfloat16 to a float32: twice the speed of float32. LLVM 15 (Numba
0.61) spells its operands in another way."""

TILES = DOT_BFLOAT16 and tiles_allowed()
"""Whether bfloat16 is multiplied in tile registers: 16 times the speed of float32. See ir/tiles.py."""

SCALEF = VECTOR_BYTES == 64 and "+avx512dq" in FEATURES
"""Whether single instructions split numbers at an integer and multiply by powers of two."""


@constant
def lanes(x):
    """Elements of array ``x`` in one vector."""
    return VECTOR_BYTES // (x.dtype.bitwidth // 8)


@uncounted
def round_up(n, step):
    return (n + step - 1) // step * step
