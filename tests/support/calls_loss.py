"""Rows of the table of calls (calls.py): cross-entropy, also of a linear layer, embedding, norm of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

import gpu_ops
from tests.support.call_maker import Maker

IGNORED = -100


def indices(new: Maker, name: str, axes: str, end: int, dtype: Any = np.int64) -> dict[str, Any]:
    """Integers in [0, end); ignored targets if that range is empty."""
    made = new.integers(0, max(end, 1), dtype, **{name: axes})
    if not end:
        made[name][...] = IGNORED
    return made


def logits(new: Maker, axes: str = "rows cols") -> dict[str, Any]:
    leading, _, vocab = axes.rpartition(" ")
    arrays = {**new.normal(logits=axes), **indices(new, "targets", leading, new.sizes[vocab])}
    arrays["targets"][2:3] = IGNORED
    return arrays


def weighted(new: Maker) -> dict[str, Any]:
    """Options of class weights, in the dtype of the loss, and others that change a kernel."""
    return {**new.normal(new.wide, class_weight="width"), "label_smoothing": 0.1, "softcap": 5.0}


def gradient(new: Maker, axes: str = "rows cols", **options: Any) -> dict[str, Any]:
    arrays, leading = logits(new, axes), axes.rpartition(" ")[0]
    _, lse = gpu_ops.cross_entropy(*arrays.values(), return_lse=True, backend="reference", **options)
    new.axes["lse"] = tuple(leading.split())
    return {**arrays, "lse": lse}


def of_rows(new: Maker) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = gradient(new)
    return {**new.normal(new.wide, dloss="rows"), **arrays}, {"reduction": "none"}


def of_mean(new: Maker) -> tuple[dict[str, Any], dict[str, Any]]:
    options = weighted(new)
    arrays = gradient(new, "batch rows width", **options)
    return {**new.normal(new.wide, dloss=""), **arrays}, options


def head(new: Maker, axes: str = "rows") -> dict[str, Any]:
    arrays = {
        **new.normal(x=f"{axes} hidden", weight="width hidden"),
        **indices(new, "targets", axes, new.sizes["width"]),
    }
    arrays["targets"][2:3] = IGNORED
    return arrays


def differentiated(new: Maker) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call with every result, in two or more chunks of 17 rows."""
    options = {"reduction": "none", "grads": True, "return_lse": True, "chunk": 16}
    return head(new), {**new.normal(bias="width"), **options}


def table(new: Maker) -> dict[str, Any]:
    return {**indices(new, "ids", "rows", new.sizes["N"]), **new.normal(weight="N width")}


def gradient_of_table(new: Maker) -> dict[str, Any]:
    arrays = {**new.normal(dx="rows cols"), **indices(new, "ids", "rows", new.sizes["N"], np.int32)}
    return {**arrays, "num_embeddings": new.sizes["N"]}


VARIANTS: dict[str, Any] = {
    "cross_entropy": lambda new: (logits(new), {"reduction": "none", "return_lse": True}),
    "cross_entropy mean": lambda new: (logits(new, "batch rows width"), weighted(new)),
    "cross_entropy_backward": of_rows,
    "cross_entropy_backward mean": of_mean,
    "linear_cross_entropy": differentiated,
    "linear_cross_entropy mean": lambda new: (head(new, "batch rows"), weighted(new)),
    "embedding": lambda new: (table(new), {"scale": 0.5}),
    "embedding_backward": lambda new: (gradient_of_table(new), {"scale": 0.5}),
    "global_norm": lambda new: (new.normal(arrays="rows cols"), {}),
    "embedding_backward added": lambda new: (
        gradient_of_table(new),
        new.normal(new.wide, dweight="N cols"),
    ),
}
