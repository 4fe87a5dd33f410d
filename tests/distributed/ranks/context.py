"""Attention over a sequence divided among ranks against the reference in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import gpu_ops
from gpu_ops import distributed
from gpu_ops.errors import CommError, DTypeError, OptionError, ShapeError
from gpu_ops.reference.attention import context_parallel
from gpu_ops.reference.attention import forward as reference
from gpu_ops.reference.tolerance import FORWARD, GRADIENT, error_report, tolerance
from tests.attention.cases import DTYPES, mixed

LAYOUTS = ("zigzag", "contiguous", "striped")
SLOPES = np.array([0.02, 0.1, 0.5, 0.004], np.float32)
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "softcap": {"causal": True, "softcap": 3.0, "softmax_scale": 0.2},
    "window": {"causal": True, "window_size": (17, 0)},
    "band": {"window_size": (20, 30)},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
}
NAMES = ("out", "dq", "dk", "dv")
CPU = {"device": "cpu"}


def draw(seqlen, dtype, level=0.0, heads=(4, 2), seed=0):
    """q, k, v and dout. ``level``: common part of all scores, and so the approximate lse."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((2, seqlen, n, 16)) for n in heads)
    v, dout = (rng.standard_normal((2, seqlen, n, 8)) for n in reversed(heads))
    if level:
        q[..., 0], k[..., 0] = 64.0, level / 16  # times the scale of 1/4
    return [x.astype(DTYPES[dtype]) for x in (q, k, v, dout)]


def unchanged(x):
    return x


def ring(comm, arrays, layout, options, there=unchanged, back=unchanged):
    """out in float32, dq, dk and dv of this rank, and lse. ``there``, ``back``: copies to the device and back."""
    mine = distributed.sequence_positions(comm, arrays[0].shape[1], layout)
    q, k, v, dout = (there(x[:, mine]) for x in arrays)
    out_dtype = np.float64 if q.dtype == np.float64 else np.float32
    settings = {"layout": layout, **options}
    out, lse = distributed.ring_attention(comm, q, k, v, return_lse=True, out_dtype=out_dtype, **settings)
    grads = distributed.ring_attention_backward(comm, dout, q, k, v, out, lse, **settings)
    return [back(x) for x in (out, *grads)], back(lse)


def exact(arrays, options):
    q, k, v, dout = (x.astype(np.float64) for x in arrays)
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    return [out, *reference.attention_backward(dout, q, k, v, out, lse, **options)], lse


def check(name, x, ref, part, textbook, in_float64):
    """Check ``x`` against a part of ``ref``, by the tolerance rule for the whole; float64 to ``in_float64``."""
    bound = in_float64
    if x.dtype != np.float64:
        bound = tolerance(ref, textbook.astype(x.dtype), x.dtype, FORWARD if name == "out" else GRADIENT)
    problem = error_report(x, ref[part], bound)
    assert problem is None, f"{name}: {problem}"


def compare(comm, arrays, layout, options, level=0.0, **device):
    mine = context_parallel.sequence_positions(comm.rank, comm.size, arrays[0].shape[1], layout)
    results, lse = ring(comm, arrays, layout, options, **device)
    expected, expected_lse = exact(arrays, options)
    np.testing.assert_allclose(lse, expected_lse[:, :, mine], rtol=2e-6, atol=1e-5)
    for name, x, ref, textbook in zip(NAMES, results, expected, mixed(arrays, options), strict=True):
        # each term of a gradient errs by units of its score times the other factor
        other = {"dq": arrays[1], "dk": arrays[0]}.get(name, ref)
        largest = max(1.0, *(float(np.abs(y).max()) for y in (ref, other)))
        check(name, x, ref, np.s_[:, mine], textbook, (1e-12 + 4 * np.spacing(abs(level))) * largest)


def layouts_for(options):
    by_distance = {"window_size", "alibi_slopes"} & set(options)
    return LAYOUTS[:2] if by_distance else LAYOUTS


