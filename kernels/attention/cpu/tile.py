"""Steps of one attention tile, shared by the forward and the backward kernel.

Vector lanes are queries, rows are keys:

                     block_m queries (lanes)
                   +-------------------------+
    block_n keys   |  S^T = K Q^T, then P^T  |     K and V tiles are used in place;
                   +-------------------------+     only Q is transposed, once per block
    head_dim_v     |  O^T += V^T P^T         |
                   +-------------------------+

so that the running maximum, the sum and exp2 are vertical operations, and P^T is already the operand
of the second product. A lane is one (head, query) pair: with few queries per head the heads of a GQA
group are adjacent and share every key that is read.

Scores are kept in base 2 (softmax_scale * log2 e is folded into Q; softcap requires natural units), -inf where
masked. All options of scores are applied here.
"""

from typing import Any, NamedTuple

import numpy as np

from gpu_ops.kernels.attention.cpu.dropout import WORDS
from gpu_ops.kernels.common.cpu.codegen.arena import arena_array
from gpu_ops.kernels.common.cpu.codegen.build import (
    address,
    every,
    fma,
    load_vector,
    number,
    prefetch,
    shuffle,
    splat,
    store_vector,
)
from gpu_ops.kernels.common.cpu.codegen.decode_rows import Rows, chunk_elements
from gpu_ops.kernels.common.cpu.codegen.exp2 import LOG2E
from gpu_ops.kernels.common.cpu.codegen.gemm import transpose_vectors
from gpu_ops.kernels.common.cpu.codegen.memory import lanes, larger, smaller
from gpu_ops.kernels.common.cpu.codegen.numba_api import intrinsic, ir, signature, types
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.dtype import like, read_row
from gpu_ops.kernels.common.cpu.fastmath import tanh, tanh_and_slope
from gpu_ops.kernels.common.cpu.jit import device_function, noinline_function

LN2 = 0.6931471805599453
TINY_LOG2 = -122.9


class Call(NamedTuple):
    """Sizes and options of one call. ``heads`` is per row group: 1, or nheads / nheads_kv when packed."""

    batch: int
    nheads: int
    nheads_kv: int
    heads: int
    head_dim: int
    head_dim_v: int
    max_seqlen_q: int
    max_seqlen_k: int
    block_m: int
    block_n: int
    n_splits: int  # parts of the work of one (batch, group): key ranges forward, query blocks backward
    left: int
    right: int
    page_size: int  # 0: contiguous keys
    block_q: int  # of the block mask, 0: none
    block_k: int
    packed: bool  # packed sequences: the batch axis of the arrays has length 1
    has_alibi: bool
    has_bias: bool
    has_sinks: bool
    softmax_scale: float
    softcap: float
    dropout_p: float  # as 16 bits hold it
    ahead: int  # of ALiBi: left and right include it
    query0: int  # positions of the first query and key, only for dropout
    key0: int


_TYPE = {int: types.int64, bool: types.boolean, float: types.float64}
CALL = types.NamedTuple([_TYPE[kind] for kind in Call.__annotations__.values()], Call)


@device_function
def is_plain(call):
    """Whether scores are q.k times softmax_scale and nothing else."""
    return call.softcap == 0 and not call.has_alibi and not call.has_bias


@device_function
def score_scale(call):
    """Factor of q.k: scores are in base 2, but in natural units before softcap."""
    return call.softmax_scale if call.softcap > 0 else call.softmax_scale * LOG2E


@device_function
def is_linear(call):
    """Whether the derivative of a score by softmax_scale * q.k is 1; else gradients need ``Terms.derivative``."""
    return call.softcap == 0


@device_function
def place_lanes(call, group, block, q_len, k_len, head, query, low, high):
    """Fill the lanes of a row block; returns (lanes used, first and last key that any lane sees).

    Row r of a group is head r // q_len, query r % q_len. Lane c sees keys low[c]..high[c].
    """
    first_row = block * call.block_m
    n = smaller(call.block_m, call.heads * q_len - first_row)
    offset = k_len - q_len  # the last query sits on the last key
    first, last = k_len, -1
    h, i = group * call.heads + first_row // q_len, first_row % q_len - 1
    for c in range(n):
        i += 1
        if i == q_len:
            h, i = h + 1, 0
        head[c], query[c] = h, i
        least, greatest = larger(i + offset - call.left, 0), smaller(i + offset + call.right, k_len - 1)
        low[c], high[c] = least, greatest
        if least <= greatest:
            first, last = smaller(first, least), larger(last, greatest)
    for c in range(n, call.block_m):  # lanes without a query: computed, never stored
        low[c], high[c] = 0, k_len
        head[c], query[c] = head[0], query[0]
    return n, first, last


@device_function
def lse_of(top, total):
    """Return lse from the largest score and the sum of the weights relative to it."""
    return -np.inf if total == 0 else (top + np.log2(total)) * LN2


