"""Trials of cross-entropy of logits and of a linear layer, of embedding, and of the norm of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import FLOAT32, FLOAT64, Array, Maths
from scripts.fuzzing.trial import BACKWARD, Trial

IGNORED = -100


@dataclass(frozen=True)
class Loss:
    """Targets and options, with the maths of rows of logits u."""

    targets: Array
    smoothing: float
    z_loss: float
    weight: Array | None
    vocab: int

    @classmethod
    def drawn(cls, draw: Draw, lead: tuple[int, ...], vocab: int, wide: np.dtype[Any]) -> Loss:
        targets = draw.rng.integers(0, vocab, lead)
        targets[draw.rng.random(lead) < 0.2] = IGNORED
        smoothing, z_loss = draw.pick(0.0, 0.1, 0.5), draw.pick(0.0, 0.01)
        weight = np.abs(draw.values((vocab,), wide)) + wide.type(0.1)
        return cls(targets, smoothing, z_loss, weight if draw.chance(0.4) else None, vocab)

    def arguments(self, draw: Draw) -> dict[str, Any]:
        result = {"targets": draw.place(self.targets.astype(draw.pick("i4", "i8"))), "reduction": "none"}
        result |= {"label_smoothing": self.smoothing, "z_loss": self.z_loss}
        return result if self.weight is None else result | {"class_weight": draw.place(self.weight)}

    @property
    def kept(self) -> Array:
        return np.asarray(self.targets != IGNORED)

    @property
    def hit(self) -> Array:
        return np.asarray(np.arange(self.vocab) == self.targets[..., None])

    def weights(self, m: Maths) -> Array:
        return np.ones(self.vocab, m.wide) if self.weight is None else m.load(self.weight)

    def exponentials(self, m: Maths, u: Array) -> tuple[Array, Array, Array]:
        """Maximum of each row, the exponentials relative to it, and their sum."""
        top = u.max(axis=-1, keepdims=True)
        weights = m.r(np.exp(m.r(u - top)))
        return top, weights, m.sum(weights)

    def lse(self, m: Maths, u: Array) -> Array:
        top, _, total = self.exponentials(m, u)
        return m.r(top + m.r(np.log(total)))

    def loss(self, m: Maths, u: Array) -> Array:
        w, lse, (top, _, total) = self.weights(m), self.lse(m, u), self.exponentials(m, u)
        nll = m.r(m.r(top - u) + m.r(np.log(total)))  # lse - u would lose digits of large logits
        target_loss = m.r((1 - self.smoothing) * np.sum(w * self.hit * nll, axis=-1))
        rest = m.r(self.smoothing / self.vocab * m.sum(m.r(w * nll))[..., 0])
        return np.where(
            self.kept, m.r(m.r(target_loss + rest) + m.r(self.z_loss * m.r(lse * lse)[..., 0])), 0
        )

    def gradient(self, m: Maths, u: Array, lse: Array, dloss: Array) -> Array:
        w, others = self.weights(m), self.smoothing / self.vocab
        target_weight = (1 - self.smoothing) * np.sum(w * self.hit, axis=-1, keepdims=True)
        _, weights, total = self.exponentials(m, u)
        share = m.r(m.r(weights / total) * m.r(target_weight + others * w.sum() + 2 * self.z_loss * lse))
        slope = m.r(m.r(share - others * w) - target_weight * self.hit)
        return np.where(self.kept[..., None], m.r(slope * m.load(dloss)[..., None]), 0)


def cross_entropy(draw: Draw) -> Trial:
    """Cross-entropy of rows, and its gradient."""
    # with one class all losses are 0, and no error is allowed
    dtype, vocab, lead = draw.dtype(), draw.length(129) + 1, draw.pick((1,), (3,), (2, 5), (33,))
    acc = FLOAT64 if dtype == np.float64 else FLOAT32
    logits, of = draw.array((*lead, vocab), dtype, 2.0), Loss.drawn(draw, lead, vocab, acc)
    inputs = {"logits": logits, **of.arguments(draw)}

    def loss(m: Maths) -> tuple[Array, ...]:
        return (of.loss(m, m.load(logits)),)

    if draw.chance(0.5):
        return Trial("cross_entropy", inputs, draw, dtype, (acc,), loss, linked=(("logits", 0),))
    plain = Maths(dtype, False)
    lse = np.where(of.kept, of.lse(plain, plain.load(logits))[..., 0], -np.inf).astype(acc)
    dloss = draw.values(lead, acc)

    def gradient(m: Maths) -> tuple[Array, ...]:
        known = m.load(np.where(of.kept, lse, 0).astype(acc))[..., None]
        return (of.gradient(m, m.load(logits), known, dloss),)

    arguments = {"dloss": draw.place(dloss), **inputs, "lse": draw.place(lse)}
    linked = (("dloss", 0), ("lse", 0))
    return Trial(
        "cross_entropy_backward", arguments, draw, dtype, (dtype,), gradient, BACKWARD, linked=linked
    )


def linear_cross_entropy(draw: Draw) -> Trial:
    """Cross-entropy of a linear layer's rows, with or without gradients, in chunks of any size."""
    dtype, limit = draw.dtype(), 33 if draw.small else 129
    rows, hidden, vocab = draw.length(40), draw.length(limit), draw.length(limit) + 1
    acc = FLOAT64 if dtype == np.float64 else FLOAT32
    x, weight = draw.array((rows, hidden), dtype), draw.array((vocab, hidden), dtype, 2 * hidden**-0.5)
    of, dloss, bias = Loss.drawn(draw, (rows,), vocab, acc), draw.values((rows,), acc), None
    arguments = {"x": x, "weight": weight, **of.arguments(draw), "chunk": draw.pick(0, 1, 7, 64)}
    if draw.chance(0.4):
        bias = arguments["bias"] = draw.array((vocab,), dtype)
    before, added, only = draw.values((vocab, hidden), acc), False, False
    if grads := draw.chance(0.7):
        arguments |= {"grads": True, "dloss": draw.place(dloss)}
        if only := draw.chance(0.2):
            arguments["only"] = "dx"
        elif added := draw.chance(0.4):
            arguments["dweight"] = draw.place(before, written=True)

    def formula(m: Maths) -> tuple[Array, ...]:
        wide_x, w = m.load(x), m.load(weight)
        u = m.matmul(wide_x, w.T)
        u = u if bias is None else m.r(u + m.load(bias))
        loss = of.loss(m, u)
        if not grads:
            return (loss,)
        dlogits = of.gradient(m, u, of.lse(m, u), dloss)
        dweight = m.matmul(dlogits.T, wide_x)
        if only:
            return (loss, m.matmul(dlogits, w))
        result = (loss, m.matmul(dlogits, w), dweight + m.load(before) if added else dweight)
        return result if bias is None else (*result, m.sum(dlogits, axis=0)[0])

    results = (acc, dtype, acc, acc)[: 1 if not grads else 2 if only else 3 if bias is None else 4]
    linked = (("x", 0), ("x", 1))
    return Trial("linear_cross_entropy", arguments, draw, dtype, results, formula, BACKWARD, linked=linked)


