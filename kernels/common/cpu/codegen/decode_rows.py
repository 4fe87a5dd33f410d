"""Conversion of rows of K and V to vectors, and the order of their elements.

64 bytes of a row (one *chunk*; VECTOR_BYTES on smaller CPUs) are one, two or four vectors of the computing type:

=================  ===========================================================================
float32, float64   one vector, in order
float16            two vectors: first half, second half
bfloat16           two vectors: even elements, odd elements. A bfloat16 is the upper half of a
                   float32, so one shift and one mask of 32-bit words widen both.
int8, uint8        four vectors, in order. uint8 has the bits of e4m3, and the vectors are 1 / UNIT of
                   it: its bits, in the upper part of a float16, whose exponent's bias is 8 higher.
=================  ===========================================================================

Q and O are kept in that order (``slot`` says where element d is), so K and V are never reordered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.build import call, load_vector, shuffle, splat
from gpu_ops.kernels.common.cpu.codegen.memory import copy_row
from gpu_ops.kernels.common.cpu.codegen.numba_api import ir, types
from gpu_ops.kernels.common.cpu.codegen.target import DOT_BFLOAT16, FEATURES, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.dtype import like, load, store
from gpu_ops.kernels.common.cpu.jit import generic

UNIT = 256

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)


@generic
def query_type(x):
    """Zero of the type of queries in ``score_keys`` for rows of ``x``: words of two, or the computing type."""
    if x.dtype == types.uint16 and DOT_BFLOAT16:
        return lambda x: np.uint32(0)
    if x.dtype == types.float64:
        return lambda x: np.float64(0)
    return lambda x: np.float32(0)


@generic
def to_query(x, dst, row, n):
    """Copy ``n`` elements of ``row`` to ``dst`` in the form that ``score_keys`` takes."""
    if dst.dtype == types.uint32:
        return lambda x, dst, row, n: copy_row(dst, row, n)
    return lambda x, dst, row, n: to_slots(x, dst, row, n, like(dst[0], 1.0))


@generic
def slot(x, d):
    """Position of element ``d`` of a row of array ``x`` in its vectors."""
    if x.dtype != types.uint16:
        return lambda x, d: d
    chunk, half = VECTOR_BYTES // 2, VECTOR_BYTES // 4
    return lambda x, d: d // chunk * chunk + d % 2 * half + d % chunk // 2


@generic
def to_slots(x, dst, row, n, factor):
    """dst = factor * row, ``n`` elements in the order of the vectors of array ``x``."""
    chunk, half = VECTOR_BYTES // 2, VECTOR_BYTES // 4

    def in_order(x, dst, row, n, factor):
        for d in range(n):
            dst[d] = load(row, d) * factor

    def apart(x, dst, row, n, factor):  # whole chunks in a form that LLVM turns into vectors
        for c in range(0, n - n % chunk, chunk):
            for i in range(half):
                dst[c + i] = load(row, c + 2 * i) * factor
                dst[c + half + i] = load(row, c + 2 * i + 1) * factor
        for d in range(n - n % chunk, n):
            dst[slot(x, d)] = load(row, d) * factor

    return apart if x.dtype == types.uint16 else in_order


@generic
def from_slots(x, dst, src, n, factor):
    """dst = factor * src, back from that order and rounded to the dtype of ``dst``."""
    chunk, half = VECTOR_BYTES // 2, VECTOR_BYTES // 4

    def in_order(x, dst, src, n, factor):
        for d in range(n):
            store(dst, d, src[d] * factor)

    def together(x, dst, src, n, factor):
        for c in range(0, n - n % chunk, chunk):
            for i in range(half):
                store(dst, c + 2 * i, src[c + i] * factor)
                store(dst, c + 2 * i + 1, src[c + half + i] * factor)
        for d in range(n - n % chunk, n):
            store(dst, d, src[slot(x, d)] * factor)

    return together if x.dtype == types.uint16 else in_order


@generic
def chunk_elements(x):
    """Elements of array ``x`` in one chunk."""
    elements = VECTOR_BYTES * 8 // x.dtype.bitwidth
    return lambda x: elements


class Rows:
    """Conversion of rows of one element type to vectors."""

    def __init__(self, dtype: types.Type) -> None:
        self.wide = ir.DoubleType() if dtype == types.float64 else ir.FloatType()
        self.lanes = VECTOR_BYTES // (8 if dtype == types.float64 else 4)
        self.vector = ir.VectorType(self.wide, self.lanes)
        self.parts = 32 // dtype.bitwidth if dtype.bitwidth < 32 else 1
        self.elements = self.lanes * self.parts
        self.zero = ir.Constant(self.vector, [0.0] * self.lanes)
        self.dtype = dtype
        if dtype == types.uint16:
            self.raw = ir.VectorType(_I16, self.elements)
        elif dtype == types.int16:
            self.raw = ir.VectorType(ir.HalfType() if "+f16c" in FEATURES else _I16, self.elements)
        elif dtype.bitwidth == 8:
            self.raw = ir.VectorType(_I8, self.elements)
        else:
            self.raw = self.vector
        element = {"half": "f16", "float": "f32", "double": "f64"}.get(
            str(self.raw.element), str(self.raw.element)
        )
        self.kind = f"v{self.elements}{element}"

    def elements_of_lanes(self) -> list[list[int]]:
        """Element in each lane, for each vector of a chunk."""
        n = self.lanes
        if self.dtype == types.uint16:
            return [[2 * lane + odd for lane in range(n)] for odd in range(2)]
        return [[part * n + lane for lane in range(n)] for part in range(self.parts)]

    def load(self, b: Any, pointer: Any, count: Any = None) -> list[Any]:
        """Load the vectors of the chunk at ``pointer``; with ``count``, its first elements, then zeros."""
        return self.widen(b, self.load_raw(b, pointer, count))

    def load_raw(self, b: Any, pointer: Any, count: Any = None) -> Any:
        """Load the chunk without conversion."""
        if count is None:
            return load_vector(b, pointer, self.raw)
        zero = b.bitcast(ir.Constant(ir.VectorType(_I8, VECTOR_BYTES), [0] * VECTOR_BYTES), self.raw)
        args = b.bitcast(pointer, self.raw.as_pointer()), ir.Constant(_I32, 1), self.first(b, count), zero
        return call(b, f"llvm.masked.load.{self.kind}.p0", self.raw, *args)

    def store_raw(self, b: Any, raw: Any, pointer: Any, count: Any) -> None:
        """Store the first ``count`` elements of a chunk."""
        pointers = b.bitcast(raw, self.raw), b.bitcast(pointer, self.raw.as_pointer())
        mask = self.first(b, count)
        call(b, f"llvm.masked.store.{self.kind}.p0", ir.VoidType(), *pointers, ir.Constant(_I32, 1), mask)

    def first(self, b: Any, count: Any) -> Any:
        """Mask of the first ``count`` elements of a chunk."""
        lanes = ir.Constant(ir.VectorType(_I32, self.elements), list(range(self.elements)))
        return b.icmp_signed("<", lanes, splat(b, b.trunc(count, _I32), self.elements))

    def widen(self, b: Any, raw: Any) -> list[Any]:
        """Vectors of a chunk, from its contiguous elements."""
        if self.parts == 1:
            return [raw]
        words = ir.VectorType(_I32, self.lanes)
        every = lambda value: ir.Constant(words, [value] * self.lanes)  # noqa: E731
        if self.dtype == types.uint16:
            pairs = b.bitcast(raw, words)
            halves = [b.shl(pairs, every(16)), b.and_(pairs, every(-65536))]
            return [b.bitcast(half, self.vector) for half in halves]
        n = self.lanes
        if self.dtype == types.uint8:
            raw = _halves_of_e4m3(b, raw)
        halves = [shuffle(b, raw, raw, list(range(part * n, part * n + n))) for part in range(self.parts)]
        if self.dtype == types.int8:
            return [b.sitofp(half, self.vector) for half in halves]
        if raw.type.element != _I16:
            return [b.fpext(half, self.vector) for half in halves]
        result = []
        for half in halves:  # as float32_of_float16 in dtype.py
            h = b.zext(half, words)
            scaled = b.bitcast(b.shl(b.and_(h, every(0x7FFF)), every(13)), self.vector)
            magnitude = b.fmul(scaled, ir.Constant(self.vector, [2.0**112] * n))
            special = b.fcmp_ordered(">=", magnitude, ir.Constant(self.vector, [65536.0] * n))
            u = b.or_(b.bitcast(magnitude, words), b.select(special, every(0x7F800000), every(0)))
            sign = b.shl(b.and_(h, every(0x8000)), every(16))
            result.append(b.bitcast(b.or_(u, sign), self.vector))
        return result


def _halves_of_e4m3(b: Any, raw: Any) -> Any:
    """Each byte as float16, or its bits where the CPU does not convert it: 2^-8 of the number, NaN for NaN."""
    n = raw.type.count
    words = ir.VectorType(_I16, n)
    every = lambda value: ir.Constant(words, [value] * n)  # noqa: E731
    h = b.and_(b.shl(b.sext(raw, words), every(7)), every(~0x4000))  # the sign, a zero, exponent and mantissa
    is_nan = b.icmp_signed("==", b.and_(h, every(0x3F80)), every(0x3F80))
    h = b.or_(h, b.select(is_nan, every(0x7C00), every(0)))
    return b.bitcast(h, ir.VectorType(ir.HalfType(), n)) if "+f16c" in FEATURES else h
