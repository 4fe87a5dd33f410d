"""Options of scores: every attention function takes the same ones, and a new option touches few files."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

import gpu_ops

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("causal", "window_size", "softmax_scale", "softcap", "sinks", "alibi_slopes")
WEIGHTS = (*SHARED, "dropout_p", "seed")
DENSE = (*WEIGHTS, "bias", "block_mask", "q_start", "k_start")
TAKEN = {
    "attention": DENSE,
    "attention_backward": DENSE,
    "attention_varlen": WEIGHTS,
    "attention_varlen_backward": WEIGHTS,
    "attention_decode": SHARED,
}


def test_an_option_is_named_in_few_files():
    """Seven files: documentation and check, lowering, one file for each kind of kernel, the reference.

    ``rglob`` does not follow the links in gpu_ops.
    """
    files = [p for folder in ("gpu_ops", "kernels", "reference") for p in (ROOT / folder).rglob("*.*")]
    sources = [p for p in files if p.suffix in (".py", ".cu", ".cuh")]
    # Losses have a softcap too, and models have both; core/op.py lists the names that other libraries use.
    others = ("cross_entropy", "ops/loss", "gpu_ops/models", "gpu_ops/inference", "gpu_ops/distributed")
    others += ("gpu_ops/core/op.py",)
    of_attention = [p for p in sources if not any(name in str(p.relative_to(ROOT)) for name in others)]
    naming = sorted(
        str(p.relative_to(ROOT)) for p in of_attention if "softcap" in p.read_text(encoding="utf-8")
    )
    assert "reference/attention/core.py" in naming
    assert len(naming) <= 8, naming


@pytest.mark.parametrize("op", TAKEN)
def test_all_attention_functions_take_the_same_options(op):
    first = inspect.signature(gpu_ops.attention).parameters
    taken = inspect.signature(getattr(gpu_ops, op)).parameters
    assert tuple(name for name in taken if name in DENSE) == TAKEN[op]
    for name in TAKEN[op]:
        assert taken[name] == first[name]


REFUSED = [(op, name) for op in TAKEN for name in ("softcapp", "dropout_p", "bias") if name not in TAKEN[op]]


@pytest.mark.parametrize(("op", "name"), REFUSED)
def test_other_options_are_refused_by_the_functions_name(op, name):
    required = [
        p.name for p in inspect.signature(getattr(gpu_ops, op)).parameters.values() if p.default is p.empty
    ]
    arguments = dict.fromkeys(required, np.ones((1, 1, 1, 8)))
    with pytest.raises(TypeError, match=f"^{op}: unknown argument '{name}'"):
        getattr(gpu_ops, op)(**arguments, **{name: 1})
