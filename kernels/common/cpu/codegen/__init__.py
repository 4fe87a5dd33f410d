"""Code generation for the CPU kernels: LLVM IR through Numba intrinsics, for code that Numba's loops cannot express.

==================  =================================================================================
numba_api           everything that is imported from Numba and llvmlite
numba_pipeline      compilers for kernels and for the device functions that are linked into them
target              the CPU that Numba compiles for: vector width, bfloat16 and int8 products, AMX
build               small helpers on an IR builder: loads, splats, shuffles, fused multiply-adds
memory              scratch arrays on cache lines, copies and prefetch of rows, round_up, min and max
arena               all scratch of a thread in one allocation; named tuples passed by reference
stream              non-temporal stores
rows, sums          functions of rows, chunk by chunk; sums over a few rows
gemm                C (+)= A B with C in registers, A by rows or by columns, of floats or bfloat16 pairs
tiles               gemm in AMX tile registers
exp2                powers of two of vectors
softmax             turns a tile of scores into weights; updates maximum and sum
decode              attention over a cache: scores, maxima, sums, weighted rows
decode_rows         rows of any element type to vectors
philox              random bits, a counter per 64-bit lane
==================  =================================================================================

Generators of one room are there: ``attention/cpu/backward_ir.py`` and ``tile.py`` (bias), ``rope/cpu/rotate_ir.py``,
``gemm/cpu/glu_ir.py``, ``norm/cpu/norm.py``, ``weights/cpu/ternary_ir.py``.

One generator serves vectors of 64, 32 and 16 bytes; a CPU that Numba names otherwise (ARM) gets 16 bytes of
generic IR. The disk cache hashes these files too: an edited generator makes new machine code.
"""
