"""Vector micro-kernels on packed ``w2`` codes, as LLVM IR: what Numba's loops cannot express.

A u32 word holds 16 codes ``c = t + 1``; code e sits at bit ``8 * (e % 4) + 2 * (e // 4)``. So the four
byte lanes of ``word >> 2i & 0x03030303`` are codes 4i..4i+3: the unsigned operand of a 4 x int8 dot
product, and ``sum(c * x) - sum(x)`` is the dot product with the trits. Two ways to fill vectors:

=================  =============================  ====================================================
lanes along K      dot_int8, dot_float32          few tokens: a row is read as it lies, and summed
                                                  over the lanes once, at its end
lanes along N      unpack_*, then tile_*          many tokens: a block of rows is unpacked, transposed
                                                  into a panel that stays in L1, and reused by all
=================  =============================  ====================================================

LANES 32-bit elements make a vector: 16 with AVX-512, 8 with AVX2, else 4. Offsets and strides count
elements of arrays that are contiguous from their first element.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

FEATURES = frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
LANES = 16 if "+avx512vnni" in FEATURES and "+avx512bw" in FEATURES else 8 if "+avx2" in FEATURES else 4
VNNI = LANES == 16 or (LANES == 8 and "+avxvnni" in FEATURES)
TILE_M = 8 if LANES == 16 else 4  # tokens of a tile: 16 (8) sums, in 32 (16) registers
PANEL_ROWS = 2 * LANES  # rows of a panel: two vectors side by side
CHUNK = 16 * LANES  # codes in one vector of words

_SIZE = types.intp
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_INT = ir.VectorType(_I32, LANES)
_FLOAT = {"float32": ir.FloatType(), "float64": ir.DoubleType()}


def describe() -> str:
    """The instructions that the int8 kernels run on."""
    return {16: "AVX-512 VNNI", 8: "AVX-VNNI" if VNNI else "AVX2"}.get(LANES, "128-bit vectors")


# --- small IR helpers ----------------------------------------------------------------------------


def _n(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _all(value: int) -> ir.Constant:
    return ir.Constant(_INT, [value] * LANES)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def _row(
    context: Any, b: Any, array_type: Any, codes: Any, offset: Any, stride: Any, r: int, last: Any
) -> Any:
    """Row r of a block; rows past the matrix repeat the last one, and their results are not stored."""
    row = b.select(b.icmp_signed("<", _n(r), last), _n(r), last)
    return _pointer(context, b, array_type, codes, b.add(offset, b.mul(stride, row)))


def _load(b: Any, pointer: Any, vector: Any) -> Any:
    return b.load(b.bitcast(pointer, vector.as_pointer()), align=1)


def _store(b: Any, value: Any, pointer: Any) -> None:
    b.store(value, b.bitcast(pointer, value.type.as_pointer()), align=1)


def _splat(b: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    one = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _call(b: Any, name: str, result: Any, *args: Any) -> Any:
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)


def _dot4(b: Any, total: Any, codes: Any, x: Any) -> Any:
    """total[lane] += sum over the lane's 4 bytes of codes (unsigned, at most 3) * x (signed)."""
    if LANES == 16:
        return _call(b, "llvm.x86.avx512.vpdpbusd.512", _INT, total, codes, x)
    if VNNI:
        return _call(b, "llvm.x86.avx512.vpdpbusd.256", _INT, total, codes, x)
    if LANES == 8:  # pairs: at most 2 * 3 * 128, so int16 cannot saturate
        as_bytes, as_words = ir.VectorType(_I8, 32), ir.VectorType(ir.IntType(16), 16)
        left, right = b.bitcast(codes, as_bytes), b.bitcast(x, as_bytes)
        pairs = _call(b, "llvm.x86.avx2.pmadd.ub.sw", as_words, left, right)
        fours = _call(b, "llvm.x86.avx2.pmadd.wd", _INT, pairs, ir.Constant(as_words, [1] * 16))
        return b.add(total, fours)
    products = []  # int16 holds them; even and odd neighbours added as int32: a multiply-add on most CPUs
    for operand, widen in ((codes, b.zext), (x, b.sext)):
        as_bytes = b.bitcast(operand, ir.VectorType(_I8, 4 * LANES))
        products.append(
            widen(widen(as_bytes, ir.VectorType(ir.IntType(16), 4 * LANES)), ir.VectorType(_I32, 4 * LANES))
        )
    terms = b.mul(*products)
    width = 4 * LANES
    while width > LANES:
        width //= 2
        parts = [
            ir.Constant(ir.VectorType(_I32, width), [2 * i + odd for i in range(width)]) for odd in range(2)
        ]
        terms = b.add(*(b.shuffle_vector(terms, terms, part) for part in parts))
    return b.add(total, terms)


