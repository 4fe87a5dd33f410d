"""Vector micro-kernels on packed ``w2`` codes, as LLVM IR: code that Numba's loops cannot express.

A u32 word holds 16 codes ``c = t + 1``; code e sits at bit ``8 * (e % 4) + 2 * (e // 4)``. So the four
byte lanes of ``word >> 2i & 0x03030303`` are codes 4i..4i+3: the unsigned operand of a 4 x int8 dot
product, and ``sum(c * x) - sum(x)`` is the dot product with the trits. Two ways to fill vectors (gradients multiply
trits as floats, or as pairs of bfloat16: unpack_row, unpack_pairs):

=================  =============================  ====================================================
lanes along K      dot_int8, dot_float32          few tokens: a row is read in place, and summed
                                                  over the lanes once, at its end
lanes along N      unpack_panel, then tile        many tokens: a block of rows is unpacked, transposed
                                                  into a panel that stays in L1, and reused by all
=================  =============================  ====================================================

Offsets and strides count elements of arrays that are contiguous from their first element.
"""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.common.cpu.codegen import build
from gpu_ops.kernels.common.cpu.codegen.build import (
    address,
    call,
    fma,
    lane_sum,
    lane_sums,
    load_vector,
    number,
    prefetch,
    store_vector,
)
from gpu_ops.kernels.common.cpu.codegen.build import splat as splat_any
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, intrinsic, ir, signature, types
from gpu_ops.kernels.common.cpu.codegen.target import FEATURES, XEON

_SIZE = types.intp

# ---- lanes along K -----------------------------------------------------------------------------------------