def embedding(draw: Draw) -> Trial:
    """Rows of a table, and the table's gradient, added to existing values or not."""
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
    acc = FLOAT64 if dtype == np.float64 else FLOAT32
    dx, before = draw.array((*ids.shape, cols), dtype), draw.values((rows, cols), acc)
    arguments = {"dx": dx, "ids": draw.place(ids), "num_embeddings": rows, "scale": scale}
    if added := draw.chance(0.4):
        arguments["dweight"] = draw.place(before, written=True)

    def summed(m: Maths) -> tuple[Array, ...]:
        hits = (np.arange(rows)[:, None] == ids.ravel()).astype(m.wide)
        total = m.matmul(hits, m.r(m.wide(scale) * m.load(dx).reshape(-1, cols)))
        return (total + m.load(before) if added else total,)

    return Trial("embedding_backward", arguments, draw, dtype, (acc,), summed, BACKWARD, linked=(("dx", 0),))


def global_norm(draw: Draw) -> Trial:
    """Norm of one or more arrays of any dtypes; float64 is not mixed, as other squares are rounded to float32."""
    dtypes = [draw.dtype() for _ in range(draw.pick(1, 1, 2, 5))]
    if FLOAT64 in dtypes:
        dtypes = [FLOAT64] * len(dtypes)
    arrays = [draw.array(_any_shape(draw), dtype, draw.pick(1.0, 1e-4, 1e3)) for dtype in dtypes]
    acc = FLOAT64 if FLOAT64 in dtypes else FLOAT32
    several = len(arrays) > 1 or draw.chance(0.5)
    arguments: dict[str, Any] = {"arrays": draw.pick(list, tuple)(arrays) if several else arrays[0]}
    if draw.chance(0.3):
        arguments["out"] = draw.out((), acc), draw.out((), FLOAT32)

    def norm(m: Maths) -> tuple[Array, ...]:
        squares = np.concatenate([m.r(m.load(x) ** 2).ravel() for x in arrays])
        return m.r(np.sqrt(m.r(m.sum(squares)[0] if squares.size else np.zeros(())))), np.zeros(())

    return Trial("global_norm", arguments, draw, acc, (acc, FLOAT32), norm)


def _any_shape(draw: Draw) -> tuple[int, ...]:
    return draw.pick((), (0,), (draw.length(384),), (2, draw.length(64)), (3, 2, draw.length(384)))


TRIALS = (cross_entropy, linear_cross_entropy, embedding, global_norm)
