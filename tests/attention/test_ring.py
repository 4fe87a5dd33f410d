"""Ring attention in one process: the keys of a sequence divided among four ranks, forward and backward.

Every rank has the queries, keys and values of some pieces of the sequence. Keys and values circulate, and their
gradients with them. Partial results are float32 with a float64 lse; the backward takes the lse and delta of whole
rows, and adds to float32 gradients.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import gpu_ops
from tests.attention.cases import AttentionInputs, make, mixed
from tests.distributed.ranks.context import NAMES, check, draw, exact

DEVICES = ("cpu", "emulator", "cuda")
RANKS = 4
# The pieces of a sequence that each rank has, in units of an eighth.
PIECES = {
    "contiguous": [[(2 * r, 2 * r + 2)] for r in range(RANKS)],
    "zigzag": [[(r, r + 1), (2 * RANKS - 1 - r, 2 * RANKS - r)] for r in range(RANKS)],
}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (50, 0)},
    "alibi": {"causal": True, "alibi_slopes": np.array([0.02, 0.1], np.float32)},
}
SIZES = (0, 4000, -16000)  # about what the lse is
LEVELS = (("float64", "float32", "bfloat16"), tuple(PIECES), tuple(MASKS), SIZES)


def runs(case):
    return case["backend"].get("backend") != "raw" or case["dtype"] != "float64"


def is_slow(case):
    """Whether a case is slow: a third of the CPU cases, covering all pairs, and one reference case run by default."""
    levels = zip(LEVELS, (case[name] for name in ("dtype", "pieces", "mask", "size")), strict=True)
    place = sum(
        weight * each.index(level) for weight, (each, level) in zip((1, 2, 1, 2), levels, strict=True)
    )
    if case["backend"].get("backend") == "reference":
        return place != 0
    return case["backend"]["device"] == "cpu" and place % 3 != 0


def quick_on_emulator(raw):
    """Numba kernels compile for seconds."""
    return {
        "test_a_ring_is_the_whole": {
            "pieces": ["contiguous"],
            "mask": ["causal"],
            "size": [4000],
            "dtype": ["bfloat16" if raw else "float32"],
        },
    }


def problem(dtype, mask, size, seqlen, seed=0):
    """Scores of order one added to ``size``, which is common to a row and matters only in lse."""
    p = make(seqlens=(seqlen, seqlen), heads=(2, 1), head_dims=(32, 32), batch=1, dtype=dtype, seed=seed)
    options = {**MASKS[mask], "softmax_scale": 0.25}
    p.q[..., 0], p.k[..., 0] = 64.0, size / 16
    return AttentionInputs(p.q, p.k, p.v, p.dout, options)


class Ring:
    """Arrays by rank and piece. ``backend``: where the calls run."""

    def __init__(self, p, pieces, backend):
        eighth = p.q.shape[1] // (2 * RANKS)
        self.p, self.backend = p, backend
        self.wide = np.float64 if p.q.dtype == np.float64 else np.float32
        self.pieces = [[slice(a * eighth, b * eighth) for a, b in mine] for mine in PIECES[pieces]]

    def pairs(self):
        """Rows and keys of each call: at step i every rank meets the keys of the rank i behind it."""
        for step, rank in itertools.product(range(RANKS), range(RANKS)):
            yield from itertools.product(self.pieces[rank], self.pieces[(rank - step) % RANKS])

    def places(self, rows, keys):
        return {**self.p.options, "q_start": rows.start, "k_start": keys.start, **self.backend}

    def forward(self):
        """out in float32 and lse in float64 (all of float64 for float64)."""
        (q, k, v), shape = self.p.arrays, self.p.dout.shape
        out = np.zeros(shape, self.wide)
        lse = np.full((shape[0], shape[2], shape[1]), -np.inf)
        results = {"return_lse": True, "out_dtype": self.wide, "lse_dtype": np.float64}
        for rows, keys in self.pairs():
            part = gpu_ops.attention(q[:, rows], k[:, keys], v[:, keys], **results, **self.places(rows, keys))
            mine = out[:, rows], lse[:, :, rows]
            gpu_ops.attention_merge(*mine, *part, out=mine, **self.backend)
        return out, lse

    def backward(self, out, lse):
        """dq, dk and dv in float32 (float64)."""
        p, grads = self.p, [np.zeros(x.shape, self.wide) for x in self.p.arrays]
        delta = np.einsum("bshd,bshd->bhs", p.dout.astype(np.float64), out).astype(self.wide)
        for rows, keys in self.pairs():
            gpu_ops.attention_backward(
                *(p.dout[:, rows], p.q[:, rows], p.k[:, keys], p.v[:, keys], None, lse[:, :, rows]),
                delta=delta[:, :, rows],
                grads=tuple(x[:, s] for x, s in zip(grads, (rows, keys, keys), strict=True)),
                accumulate=True,
                **self.places(rows, keys),
            )
        return grads


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("dtype", LEVELS[0])
def test_a_ring_is_the_whole(dtype, pieces, mask, size, backend):
    p = problem(dtype, mask, size, 64 if backend["device"] == "emulator" else 192)
    ring = Ring(p, pieces, backend)
    out, lse = ring.forward()
    results = dict(zip(NAMES, (out, *ring.backward(out, lse)), strict=True))
    arrays = (*p.arrays, p.dout)
    for (name, x), ref, textbook in zip(
        results.items(), exact(arrays, p.options)[0], mixed(arrays, p.options), strict=True
    ):
        # Each term of a gradient errs by units of its score times the other factor.
        scale = max(np.abs(y.astype(np.float64)).max() for y in ({"dq": p.k, "dk": p.q}.get(name, ref), ref))
        check(name, x, ref, ..., textbook, (1e-12 + 4 * np.spacing(float(abs(size)))) * scale)


def test_the_bound_finds_faults():
    """Faults: a sum that lacks a rank, a key that a mask should hide, tokens of another rank; large scores too."""
    options, rows = {"causal": True}, np.arange(72)[:, None, None]
    for dtype, level in itertools.product(("float32", "bfloat16"), (0.0, 4000.0)):
        q, k, v, dout = arrays = draw(72, dtype, level)
        expected, textbook = exact(arrays, options)[0], mixed(arrays, options)
        out, *_ = exact([q, k, np.where(rows < 48, v, 0), dout], options)[0]
        _, *grads = exact([q, k, v, np.where(rows < 48, dout, 0)], options)[0]
        mask = exact(arrays, {"window_size": (-1, 1)})[0]
        swapped = [np.concatenate((x[:, 48:], x[:, 24:48], x[:, :24]), axis=1) for x in expected]
        for fault in ([out, *grads], mask, swapped):
            for name, x, ref, near in zip(NAMES, fault, expected, textbook, strict=True):
                # In 16 bits dq and dk of such keys and queries round by more.
                if level == 0 or name in ("out", "dv"):
                    with pytest.raises(AssertionError, match=name):
                        check(name, x.astype(q.dtype), ref, ..., near, 0.0)