def check_positions(comm):
    for layout in LAYOUTS:
        for seqlen in (0, 2 * comm.size, 6 * comm.size):
            positions = distributed.sequence_positions(comm, seqlen, layout)
            assert positions.tolist() == context_parallel.sequence_positions(
                comm.rank, comm.size, seqlen, layout
            )
            both = np.sort(comm.all_gather(positions))
            assert both.tolist() == list(range(seqlen))


def check_ring_in_float64(comm):
    arrays = draw(12 * comm.size, "float64")
    for options in OPTIONS.values():
        for layout in layouts_for(options):
            compare(comm, arrays, layout, options)


def check_ring_in_other_dtypes(comm):
    """Check lengths that no tile divides."""
    for dtype, layout in itertools.product(("float32", "bfloat16"), LAYOUTS):
        for name in ("full", "causal"):
            compare(comm, draw(74 * comm.size, dtype), layout, OPTIONS[name])


def check_ring_with_large_scores(comm):
    """Check scores at which float32 has too few digits for lse: 2839 is the smallest such level, 16000 far beyond."""
    for dtype, level in itertools.product(("float64", "float32", "bfloat16"), (4000.0, -16000.0)):
        for layout in LAYOUTS[:2]:
            compare(comm, draw(24 * comm.size, dtype, level), layout, OPTIONS["causal"], level)


def check_ring_rows_that_see_no_key(comm):
    """A query whose keys all score -inf has out 0, lse -inf, no gradients. NaN reaches only queries that see it."""
    q, k, v, dout = draw(8 * comm.size, "float64")
    q[0, 5], k[0, ..., 0] = 0.0, 1.0
    q[0, 5, :, 0] = -np.inf
    v[1, -1] = np.nan
    (out, dq, _, _), lse = ring(comm, (q, k, v, dout), "zigzag", {"causal": True})
    mine = distributed.sequence_positions(comm, q.shape[1]).tolist()
    if 5 in mine:
        row = mine.index(5)
        assert (out[0, row] == 0).all()
        assert (lse[0, :, row] == -np.inf).all()
        assert (dq[0, row] == 0).all()
    last = q.shape[1] - 1
    assert np.isnan(out[1]).any(axis=(1, 2)).tolist() == [position == last for position in mine]


def check_ring_bytes(comm):
    """Forward sends k and v (p - 1) times; backward does too, and sends their float32 gradients p times."""
    p = comm.size
    for dtype, grad_size in (("bfloat16", 4), ("float64", 8)):
        arrays = draw(16 * p, dtype)
        per_rank = (arrays[1].size + arrays[2].size) // p
        item = arrays[1].itemsize
        before = comm.bytes_sent["shift"]
        ring(comm, arrays, "zigzag", {"causal": True})
        sent = comm.bytes_sent["shift"] - before
        assert sent == (2 * (p - 1) * per_rank * item + p * per_rank * grad_size if p > 1 else 0)


def check_ring_twice(comm):
    """A repeated call gives the same bits."""
    arrays = draw(20 * comm.size, "bfloat16")
    first, second = (ring(comm, arrays, "zigzag", {"causal": True})[0] for _ in range(2))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


