"""Micro-kernel of the attention backward pass: computes P and dS from Q, K, V and dO in registers.

A tile is MR keys by two vectors of queries. The sums of two products stay in registers, and P and dS are computed
from them at once:

                    2 vectors of queries                              2 vectors of queries
                  +---------+---------+                             +---------+---------+
    MR rows of K  |     sum of k q    |  P = exp2(scale sum - lse)  |    sum of v dO    |  dS = P (sum - delta)
                  +---------+---------+   (0 where masked)          +---------+---------+

The CPU starts on the second product while it works on the exponentials of the first. Where it multiplies
bfloat16, P and dS are rounded to the pairs that the next products take: of neighbouring queries (P, dS) and of
neighbouring keys (dS once more).
"""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.common.cpu.codegen.arena import ByReference, field
from gpu_ops.kernels.common.cpu.codegen.build import (
    dot_bfloat16,
    every,
    fma,
    load_vector,
    number,
    round_bfloat16,
    shuffle,
    splat,
    store_vector,
)
from gpu_ops.kernels.common.cpu.codegen.exp2 import FLOAT32, PAIRS, exp2
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, intrinsic, ir, signature, types
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES, MR, TILES

PANEL = 2 * MAX_LANES  # queries of a tile

_INT, _FLOAT = ir.VectorType(ir.IntType(32), MAX_LANES), ir.VectorType(ir.FloatType(), MAX_LANES)
_TILE = [(m, n) for m in range(MR) for n in range(2)]


class _Fields:
    """Arrays of a by_reference tuple inside an intrinsic."""

    def __init__(self, context: Any, b: Any, by_reference: ByReference, pointer: Any) -> None:
        self.b, self.by_reference = b, by_reference
        self.arrays = {
            name: context.make_array(by_reference.type_of(name))(
                context, b, field(b, by_reference, pointer, name)
            )
            for name in (
                "k",
                "qt",
                "v",
                "dot",
                "p",
                "ds",
                "ds_keys",
                "s_panel",
                "dp_panel",
                "lse2",
                "delta",
                "low",
                "top",
            )
        }

    def dtype(self, name: str) -> Any:
        return self.by_reference.type_of(name).dtype

    def pointer(self, name: str, row: Any, column: Any) -> Any:
        """Pointer to an element; ``row`` is None for arrays of one axis."""
        offset = column if row is None else self.b.add(self.b.mul(row, self.length(name)), column)
        return self.b.gep(self.arrays[name].data, [offset])

    def length(self, name: str) -> Any:
        """Length of a row."""
        return cgutils.unpack_tuple(self.b, self.arrays[name].shape)[-1]

    def vectors(self, name: str, at: Any, kind: Any, row: Any = None) -> list[Any]:
        pointer = self.pointer(name, row, at)
        return [load_vector(self.b, self.b.gep(pointer, [number(n * MAX_LANES)]), kind) for n in range(2)]


