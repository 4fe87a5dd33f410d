"""Code generation for the CPU kernels: LLVM IR through Numba intrinsics, for code that Numba's loops cannot express.

==================  =================================================================================
numba_api           everything that is imported from Numba and llvmlite
numba_pipeline      compilers for kernels and for the device functions that are linked into them
target              the CPU that Numba compiles for: vector width, bfloat16 and int8 products, AMX
build               small helpers on an IR builder: loads, splats, shuffles, fused multiply-adds
memory              scratch arrays on cache lines, copies and prefetch of rows, round_up, min and max
arena               all scratch of a thread in one allocation; named tuples passed by reference
stream              non-temporal stores
rows, norm, sums    functions of rows, chunk by chunk; the passes of the norms and their sums
gemm                C (+)= A B with C in registers, A by rows or by columns, of floats or bfloat16 pairs
tiles               gemm in AMX tile registers
exp2                powers of two of vectors
softmax             turns a tile of scores into weights; updates maximum and sum
attention_gradient  turns S and dP of a tile of keys into P and dS in registers
bias                adds bias to scores: squares are transposed in registers
decode              attention over a cache: scores, maxima, sums, weighted rows
decode_rows         rows of any element type to vectors; convert: vectors to rows
rotate              halves of heads, rotated: of all heads of a token, or of tokens of a head
glu                 gated activations of vectors and of rows
ternary_codes       vectors of 2-bit codes; ternary: their products with int8 or floats
==================  =================================================================================

One generator serves vectors of 64, 32 and 16 bytes; a CPU that Numba names otherwise (ARM) gets 16 bytes of
generic IR. The disk cache hashes these files too: an edited generator makes new machine code.
"""
