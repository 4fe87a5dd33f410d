"""Trials of sampling: the filters keep the token, and the random number selects it."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.reference.sampling.sample import random_number
from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import FLOAT32, FLOAT64, Array
from scripts.fuzzing.trial import Trial

SLACK = 1e-5  # of shares: float32 and float64 have different exponentials


def sample(draw: Draw) -> Trial:
    """Trial with options as scalars or per row, with or without penalties and bias."""
    dtype, vocab = draw.dtype(), draw.length(300)
    lead = draw.pick((), (1,), (5,), (2, 3))
    logits = draw.array((*lead, vocab), dtype, draw.pick(1.0, 5.0, 0.0))
    wide_dtype, rng = FLOAT64 if dtype == np.float64 else FLOAT32, draw.rng

    def option(values: Array, kind: str = "f4") -> Any:
        values = values.astype(kind)
        return draw.place(values) if draw.chance(0.5) else values.ravel()[0].item()

    options: dict[str, Any] = {
        "temperature": option(draw.pick(0.0, 0.3, 1.0, 5.0) * rng.uniform(0.5, 1, lead)),
        "top_k": option(rng.integers(0, draw.pick(1, 3, vocab + 9), lead), "i4"),
        "top_p": option(np.minimum(rng.uniform(0, draw.pick(1.0, 3.0), lead), 1)),
        "min_p": option(draw.pick(0.0, 0.2, 1.0) * rng.random(lead)),
        "seed": option(rng.integers(0, 2**63, lead), "i8"),
        "step": option(rng.integers(0, 2**40, lead), "u8"),
    }
    if draw.chance(0.4):
        options["bias"] = draw.array(draw.pick((vocab,), (*lead, vocab)), wide_dtype)
    if draw.chance(0.4):
        options["counts"] = draw.place(rng.integers(-1, 3, (*lead, vocab)).astype("i4"))
        options["repetition_penalty"] = option(rng.uniform(0.5, 2, lead))
        options["frequency_penalty"] = option(rng.uniform(-1, 1, lead))
        options["presence_penalty"] = option(rng.uniform(-1, 1, lead))
    if len(lead) < 2 and draw.chance(0.3):
        options["out"] = draw.out(lead, np.dtype(np.int32))

    def check(found: list[Any]) -> str | None:
        tokens = np.asarray(found[0])
        if tokens.shape != lead or tokens.dtype != np.int32:
            return f"tokens {tokens.dtype}{tokens.shape}"
        z = adjusted(np.asarray(logits, wide_dtype), options)
        for row, at in enumerate(np.ndindex(lead)):
            seed, step = (
                int(options[n][at] if np.ndim(options[n]) else options[n]) for n in ("seed", "step")
            )
            own_seed = isinstance(options["seed"], np.ndarray)
            number = random_number(seed, step, 0 if own_seed else row) / 2.0**64
            named = {n: pick_row(options[n], at) for n in ("temperature", "top_k", "top_p", "min_p")}
            if wrong := fault_of_row(z[at].astype(np.float64), int(tokens[at]), number, **named):
                return f"row {at}: {wrong}"
        return None

    return Trial("sample", {"logits": logits, **options}, draw, dtype, check=check)


def pick_row(x: Any, at: tuple[int, ...]) -> Any:
    return x[at] if isinstance(x, np.ndarray) else x


def adjusted(z: Array, given: dict[str, Any]) -> Array:
    """Logits with penalties and bias, in their computing dtype."""
    if "counts" in given:
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        repetition, frequency, presence = (
            np.asarray(given[n], "f4").astype(z.dtype)[..., None] for n in names
        )
        counts = given["counts"]
        z = np.where(counts == 0, z, np.where(z < 0, z * repetition, z / repetition))
        z = np.where(counts > 0, z - frequency * counts.astype(z.dtype) - presence, z)
    return z + given["bias"] if "bias" in given else z


def fault_of_row(
    z: Array, token: int, number: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> str | None:
    """Fault of a token, if it is wrong regardless of float32 rounding."""
    if not z.size:
        return None if token == -1 else f"token {token} of none"
    if not 0 <= token < len(z):
        return f"token {token}"
    order = np.lexsort((np.arange(len(z)), -z))
    place = int(np.flatnonzero(order == token)[0])
    t = float(np.float32(temperature))
    if t == 0:
        return None if place == 0 else f"token {token} is not the largest, {order[0]}"
    if top_k and place >= top_k:
        return f"token {token} is number {place} of top_k {top_k}"
    p = np.exp((z - z.max()) / t)[order]
    p[top_k or len(p) :] = 0
    before, total, share = np.cumsum(p) - p, p.sum(), float(np.float32(top_p))
    if place and before[place] > (share + SLACK) * total:
        return f"token {token} comes after {before[place] / total} of top_p {share}"
    if p[place] < (float(np.float32(min_p)) - SLACK) * p[0]:
        return f"token {token} has {p[place] / p[0]} of the largest, min_p {min_p}"
    # share of the kept tokens before this one: lower bound (surely kept) and upper bound (possibly kept)
    spans = []
    for slack in (-SLACK, SLACK):
        kept = (before < (share + slack) * total) & (p >= (float(np.float32(min_p)) - slack) * p[0])
        kept[0] = True
        weights = np.zeros(len(z))
        weights[order] = np.where(kept, p, 0)
        whole = weights.sum()
        spans.append((weights[:token].sum() / whole, weights[: token + 1].sum() / whole))
    low, high = min(s[0] for s in spans), max(s[1] for s in spans)
    return (
        None if low - SLACK <= number <= high + SLACK else f"token {token} has {low} to {high}, not {number}"
    )


TRIALS = (sample,)
