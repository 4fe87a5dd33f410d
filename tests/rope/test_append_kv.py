"""rope_append_kv on every backend: against its reference, against the three separate steps, and its memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import RopeScaling, rope_append_kv
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.reference.rope import rope_append_kv as reference
from tests.attention.cases import DTYPES, pairwise, row_id
from tests.support.compare import assert_close, random

DEVICES = ("cpu", "emulator", "cuda")

FACTORS = {
    "place": ("rows", 1, 3, 16, "slots"),  # a contiguous cache, pages of this number of rows, slots
    "dims": ((64, 64), (80, 32), (7, 6), (60, 44), (128, 128)),  # head_dim, rotary_dim
    "interleaved": (False, True),
    "norm": (None, 0.0, 1.0),  # without, weight_offset
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "positions": (None, np.int32, np.uint8),
    "heads": ((4, 2), (3, 1), (2, 2)),
    "used": ((5, 0), (40,), (1, 17, 9)),
    "seqlen": (1, 6),
}
ROWS = pairwise(FACTORS)


def quick_on_emulator(raw):
    """Run CUDA C++ kernels with every pair of options; Numba compiles for seconds, and has fewer code paths."""
    if raw:
        return {}
    return {
        "test_options": {"row": ROWS[:6]},
        "test_without_weights_it_is_rope_and_two_copies": {"dtype": [np.dtype(np.float32)]},
        "test_with_weights_it_is_the_three_steps": {"place": ["rows"]},
        "test_large_and_small_numbers": {"dtype": [np.dtype(np.float32)]},
        "test_what_attention_reads_next": None,
    }


def make(
    *,
    place="rows",
    dims=(16, 16),
    norm=0.0,
    dtype="float32",
    positions=None,
    heads=(4, 2),
    used=(5, 0),
    seqlen=3,
    **options,
):
    """Arrays and options of a call. Caches are NaN except for the rows in use, and unused pages are -1."""
    rng = np.random.default_rng(5)
    native = np.dtype(DTYPES[dtype])
    (nheads, nheads_kv), (head_dim, rotary_dim), batch = heads, dims, len(used)
    shape = (batch, seqlen)
    page_size = 4 if place == "slots" else max(used) + seqlen + 2 if place == "rows" else place
    pages_each = -(-(max(used) + seqlen) // page_size)
    order = np.arange(batch) if place == "rows" else rng.permutation(batch * pages_each + 2)
    table = order[: batch * pages_each].reshape(batch, pages_each)
    caches = random(rng, (2, len(order), page_size, nheads_kv, head_dim), native)
    rows = np.array(used)[:, None] + np.arange(seqlen)
    for pages, n in zip(table, used, strict=True):
        kept = np.arange(pages_each * page_size).reshape(pages_each, page_size) < n
        caches[:, pages] = np.where(kept[..., None, None], caches[:, pages], np.nan).astype(native)
    q, k, v = (random(rng, (*shape, n, head_dim), native) for n in (nheads, nheads_kv, nheads_kv))
    if norm is not None:
        options |= {"weight_offset": norm, "eps": 1e-5}
        options |= {name: random(rng, (head_dim,), native) for name in ("q_weight", "k_weight")}
    if positions is not None:
        options["positions"] = rng.integers(0, 200, shape).astype(positions)
    if place == "slots":
        slots = np.take_along_axis(table, rows // page_size, axis=1) * page_size + rows % page_size
        slots[rng.random(shape) < 0.2] = -1
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        options["slot_mapping"] = slots.ravel()
        options["positions"] = options.get("positions", rows).ravel()
    else:
        options["seqused_k"] = np.array(used, np.int32)
        if place != "rows":
            first, end = rows[:, :1] // page_size, -(-(rows[:, -1:] + 1) // page_size)
            needed = (np.arange(pages_each) >= first) & (np.arange(pages_each) < end)
            options["block_table"] = np.where(needed, table, -1).astype(np.int32)
    return [q, k, v, *caches], {"rotary_dim": rotary_dim, **options}


def new_rows(q, cache, options):
    """Mask of the tokens that are kept, and their pages and rows."""
    where = (options.get(name) for name in ("seqused_k", "block_table", "slot_mapping"))
    slots = reference.cache_slots(q.shape[:-2], *where, cache.shape[1])
    return slots >= 0, np.divmod(slots[slots >= 0], cache.shape[1])


def check(arrays, options, backend):
    """Check one call: the rotated q and the new rows are right, nothing else has changed."""
    q, _, v, *caches = arrays
    exact, naive = (
        reference.rope_append_kv(*arrays, **options, precision=precision)
        for precision in ("float64", "naive")
    )
    before = [cache.copy() for cache in caches]
    actual = rope_append_kv(*arrays, **options, **backend)
    assert (actual.dtype, actual.shape) == (q.dtype, q.shape)
    kept, where = new_rows(q, caches[0], options)
    for name, have, expected, textbook in (
        ("q", actual, exact[0], naive[0]),
        ("k", caches[0][where], exact[1][where], naive[1][where]),
    ):
        if q.dtype == np.float64:  # the textbook code is the reference itself here
            np.testing.assert_allclose(
                have, expected, rtol=0, atol=1e-14 * max(1, np.abs(expected).max(initial=0))
            )
        else:
            assert_close(have, expected, textbook, q.dtype, what=name)
    assert caches[1][where].tobytes() == v[kept].tobytes()
    for now, then in zip(caches, before, strict=True):
        now[where] = then[where]
        assert now.tobytes() == then.tobytes(), "another row was written"
    return actual


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_options(row, backend):
    if row["dtype"] == "float64" and backend["backend"] == "raw":
        row = {**row, "dtype": "float32"}
    check(*make(**row), backend)


@pytest.mark.parametrize("place", ["rows", 3, "slots"])
def test_without_weights_it_is_rope_and_two_copies(place, dtype, backend):
    """Results are equal bit for bit, except where Numba's compilers choose which products to fuse with sums."""
    (q, k, v, k_cache, v_cache), options = make(place=place, dims=(40, 24), norm=None, dtype=dtype.name)
    actual = rope_append_kv(q, k, v, k_cache, v_cache, **options, **backend)
    positions = options.get("positions")
    if positions is None:
        positions = options["seqused_k"][:, None] + np.arange(q.shape[1])
    q_rotated, k_rotated = gpu_ops.rope(q, k, positions=positions, rotary_dim=24, **backend)
    kept, where = new_rows(q, k_cache, options)
    ulp = float(ml_dtypes.finfo(dtype).eps) if backend["backend"] == "numba" else 0
    for have, expected in ((actual, q_rotated), (k_cache[where], k_rotated[kept])):
        np.testing.assert_allclose(have.astype(np.float64), expected.astype(np.float64), rtol=ulp, atol=ulp)
    assert v_cache[where].tobytes() == v[kept].tobytes()