def _product(b: Any, w: _Fields, rows: str, columns: str, row: Any, lane: Any, steps: Any) -> list[Any]:
    """Sums over ``steps`` > 0 words of rows[row + m] times columns[:, lane...]."""
    pairs = w.dtype(columns) == types.uint32
    multiply_add, element = (dot_bfloat16, _INT) if pairs else (fma, _FLOAT)
    length, zero = w.length(columns), number(0)
    starts = [w.pointer(rows, b.add(row, number(m)), zero) for m in range(MR)]
    start = w.pointer(columns, zero, lane)
    entry, loop, done = b.block, b.append_basic_block("product"), b.append_basic_block("product.done")
    b.branch(loop)
    b.position_at_end(loop)
    step = b.phi(ir.IntType(64))
    sums = [b.phi(_FLOAT) for _ in _TILE]
    at = b.gep(start, [b.mul(step, length)])
    factors = [load_vector(b, b.gep(at, [number(n * MAX_LANES)]), element) for n in range(2)]
    splats = [splat(b, b.load(b.gep(pointer, [step])), MAX_LANES) for pointer in starts]
    totals = [multiply_add(b, splats[m], factors[n], x) for (m, n), x in zip(_TILE, sums, strict=True)]
    following = b.add(step, number(1))
    zeros = (zero, *[every(_FLOAT, 0.0)] * len(_TILE))
    for phi, first, next_ in zip((step, *sums), zeros, (following, *totals), strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(next_, loop)
    b.cbranch(b.icmp_signed("<", following, steps), loop, done)
    b.position_at_end(done)
    return totals


def _sums(b: Any, w: _Fields, name: str, row: Any) -> list[Any]:
    """Load the part of a panel that tile registers computed."""
    return [x for m in range(MR) for x in w.vectors(name, number(0), _FLOAT, b.add(row, number(m)))]


def _mask(b: Any, w: _Fields, values: list[Any], lane: Any, key: Any, masked: Any) -> list[Any]:
    """Set values to 0 where a lane does not see key + m, if ``masked``."""
    before = b.block
    with b.if_then(masked):
        low, top = w.vectors("low", lane, _INT), w.vectors("top", lane, _INT)
        first = splat(b, b.trunc(key, ir.IntType(32)), MAX_LANES)
        kept = []
        for (m, n), value in zip(_TILE, values, strict=True):
            here = b.add(first, every(_INT, m))
            seen = b.and_(b.icmp_signed("<=", low[n], here), b.icmp_signed("<=", here, top[n]))
            kept.append(b.select(seen, value, every(_FLOAT, 0.0)))
        behind = b.block
    results = [b.phi(_FLOAT) for _ in values]
    for phi, value, other in zip(results, values, kept, strict=True):
        phi.add_incoming(value, before)
        phi.add_incoming(other, behind)
    return results


def _store(b: Any, w: _Fields, name: str, values: list[Any], row: Any, lane: Any) -> None:
    """Store rows of keys, as floats or as pairs of neighbouring queries."""
    for m in range(MR):
        pair = values[2 * m : 2 * m + 2]
        at = b.add(row, number(m))
        if w.dtype(name) == types.uint32:
            store_vector(b, round_bfloat16(b, *pair), w.pointer(name, at, b.udiv(lane, number(2))))
        else:
            pointer = w.pointer(name, at, lane)
            for n, value in enumerate(pair):
                store_vector(b, value, b.gep(pointer, [number(n * MAX_LANES)]))


def _store_key_pairs(b: Any, w: _Fields, values: list[Any], row: Any, lane: Any) -> None:
    interleaved = [i // 2 + i % 2 * MAX_LANES for i in range(2 * MAX_LANES)]
    halves = ir.VectorType(ir.IntType(16), 2 * MAX_LANES)
    for m in range(0, MR, 2):
        pointer = w.pointer("ds_keys", b.udiv(b.add(row, number(m)), number(2)), lane)
        for n in range(2):
            both = b.bitcast(round_bfloat16(b, values[2 * m + n], values[2 * m + 2 + n]), halves)
            words = b.bitcast(shuffle(b, both, both, interleaved), _INT)
            store_vector(b, words, b.gep(pointer, [number(n * MAX_LANES)]))


@intrinsic
def score_tile(typingctx, w, row, lane, key, masked, scale, steps, steps_v):
    """Fill w.p and w.ds for keys row ... row + MR - 1 of the tile and PANEL lanes from ``lane``.

    ``key``: index of the first key in its sequence; ``masked``: some lane may not see some key;
    ``steps``, ``steps_v``: words of head_dim and head_dim_v.
    """

    def codegen(context, b, sig, args):
        fields = _Fields(context, b, sig.args[0], args[0])
        _, row_, lane_, key_, masked_, scale_, steps_, steps_v_ = args
        lse, delta = (fields.vectors(name, lane_, _FLOAT) for name in ("lse2", "delta"))
        factor = splat(b, scale_, MAX_LANES)
        pairs = fields.dtype("p") == types.uint32
        tiles, polynomial = TILES and pairs, PAIRS if pairs else FLOAT32
        at = row_, lane_
        totals = _sums(b, fields, "s_panel", row_) if tiles else _product(b, fields, "k", "qt", *at, steps_)
        exponents = [fma(b, x, factor, b.fneg(lse[n])) for (_, n), x in zip(_TILE, totals, strict=True)]
        p = [exp2(b, x, polynomial) for x in exponents]
        p = _mask(b, fields, p, lane_, key_, masked_)
        _store(b, fields, "p", p, row_, lane_)
        totals = (
            _sums(b, fields, "dp_panel", row_) if tiles else _product(b, fields, "v", "dot", *at, steps_v_)
        )
        ds = [
            b.fmul(p[i], b.fsub(x, delta[n])) for i, ((_, n), x) in enumerate(zip(_TILE, totals, strict=True))
        ]
        ds = _mask(b, fields, ds, lane_, key_, masked_)  # again: 0 times an overflow is NaN
        _store(b, fields, "ds", ds, row_, lane_)
        if pairs:
            _store_key_pairs(b, fields, ds, row_, lane_)
        return context.get_dummy_value()

    i = types.int64
    return signature(types.void, w, i, i, i, types.boolean, types.float32, i, i), codegen
