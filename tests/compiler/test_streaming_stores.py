"""Results too large for a cache use streaming stores: the same bits, wherever rows begin and end."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import gpu_ops
from gpu_ops.kernels.common.cpu.codegen import stream

COLUMNS = (1, 15, 16, 17, 33, 511, 1025, 2080, 4097)


@pytest.fixture
def streamed(monkeypatch):
    """Function that calls an op as if no result fit in a cache."""

    def call(op, *arrays, **options):
        with monkeypatch.context() as patch:
            patch.setattr(stream, "last_level_cache", lambda: 0)
            return op(*arrays, **options)

    return call


def at(offset, x, gap=3):
    """Copy of x whose first row is ``offset`` elements past a boundary of 64 bytes, and the array around its rows."""
    rows, cols = x.shape
    frame = np.empty((rows, cols + gap), x.dtype)
    whole = np.full(frame.size + 128, 7, x.dtype)
    first = -whole.ctypes.data % 64 // x.itemsize + offset
    frame = whole[first : first + frame.size].reshape(frame.shape)
    frame[:, :cols] = x
    return frame[:, :cols], (whole[:first], frame[:, cols:], whole[first + frame.size :])


def untouched(frame):
    return all((part == 7).all() for part in frame)


# Columns, elements past a boundary, elements between rows: adjacent rows share cache lines.
PLACES = list(itertools.product(COLUMNS, (0, 1, 8), (0, 4)))


CALLS = {
    "rmsnorm": lambda x, r, w: (gpu_ops.rmsnorm, (x, w), {}),
    "rmsnorm llama": lambda x, r, w: (gpu_ops.rmsnorm, (x, w), {"casting": "llama"}),
    "rmsnorm residual": lambda x, r, w: (gpu_ops.rmsnorm, (x, w), {"residual": r}),
    "layernorm": lambda x, r, w: (gpu_ops.layernorm, (x, w, w), {}),
    "layernorm residual": lambda x, r, w: (gpu_ops.layernorm, (x, w), {"residual": r}),
    "swiglu": lambda x, r, w: (gpu_ops.swiglu, (x, r), {}),
    "swiglu gelu": lambda x, r, w: (gpu_ops.swiglu, (x, r), {"activation": "gelu"}),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_same_bits(case, dtype, streamed, rng):
    for cols, offset, gap in PLACES:
        x, r = (rng.standard_normal((3, cols)).astype(dtype) for _ in range(2))
        w = rng.standard_normal(cols).astype(dtype)
        op, arrays, options = CALLS[case](x, r, w)
        expected = op(*arrays, **options)
        out, frame = at(offset, np.zeros_like(x), gap)
        more = {"out": out}
        if "residual" in options:
            more["residual_out"], sums_frame = at(offset + 3, np.zeros_like(x), gap)
        actual = streamed(op, *arrays, **options, **more)
        assert untouched(frame), (cols, offset, gap)
        if "residual" in options:
            assert untouched(sums_frame), (cols, offset, gap)
        else:
            expected, actual = (expected,), (actual,)
        assert [a.tobytes() for a in actual] == [a.tobytes() for a in expected], (cols, offset, gap)


@pytest.mark.parametrize("case", CALLS)
def test_in_place(case, dtype, streamed, rng):
    for cols in COLUMNS:
        x, r = (rng.standard_normal((3, cols)).astype(dtype) for _ in range(2))
        op, arrays, options = CALLS[case](x, r, x[0].copy())
        expected = op(*arrays, **options)
        expected = expected[0] if "residual" in options else expected
        for call in (streamed, lambda op, *a, **k: op(*a, **k)):
            mine, kept = x.copy(), r.copy()
            if "residual" in options:
                options = {**options, "residual": kept, "residual_out": kept}
            call(op, mine, *arrays[1:], **options, out=mine)
            assert mine.tobytes() == expected.tobytes(), cols


GRADIENTS = {
    "rmsnorm": lambda dy, x, w: (gpu_ops.rmsnorm_backward, (dy, x, w, x[:, 0].astype(statistics(x))), {}),
    "rmsnorm llama residual": lambda dy, x, w: (gpu_ops.rmsnorm_backward, (dy, x, w, x[:, 0].astype(statistics(x))),
     {"casting": "llama", "dresidual": x}),
    "layernorm": lambda dy, x, w: (gpu_ops.layernorm_backward, (dy, x, w, *[x[:, 0].astype(statistics(x))] * 2), {}),
    "layernorm residual": lambda dy, x, w: (gpu_ops.layernorm_backward,
     (dy, x, w, *[x[:, 0].astype(statistics(x))] * 2), {"dresidual": x}),
}  # fmt: skip


def statistics(x):
    return np.float64 if x.dtype == np.float64 else np.float32


@pytest.mark.parametrize("case", GRADIENTS)
def test_the_same_gradients(case, dtype, streamed, rng):
    for cols, offset, gap in PLACES:
        dy, x = (rng.standard_normal((3, cols)).astype(dtype) for _ in range(2))
        op, arrays, options = GRADIENTS[case](dy, x, rng.standard_normal(cols).astype(dtype))
        expected = [a.tobytes() for a in op(*arrays, **options)]
        out, frame = at(offset, np.zeros_like(x), gap)
        assert [a.tobytes() for a in streamed(op, *arrays, **options, out=out)] == expected, (
            cols,
            offset,
            gap,
        )
        assert untouched(frame), (cols, offset, gap)
        for call in (streamed, lambda op, *a, **k: op(*a, **k)):
            in_place = dy.copy()
            assert [
                a.tobytes() for a in call(op, in_place, *arrays[1:], **options, out=in_place)
            ] == expected, cols


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_the_same_gradients_of_gates(activation, dtype, streamed, rng):
    for cols, offset, gap in PLACES:
        arrays = [rng.standard_normal((3, cols)).astype(dtype) for _ in range(3)]
        expected = gpu_ops.swiglu_backward(*arrays, activation=activation)
        for distance in (0, 3):  # the lines of both results begin at one place, or do not
            (dgate, frame), (dup, other) = (
                at(o, np.zeros_like(arrays[0]), gap) for o in (offset, offset + distance)
            )
            streamed(gpu_ops.swiglu_backward, *arrays, activation=activation, out=(dgate, dup))
            assert [dgate.tobytes(), dup.tobytes()] == [a.tobytes() for a in expected], (cols, offset, gap)
            assert untouched(frame), (cols, offset, gap)
            assert untouched(other), (cols, offset, gap)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_same_rotation(interleaved, layout, dtype, streamed, rng):
    """Rotate heads that are contiguous in memory, across tokens too, and heads that are not."""
    for nheads, head_dim, offset in itertools.product((1, 5), (2, 48, 130), (0, 1, 8)):
        q = rng.standard_normal((2, 7, nheads, head_dim)).astype(dtype)
        q = np.ascontiguousarray(q.swapaxes(1, 2)) if layout == "bhsd" else q
        options = {"interleaved": interleaved, "layout": layout, "rotary_dim": max(2, head_dim // 4 * 2)}
        expected = gpu_ops.rope(q, **options)
        close, frame = at(offset, np.zeros((1, q.size), dtype))
        streamed(gpu_ops.rope, q, **options, out=close.reshape(q.shape))
        assert close.tobytes() == expected.tobytes(), (nheads, head_dim, offset)
        assert untouched(frame), (nheads, head_dim, offset)
        strided, frame = at(offset, np.zeros((q.size // head_dim, head_dim), dtype))
        strided = np.lib.stride_tricks.as_strided(
            strided,
            q.shape,
            (*(strided.strides[0] * n for n in (q.shape[1] * q.shape[2], q.shape[2], 1)), q.itemsize),
        )
        streamed(gpu_ops.rope, q, **options, out=strided)
        assert strided.tobytes() == expected.tobytes(), (nheads, head_dim, offset)
        assert untouched(frame), (nheads, head_dim, offset)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_same_caches(normalised, dtype, streamed, rng):
    """Heads of 128 and 64 are stored together, heads of 48 one by one."""
    for head_dim, offset in itertools.product((48, 64, 128), (0, 1, 8)):
        q, k, v = (rng.standard_normal((2, 7, heads, head_dim)).astype(dtype) for heads in (5, 3, 3))
        options = {"seqused_k": np.array([1, 4], np.int32)}
        if normalised:
            options |= {f"{name}_weight": rng.standard_normal(head_dim).astype(dtype) for name in "qk"}
        caches = [np.zeros((2, 12, 3, head_dim), dtype) for _ in range(2)]
        expected = gpu_ops.rope_append_kv(q, k, v, *caches, **options)
        lines = [at(offset, np.zeros((1, x.size), dtype)) for x in (q, *caches)]
        out, *cache_views = (line.reshape(x.shape) for (line, _), x in zip(lines, (q, *caches), strict=True))
        streamed(gpu_ops.rope_append_kv, q, k, v, *cache_views, **options, out=out)
        for actual, exact in zip((out, *cache_views), (expected, *caches), strict=True):
            assert actual.tobytes() == exact.tobytes(), (head_dim, offset)
        assert all(untouched(frame) for _, frame in lines), (head_dim, offset)


def test_what_streams():
    least = min(stream.last_level_cache(), 32 << 20) // 2
    assert stream.stays_in_cache(least - 1)
    assert not stream.stays_in_cache(least + 1)
    assert stream.last_level_cache() >= 1 << 18


def test_a_result_that_is_not_aligned_is_refused(rng):
    """No element is aligned to a line; the result is refused even if a similar call was checked before."""
    x, w = rng.standard_normal((3, 64)).astype(np.float32), np.ones(64, np.float32)
    raw = np.zeros(x.nbytes + 1, np.uint8)
    between = raw[1:].view(np.float32).reshape(x.shape)
    for _ in range(2):
        gpu_ops.rmsnorm(x, w, out=np.empty_like(x))
        with pytest.raises(gpu_ops.errors.ShapeError, match="out is not aligned"):
            gpu_ops.rmsnorm(x, w, out=between)
    assert not raw.any()