@device_function
def cap_scores(s, softcap, n, width, factor, derivative, keep):
    """s = log2(e) * softcap * tanh(factor * s / softcap); with ``keep`` also its derivative 1 - tanh^2."""
    cap = like(s[0, 0], softcap * LOG2E)
    inverse = like(s[0, 0], factor / softcap)
    for j in range(n):
        row, derivative_row = s[j], derivative[j]
        for c in range(width):
            t, slope = tanh_and_slope(row[c] * inverse)
            row[c] = cap * t
            if keep:
                derivative_row[c] = slope


@device_function
def cap_row(row, call, n):
    """Cap a row of ``n`` scores, if there is a cap."""
    if call.softcap > 0:
        cap, inverse = like(row[0], call.softcap * LOG2E), like(row[0], 1.0 / call.softcap)
        for i in range(n):
            row[i] = cap * tanh(row[i] * inverse)


class Terms(NamedTuple):
    """Scratch of the operations on scores and weights."""

    slope: Any  # (m) decrease of a score, in base 2, per key between it and the lane's position
    position: Any  # (m) of the query on the axis of keys
    starts: Any  # (m and a panel) addresses of the lanes' rows of bias
    derivative: Any  # (n, m) for gradients, of scores by softmax_scale * q.k, if it is not 1
    words: Any  # (4, WORDS) random bits for dropout


@device_function
def make_terms(memory, n, m, wide):
    return Terms(
        arena_array(memory, m, wide),
        arena_array(memory, m, wide),
        arena_array(memory, m + PANEL * MAX_LANES, np.int64(0)),
        arena_array(memory, (n, m), wide),
        arena_array(memory, (4, WORDS), np.uint32(0)),
    )


@device_function
def place_bias(starts, b, n, head, query, bias):
    """Fill ``starts`` with the address of each lane's row; lanes past ``n`` repeat the last (only prefetched)."""
    for c in range(len(starts)):
        lane = smaller(c, n - 1)
        starts[c] = read_row(bias, (b, head[lane], query[lane])).ctypes.data


@device_function
def add_bias(s, first, n, lane, n_lanes, factor, starts, bias):
    """s = factor * s + bias in base 2: ``n`` keys from ``first``, ``n_lanes`` lanes of the block from ``lane``."""
    step, chunk, ld = lanes(s), chunk_elements(bias), s.shape[1]
    for c in range(0, n_lanes, step):
        for j in range(0, n, chunk):
            keys, queries = smaller(chunk, n - j), smaller(step, n_lanes - c)
            offset = (first + j) * bias.itemsize
            add_square(s, j * ld + c, ld, keys, queries, starts, lane + c, offset, bias, factor)


@device_function
def place_terms(terms, call, b, alibi, bias, n, offset, head, query):
    """Fill the lanes of a row block; a query sits on key ``offset`` + ``call.ahead`` + its number."""
    if call.has_bias:
        place_bias(terms.starts, b, n, head, query, bias)
    if call.has_alibi:
        for c in range(n):
            terms.slope[c] = alibi[b, head[c]] * LOG2E
            terms.position[c] = query[c] + offset + call.ahead
        for c in range(n, len(terms.slope)):
            terms.slope[c] = terms.position[c] = 0


@device_function
def finish_scores(s, call, first, n, lane, n_lanes, width, factor, terms, keep, bias):
    """Apply softcap, ALiBi and bias; leaves scores in base 2.

    ``factor``: the part of score_scale that is not applied yet. ``lane``: the first lane, counted in the block.
    ``keep``: keep the derivative too.
    """
    if call.softcap > 0:
        cap_scores(s, call.softcap, n, width, factor, terms.derivative if keep else s, keep)
        factor = like(factor, 1.0)
    if call.has_alibi:
        slope, position = terms.slope[lane : lane + width], terms.position[lane : lane + width]
        for j in range(n):
            row, key = s[j], like(s[0, 0], first + j)
            for c in range(width):
                row[c] = row[c] * factor - slope[c] * abs(position[c] - key)
        factor = like(factor, 1.0)
    if call.has_bias:
        add_bias(s, first, n, lane, n_lanes, factor, terms.starts, bias)


@device_function
def unfinish_gradients(ds, dscore, call, n, width, terms):
    """Turn gradients of scores into those of softmax_scale * q.k; ``dscore`` keeps the former."""
    if not is_linear(call):
        for j in range(n):
            row, kept, derivative = ds[j], dscore[j], terms.derivative[j]
            for c in range(width):
                kept[c] = row[c]
                row[c] = row[c] * derivative[c]


@noinline_function
def mask_scores(s, first, n, width, low, high):
    """Set scores to -inf where lane c does not see key first + j."""
    for j in range(n):
        row = s[j]
        key = np.int32(first + j)
        for c in range(width):
            seen = (low[c] <= key) & (key <= high[c])  # `and` would branch: no vectors
            row[c] = row[c] if seen else -np.inf