@pytest.mark.parametrize("place", ["rows", 3])
def test_with_weights_it_is_the_three_steps(place, backend):
    """Compare in float32, where the roundings between the steps are small."""
    (q, k, v, k_cache, v_cache), options = make(place=place, dims=(64, 64), norm=1.0, interleaved=True)
    actual = rope_append_kv(q, k, v, k_cache, v_cache, **options, **backend)
    norm = {"eps": 1e-5, "weight_offset": 1.0, **backend}
    normalised = [gpu_ops.rmsnorm(x, options[w], **norm) for x, w in ((q, "q_weight"), (k, "k_weight"))]
    positions = options["seqused_k"][:, None] + np.arange(q.shape[1])
    q_rotated, k_rotated = gpu_ops.rope(*normalised, positions=positions, interleaved=True, **backend)
    np.testing.assert_allclose(actual, q_rotated, rtol=0, atol=3e-6)
    kept, where = new_rows(q, k_cache, options)
    np.testing.assert_allclose(k_cache[where], k_rotated[kept], rtol=0, atol=3e-6)


def test_what_attention_reads_next(backend):
    """A prompt at once, then token by token, through pages, equals attention over the whole sequence."""
    rng = np.random.default_rng(2)
    seqlen, prompt, page_size = 9, 6, 4
    q, k, v = (rng.standard_normal((1, seqlen, n, 32), dtype=np.float32) for n in (4, 2, 2))
    pages = np.full((2, 5, page_size, 2, 32), np.nan, np.float32)
    where = {"block_table": np.array([[3, 0, 4]], np.int32), **backend}
    rows = []
    for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, seqlen))]:
        new = (x[:, start:end] for x in (q, k, v))
        q_rotated = rope_append_kv(*new, *pages, seqused_k=np.array([start], np.int32), **where)
        used = np.array([end], np.int32)
        rows.append(gpu_ops.attention_decode(q_rotated, *pages, seqused_k=used, causal=True, **where))
    expected = gpu_ops.attention(*gpu_ops.rope(q, k), v, causal=True, device="cpu")
    np.testing.assert_allclose(np.concatenate(rows, axis=1), expected, rtol=0, atol=2e-6)


