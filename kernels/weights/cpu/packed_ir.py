"""Vector code for panels of packed weights (:mod:`gpu_ops.kernels.weights.packed_panels`), per layout of block.

    unpack      32 weights of LANES rows as float32, one vector per step of K: the operands of float products
    sums        float32 sums over all of K of these, or of pairs of bfloat16, in the order of K
    dot         float32 sums over all of K with int8 activations: integer sums per block, then their scales

A vector lane is a row, so that every row adds up in the order of K, and its bits do not depend on the CPU. Panels are
read one after the other: a single stream, which the hardware prefetches. On a Zen 4 core two or four panels at once,
or prefetching them by instructions, took 1 to 2.2 times as long, except where a block is several streams.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

from gpu_ops.kernels.common.cpu.codegen import build
from gpu_ops.kernels.common.cpu.codegen.build import (
    address,
    dot_bfloat16,
    fma,
    load_vector,
    number,
    prefetch,
    rounded,
    store_vector,
)
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, intrinsic, ir, signature, types
from gpu_ops.kernels.common.cpu.packing import SUM_STEPS
from gpu_ops.kernels.weights.cpu.packed_values import (
    BYTES,
    FLOAT,
    byte_values,
    float_values,
    half,
    looked_up,
    plain_values,
    power_of_two,
)
from gpu_ops.kernels.weights.cpu.ternary_ir import INT, LANES, VNNI, dot4, every, splat
from gpu_ops.kernels.weights.packed_panels import BlockLayout

UNIT = 32  # weights of a row that are unpacked at a time: whole vectors of every plane

_LINE = 64  # bytes of a cache line
_I8, _I16 = ir.IntType(8), ir.IntType(16)


class _Block:
    """Pointers to the fields of one block of a panel."""

    def __init__(self, b: Any, layout: BlockLayout, start: Any) -> None:
        self.b, self.layout = b, layout
        self.scale = start
        self.minimum = b.gep(start, [number(layout.scale_bytes * LANES)])
        self.run_scales = b.gep(self.minimum, [number(2 * layout.has_minimum * LANES)])
        self.run_minimums = b.gep(self.run_scales, [number(layout.has_run_scales * layout.runs * LANES)])
        self.low = b.gep(self.run_minimums, [number(layout.has_run_minimums * layout.runs * LANES)])
        self.high = b.gep(self.low, [number(layout.block * layout.planes[0] // 8 * LANES)])

    def scales(self) -> Any:
        """Scales of the rows, float32."""
        if self.layout.scale_bytes >= 4:
            return load_vector(self.b, self.scale, FLOAT)
        return power_of_two(self.b, self.scale) if self.layout.scale_bytes == 1 else half(self.b, self.scale)

    def minimums(self) -> Any:
        return half(self.b, self.minimum)

    def run_scale(self, run: Any) -> Any:
        """Scales of a run, int32."""
        return self.b.sext(load_vector(self.b, self._run(run), ir.VectorType(_I8, LANES)), INT)

    def scales_of_run(self, run: Any, scales: Any) -> Any:
        """Scales of a run, float32. ``scales``: of the block."""
        if not self.layout.is_nested:
            return self.b.fmul(scales, self.b.sitofp(self.run_scale(run), FLOAT))
        values = looked_up(self.b, self.layout.scale_values, self._run(run))
        offsets = load_vector(self.b, self.b.gep(self.scale, [number(4 * LANES)]), FLOAT)
        return self.b.fadd(rounded(self.b, self.b.fmul(values, scales)), offsets)

    def _run(self, run: Any) -> Any:
        return self.b.gep(self.run_scales, [self.b.mul(run, number(LANES))])

    def run_minimum(self, run: Any) -> Any:
        place = self.b.gep(self.run_minimums, [self.b.mul(run, number(LANES))])
        return self.b.zext(load_vector(self.b, place, ir.VectorType(_I8, LANES)), INT)

    def codes(self, unit: Any) -> Iterator[Any]:
        """Codes of a unit: for each four weights a vector whose lanes hold four bytes."""
        b, (low_bits, high_bits) = self.b, self.layout.planes
        low, high = self._plane(self.low, low_bits, unit), self._plane(self.high, high_bits, unit)
        for step in range(UNIT // 4):
            codes = _part(b, low, low_bits, step)
            if high_bits:
                codes = b.or_(codes, b.shl(_part(b, high, high_bits, step), every(low_bits)))
            yield codes

    def scaled_codes(self, unit: Any) -> Iterator[Any]:
        """Codes of a unit where they are in their bytes: 1, 2^bits, ... times the codes, of one plane."""
        bits = self.layout.bits
        vectors = self._plane(self.low, bits, unit)
        for step in range(UNIT // 4):
            mask = 0x01010101 * ((1 << bits) - 1) << bits * (step % (8 // bits))
            yield self.b.and_(vectors[step // (8 // bits)], every(mask - (mask >> 31 << 32)))

    def prefetch_next(self, unit: Any) -> None:
        """Prefetch a unit's share of the next block, where scales of runs and planes of codes are several streams.
        The hardware does not follow them: q6_k and q5_k came from memory at 10 GB/s on a Zen 4 core, with this at 20
        (30: one stream), q4_k on a Zen 5 core at 17, with this at 29 (35: one stream)."""
        layout, units = self.layout, self.layout.block // UNIT
        nbytes = layout.row_bytes * LANES
        if units == 1 or not (layout.planes[1] or layout.has_run_scales):
            return
        share = -(-nbytes // (units * _LINE)) * _LINE
        first = self.b.gep(self.scale, [self.b.add(number(nbytes), self.b.mul(unit, number(share)))])
        for byte in range(0, share, _LINE):
            prefetch(self.b, self.b.gep(first, [number(byte)]))

    def _plane(self, start: Any, bits: int, unit: Any) -> list[Any]:
        b = self.b
        first = b.gep(start, [b.mul(unit, number(4 * bits * LANES))])
        return [load_vector(b, b.gep(first, [number(4 * i * LANES)]), INT) for i in range(bits)]


def _part(b: Any, vectors: list[Any], bits: int, step: int) -> Any:
    """Bits of a plane that belong to four weights, in the low bits of four bytes."""
    parts = 8 // bits
    vector, shift = vectors[step // parts], bits * (step % parts)
    mask = 0x01010101 * ((1 << bits) - 1)
    shifted = b.lshr(vector, every(shift)) if shift else vector
    return vector if bits == 8 else b.and_(shifted, every(mask))


# ---- float32 -----------------------------------------------------------------------------------------------


def _unit_weights(b: Any, layout: BlockLayout, start: Any, index: Any) -> Iterator[Any]:
    """Weights of unit ``index`` of a panel as float32, a vector of rows for each step of K."""
    if layout.is_plain:
        for lanes in _plain_lanes(b, layout, start, index):
            yield from plain_values(b, layout, lanes)
        return
    per_block = layout.block // UNIT
    block_index, unit = b.udiv(index, number(per_block)), b.urem(index, number(per_block))
    block = _Block(b, layout, b.gep(start, [b.mul(block_index, number(layout.row_bytes * LANES))]))
    whole_scale = block.scales()
    whole_minimum = block.minimums() if layout.has_minimum else None
    scale, minimum, zero = whole_scale, whole_minimum, None
    for step, codes in enumerate(block.codes(unit)):
        if step * 4 % layout.run == 0:
            run = b.add(b.udiv(b.mul(unit, number(UNIT)), number(layout.run)), number(step * 4 // layout.run))
            if layout.has_run_scales:
                scale = block.scales_of_run(run, whole_scale)
            if layout.has_zeros:
                zero = block.run_minimum(run)
            elif layout.has_run_minimums:
                minimum = b.fmul(whole_minimum, b.sitofp(block.run_minimum(run), FLOAT))
        for i in range(4):
            code = b.lshr(codes, every(8 * i)) if i else codes
            code = b.and_(code, every(255)) if i < 3 else code
            code = code if zero is None else b.sub(code, zero)
            weight = b.fmul(scale, float_values(b, layout, code))
            yield weight if minimum is None else b.fsub(weight, minimum)


def _plain_lanes(b: Any, layout: BlockLayout, start: Any, index: Any) -> Iterator[Any]:
    """Unit ``index`` of a panel of floats: one or two steps of K in each 32-bit lane."""
    first = b.gep(start, [b.mul(index, number(UNIT * layout.bits // 8 * LANES))])
    for i in range(UNIT * layout.bits // 32):
        yield load_vector(b, b.gep(first, [number(4 * LANES * i)]), INT)


def _emit_unpack(
    layout: BlockLayout, b: Any, start: Any, first: Any, units: Any, panel: Any, stride: Any
) -> None:
    """Store float32 weights of ``units`` units from unit ``first`` of a panel; a step of K every ``stride``."""
    with cgutils.for_range(b, units) as loop:
        target = b.gep(panel, [b.mul(b.mul(loop.index, number(UNIT)), stride)])
        for k, weight in enumerate(_unit_weights(b, layout, start, b.add(first, loop.index))):
            store_vector(b, weight, b.gep(target, [b.mul(stride, number(k))]))


@cache
def unpack_of(layout: BlockLayout) -> Any:
    """Intrinsic that unpacks units of a panel as float32 [weight][row]."""
    i = types.int64

    @intrinsic
    def unpack(typingctx, panels, start, first, units, target, target0, stride):
        def codegen(context, b, sig, args):
            source = address(context, b, sig.args[0], args[0], args[1])
            panel = address(context, b, sig.args[4], args[4], args[5])
            _emit_unpack(layout, b, source, args[2], args[3], panel, args[6])
            return context.get_dummy_value()

        return signature(types.void, panels, i, i, i, target, i, i), codegen

    return unpack


def _emit_sums(layout: BlockLayout, tokens: int, panels: int, pairs: bool, b: Any, p: dict[str, Any]) -> None:
    """``c[t, lane]`` = the float32 product of row ``lane`` of neighbouring panels and token t.

    Sums of SUM_STEPS steps, added up one after the other: the order of the tiles of a matrix product.
    ``pairs``: a step is a pair of bfloat16.
    """
    count = panels * tokens
    totals, sums = ([cgutils.alloca_once(b, FLOAT) for _ in range(count)] for _ in range(2))
    for slot in totals:
        b.store(build.every(FLOAT, -0.0), slot)  # adding to it changes no bit
    starts = [b.gep(p["panels"], [b.mul(p["panels_stride"], number(i))]) for i in range(panels)]
    unit_steps, multiply_add = (UNIT // 2, dot_bfloat16) if pairs else (UNIT, fma)
    weights_of = _plain_lanes if pairs else _unit_weights
    per_sum = SUM_STEPS // unit_steps
    chunks = b.udiv(b.add(p["units"], number(per_sum - 1)), number(per_sum))
    with cgutils.for_range(b, chunks) as chunk:
        for slot in sums:
            b.store(build.every(FLOAT, 0.0), slot)
        first = b.mul(chunk.index, number(per_sum))
        remaining = b.sub(p["units"], first)
        units = b.select(b.icmp_signed("<", remaining, number(per_sum)), remaining, number(per_sum))
        with cgutils.for_range(b, units) as loop:
            unit = b.add(first, loop.index)
            start = b.mul(unit, number(unit_steps))
            rows = [b.gep(p["x"], [b.add(b.mul(p["x_stride"], number(t)), start)]) for t in range(tokens)]
            steps = zip(*(weights_of(b, layout, panel, unit) for panel in starts), strict=True)
            for k, weights in enumerate(steps):
                for t, row in enumerate(rows):
                    x = splat(b, b.load(b.gep(row, [number(k)])))
                    for weight, slot in zip(weights, sums[t::tokens], strict=True):
                        b.store(multiply_add(b, weight, x, b.load(slot)), slot)
        for slot, part in zip(totals, sums, strict=True):
            b.store(b.fadd(b.load(slot), b.load(part)), slot)
    for i in range(panels):
        _store_totals(b, totals[i * tokens : (i + 1) * tokens], p, i * LANES)


def _store_totals(b: Any, totals: list[Any], p: dict[str, Any], first: int = 0) -> None:
    for t, slot in enumerate(totals):
        place = b.add(b.mul(p["c_stride"], number(t)), number(first))
        store_vector(b, b.load(slot), b.gep(p["c"], [place]))


@cache
def sums_of(layout: BlockLayout, tokens: int, panels: int) -> Any:
    """Intrinsic: float32 products of neighbouring panels and ``tokens`` tokens, float32 or pairs of bfloat16."""
    i = types.int64

    @intrinsic
    def sums(typingctx, data, start, units, x, x0, c, c0):
        def codegen(context, b, sig, args):
            p = _pointers(context, b, sig, args, {"panels": 0, "x": 3, "c": 5})
            pairs = sig.args[3].dtype == types.uint32
            _emit_sums(layout, tokens, panels, pairs, b, {**p, "units": args[2]})
            return context.get_dummy_value()

        return signature(types.void, data, i, i, x, i, c, i), codegen

    return sums


def _pointers(context: Any, b: Any, sig: Any, args: Any, places: dict[str, int]) -> dict[str, Any]:
    """Pointers to arrays from their offsets, and elements from row to row, by name."""
    pointers = {}
    for name, index in places.items():
        array = context.make_array(sig.args[index])(context, b, args[index])
        pointers[name] = address(context, b, sig.args[index], args[index], args[index + 1])
        pointers[f"{name}_stride"] = b.sdiv(b.extract_value(array.strides, 0), array.itemsize)
    return pointers


# ---- int8 activations --------------------------------------------------------------------------------------


def _multiplies_magnitudes(layout: BlockLayout) -> bool:
    """Whether signs go to the activations: pairs of products of AVX2 saturate above 128 * 127 * 2."""
    return not VNNI and (layout.bits == 8 or layout.offset is None)


def _scaled_sums(layout: BlockLayout) -> int:
    """Sums per token of 1, 2^bits, ... times the products, which spare a shift per vector; 1 if codes are shifted.

    AVX2 adds pairs of products in int16, which 240 * 127 * 2 exceeds. Runs of 32 would spend the shifts on the sums.
    """
    few_bits = layout.bits < 8 and not layout.planes[1] and not layout.table
    return 8 // layout.bits if VNNI and few_bits and summed_steps(layout) > UNIT else 1


def summed_steps(layout: BlockLayout) -> int:
    """Steps of K whose products one integer sum holds: activations have their sums too."""
    return layout.block if layout.runs == 1 else min(layout.run, UNIT)


def sum_offset(layout: BlockLayout) -> int:
    """Multiple of the activations' sum that the products contain; negative if they lack it."""
    if _multiplies_magnitudes(layout):
        return -128 if layout.has_zeros else 0
    return 128 if layout.offset is None else layout.offset