def check_ulysses(comm):
    """Check the results bit for bit against one rank, and the bytes sent."""
    p = comm.size
    slopes = np.linspace(0.01, 0.5, 4 * p).astype(np.float32)
    options = {**OPTIONS, "alibi": {"causal": True, "alibi_slopes": slopes}}
    for dtype, (name, settings) in itertools.product(("float64", "float32", "bfloat16"), options.items()):
        if dtype != "float32" and name not in ("causal", "alibi"):
            continue
        q, k, v, dout = draw(10 * p, dtype, heads=(4 * p, 2 * p))
        single_out, single_lse = gpu_ops.attention(q, k, v, return_lse=True, **settings, **CPU)
        single_rank = [
            single_out,
            *gpu_ops.attention_backward(dout, q, k, v, single_out, single_lse, **settings, **CPU),
        ]
        mine = [np.split(x, p, axis=1)[comm.rank] for x in (q, k, v, dout)]
        before = comm.bytes_sent["all_to_all"]
        out, saved = distributed.ulysses_attention(comm, *mine[:3], return_saved=True, **settings)
        forward = comm.bytes_sent["all_to_all"] - before
        grads = distributed.ulysses_attention_backward(comm, mine[3], saved, **settings)
        for x, ref in zip((out, *grads), single_rank, strict=True):
            np.testing.assert_array_equal(x, np.split(ref, p, axis=1)[comm.rank])
        moved = sum(x.nbytes for x in (q, k, v, single_out)) // p
        assert forward == moved * (p - 1) // p
        assert comm.bytes_sent["all_to_all"] - before == 2 * forward


def check_documents(comm):
    """Check documents with any bounds, some empty, some longer than the share of a rank; and the bytes sent."""
    p, share = comm.size, 30
    total = p * share
    cases = (
        [0, 7, 7, 31, 38, total - 1, total],
        [0, total],
        [0, share, share, total] if p > 1 else [0, total],
    )
    for ends, dtype, causal in itertools.product(cases, ("float64", "bfloat16"), (True, False)):
        cu = np.sort(np.minimum(ends, total)).astype(np.int32)
        q, k, v, dout = (x[0] for x in draw(total, dtype, seed=len(ends)))
        for more in ({}, {"window_size": (9, 0)}, {"alibi_slopes": np.tile(SLOPES, (cu.size - 1, 1))}):
            if more and (not causal or dtype != "float64"):
                continue
            options = {"causal": causal, **more}
            expected = documents_of((q, k, v, dout), cu, options, lambda *arguments: exact(*arguments)[0])
            textbook = documents_of((q, k, v, dout), cu, options, mixed)
            local = slice(comm.rank * share, (comm.rank + 1) * share)
            before = {n: comm.bytes_sent[n] for n in ("all_gather", "reduce_scatter")}
            out, lse = distributed.gathered_attention_varlen(
                comm, q[local], k[local], v[local], cu, return_lse=True, **options
            )
            grads = distributed.gathered_attention_varlen_backward(
                comm, dout[local], q[local], k[local], v[local], out, lse, cu, **options
            )
            item = 8 if dtype == "float64" else 4
            assert (
                comm.bytes_sent["all_gather"] - before["all_gather"]
                == 2 * (p - 1) * (k.nbytes + v.nbytes) // p
            )
            assert comm.bytes_sent["reduce_scatter"] - before["reduce_scatter"] == (
                (p - 1) * (k.size + v.size) * item // p
            )
            for name, x, ref, by_textbook in zip(NAMES, (out, *grads), expected, textbook, strict=True):
                check(name, x, ref, local, by_textbook, 1e-12 * max(1.0, np.abs(ref).max()))


def documents_of(arrays, cu, options, compute):
    """out, dq, dk and dv by ``compute``, document by document."""
    slopes = options.get("alibi_slopes")
    documents = []
    for i, (begin, end) in enumerate(itertools.pairwise(cu)):
        settings = options if slopes is None else {**options, "alibi_slopes": slopes[i]}
        documents.append([x[0] for x in compute([x[None, begin:end] for x in arrays], settings)])
    return [np.concatenate(parts) for parts in zip(*documents, strict=True)]