def test_scalings(backend):
    """Check the attention factor of YaRN, and the length that dynamic scaling uses, from seqused_k or as passed."""
    for scaling in (RopeScaling.yarn(4.0, 64), RopeScaling.dynamic(2.0, 6)):
        arrays, options = make(scaling=scaling, theta=500.0)
        whole = check(arrays, options, backend)
        alone = rope_append_kv(*arrays, **options, seqlen=8, **backend)  # 5 keys and 3 new ones
        assert whole.tobytes() == alone.tobytes()
    arrays, options = make(scaling=RopeScaling.from_hf({"rope_theta": 500.0, "partial_rotary_factor": 0.5}))
    del options["rotary_dim"]
    check(arrays, {**options, "rotary_dim": 8}, backend)
    theirs = rope_append_kv(*arrays, **options, **backend)
    assert (
        theirs.tobytes() == rope_append_kv(*arrays, **options, theta=500.0, rotary_dim=8, **backend).tobytes()
    )


def test_no_kv_heads(backend):
    arrays, options = make(norm=None)
    none = np.zeros((*arrays[1].shape[:2], 0, 16), np.float32)
    cache = np.zeros((2, 9, 0, 16), np.float32)
    actual = rope_append_kv(arrays[0], none, none, cache, cache.copy(), **options, **backend)
    assert actual.tobytes() == rope_append_kv(*arrays, **options, **backend).tobytes()


# ---- numbers -----------------------------------------------------------------------------------------------


def test_large_and_small_numbers(dtype, backend):
    """Squares that overflow or vanish in one head among ordinary ones; zeros; NaN stays in its head."""
    large, small = {"float16": (6e4, 1e-4), "float64": (1e150, 1e-150)}.get(dtype.name, (1e38, 1e-18))
    arrays, options = make(dims=(8, 8), dtype=dtype.name)
    options["eps"] = {"float16": 1e-12, "float64": 1e-305}.get(dtype.name, 1e-40)
    q, k = arrays[:2]
    q[0, 0, 0] = k[1, 0, 1] = np.where(q[0, 0, 0] < 0, -large, large)
    q[0, 1, 1], q[1, 1, 3], q[0, 2, 0, 1] = small * q[0, 1, 1].astype(np.float64), 0, np.nan
    expected, keys, _ = reference.rope_append_kv(*arrays, **options, precision="float64")
    assert np.isnan(expected).sum() == 8
    assert np.abs(expected[0, 1, 1]).max() > 0.1
    actual = rope_append_kv(*arrays, **options, **backend)
    close = 8 * float(ml_dtypes.finfo(dtype).eps)  # numbers are of order one
    np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=0, atol=close)
    np.testing.assert_allclose(arrays[3].astype(np.float64), keys, rtol=0, atol=close)


# ---- mistakes: those that tests/core/test_laws_refusals.py has no room for ---------------------------------