def _terms(b: Any, layout: BlockLayout, codes: Any) -> tuple[Any, Any]:
    """Unsigned bytes for a dot product, and signed ones whose signs the activations take, or None."""
    table = [int(value) for value in layout.table]
    if not _multiplies_magnitudes(layout):
        return (byte_values(b, codes, [value + 128 for value in table]) if table else codes), None
    if table:
        return byte_values(b, codes, [abs(value) for value in table]), byte_values(b, codes, table)
    signed = b.xor(codes, every(-0x7F7F7F80))
    return _signed_by(b, signed, signed), signed


def _signed_by(b: Any, x: Any, signs: Any) -> Any:
    """Bytes of x, negated where those of ``signs`` are negative."""
    as_bytes = b.bitcast(x, BYTES)
    negative = b.icmp_signed("<", b.bitcast(signs, BYTES), build.every(BYTES, 0))
    return b.bitcast(b.select(negative, b.sub(build.every(BYTES, 0), as_bytes), as_bytes), INT)


def _unscaled_sum(b: Any, sums: list[Any], bits: int) -> Any:
    """Sum of ``sums[i] / 2^(bits i)``, which have no remainders."""
    total = sums[0]
    for i, part in enumerate(sums[1:], 1):
        total = b.add(total, b.ashr(part, every(bits * i)))
    return total