@device_function
def block_visibility(visible, call, b, key, lanes, head, query):
    """Visibility of one block of keys in a block mask: 0 no lane sees it, 1 some lanes, 2 all."""
    first = visible[b, head[0], query[0] // call.block_q, key // call.block_k]
    for c in range(1, lanes):
        if visible[b, head[c], query[c] // call.block_q, key // call.block_k] != first:
            return 1
    return 2 if first else 0


@device_function
def mask_block(s, visible, call, b, key, n, lanes, head, query):
    for c in range(lanes):
        if not visible[b, head[c], query[c] // call.block_q, key // call.block_k]:
            for j in range(n):
                s[j, c] = -np.inf


# Addition of bias to scores, as LLVM IR. Rows of bias are queries, rows of S^T keys: squares are transposed.
#
# bias    | query 0: keys ... |      bfloat16  as words of two keys, which are widened where they are added
#         | query 1: keys ... |      else      widened first; float16 makes two squares

PANEL = 2  # vectors of lanes that process the same keys one after the other
# A very negative finite bias is not a mask: scores in base 2 stay finite.
_LOWEST = {"float": -3.3e38, "double": -1.7e308}


@intrinsic
def add_square(typingctx, s, at, ld, keys, queries, starts, lane, offset, bias, factor):
    """s = factor * s + log2(e) * bias for a vector of lanes from ``s[at]`` on and a chunk of keys, rows ``ld`` apart.

    ``starts[lane]`` and so on are addresses of rows of ``bias``, ``offset`` bytes before the chunk; rows of the next
    panel are prefetched. Elements beyond ``keys`` and ``queries`` are not read, and count as 0. -inf is a mask: from
    the bias alone, then also for a NaN score, or from the score alone.
    """
    score = ir.DoubleType() if s.dtype == types.float64 else ir.FloatType()

    def codegen(context, b, sig, args):
        square = _Square(b, bias.dtype, ir.VectorType(score, VECTOR_BYTES * 8 // s.dtype.bitwidth))
        scores = address(context, b, s, args[0], args[1])
        places = address(context, b, starts, args[5], args[6])
        lanes = square.vector.count
        rows = [b.add(b.load(b.gep(places, [number(i)])), args[7]) for i in range(lanes)]
        rows = [b.inttoptr(row, ir.IntType(8).as_pointer()) for row in rows]
        factors = splat(b, args[9], lanes)

        def add(j: int, more: Any) -> None:
            pointer = b.gep(scores, [b.mul(args[2], number(j))])
            store_vector(b, _sum(b, load_vector(b, pointer, square.vector), more, factors), pointer)

        full = [
            b.icmp_signed("==", args[3 + i], number(n)) for i, n in enumerate((square.rows.elements, lanes))
        ]
        with b.if_else(b.and_(*full)) as (whole, part):
            with whole:
                for i in range(lanes):
                    later = b.add(b.load(b.gep(places, [number(PANEL * lanes + i)])), args[7])
                    prefetch(b, b.inttoptr(later, ir.IntType(8).as_pointer()))
                for j, more in enumerate(square.by_keys([square.rows.load_raw(b, row) for row in rows])):
                    add(j, more)
            with part:
                counts = [
                    b.select(b.icmp_signed("<", number(i), args[4]), args[3], number(0)) for i in range(lanes)
                ]
                raw_rows = [square.rows.load_raw(b, row, n) for row, n in zip(rows, counts, strict=True)]
                for j, more in enumerate(square.by_keys(raw_rows)):
                    with b.if_then(b.icmp_signed("<", number(j), args[3])):
                        add(j, more)
        return context.get_dummy_value()

    i = types.int64
    return signature(types.void, s, i, i, i, i, starts, i, i, bias, s.dtype), codegen


class _Square:
    """Chunks of rows as vectors of ``vector``, one for each key."""

    def __init__(self, b: Any, kind: types.Type, vector: ir.VectorType) -> None:
        self.b, self.rows, self.vector = b, Rows(kind), vector

    def by_keys(self, chunks: list[Any]) -> list[Any]:
        if self.rows.dtype == types.uint16:
            words = ir.VectorType(ir.IntType(32), self.vector.count)
            pairs = transpose_vectors(self.b, [self.b.bitcast(chunk, words) for chunk in chunks])
            return [x for pair in pairs for x in self.rows.widen(self.b, pair)]
        parts = zip(*(self._widened(chunk) for chunk in chunks), strict=True)
        return [x for part in parts for x in transpose_vectors(self.b, list(part))]

    def _widened(self, chunk: Any) -> list[Any]:
        vectors, n = self.rows.widen(self.b, chunk), self.vector.count
        if vectors[0].type == self.vector:
            return vectors
        halves = [shuffle(self.b, x, x, list(range(start, start + n))) for x in vectors for start in (0, n)]
        return [self.b.fpext(half, self.vector) for half in halves]  # float32 bias of float64 scores


def _sum(b: Any, score: Any, more: Any, factor: Any) -> Any:
    infinite, lowest = every(score.type, float("-inf")), every(score.type, _LOWEST[str(score.type.element)])
    total = fma(b, score, factor, b.fmul(more, every(score.type, LOG2E)))
    total = b.select(b.fcmp_ordered("<", total, lowest), lowest, total)
    hidden = [b.fcmp_ordered("==", x, infinite) for x in (more, score)]
    return b.select(b.or_(*hidden), infinite, total)