PACKED = {"place": "slots", "norm": None, "used": (3,)}
MISTAKES = {
    "lengths of int64": ({}, DTypeError, "seqused_k is int64", {"seqused_k": np.array([5, 0])}),
    "a negative length": ({}, OptionError, "seqused_k must lie in", {"seqused_k": np.array([-1, 0], np.int32)}),
    "a page not there": ({"place": 4}, OptionError, "block_table[0, 1] is 99",
     {"block_table": np.array([[0, 99], [1, -1]], np.int32)}),
    "too few pages": ({"place": 4}, OptionError, "cache of 4", {"block_table": np.array([[0], [1]], np.int32)}),
    "two ways to say where": (PACKED, OptionError, "without seqused_k", {"seqused_k": np.array([1], np.int32)}),
    "a slot beyond": (PACKED, OptionError, "slot_mapping[1] is 99", {"slot_mapping": np.array([-1, 99, 0])}),
    "a slot for two": (PACKED, OptionError, "slot_mapping[0] and slot_mapping[2] are both 3; no two",
     {"slot_mapping": np.array([3, 1, 3])}),
    "a row for two": (
        {"place": 4},
        OptionError,
        "token 0 of sequence 0 and token 1 of sequence 1 both go to row 1 of page 1, which is block_table[0, 1] and "
        "block_table[1, 0]; no two new",
        {"block_table": np.array([[0, 1], [1, -1]], np.int32)},
    ),
    "slots of int32": (PACKED, DTypeError, "slot_mapping is int32", {"slot_mapping": np.arange(3, dtype=np.int32)}),
    "packed without positions": (PACKED, OptionError, "pass positions=", {"positions": None}),
    "packed without slots": (PACKED, ShapeError, "q has 3 axes", {"slot_mapping": None}),
    "one position": ({}, ShapeError, "positions is the number 7", {"positions": 7}),
    "weights of every head": ({}, ShapeError, "q_weight", {"q_weight": np.ones((4, 16), np.float32)}),
    "weights of another dtype": ({}, DTypeError, "k_weight is float16", {"k_weight": np.ones(16, np.float16)}),
    "an eps below 0": ({}, OptionError, "eps must be finite and >= 0", {"eps": -1}),
    "an odd rotary_dim": ({}, OptionError, "rotary_dim is 5", {"rotary_dim": 5}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    settings, error, message, changes = MISTAKES[name]
    arrays, options = make(**settings)
    refused(arrays, {**options, **changes}, error, message)


def refused(arrays, options, error, message):
    before = [x.copy() for x in arrays]
    with pytest.raises(error) as caught:
        rope_append_kv(*arrays, **options)
    assert type(caught.value) is error
    assert str(caught.value).startswith("rope_append_kv: ")
    assert message in str(caught.value)
    assert [x.tobytes() for x in arrays] == [x.tobytes() for x in before]


def test_mistakes_of_memory():
    arrays, options = make()
    q, k, v, k_cache, v_cache = arrays
    turned = v_cache.swapaxes(2, 3).copy().swapaxes(2, 3)
    for arguments, error, message in (
        ([q, k, v, k_cache, turned], ShapeError, "the last axis of v_cache is not contiguous"),
        ([q, k, v, k_cache, v_cache[:, :-1]], ShapeError, "max_seqlen is 9 here but 10 in k_cache"),
        ([q, k, v[:, :, :1], k_cache, v_cache], ShapeError, "nheads_kv is 1 here but 2 in k"),
    ):
        refused(arguments, options, error, message)
    memory = np.zeros((2, 10, 4, 16), np.float32)
    overlapping = [*arrays[:3], memory[:, :, :2], v_cache]
    refused(overlapping, {**options, "out": memory[:, :3]}, ShapeError, "out shares memory with k_cache")


# The caches of rope_append_kv share memory with no other array, in a first call and in a later one.


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("place", ["rows", "pages", "slots"])
def test_a_cache_is_no_other_array_in_any_call(place, cache):
    """Every array has the shape of a valid call, so that a later call differs only in addresses."""
    shape = (2, 4, 2, 8)
    arrays = {name: np.ones(shape, np.float32) for name in ("q", "k", "v", "k_cache", "v_cache", "out")}
    arrays |= {name: np.ones(8, np.float32) for name in ("q_weight", "k_weight")}
    arrays["positions"] = np.zeros(shape[:2], np.int32)
    if place == "slots":
        tokens = ("q", "k", "v", "out")
        arrays |= {name: arrays[name].reshape(8, 2, 8) for name in tokens}
        arrays |= {"slot_mapping": np.arange(8), "positions": np.zeros(8, np.int32)}
    else:
        arrays["seqused_k"] = np.zeros(2, np.int32)
    if place == "pages":
        arrays["block_table"] = np.array([[0], [1]], np.int32)
    whole = np.ones(shape, np.float32)
    for name, x in arrays.items():
        if name == cache:
            continue
        inside = whole.reshape(-1)[: x.nbytes // 4].view(x.dtype).reshape(x.shape)
        inside[...] = x
        inputs = arrays | {cache: whole, name: inside}
        for later in (False, True):
            forget_calls()
            if later:
                rope_append_kv(**{n: a.copy() for n, a in inputs.items()})
            before = {n: a.copy() for n, a in inputs.items()}
            with pytest.raises(ShapeError, match="shares memory with"):
                rope_append_kv(**inputs)
            assert all(a.tobytes() == before[n].tobytes() for n, a in inputs.items()), (name, later)
            if x.shape == shape and x.dtype == whole.dtype:
                with pytest.raises(ShapeError, match="shares memory with"):  # the very same array
                    rope_append_kv(**{**inputs, name: whole})
