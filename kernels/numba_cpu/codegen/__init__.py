"""Vector micro-kernels, emitted as LLVM IR through Numba intrinsics: what Numba's loops cannot express.

==================  =================================================================================
target              what Numba's target offers: vector width, native bfloat16 and int8 dot products
build               small helpers on an IR builder: loads, splats, shuffles, fused multiply-adds
memory, scalar      scratch arrays on cache-line boundaries, rows fetched ahead; smaller and larger
stream              stores past the caches
rows, norm, sums    a function of rows, vector by vector; the sums of norms and of their gradients
arena_array               the arrays of a thread in one piece of memory
by_reference                named tuples passed as one pointer
gemm                C (+)= A B with C in registers, A by rows or by columns, of floats or bfloat16 pairs
tiles               the same in tile registers
exp2                powers of two of vectors
softmax             scores of a tile of keys become weights, maximum and sum move along
attention_gradient  S and dP of a tile of keys become P and dS in registers
bias                bias of scores: squares of it transposed in registers, and added
decode              attention over a cache: scores, maxima, sums, weighted rows
decode_rows         how 16-bit rows become vectors there; narrow: and vectors rows
rotate              halves of heads, rotated: of all heads of a token, or of tokens of a head
activations, gated  gated activations of vectors, and of rows
codes, ternary      2-bit codes times int8 or floats
==================  =================================================================================

One generator serves 64, 32 and 16 byte vectors; a target that Numba names otherwise (ARM) gets 16 bytes of
generic IR. The disk cache hashes these files too: an edited generator makes new machine code.
"""
