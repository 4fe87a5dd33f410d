"""Bits of a result that change with the uninitialised bits of its sources."""

from __future__ import annotations

import itertools

import numpy as np

from gpu_ops.emulator.flow import Flow
from gpu_ops.emulator.syntax import DTYPE, Array

ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def changing(flow: Flow, values: list[Array], unknown: list[Array]) -> list[Array]:
    """Bits of each result of ``flow.op`` that change with the unknown bits (uint64) of its sources.

    Each bit of a result is a function of one bit of each source, once the sources that ``flow.controls`` names (a
    shift amount, for example) are known. So zeros and ones for the unknown bits show all its possible values.
    """
    op = flow.op
    assert op is not None
    if flow.compares:
        return _compared(flow, values, unknown)
    tried = [k for k, bits in enumerate(unknown) if bits.any() and k not in flow.controls]
    results = []
    for choice in itertools.product((False, True), repeat=len(tried)):
        trial = list(values)
        for k, ones in zip(tried, choice, strict=True):
            trial[k] = filled(values[k], unknown[k], ones)
        out = op.run(*trial)
        results.append(_unsigned(out[0] if isinstance(out, tuple) else out))
    differs = np.bitwise_or.reduce([result ^ results[0] for result in results])
    signed = DTYPE[op.writes[0]].kind == "i"  # the register takes copies of the sign
    bits = differs.view(f"i{differs.itemsize}").astype(np.int64).view(np.uint64) if signed else differs
    bits = np.broadcast_to(bits.astype(np.uint64), unknown[0].shape)
    uncertain = np.bitwise_or.reduce([unknown[k] for k in flow.controls]) if flow.controls else np.uint64(0)
    results = [np.where(uncertain != 0, ALL, bits)]
    if len(op.writes) == 2:  # lop3.or.b32 d|p: the predicate tells whether any bit is set
        results.append((np.bitwise_or.reduce(unknown) != 0).astype(np.uint64))
    return results


def _unsigned(values: Array) -> Array:
    values = np.asarray(values)
    return values.view(f"u{values.itemsize}")


def _like(unknown: Array, values: Array) -> Array:
    """The unknown bits of values, as unsigned integers of their size."""
    lowest = np.uint64(1)
    return (unknown & lowest if values.dtype == np.bool_ else unknown).astype(f"u{values.itemsize}")


def filled(values: Array, unknown: Array, ones: bool) -> Array:
    """The values with ones or zeros for their unknown bits."""
    bits = _like(unknown, values)
    return (_unsigned(values) | bits if ones else _unsigned(values) & ~bits).view(values.dtype)


def _compared(flow: Flow, values: list[Array], unknown: list[Array]) -> list[Array]:
    """Return whether each of the two results of ``setp`` changes."""
    assert flow.op is not None
    run, (ptx_type, *_) = flow.op.run, flow.op.reads
    words, c = flow.words, values[2:]
    if ptx_type[0] in "bsu" and ptx_type[1:].isdigit():
        neutral = [np.array(["and" in words])] if c else []
        trials = (_equal if words & {"eq", "ne"} else _extremes)(values, unknown)
        first, second = (run(a, b, *neutral)[0] for a, b in trials)
        changes = first != second
    else:
        changes = (unknown[0] | unknown[1]) != 0
    if not c:
        return [changes.astype(np.uint64)] * 2
    uncertain = unknown[2] != 0
    decides = ~c[0] if "and" in words else c[0] & ("or" in words)
    results = zip(*(run(*values[:2], np.array([bit])) for bit in (False, True)), strict=True)
    return [
        np.where(uncertain, changes | (low != high), changes & ~decides).astype(np.uint64)
        for low, high in results
    ]


def _equal(values: list[Array], unknown: list[Array]) -> list[tuple[Array, Array]]:
    """Operands that are equal if they can be, and operands that are not equal if they need not be."""
    a, b = (_unsigned(v) for v in values[:2])
    of_a, of_b = (_like(u, v) for u, v in zip(unknown[:2], values[:2], strict=True))
    a = a & ~of_a | b & of_a
    b = b & ~of_b | a & of_b
    dtype = values[0].dtype
    return [(a.view(dtype), b.view(dtype)), (a.view(dtype), (b ^ (of_a | of_b)).view(dtype))]


def _extremes(values: list[Array], unknown: list[Array]) -> list[tuple[Array, Array]]:
    """Pair of the smallest a with the largest b, and the reverse."""
    dtype = values[0].dtype
    sign = np.uint64(1 << (8 * dtype.itemsize - 1) if dtype.kind == "i" else 0)
    ranges = []
    for v, u in zip(values[:2], unknown[:2], strict=True):
        ranges.append([filled(filled(v, u & ~sign, ones), u & sign, not ones) for ones in (False, True)])
    (low_a, high_a), (low_b, high_b) = ranges
    return [(low_a, high_b), (high_a, low_b)]