def _emit_dot(layout: BlockLayout, tokens: int, b: Any, p: dict[str, Any]) -> None:
    """``c[t, lane]`` = the product of row ``lane`` of a panel and token t, over ``blocks`` blocks."""
    zero, zero_int = build.every(FLOAT, 0.0), every(0)
    totals = [cgutils.alloca_once_value(b, zero) for _ in range(tokens)]
    sums, lows = ([cgutils.alloca_once_value(b, zero_int) for _ in range(tokens)] for _ in range(2))
    offset, units, summed = sum_offset(layout), layout.block // UNIT, summed_steps(layout)
    scaled = _scaled_sums(layout)
    products = [[cgutils.alloca_once(b, INT) for _ in range(scaled)] for _ in range(tokens)]
    for slot in totals:
        b.store(zero, slot)
    for slot in itertools.chain(*products):
        b.store(zero_int, slot)

    with cgutils.for_range(b, p["blocks"]) as loop:
        block = _Block(b, layout, b.gep(p["panels"], [b.mul(loop.index, number(layout.row_bytes * LANES))]))
        for slot in (*sums, *lows):
            b.store(zero_int, slot)

        def token(name: str, t: int, per_block: int, index: Any = loop.index) -> Any:
            return b.gep(
                p[name], [b.add(b.mul(p[f"{name}_stride"], number(t)), b.mul(index, number(per_block)))]
            )

        def end_run(weight: Any) -> None:
            """Add the sums of ``summed`` weights from ``weight`` on, and begin others."""
            run, place = b.udiv(weight, number(layout.run)), b.udiv(weight, number(summed))
            scale = block.run_scale(run) if layout.has_run_scales else None
            minimum = block.run_minimum(run) if layout.has_run_minimums else None
            excess = every(offset)
            if layout.has_zeros:
                excess, minimum = b.add(minimum, excess), None
            for t, slots in enumerate(products):
                part, x_sum = _unscaled_sum(b, [b.load(slot) for slot in slots], layout.bits), None
                for slot in slots:
                    b.store(zero_int, slot)
                if offset or layout.has_minimum or layout.has_zeros:
                    x_sum = splat(b, b.load(b.gep(token("x_sums", t, layout.block // summed), [place])))
                if offset or layout.has_zeros:
                    part = b.sub(part, b.mul(x_sum, excess))
                if scale is not None:
                    part = b.mul(part, scale)
                b.store(b.add(b.load(sums[t]), part), sums[t])
                if layout.has_minimum:
                    low = x_sum if minimum is None else b.mul(x_sum, minimum)
                    b.store(b.add(b.load(lows[t]), low), lows[t])

        def unit_sums(unit: Any) -> None:
            block.prefetch_next(unit)
            first = b.mul(unit, number(UNIT))
            for step, codes in enumerate(block.scaled_codes(unit) if scaled > 1 else block.codes(unit)):
                unsigned, signs = _terms(b, layout, codes)
                for t in range(tokens):
                    place = b.gep(token("x", t, layout.block), [b.add(first, number(4 * step))])
                    x = splat(b, b.load(b.bitcast(place, ir.IntType(32).as_pointer()), align=1))
                    x = x if signs is None else _signed_by(b, x, signs)
                    slot = products[t][step % scaled]
                    b.store(dot4(b, b.load(slot), unsigned, x), slot)
                if (step + 1) * 4 % summed == 0:
                    end_run(b.add(first, number((step + 1) * 4 - summed)))

        if units > 1:
            with cgutils.for_range(b, number(units)) as inner:
                unit_sums(inner.index)
        else:
            unit_sums(number(0))
        if summed > UNIT:
            end_run(number(0))
        scale, minimum = block.scales(), block.minimums() if layout.has_minimum else None
        for t, slot in enumerate(totals):
            x_scale = splat(b, b.load(token("x_scales", t, 1)))
            product = b.fmul(scale, x_scale)
            total = fma(b, product, b.sitofp(b.load(sums[t]), FLOAT), b.load(slot))
            if minimum is not None:
                product = b.fmul(b.fsub(build.every(FLOAT, -0.0), minimum), x_scale)
                total = fma(b, product, b.sitofp(b.load(lows[t]), FLOAT), total)
            b.store(total, slot)
    _store_totals(b, totals, p)


@cache
def dot_of(layout: BlockLayout, tokens: int) -> Any:
    """Intrinsic: products of a panel and ``tokens`` tokens of int8."""
    i = types.int64

    @intrinsic
    def dot(typingctx, panels, start, blocks, x, x0, x_scales, scales0, x_sums, sums0, c, c0):
        def codegen(context, b, sig, args):
            places = {"panels": 0, "x": 3, "x_scales": 5, "x_sums": 7, "c": 9}
            p = _pointers(context, b, sig, args, places)
            _emit_dot(layout, tokens, b, {**p, "blocks": args[2]})
            return context.get_dummy_value()

        return signature(types.void, panels, i, i, x, i, x_scales, i, x_sums, i, c, i), codegen

    return dot
