"""Embedding, logits and loss over rows of a table divided among ranks, against the ops over the whole table."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import gpu_ops
from gpu_ops.distributed import VocabularyRows
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.reference.loss import linear_cross_entropy as reference
from gpu_ops.reference.tolerance import FORWARD, GRADIENT, error_report, tolerance
from tests.attention.cases import DTYPES

VOCAB, HIDDEN = 23, 12  # 2, 3 and 4 ranks do not divide it
WEIGHTS = np.random.default_rng(8).uniform(0.5, 2.0, VOCAB)
LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum", "z_loss": 1e-2},
    "none": {"reduction": "none", "softcap": 3.0},
    "denominator": {"denominator": np.int64(5), "ignore_index": 7, "dloss": 16.0},
    "smoothing": {"label_smoothing": 0.2, "class_weight": WEIGHTS, "softcap": 4.0, "z_loss": 1e-3},
    "chunks": {"chunk": 2, "label_smoothing": 0.1},
}


def draw(comm, dtype="float64", level=0.0):
    """h, the table, and a target in the rows of each rank. ``level``: distance between the largest logits."""
    rng = np.random.default_rng(3)
    h, weight = rng.standard_normal((2, 2 * comm.size, HIDDEN)), rng.standard_normal((VOCAB, HIDDEN))
    h[..., 0], weight[:, 0] = 1.0, np.linspace(0, level, VOCAB)
    targets = np.resize(np.arange(0, VOCAB, 3), h.shape[:2])
    targets[0, 1] = -100
    return h.astype(DTYPES[dtype]), weight.astype(DTYPES[dtype]), targets


def table_of(comm, weight, **options):
    at = slice(VOCAB * comm.rank // comm.size, VOCAB * (comm.rank + 1) // comm.size)
    return VocabularyRows(comm, weight[at], VOCAB, **options), at


def close(actual, expected):
    with np.errstate(invalid="ignore"):  # inf - inf
        error = np.where(actual == expected, 0, np.abs(actual - expected))
    finite = np.abs(expected)[np.isfinite(expected)]
    assert not (error > 1e-12 * max(1.0, finite.max(initial=0))).any()
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))


def check_embedding(comm):
    """Check that the embedding has the bits of one rank, and its gradient."""
    _, weight, _ = draw(comm)
    ids = np.resize(np.arange(VOCAB, dtype=np.int32), (2, 3 * comm.size))
    dx = np.random.default_rng(1).standard_normal((*ids.shape, HIDDEN))
    for divided, scale in ((False, 1.0), (True, 2.0)):
        table, at = table_of(comm, weight, sequence_parallel=divided)
        mine = slice(3 * comm.rank, 3 * comm.rank + 3) if divided else slice(None)
        expected = gpu_ops.embedding(ids, weight, scale=scale)[:, mine]
        np.testing.assert_array_equal(table.embed(ids, scale=scale), expected)
        grads = np.ones(table.shape)
        table.embed_backward(dx[:, mine], ids, dweight=grads, scale=scale)
        close(grads, 1 + gpu_ops.embedding_backward(dx, ids, VOCAB, scale=scale)[at])


def check_loss(comm):
    """Check loss and gradients in float64; the loss has the same bits on every rank."""
    h, weight, drawn = draw(comm)
    for options, divided in itertools.product(LOSSES.values(), (False, True)):
        targets = np.where(drawn == -100, options.get("ignore_index", -100), drawn)
        of_loss = {"grads": True, **options}
        expected, dh, dweight = gpu_ops.linear_cross_entropy(h, weight, targets, **of_loss)
        table, at = table_of(comm, weight, sequence_parallel=divided)
        mine = slice(2 * comm.rank, 2 * comm.rank + 2) if divided else slice(None)
        results = table.loss(h[:, mine], targets, **of_loss)
        for x, ref in zip(results, (expected, dh[:, mine], dweight[at]), strict=True):
            close(x, ref)
        each = comm.all_gather(np.atleast_1d(results[0])[None])
        np.testing.assert_array_equal(each, np.broadcast_to(each[0], each.shape))
        sums = np.ones(table.shape)
        table.loss(h[:, mine], targets, **of_loss, dweight=sums)
        close(sums, 1 + dweight[at])
        assert len(table.loss(h[:, mine], targets, **of_loss, only="dx")) == 2
        plain = {name: x for name, x in options.items() if name != "dloss"}
        close(table.loss(h[:, mine], targets, **plain), expected)
        close(table.logits(h[:, mine]), gpu_ops.linear(h, weight))


def check_loss_in_other_dtypes(comm):
    """Check loss and gradients by the tolerance rule for the whole arrays."""
    for dtype in ("float32", "bfloat16"):
        h, weight, targets = draw(comm, dtype)
        exact, naive = (
            reference.linear_cross_entropy(h, weight, targets, grads=True, precision=p)
            for p in ("float64", "naive")
        )
        table, at = table_of(comm, weight)
        results = table.loss(h, targets, grads=True)
        for name, x, ref, textbook, part, factor in zip(
            *(("loss", "dx", "dweight"), results, exact, naive),
            *((..., ..., at), (FORWARD, GRADIENT, GRADIENT)),
            strict=True,
        ):
            problem = error_report(x, ref[part], tolerance(ref, textbook, x.dtype, factor))
            assert problem is None, f"{name} in {dtype}: {problem}"


def check_logits_far_from_zero(comm):
    """Equal logits so large that float64 loses lse: the loss is that of a uniform guess, with its gradient."""
    h, weight, targets = draw(comm)
    h[...], weight[...] = 2.0**30 / HIDDEN, 2.0**30
    table, at = table_of(comm, weight)
    loss, _, dweight = table.loss(h, targets, label_smoothing=0.1, grads=True)
    assert loss == pytest.approx(np.log(VOCAB), rel=1e-12)
    hits = np.bincount(targets[targets != -100], minlength=VOCAB)[at] / np.sum(targets != -100)
    np.testing.assert_allclose(dweight[:, 0] / h[0, 0, 0], 0.9 * (1 / VOCAB - hits), rtol=1e-9)


def check_large_and_infinite_logits(comm):
    """exp of the difference between logits of two ranks overflows; some or all logits of a row are -inf, or NaN."""
    h, weight, targets = draw(comm, level=4000.0)
    table, at = table_of(comm, weight)
    for x, ref, part in zip(
        table.loss(h, targets, grads=True),
        gpu_ops.linear_cross_entropy(h, weight, targets, grads=True),
        (..., ..., at),
        strict=True,
    ):
        close(x, ref[part])
    weight[:, 0] = 0
    weight[1::2, 0] = -np.inf  # times 1
    table, _ = table_of(comm, weight)
    options = {"reduction": "none"}
    close(table.loss(h, targets, **options), gpu_ops.linear_cross_entropy(h, weight, targets, **options))
    weight[:, 0] = -np.inf
    h[1, 0] = np.nan
    h[0, 1] = np.nan  # ignored
    table, _ = table_of(comm, weight)
    losses = table.loss(h, targets, **options)
    assert losses[0, 1] == 0
    assert np.isnan(losses.ravel()[np.arange(losses.size) != 1]).all()


def check_loss_bytes(comm):
    """Ranks send three numbers per token, and N for the gradient of h."""
    p = comm.size
    for dtype, sum_size in (("bfloat16", 4), ("float64", 8)):
        h, weight, targets = draw(comm, dtype)
        table, _ = table_of(comm, weight)
        for grads in (False, True):
            before = dict(comm.bytes_sent)
            table.loss(h, targets, grads=grads)
            sent = sum(comm.bytes_sent.values()) - sum(before.values())
            n = 3 * sum_size * targets.size + (h.nbytes if grads else 0)
            assert sent == 2 * n * (p - 1) // p


def check_no_tokens(comm):
    _, weight, _ = draw(comm)
    table, _ = table_of(comm, weight)
    none, empty = np.zeros((1, 0), np.int64), np.zeros((1, 0, HIDDEN))
    assert table.embed(none).shape == (1, 0, HIDDEN)
    assert table.logits(empty).shape == (1, 0, VOCAB)
    loss, dh = table.loss(empty, none, grads=True, only="dx")
    assert (loss, dh.shape) == (0, (1, 0, HIDDEN))


def check_vocabulary_mistakes(comm):
    h, weight, targets = draw(comm)
    table, at = table_of(comm, weight)
    before = dict(comm.bytes_sent)
    beyond = targets.copy()
    beyond[-1, -1] = VOCAB
    loss = table.loss
    mistakes = (
        (OptionError, r"ids\[1\] is 23, not in \[0, 23\)", lambda: table.embed(np.array([0, 23]))),
        (OptionError, r"ids\[0\] is -1", lambda: table.embed(np.array([-1]))),
        (DTypeError, "ids is float64", lambda: table.embed(np.array([1.0]))),
        (OptionError, "is 23, not in", lambda: loss(h, beyond)),
        (ShapeError, "targets", lambda: loss(h, targets[:1])),
        (OptionError, "label_smoothing", lambda: loss(h, targets, label_smoothing=2.0)),
        (OptionError, "did you mean 'z_loss'", lambda: loss(h, targets, zloss=0.1)),
        (ShapeError, "class_weight", lambda: loss(h, targets, class_weight=WEIGHTS[at][1:])),
        (OptionError, "only", lambda: loss(h, targets, grads=True, only="dweight")),
        (ShapeError, "dloss", lambda: loss(h, targets, grads=True, dloss=np.ones(3))),
        (ShapeError, "part has shape", lambda: VocabularyRows(comm, weight[1:], VOCAB)),
        (OptionError, "vocab", lambda: VocabularyRows(comm, weight, 0)),
    )
    for error, message, call in mistakes:
        for _ in range(2):
            with pytest.raises(error, match=message):
                call()
    assert dict(comm.bytes_sent) == before