def check_context_mistakes(comm):
    q, k, v, dout = (x[:, : 4 * 2] for x in draw(16, "float32"))
    ring_, ulysses = distributed.ring_attention, distributed.ulysses_attention
    before = dict(comm.bytes_sent)
    out, lse = np.zeros_like(dout), np.zeros((2, 4, 8))
    back, packed = distributed.ring_attention_backward, distributed.gathered_attention_varlen
    cu = np.array([0, 8 * comm.size], np.int32)
    mistakes = (
        (OptionError, "did you mean 'zigzag'", lambda: ring_(comm, q, k, v, layout="zig-zag")),
        (OptionError, "no window_size", lambda: ring_(comm, q, k, v, layout="striped", window_size=(3, 0))),
        (OptionError, "no window_size", lambda: ring_(comm, q, k, v, layout="striped", alibi_slopes=SLOPES)),
        (ShapeError, "even number", lambda: ring_(comm, q[:, :5], k[:, :5], v[:, :5])),
        (ShapeError, "seqlen is 6 here but 8 in q", lambda: ring_(comm, q, k[:, :6], v[:, :6])),
        (OptionError, "unknown option 'dropout_p'", lambda: ring_(comm, q, k, v, dropout_p=0.1)),
        (OptionError, "softcap", lambda: ring_(comm, q, k, v, softcap=-1.0)),
        (DTypeError, "v is list, not an array", lambda: ring_(comm, q, k, [1.0])),
        (DTypeError, "dout is NoneType", lambda: back(comm, None, q, k, v, out, lse)),
        (DTypeError, "out_dtype", lambda: ring_(comm, q, k, v, out_dtype=np.float16)),
        (DTypeError, "mixed", lambda: ring_(comm, q, k.astype(np.float64), v)),
        (DTypeError, "lse is float32", lambda: back(comm, dout, q, k, v, out, lse.astype(np.float32))),
        (ShapeError, "dout", lambda: back(comm, dout[:, 1:], q, k, v, out, lse)),
        (ShapeError, "int32", lambda: packed(comm, q[0], k[0], v[0], np.array([0, 8]))),
        (ShapeError, "never fall", lambda: packed(comm, q[0], k[0], v[0], np.array([0, 9, 8], np.int32))),
        (ShapeError, "end at", lambda: packed(comm, q[0], k[0], v[0], np.array([0, 7], np.int32))),
        (OptionError, "want causal", lambda: packed(comm, q[0], k[0], v[0], cu, window_size=(3, 0))),
        (ShapeError, "do not divide", lambda: distributed.sequence_positions(comm, 2 * comm.size + 1)),
    )
    if comm.size > 1:
        three = np.ones((1, 4, 2 * comm.size + 1, 8), np.float32)
        mistakes += ((ShapeError, "use ring_attention", lambda: ulysses(comm, three, three, three)),)
    for error, message, call in mistakes:
        for _ in range(2):
            with pytest.raises(error, match=message):
                call()
    assert dict(comm.bytes_sent) == before


def check_different_options(comm):
    """Every rank gets the error before it sends anything else."""
    q, k, v, dout = draw(16, "float32", heads=(2 * comm.size, comm.size))
    other = {"causal": comm.rank == comm.size - 1}
    _, lse = distributed.ring_attention(comm, q, k, v, return_lse=True)
    _, saved = distributed.ulysses_attention(comm, q, k, v, return_saved=True)
    cu = np.array([0, 16 * comm.size], np.int32)
    packed, _ = distributed.gathered_attention_varlen(comm, q[0], k[0], v[0], cu, return_lse=True)
    calls = (
        lambda: distributed.ring_attention(comm, q, k, v, **other),
        lambda: distributed.ring_attention_backward(comm, dout, q, k, v, dout, lse, **other),
        lambda: distributed.ulysses_attention(comm, q, k, v, **other),
        lambda: distributed.ulysses_attention_backward(comm, dout, saved, **other),
        lambda: distributed.gathered_attention_varlen(comm, q[0], k[0], v[0], cu, **other),
        lambda: distributed.gathered_attention_varlen_backward(
            comm, packed, q[0], k[0], v[0], packed, lse[0].astype(np.float32), cu, **other
        ),
    )
    for call in calls:
        before = dict(comm.bytes_sent)
        with pytest.raises(CommError, match=r"causal=False.*causal=True"):
            call()
        assert dict(comm.bytes_sent) == before