def _dot(rows: int, tokens: int, dtype: str) -> Any:
    """Codegen of ``out[t, r] = sum over words of codes(row r) * x(token t)``; codes as trits for floats."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, _, codes, offset, stride, last_row, x, x_offset, x_stride, words, out = args
        integer = dtype == "int8"
        vector = INT if integer else ir.VectorType(FLOAT[dtype], LANES)
        row_pointers = [
            row_pointer(context, b, sig.args[2], codes, offset, stride, r, last_row) for r in range(rows)
        ]
        token_pointers = [
            address(context, b, sig.args[6], x, b.add(x_offset, b.mul(x_stride, number(t))))
            for t in range(tokens)
        ]
        # One token: four sums per row, of 1, 4, 16 and 64 times the products, spare the shifts. Only where
        # 4 x 192 x 128 fits: AVX2 adds pairs of products in int16.
        scaled = integer and tokens == 1 and VNNI
        sums = 4 if scaled else 1
        zero = ir.Constant(vector, [0 if integer else 0.0] * LANES)
        acc = [cgutils.alloca_once_value(b, zero) for _ in range(rows * tokens * sums)]
        for slot in acc:
            b.store(zero, slot)
        parts = 4 if integer else 16  # vectors of x for one vector of words

        def step(index: Any, loaded: list[Any]) -> None:
            first = b.mul(index, number(CHUNK))
            for i in range(parts):
                if scaled:
                    mask = 0x03030303 << 2 * i
                    left = [b.and_(v, every(mask - (mask >> 31 << 32))) for v in loaded]
                elif integer:
                    left = [plane(b, v, i) for v in loaded]
                else:
                    left = [trit(b, v, i, dtype) for v in loaded]
                for t in range(tokens):
                    start = b.add(first, number(i * (4 * LANES if integer else LANES)))
                    right = load_vector(b, b.gep(token_pointers[t], [start]), vector)
                    for r in range(rows):
                        slot = acc[(t * rows + r) * sums + (i if scaled else 0)]
                        total = b.load(slot)
                        total = dot4(b, total, left[r], right) if integer else fma(b, left[r], right, total)
                        b.store(total, slot)

        full, ahead = b.udiv(words, number(LANES)), b.mul(stride, number(rows * (2 if tokens == 1 else 1)))
        with cgutils.for_range(b, full) as loop:
            byte = b.mul(loop.index, number(4 * LANES))
            for p in row_pointers:  # the same place in a later block of rows: cold weights arrive in time
                prefetch(b, b.gep(p, [b.add(byte, ahead)]), ONCE if tokens == 1 else 3)
            step(loop.index, [load_vector(b, b.gep(p, [byte]), INT) for p in row_pointers])
        tail = b.urem(words, number(LANES))
        with b.if_then(b.icmp_unsigned("!=", tail, number(0))):
            byte = b.mul(full, number(4 * LANES))
            step(full, [copy_words(b, b.gep(p, [byte]), tail) for p in row_pointers])

        result = address(context, b, sig.args[10], out, number(0))
        totals = []
        for slot in range(rows * tokens):
            total = b.load(acc[slot * sums])
            for i in range(1, sums):
                total = b.add(total, b.ashr(b.load(acc[slot * sums + i]), every(2 * i)))
            totals.append(total)
        if integer and len(totals) % LANES == 0:  # exact in any order: together, in a quarter of the steps
            for start in range(0, len(totals), LANES):
                store_vector(b, lane_sums(b, totals[start : start + LANES]), b.gep(result, [number(start)]))
        else:
            for slot, total in enumerate(totals):
                b.store(lane_sum(b, total), b.gep(result, [number(slot)]))
        return context.get_dummy_value()

    return codegen


@intrinsic(prefer_literal=True)
def dot_int8(typingctx, rows, tokens, codes, offset, stride, last_row, x, x_offset, x_stride, words, out):
    """int32 ``out[tokens, rows]``: sum of code * x over ``words`` words of each row.

    ``x`` is int8, per CHUNK of k ordered (plane, word, byte), zero where the codes are padding.
    """
    sig = types.void(rows, tokens, codes, _SIZE, _SIZE, _SIZE, x, _SIZE, _SIZE, _SIZE, out)
    return sig, _dot(rows.literal_value, tokens.literal_value, "int8")


@intrinsic(prefer_literal=True)
def dot_float32(typingctx, rows, tokens, codes, offset, stride, last_row, x, x_offset, x_stride, words, out):
    """float32 ``out[tokens, rows]``: sum of trit * x; ``x`` per CHUNK of k ordered (code, word)."""
    sig = types.void(rows, tokens, codes, _SIZE, _SIZE, _SIZE, x, _SIZE, _SIZE, _SIZE, out)
    return sig, _dot(rows.literal_value, tokens.literal_value, "float32")


# ---- lanes along N -----------------------------------------------------------------------------------------


def _unpack(dtype: str) -> Any:
    """Codegen: LANES rows x ``words`` (<= LANES) words -> panel columns, one vector per k (int8: per 4 k)."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        codes, offset, stride, last_row, words, panel, panel_offset = args
        square = cgutils.alloca_once(b, ir.ArrayType(INT, LANES))
        whole = b.icmp_unsigned("==", words, number(LANES))
        for r in range(LANES):
            source = row_pointer(context, b, sig.args[0], codes, offset, stride, r, last_row)
            slot = b.gep(square, [number(0), number(r)])
            prefetch(b, b.gep(source, [number(CHUNK // 2)]))  # two vectors of words on: the next panel
            with b.if_else(whole) as (then, otherwise):
                with then:
                    b.store(load_vector(b, source, INT), slot)
                with otherwise:
                    b.store(copy_words(b, source, words), slot)
        columns = transpose(b, [b.load(b.gep(square, [number(0), number(r)])) for r in range(LANES)])
        target = address(context, b, sig.args[5], panel, panel_offset)
        per_word = 4 if dtype == "int8" else 16
        step = (4 if dtype == "int8" else 1) * PANEL_ROWS
        for j, column in enumerate(columns):
            for i in range(per_word):
                value = plane(b, column, i) if dtype == "int8" else trit(b, column, i, dtype)
                store_vector(b, value, b.gep(target, [number((j * per_word + i) * step)]))
        return context.get_dummy_value()

    return codegen


@intrinsic
def unpack_panel(typingctx, codes, offset, stride, last_row, words, panel, panel_offset):
    """Unpack LANES rows of up to LANES words into half a panel, as the panel's dtype.

    int8: codes, four k per 32-bit lane, ``panel[k // 4, row, k % 4]``. float: trits, ``panel[k, row]``.
    Words beyond ``words`` count as zero; always CHUNK values of k are written.
    """
    sig = types.void(codes, _SIZE, _SIZE, _SIZE, _SIZE, panel, _SIZE)
    return sig, _unpack(str(panel.dtype))


def _tile(tokens: int, dtype: str) -> Any:
    """Codegen: acc[tokens, PANEL_ROWS] += x[tokens, steps] @ panel[steps, PANEL_ROWS]."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, panel, panel_offset, x, x_offset, x_stride, steps, acc, acc_offset = args
        integer = dtype == "int8"
        vector = INT if integer else ir.VectorType(FLOAT[dtype], LANES)
        width = 4 if integer else 1  # elements of x and of the panel per step and lane
        left = address(context, b, sig.args[1], panel, panel_offset)
        result = address(context, b, sig.args[7], acc, acc_offset)
        rows = [
            address(context, b, sig.args[3], x, b.add(x_offset, b.mul(x_stride, number(t))))
            for t in range(tokens)
        ]
        zero = ir.Constant(vector, [0 if integer else 0.0] * LANES)
        add = b.add if integer else b.fadd
        slots = []
        for _ in range(2 * tokens):
            slot = cgutils.alloca_once(b, vector)
            b.store(zero, slot)
            slots.append(slot)
        with cgutils.for_range(b, steps) as loop:
            first = b.mul(loop.index, number(PANEL_ROWS * width))
            halves = [
                load_vector(b, b.gep(left, [b.add(first, number(h * LANES * width))]), vector)
                for h in range(2)
            ]
            element = b.mul(loop.index, number(width))
            for t in range(tokens):
                source = b.bitcast(b.gep(rows[t], [element]), vector.element.as_pointer())
                value = splat(b, b.load(source, align=1))
                for h in range(2):
                    slot = slots[2 * t + h]
                    total = b.load(slot)
                    b.store(
                        dot4(b, total, halves[h], value) if integer else fma(b, halves[h], value, total),
                        slot,
                    )
        for at, slot in enumerate(slots):
            target = b.gep(result, [number(at * LANES)])  # added last: short sums keep rounding small
            store_vector(b, add(load_vector(b, target, vector), b.load(slot)), target)
        return context.get_dummy_value()

    return codegen


@intrinsic(prefer_literal=True)
def tile(typingctx, tokens, panel, panel_offset, x, x_offset, x_stride, steps, acc, acc_offset):
    """``acc[tokens, PANEL_ROWS] += x @ panel`` over ``steps`` values of k (int8: steps of four k)."""
    sig = types.void(tokens, panel, _SIZE, x, _SIZE, _SIZE, _SIZE, acc, _SIZE)
    return sig, _tile(tokens.literal_value, str(panel.dtype))


WORD = 16  # codes of a word


def _codes(b: Any, row: Any, index: Any) -> Any:
    """Vector of the codes in a word: code i is in byte i % 4, 2 (i // 4) bits up."""
    words = ir.VectorType(I32, WORD)
    word = b.load(b.gep(b.bitcast(row.data, I32.as_pointer()), [index]), align=1)
    shifts = ir.Constant(words, [8 * (i % 4) + 2 * (i // 4) for i in range(WORD)])
    return b.and_(b.lshr(splat_any(b, word, WORD), shifts), ir.Constant(words, [3] * WORD))


@intrinsic
def unpack_row(typingctx, to, codes):
    """to = trits of a row, or of whole words of it."""

    def codegen(context, b, sig, args):
        vector = ir.VectorType(FLOAT[to.dtype.name], WORD)
        target, source = (context.make_array(t)(context, b, x) for t, x in zip(sig.args, args, strict=True))
        unit = ir.Constant(ir.VectorType(I32, WORD), [1] * WORD)
        with cgutils.for_range(b, b.udiv(b.extract_value(source.shape, 0), number(4))) as loop:
            trits = b.sitofp(b.sub(_codes(b, source, loop.index), unit), vector)
            store_vector(b, trits, b.gep(target.data, [b.mul(loop.index, number(WORD))]))
        return context.get_dummy_value()

    return types.void(to, codes), codegen


_SIGNED = (-1, 0, 1, 0)  # trits by their codes


@intrinsic
def unpack_pairs(typingctx, panels, step, word, low, high, low_scale, high_scale):
    """Words of one step of panels, from ``word`` on = pairs of bfloat16: trits of two rows, each times its scale."""

    def codegen(context, b, sig, args):
        words = ir.VectorType(I32, WORD)

        def vector(of: Any) -> Any:
            return ir.Constant(words, [of(i) & 0xFFFFFFFF for i in range(WORD)])

        def products(scale: Any, shift: int, trit: Any) -> Any:
            """``trit`` of an index times the scale, ``shift`` bits up."""
            bits = splat_any(b, b.shl(b.zext(scale, I32), I32(shift)), WORD)
            present = b.and_(bits, vector(lambda i: 0xFFFF << shift if trit(i) else 0))
            return b.xor(present, vector(lambda i: 0x8000 << shift if trit(i) < 0 else 0))

        pairs = b.or_(
            products(args[5], 0, lambda i: _SIGNED[i % 4]), products(args[6], 16, lambda i: _SIGNED[i // 4])
        )
        target, *rows = (context.make_array(sig.args[i])(context, b, args[i]) for i in (0, 3, 4))
        panel, start = b.extract_value(target.shape, 1), b.mul(args[1], number(2 * WORD))
        with cgutils.for_range(b, b.udiv(b.extract_value(rows[0].shape, 0), number(4))) as loop:
            first, second = (_codes(b, row, loop.index) for row in rows)
            index = b.or_(first, b.shl(second, ir.Constant(words, [2] * WORD)))
            permuted = call(b, "llvm.x86.avx512.permvar.si.512", words, pairs, index)
            at = b.add(args[2], loop.index)
            half = b.mul(b.and_(at, number(1)), number(WORD))  # a panel has two vectors
            place = b.add(b.mul(b.lshr(at, number(1)), panel), b.add(start, half))
            store_vector(b, permuted, b.gep(target.data, [place]))
        return context.get_dummy_value()

    i = types.int64
    return signature(types.void, panels, i, i, low, high, low_scale, high_scale), codegen


# LLVM IR for the ternary micro-kernels: the vector width, and operations on vectors of packed codes.
#
# LANES 32-bit elements make a vector: 16 with AVX-512, 8 with AVX2, else 4. ``b`` is an IR builder.

LANES = 16 if "+avx512vnni" in FEATURES and "+avx512bw" in FEATURES else 8 if "+avx2" in FEATURES else 4
VNNI = LANES == 16 or (LANES == 8 and "+avxvnni" in FEATURES)
TILE_M = 8 if LANES == 16 else 4  # tokens of a tile: 16 (8) sums, in 32 (16) registers
PANEL_ROWS = 2 * LANES  # rows of a panel: two adjacent vectors
CHUNK = 16 * LANES  # codes in one vector of words

I8, I32 = ir.IntType(8), ir.IntType(32)
INT = ir.VectorType(I32, LANES)
# Cache into which codes that are read once are prefetched. Into the first only, a Xeon would read them
# at little more than half the speed.
ONCE = 3 if XEON else 0
FLOAT = {"float32": ir.FloatType(), "float64": ir.DoubleType()}


def describe() -> str:
    """Names of the instructions that the int8 kernels use."""
    return {16: "AVX-512 VNNI", 8: "AVX-VNNI" if VNNI else "AVX2"}.get(LANES, "128-bit vectors")


def every(value: int) -> ir.Constant:
    return ir.Constant(INT, [value] * LANES)


def splat(b: Any, scalar: Any) -> Any:
    return build.splat(b, scalar, LANES)


def row_pointer(
    context: Any, b: Any, array_type: Any, codes: Any, offset: Any, stride: Any, r: int, last: Any
) -> Any:
    """Pointer to row r of a block; rows past the matrix repeat the last one, and their results are not stored."""
    row = b.select(b.icmp_signed("<", number(r), last), number(r), last)
    return address(context, b, array_type, codes, b.add(offset, b.mul(stride, row)))


def dot4(b: Any, total: Any, codes: Any, x: Any) -> Any:
    """total[lane] += sum over the lane's 4 bytes of codes (unsigned, at most 3) * x (signed)."""
    if LANES == 16:
        return call(b, "llvm.x86.avx512.vpdpbusd.512", INT, total, codes, x)
    if VNNI:
        return call(b, "llvm.x86.avx512.vpdpbusd.256", INT, total, codes, x)
    if LANES == 8:  # pairs: at most 2 * 3 * 128, so int16 cannot saturate
        as_bytes, as_words = ir.VectorType(I8, 32), ir.VectorType(ir.IntType(16), 16)
        left, right = b.bitcast(codes, as_bytes), b.bitcast(x, as_bytes)
        pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", as_words, left, right)
        fours = call(b, "llvm.x86.avx2.pmadd.wd", INT, pairs, ir.Constant(as_words, [1] * 16))
        return b.add(total, fours)
    products = []  # int16 holds them; even and odd neighbours added as int32: a multiply-add on most CPUs
    for operand, widen in ((codes, b.zext), (x, b.sext)):
        as_bytes = b.bitcast(operand, ir.VectorType(I8, 4 * LANES))
        products.append(
            widen(widen(as_bytes, ir.VectorType(ir.IntType(16), 4 * LANES)), ir.VectorType(I32, 4 * LANES))
        )
    terms = b.mul(*products)
    width = 4 * LANES
    while width > LANES:
        width //= 2
        parts = [
            ir.Constant(ir.VectorType(I32, width), [2 * i + odd for i in range(width)]) for odd in range(2)
        ]
        terms = b.add(*(b.shuffle_vector(terms, terms, part) for part in parts))
    return b.add(total, terms)


def plane(b: Any, words: Any, i: int) -> Any:
    return b.and_(b.lshr(words, every(2 * i)) if i else words, every(0x03030303))


def trit(b: Any, words: Any, e: int, dtype: str) -> Any:
    """Code e of each word as -1.0, 0.0 or 1.0."""
    shift = 8 * (e % 4) + 2 * (e // 4)
    index = b.lshr(words, every(shift)) if shift else words
    vector = ir.VectorType(FLOAT[dtype], LANES)
    if dtype == "float32" and LANES >= 8:  # a table in a register, indexed by the low two bits of each lane
        table = ir.Constant(vector, [-1.0, 0.0, 1.0, 2.0] * (LANES // 4))
        name = "llvm.x86.avx512.vpermilvar.ps.512" if LANES == 16 else "llvm.x86.avx.vpermilvar.ps.256"
        return call(b, name, vector, table, index)
    return b.sitofp(b.sub(b.and_(index, every(3)), every(1)), vector)


def copy_words(b: Any, source: Any, count: Any) -> Any:
    """``count`` < LANES words from memory, the rest zero: reads nothing past the row's end."""
    room = cgutils.alloca_once_value(b, ir.Constant(INT, [0] * LANES))
    b.store(ir.Constant(INT, [0] * LANES), room)
    target = b.bitcast(room, I32.as_pointer())
    words = b.bitcast(source, I32.as_pointer())
    with cgutils.for_range(b, count) as loop:
        b.store(b.load(b.gep(words, [loop.index]), align=1), b.gep(target, [loop.index]))
    return b.load(room)


def transpose(b: Any, v: list[Any]) -> list[Any]:
    """LANES vectors as a square, transposed: blocks of 1, 2, 4, ... swap across the diagonal."""
    block = 1
    while block < LANES:
        low = [c if c & block == 0 else LANES + c - block for c in range(LANES)]
        high = [c + block if c & block == 0 else LANES + c for c in range(LANES)]
        masks = [ir.Constant(ir.VectorType(I32, LANES), m) for m in (low, high)]
        for i in range(LANES):
            if i & block == 0:
                first, second = v[i], v[i | block]
                v[i] = b.shuffle_vector(first, second, masks[0])
                v[i | block] = b.shuffle_vector(first, second, masks[1])
        block *= 2
    return v
