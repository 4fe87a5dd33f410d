"""q_start and k_start: positions of the queries and keys of a call, for causal, windows and ALiBi."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpu_ops
from gpu_ops import emulator
from gpu_ops.core.device import compiler_missing
from gpu_ops.kernels.attention.problem import UNLIMITED, Attention
from gpu_ops.ops.attention.options import visible_pairs
from gpu_ops.reference.attention import forward as reference
from gpu_ops.reference.attention.core import visible_keys
from tests.attention.cases import expected, row_id

DEVICES = ("cpu", "emulator", "cuda")

# (seqlen_q, seqlen_k), (q_start, k_start): some keys hidden, all, none; by the window's other side; far away
PLACES = [
    {"seqlens": (70, 90), "q_start": 40, "k_start": 15, "mask": "causal", "sinks": True},
    {"seqlens": (90, 33), "k_start": 60, "mask": "causal", "alibi": "heads"},
    {"seqlens": (33, 70), "q_start": 5, "k_start": 900, "mask": "causal", "sinks": True},
    {"seqlens": (33, 70), "q_start": 900, "mask": "wide_left", "alibi": "batch_heads"},
    {
        "seqlens": (70, 90),
        "q_start": 1000,
        "k_start": 985,
        "mask": "wide_band",
        "alibi": "heads",
        "dtype": "float32",
    },
    {"seqlens": (90, 70), "q_start": 3, "k_start": 60, "mask": "right", "heads": (3, 1), "dtype": "float32"},
    {"seqlens": (1, 90), "q_start": 60, "k_start": 7, "mask": "causal", "alibi": "heads", "batch": 12},
    {
        "seqlens": (70, 70),
        "q_start": 9,
        "bias": "full",
        "block_mask": "shared",
        "blocks": (5, 7),
        "mask": "band",
    },
]
FAR = 2**30 - 1


def quick_on_emulator(raw):
    """Numba kernels compile for seconds: masks and ALiBi once."""
    if raw:
        return {
            "test_forward_and_backward": {"place": PLACES[1:5]},
            "test_the_farthest_positions": {"window": [(3, -1)]},
        }
    return {"test_forward_and_backward": {"place": PLACES[4:5]}, "test_the_farthest_positions": None}


@pytest.mark.parametrize("place", PLACES, ids=row_id)
def test_forward_and_backward(place, backend):
    e = expected(
        gradients=True, **{"heads": (2, 1), "head_dims": (32, 32), "dtype": "bfloat16", "batch": 1, **place}
    )
    p = e.problem
    out, lse = gpu_ops.attention(*p.arrays, **p.options, return_lse=True, **backend)
    e.check("out", out)
    e.check("lse", lse)
    assert not out[np.isneginf(np.asarray(lse)).swapaxes(1, 2)].any()
    for name, x in zip(
        ("dq", "dk", "dv"),
        gpu_ops.attention_backward(p.dout, *p.arrays, out, lse, **p.options, **backend),
        strict=True,
    ):
        e.check(name, x)


@pytest.mark.parametrize("first_key", [0, 4])
def test_blocks_of_queries_and_keys_are_those_of_the_whole(first_key, rng):
    """Scores of a pair depend only on its positions, wherever a call begins and ends."""
    q, k, v = rng.standard_normal((3, 1, 60, 2, 8))
    options = {"causal": True, "alibi_slopes": np.array([0.3, 0.02], np.float32)}
    if first_key:
        options["window_size"] = (40, 0)  # the last block of queries sees no key before 45 - 40
    out, lse = gpu_ops.attention(q, k, v, **options, return_lse=True)
    for rows, keys in (
        (slice(0, 20), slice(0, 60)),
        (slice(20, 45), slice(0, 45)),
        (slice(45, 60), slice(first_key, 60)),
    ):
        place = {"q_start": rows.start, "k_start": keys.start}
        part = gpu_ops.attention(q[:, rows], k[:, keys], v[:, keys], **options, **place, return_lse=True)
        np.testing.assert_allclose(part[0], out[:, rows], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(part[1], lse[:, :, rows], rtol=1e-12)


@pytest.mark.parametrize("window", [(-1, -1), (2**31, 2**31), (3, -1), (2**40, 0)])
@pytest.mark.parametrize("place", [{"q_start": FAR}, {"k_start": FAR}], ids=str)
def test_the_farthest_positions(place, window, backend, rng):
    q, k, v = rng.standard_normal((3, 1, 17, 1, 8), dtype=np.float32)
    options = {"causal": True, "window_size": window, "alibi_slopes": np.array([1e-9], np.float32), **place}
    out, lse = gpu_ops.attention(q, k, v, **options, return_lse=True, **backend)
    want, expected_lse = reference.attention(q, k, v, **options, return_lse=True)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


def test_visible_pairs_are_those_of_the_masks():
    for seqlens in ((5, 9), (9, 5), (1, 4)):
        for places in ({}, {"q_start": 3}, {"k_start": 4}, {"q_start": 40, "k_start": 2}, {"k_start": 40}):
            for masks in ({"causal": True}, {"window_size": (3, 2)}, {"window_size": (-1, 1)}, {}):
                options = {"causal": False, "window_size": (-1, -1), **masks}
                offset = (
                    places.get("q_start", 0) - places.get("k_start", 0) if places else seqlens[1] - seqlens[0]
                )
                seen = visible_keys((1, 1, *seqlens), **options, offset=offset, bias=None, block_mask=None)
                assert visible_pairs(seqlens, **masks, **places) == seen.sum()


def test_windows_have_the_offset_counted_in():
    """The windows passed to kernels hide what the masks hide, in small numbers, and are open where all is visible."""
    sides = (-1, 0, 1, 3, 9, 2**40)
    for (rows, keys), offset in itertools.product(((5, 7), (7, 5), (1, 4)), (-FAR, -8, -3, 0, 1, 6, FAR)):
        for causal, window in itertools.product((False, True), itertools.product(sides, sides)):
            masks: Any = {"causal": causal, "window_size": window}
            call: Any = SimpleNamespace(
                **masks, seqlen_q=rows, seqlen_k=keys, known_lengths=True, ahead=offset - (keys - rows)
            )
            left, right = Attention.window(call, UNLIMITED)
            want = visible_keys((1, 1, rows, keys), **masks, offset=offset, bias=None, block_mask=None)[0, 0]
            distance = np.arange(rows)[:, None] + keys - rows - np.arange(keys)
            np.testing.assert_array_equal((distance <= left) & (-distance <= right), want)
            assert (left == right == UNLIMITED) == want.all()
            assert min(left, right) >= -max(rows, keys)


def test_tiles_that_no_query_sees_are_not_read():
    if missing := compiler_missing("raw"):
        pytest.skip(str(missing))
    q, k = np.zeros((1, 64, 1, 32), np.float16), np.zeros((1, 192, 1, 32), np.float16)
    products = {}
    for place in ({"k_start": 64}, {"q_start": 32, "k_start": 64}, {"q_start": 63}, {}):
        with emulator.record() as profiles:
            gpu_ops.attention(q, k, k, causal=True, **place, device="emulator", backend="raw")
        products[str(place)] = sum(sum(p.multiply_adds.values()) for p in profiles)
    no_keys, some_keys, more_keys, all_keys = products.values()
    assert no_keys == 0 < some_keys < more_keys < all_keys
