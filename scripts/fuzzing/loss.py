"""Trials of cross-entropy, embedding and the norm of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import FLOAT32, FLOAT64, Array, Maths
from scripts.fuzzing.trial import BACKWARD, Trial

IGNORED = -100


def cross_entropy(draw: Draw) -> Trial:
    """Of rows, and the gradient."""
    dtype, vocab = (
        draw.dtype(),
        draw.length(129) + 1,
    )  # of one class all losses are 0, and no error is allowed
    lead = draw.pick((1,), (3,), (2, 5), (33,))
    wide = FLOAT64 if dtype == np.float64 else FLOAT32
    logits, targets = draw.array((*lead, vocab), dtype, 2.0), draw.rng.integers(0, vocab, lead)
    targets[draw.rng.random(lead) < 0.2] = IGNORED
    given: dict[str, Any] = {"logits": logits, "targets": draw.place(targets.astype(draw.pick("i4", "i8")))}
    options: dict[str, Any] = {"reduction": "none"}
    smoothing = options["label_smoothing"] = draw.pick(0.0, 0.1, 0.5)
    z_loss = options["z_loss"] = draw.pick(0.0, 0.01)
    weight = np.abs(draw.values((vocab,), wide)) + wide.type(0.1)
    if weighted := draw.chance(0.4):
        options["class_weight"] = draw.place(weight)
    kept, hit = targets != IGNORED, np.arange(vocab) == targets[..., None]

    def parts(m: Maths) -> tuple[Array, Array, Array]:
        u = m.load(logits)
        w = m.load(weight) if weighted else np.ones(vocab, m.wide)
        top = u.max(axis=-1, keepdims=True)
        lse = m.r(top + m.r(np.log(m.sum(m.r(np.exp(m.r(u - top)))))))
        return u, w, lse

    def loss(m: Maths) -> tuple[Array, ...]:
        u, w, lse = parts(m)
        nll = m.r(lse - u)
        own = m.r((1 - smoothing) * np.sum(w * hit * nll, axis=-1))
        rest = m.r(smoothing / vocab * m.sum(m.r(w * nll))[..., 0])
        return (np.where(kept, m.r(m.r(own + rest) + m.r(z_loss * m.r(lse * lse)[..., 0])), 0),)

    if draw.chance(0.5):
        return Trial("cross_entropy", given | options, draw, dtype, (wide,), loss, linked=(("logits", 0),))
    lse = np.where(kept, parts(Maths(dtype, False))[2][..., 0], -np.inf).astype(wide)
    dloss = draw.values(lead, wide)

    def gradient(m: Maths) -> tuple[Array, ...]:
        u, w, _ = parts(m)
        known = m.load(np.where(kept, lse, 0).astype(wide))[..., None]
        own = (1 - smoothing) * np.sum(w * hit, axis=-1, keepdims=True)
        share = m.r(m.r(np.exp(m.r(u - known))) * m.r(own + smoothing / vocab * w.sum() + 2 * z_loss * known))
        found = m.r(m.r(share - smoothing / vocab * w) - own * hit)
        return (np.where(kept[..., None], m.r(found * m.load(dloss)[..., None]), 0),)

    arguments = {"dloss": draw.place(dloss), **given, "lse": draw.place(lse), **options}
    linked = (("dloss", 0), ("lse", 0))
    return Trial(
        "cross_entropy_backward", arguments, draw, dtype, (dtype,), gradient, BACKWARD, linked=linked
    )


def embedding(draw: Draw) -> Trial:
    """Rows of a table, and the table's gradient, added to what is there or not."""
    dtype, rows, cols = draw.dtype(), draw.length(64), draw.length(129)
    ids = draw.rng.integers(0, rows, draw.pick((1,), (4, 3), (90,))).astype(draw.pick("i4", "i8"))
    scale = draw.pick(1.0, 0.5, 3.0)
    if draw.chance(0.5):
        table = draw.array((rows, cols), dtype)
        arguments: dict[str, Any] = {"ids": draw.place(ids), "weight": table, "scale": scale}
        if draw.chance(0.3):
            arguments["out"] = draw.out((*ids.shape, cols), dtype, rows=True)

        def taken(m: Maths) -> tuple[Array, ...]:
            return (m.r(m.wide(scale) * m.load(table)[ids]),)

        return Trial("embedding", arguments, draw, dtype, (dtype,), taken)
    wide = FLOAT64 if dtype == np.float64 else FLOAT32
    dx, before = draw.array((*ids.shape, cols), dtype), draw.values((rows, cols), wide)
    arguments = {"dx": dx, "ids": draw.place(ids), "num_embeddings": rows, "scale": scale}
    if added := draw.chance(0.4):
        arguments["dweight"] = draw.place(before, written=True)

    def summed(m: Maths) -> tuple[Array, ...]:
        hits = (np.arange(rows)[:, None] == ids.ravel()).astype(m.wide)
        total = m.matmul(hits, m.r(m.wide(scale) * m.load(dx).reshape(-1, cols)))
        return (total + m.load(before) if added else total,)

    return Trial("embedding_backward", arguments, draw, dtype, (wide,), summed, BACKWARD, linked=(("dx", 0),))


def global_norm(draw: Draw) -> Trial:
    """Of one array or several, each of its own dtype; float64 alone, as squares of others are rounded to float32."""
    dtypes = [draw.dtype() for _ in range(draw.pick(1, 1, 2, 5))]
    if FLOAT64 in dtypes:
        dtypes = [FLOAT64] * len(dtypes)
    arrays = [draw.array(_any_shape(draw), dtype, draw.pick(1.0, 1e-4, 1e3)) for dtype in dtypes]
    wide = FLOAT64 if FLOAT64 in dtypes else FLOAT32
    several = len(arrays) > 1 or draw.chance(0.5)
    arguments: dict[str, Any] = {"arrays": draw.pick(list, tuple)(arrays) if several else arrays[0]}
    if draw.chance(0.3):
        arguments["out"] = draw.out((), wide), draw.out((), FLOAT32)

    def norm(m: Maths) -> tuple[Array, ...]:
        squares = np.concatenate([m.r(m.load(x) ** 2).ravel() for x in arrays])
        return m.r(np.sqrt(m.r(m.sum(squares)[0] if squares.size else np.zeros(())))), np.zeros(())

    return Trial("global_norm", arguments, draw, wide, (wide, FLOAT32), norm)


def _any_shape(draw: Draw) -> tuple[int, ...]:
    return draw.pick((), (0,), (draw.length(384),), (2, draw.length(64)), (3, 2, draw.length(384)))


TRIALS = (cross_entropy, embedding, global_norm)