def _plane(b: Any, words: Any, i: int) -> Any:
    return b.and_(b.lshr(words, _all(2 * i)) if i else words, _all(0x03030303))


def _trit(b: Any, words: Any, e: int, dtype: str) -> Any:
    """Code e of each word as -1.0, 0.0 or 1.0."""
    shift = 8 * (e % 4) + 2 * (e // 4)
    index = b.lshr(words, _all(shift)) if shift else words
    vector = ir.VectorType(_FLOAT[dtype], LANES)
    if dtype == "float32" and LANES >= 8:  # a table in a register, indexed by the low two bits of each lane
        table = ir.Constant(vector, [-1.0, 0.0, 1.0, 2.0] * (LANES // 4))
        name = "llvm.x86.avx512.vpermilvar.ps.512" if LANES == 16 else "llvm.x86.avx.vpermilvar.ps.256"
        return _call(b, name, vector, table, index)
    return b.sitofp(b.sub(b.and_(index, _all(3)), _all(1)), vector)


def _fma(b: Any, x: Any, y: Any, total: Any) -> Any:
    # fmuladd: one instruction where the CPU has it, multiply and add (not a library call) elsewhere
    kind = "f64" if x.type.element == _FLOAT["float64"] else "f32"
    return _call(b, f"llvm.fmuladd.v{LANES}{kind}", x.type, x, y, total)


def _sum(b: Any, vector: Any) -> Any:
    """Sum over lanes, in a fixed tree."""
    add = b.add if vector.type.element == _I32 else b.fadd
    width = LANES
    while width > 1:
        width //= 2
        high = ir.Constant(ir.VectorType(_I32, LANES), [(i + width) % LANES for i in range(LANES)])
        vector = add(vector, b.shuffle_vector(vector, vector, high))
    return b.extract_element(vector, ir.Constant(_I32, 0))


def _copy_words(b: Any, source: Any, count: Any) -> Any:
    """``count`` < LANES words from memory, the rest zero: reads nothing past the row's end."""
    room = cgutils.alloca_once_value(b, ir.Constant(_INT, [0] * LANES))
    b.store(ir.Constant(_INT, [0] * LANES), room)
    target = b.bitcast(room, _I32.as_pointer())
    words = b.bitcast(source, _I32.as_pointer())
    with cgutils.for_range(b, count) as loop:
        b.store(b.load(b.gep(words, [loop.index]), align=1), b.gep(target, [loop.index]))
    return b.load(room)


# --- lanes along K -------------------------------------------------------------------------------


def _dot(rows: int, tokens: int, dtype: str) -> Any:
    """Codegen of ``out[t, r] = sum over words of codes(row r) * x(token t)``; codes as trits for floats."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, _, codes, offset, stride, last_row, x, x_offset, x_stride, words, out = args
        integer = dtype == "int8"
        vector = _INT if integer else ir.VectorType(_FLOAT[dtype], LANES)
        row_pointers = [
            _row(context, b, sig.args[2], codes, offset, stride, r, last_row) for r in range(rows)
        ]
        token_pointers = [
            _pointer(context, b, sig.args[6], x, b.add(x_offset, b.mul(x_stride, _n(t))))
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
        parts = 4 if integer else 16  # vectors of x that meet one vector of words

        def step(index: Any, loaded: list[Any]) -> None:
            first = b.mul(index, _n(CHUNK))
            for i in range(parts):
                if scaled:
                    mask = 0x03030303 << 2 * i
                    left = [b.and_(v, _all(mask - (mask >> 31 << 32))) for v in loaded]
                elif integer:
                    left = [_plane(b, v, i) for v in loaded]
                else:
                    left = [_trit(b, v, i, dtype) for v in loaded]
                for t in range(tokens):
                    start = b.add(first, _n(i * (4 * LANES if integer else LANES)))
                    right = _load(b, b.gep(token_pointers[t], [start]), vector)
                    for r in range(rows):
                        slot = acc[(t * rows + r) * sums + (i if scaled else 0)]
                        total = b.load(slot)
                        total = _dot4(b, total, left[r], right) if integer else _fma(b, left[r], right, total)
                        b.store(total, slot)

        full = b.udiv(words, _n(LANES))
        with cgutils.for_range(b, full) as loop:
            byte = b.mul(loop.index, _n(4 * LANES))
            step(loop.index, [_load(b, b.gep(p, [byte]), _INT) for p in row_pointers])
        tail = b.urem(words, _n(LANES))
        with b.if_then(b.icmp_unsigned("!=", tail, _n(0))):
            byte = b.mul(full, _n(4 * LANES))
            step(full, [_copy_words(b, b.gep(p, [byte]), tail) for p in row_pointers])

        result = _pointer(context, b, sig.args[10], out, _n(0))
        for slot in range(rows * tokens):
            total = b.load(acc[slot * sums])
            for i in range(1, sums):
                total = b.add(total, b.ashr(b.load(acc[slot * sums + i]), _all(2 * i)))
            b.store(_sum(b, total), b.gep(result, [_n(slot)]))
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


# --- lanes along N -------------------------------------------------------------------------------


def _transpose(b: Any, v: list[Any]) -> list[Any]:
    """LANES vectors as a square, transposed: blocks of 1, 2, 4, ... swap across the diagonal."""
    block = 1
    while block < LANES:
        low = [c if c & block == 0 else LANES + c - block for c in range(LANES)]
        high = [c + block if c & block == 0 else LANES + c for c in range(LANES)]
        masks = [ir.Constant(ir.VectorType(_I32, LANES), m) for m in (low, high)]
        for i in range(LANES):
            if i & block == 0:
                first, second = v[i], v[i | block]
                v[i] = b.shuffle_vector(first, second, masks[0])
                v[i | block] = b.shuffle_vector(first, second, masks[1])
        block *= 2
    return v


def _unpack(dtype: str) -> Any:
    """Codegen: LANES rows x ``words`` (<= LANES) words -> panel columns, one vector per k (int8: per 4 k)."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        codes, offset, stride, last_row, words, panel, panel_offset = args
        square = cgutils.alloca_once(b, ir.ArrayType(_INT, LANES))
        whole = b.icmp_unsigned("==", words, _n(LANES))
        for r in range(LANES):
            source = _row(context, b, sig.args[0], codes, offset, stride, r, last_row)
            slot = b.gep(square, [_n(0), _n(r)])
            with b.if_else(whole) as (then, otherwise):
                with then:
                    b.store(_load(b, source, _INT), slot)
                with otherwise:
                    b.store(_copy_words(b, source, words), slot)
        columns = _transpose(b, [b.load(b.gep(square, [_n(0), _n(r)])) for r in range(LANES)])
        target = _pointer(context, b, sig.args[5], panel, panel_offset)
        per_word = 4 if dtype == "int8" else 16
        step = (4 if dtype == "int8" else 1) * PANEL_ROWS
        for j, column in enumerate(columns):
            for i in range(per_word):
                value = _plane(b, column, i) if dtype == "int8" else _trit(b, column, i, dtype)
                _store(b, value, b.gep(target, [_n((j * per_word + i) * step)]))
        return context.get_dummy_value()

    return codegen


@intrinsic
def unpack_panel(typingctx, codes, offset, stride, last_row, words, panel, panel_offset):
    """Unpack LANES rows of up to LANES words into half a panel; the panel's dtype says as what.

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
        vector = _INT if integer else ir.VectorType(_FLOAT[dtype], LANES)
        width = 4 if integer else 1  # elements of x and of the panel per step and lane
        left = _pointer(context, b, sig.args[1], panel, panel_offset)
        result = _pointer(context, b, sig.args[7], acc, acc_offset)
        rows = [
            _pointer(context, b, sig.args[3], x, b.add(x_offset, b.mul(x_stride, _n(t))))
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
            first = b.mul(loop.index, _n(PANEL_ROWS * width))
            halves = [_load(b, b.gep(left, [b.add(first, _n(h * LANES * width))]), vector) for h in range(2)]
            element = b.mul(loop.index, _n(width))
            for t in range(tokens):
                pointer = b.bitcast(b.gep(rows[t], [element]), vector.element.as_pointer())
                value = _splat(b, b.load(pointer, align=1))
                for h in range(2):
                    slot = slots[2 * t + h]
                    total = b.load(slot)
                    b.store(
                        _dot4(b, total, halves[h], value) if integer else _fma(b, halves[h], value, total),
                        slot,
                    )
        for at, slot in enumerate(slots):
            target = b.gep(result, [_n(at * LANES)])  # added last: short sums first keep rounding small
            _store(b, add(_load(b, target, vector), b.load(slot)), target)
        return context.get_dummy_value()

    return codegen


@intrinsic(prefer_literal=True)
def tile(typingctx, tokens, panel, panel_offset, x, x_offset, x_stride, steps, acc, acc_offset):
    """``acc[tokens, PANEL_ROWS] += x @ panel`` over ``steps`` values of k (int8: steps of four k)."""
    sig = types.void(tokens, panel, _SIZE, x, _SIZE, _SIZE, _SIZE, acc, _SIZE)
    return sig, _tile(tokens.literal_value, str(panel.dtype))
