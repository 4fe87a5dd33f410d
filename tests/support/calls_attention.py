"""Rows of the table of calls (calls.py): attention and RoPE."""

from __future__ import annotations

from typing import Any

import numpy as np

import gpu_ops
from gpu_ops import BlockMask, RopeScaling
from gpu_ops.reference.attention.quantized_pages import quantize
from tests.support.call_maker import Made, Maker

F32, I32 = np.float32, np.int32
CAUSAL = {"causal": True}


def dense(new: Maker) -> dict[str, Any]:
    kv = "batch seqlen_k nheads_kv head_dim"
    return new.normal(q="batch seqlen_q nheads head_dim", k=kv, v=f"{kv}_v")


def bhsd(new: Maker) -> dict[str, Any]:
    kv = "batch nheads_kv seqlen_k head_dim"
    return new.normal(q="batch nheads seqlen_q head_dim", k=kv, v=f"{kv}_v")


def packed(new: Maker, offsets: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Packed sequences: two, divided near the middle, or those of ``offsets``."""
    total = new.sizes["total"]
    if offsets is None:
        lengths = [(0, int(new.rng.integers(total // 2 - 1, total // 2 + 2)), total) for _ in range(2)]
    else:
        lengths = [(0, *sorted(int(i) for i in new.rng.integers(0, total + 1, 3)), total) for _ in range(2)]
    arrays = new.normal(q="total nheads head_dim", k="total nheads_kv head_dim", v="total nheads_kv head_dim")
    cu_seqlens_q, cu_seqlens_k = (np.array(n, I32) for n in lengths)
    return {**arrays, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}


def backward(new: Maker, forward: str, arrays: dict[str, Any], **options: Any) -> Made:
    """Arguments of the backward after the reference's forward."""
    out, lse = getattr(gpu_ops, forward)(*arrays.values(), **options, return_lse=True, backend="reference")
    q_axes = new.axes["q"]
    first = {name: arrays[name] for name in ("q", "k", "v")}
    lengths = {name: x for name, x in arrays.items() if name not in first}
    new.axes |= {"dout": q_axes, "out": q_axes}
    dout = new.rng.standard_normal(out.shape).astype(out.dtype)
    return {"dout": dout, **first, "out": out, "lse": lse, **lengths}, options


def of_whole_rows(new: Maker) -> Made:
    """Backward as in a ring: delta in place of out, lse in float64."""
    arrays, options = backward(new, "attention", dense(new), **CAUSAL)
    del new.axes["out"]
    new.axes["delta"] = ("batch", "nheads", "seqlen_q")
    products = arrays["dout"].astype(np.float64) * arrays["out"]
    delta = products.sum(axis=-1).swapaxes(1, 2).astype(np.float64 if new.dtype == np.float64 else F32)
    return {**arrays, "out": None, "lse": arrays["lse"].astype(np.float64)}, {**options, "delta": delta}


def wide_dout(new: Maker) -> Made:
    """Backward with a float32 out and a float32 dout."""
    arrays, options = backward(new, "attention", dense(new), **CAUSAL)
    computing = np.float64 if new.dtype == np.float64 else F32
    return {
        **arrays,
        "dout": arrays["dout"].astype(computing),
        "out": arrays["out"].astype(computing),
    }, options


def scores(new: Maker) -> dict[str, Any]:
    """Options sinks, and a bias that broadcasts."""
    return {**new.normal(F32, sinks="nheads"), **new.normal(bias="nheads 1 seqlen_k")}


def wide(new: Maker) -> dict[str, Any]:
    """Options that keep results in the dtypes they are computed in."""
    return {"out_dtype": np.float64 if new.dtype == np.float64 else F32, "lse_dtype": "float64"}


def slopes(new: Maker) -> dict[str, Any]:
    return {"alibi_slopes": abs(new.normal(F32, alibi_slopes="batch nheads")["alibi_slopes"])}


def block_mask(new: Maker) -> dict[str, Any]:
    blocks = (-(-new.sizes["seqlen_q"] // 4), -(-new.sizes["seqlen_k"] // 4))
    visible = new.rng.random((new.sizes["nheads"], *blocks)) < 0.7
    return {"block_mask": BlockMask(visible, block_q=4, block_k=4)}


def halves(new: Maker, out: str, lse: str, dtype: Any = F32) -> dict[str, Any]:
    """Attention over two sets of keys; the last rows do not see the second set."""
    arrays: dict[str, Any] = {}
    for i in "12":
        arrays |= new.normal(**{f"out{i}": out})
        arrays |= new.normal(np.float64 if new.dtype == np.float64 else dtype, **{f"lse{i}": lse})
    arrays["lse2"][..., -1] = -np.inf
    return arrays


def cache(new: Maker) -> Made:
    rows = "batch max_seqlen nheads_kv head_dim"
    arrays = new.normal(q="batch 1 nheads head_dim", k_cache=rows, v_cache=f"{rows}_v")
    return arrays, new.integers(1, new.sizes["max_seqlen"] + 1, I32, seqused_k="batch")


def pages(new: Maker, used: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Table of shuffled pages for ``max_seqlen`` tokens; -1 past ``used``; one page belongs to no sequence."""
    each = new.sizes["pages"] = -(-new.sizes["max_seqlen"] // new.sizes["page_size"])
    new.sizes["num_pages"] = len(used) * each + 1
    table = new.rng.permutation(new.sizes["num_pages"])[: len(used) * each].reshape(len(used), each)
    new.axes["block_table"] = ("batch", "pages")
    needed = np.arange(each) < -(-used[:, None] // new.sizes["page_size"])
    return {"block_table": np.where(needed, table, -1).astype(I32)}


def paged_cache(new: Maker) -> Made:
    used = new.integers(0, new.sizes["max_seqlen"] + 1, I32, seqused_k="batch")
    table = pages(new, used["seqused_k"])
    rows = "num_pages page_size nheads_kv head_dim"
    arrays = new.normal(q="batch 1 nheads head_dim", k_cache=rows, v_cache=f"{rows}_v")
    return arrays, {**used, **table, **new.normal(F32, sinks="nheads")}


def two_sequences(new: Maker, name: str) -> dict[str, Any]:
    """Offsets of two packed sequences."""
    total = new.sizes["total"]
    return {name: np.array([0, new.rng.integers(0, total + 1), total], I32)}


def packed_used(new: Maker) -> Made:
    """Packed keys, the first two thirds of which are in use."""
    arrays = new.normal(q="total nheads head_dim", k="total nheads_kv head_dim", v="total nheads_kv head_dim")
    starts = two_sequences(new, "cu_seqlens_q") | two_sequences(new, "cu_seqlens_k")
    new.axes["seqused_k"] = ("2",)
    return {**arrays, **starts}, {"seqused_k": np.diff(starts["cu_seqlens_k"]) * 2 // 3}


def packed_pages(new: Maker) -> Made:
    used = new.integers(0, new.sizes["max_seqlen"] + 1, I32, seqused_k="2")
    table = pages(new, used["seqused_k"])
    new.axes["block_table"] = ("2", "pages")
    rows = "num_pages page_size nheads_kv head_dim"
    arrays = new.normal(q="total nheads head_dim", k=rows, v=f"{rows}_v")
    return {**arrays, **two_sequences(new, "cu_seqlens_q")}, {**used, **table, **CAUSAL, "return_lse": True}


def rope(new: Maker, first: str = "q", second: str | None = "k") -> dict[str, Any]:
    axes = {first: "batch seqlen nheads head_dim"}
    return new.normal(**axes, **({second: "batch seqlen nheads_kv head_dim"} if second else {}))


def new_tokens(new: Maker) -> dict[str, Any]:
    axes = "batch seqlen_new nheads_kv head_dim"
    return new.normal(q="batch seqlen_new nheads head_dim", k=axes, v=axes)


def append(new: Maker) -> Made:
    tokens = new_tokens(new)
    rows = "batch max_seqlen nheads_kv head_dim"
    caches = new.normal(k_cache=rows, v_cache=rows)
    room = new.sizes["max_seqlen"] - new.sizes["seqlen_new"] + 1
    return {**tokens, **caches}, new.integers(0, room, I32, seqused_k="batch")


def append_pages(new: Maker) -> Made:
    tokens = new_tokens(new)
    room = new.sizes["max_seqlen"] - new.sizes["seqlen_new"] + 1
    used = new.integers(0, room, I32, seqused_k="batch")
    table = pages(new, used["seqused_k"] + new.sizes["seqlen_new"])
    rows = "num_pages page_size nheads_kv head_dim"
    caches = new.normal(k_cache=rows, v_cache=rows)
    weights = new.normal(q_weight="head_dim", k_weight="head_dim")
    return {**tokens, **caches}, {**used, **table, **weights}


def append_slots(new: Maker) -> Made:
    """Packed tokens at any slots; one is padding."""
    rows = "total nheads_kv head_dim"
    tokens = new.normal(q="total nheads head_dim", k=rows, v=rows)
    caches = new.normal(
        k_cache="batch max_seqlen nheads_kv head_dim", v_cache="batch max_seqlen nheads_kv head_dim"
    )
    total, slots = new.sizes["total"], new.sizes["batch"] * new.sizes["max_seqlen"]
    new.axes["slot_mapping"] = ("total",)
    mapping = new.rng.permutation(slots)[:total]
    mapping[-1:] = -1
    return {**tokens, **caches}, {"slot_mapping": mapping, **new.integers(0, 99, np.int64, positions="total")}


def quantized(new: Maker, made: Made, codes: Any) -> Made:
    """Call with its pages in ``codes`` and their scales; float64 is not quantized."""
    arrays, options = made
    if new.dtype == np.float64:
        return made
    pages = [name for name in arrays if name in PAGES][-2:]  # after k and v of new tokens
    for name, scale in zip(pages, ("k_scale", "v_scale"), strict=True):
        new.axes[scale] = ("num_pages", "page_size", "nheads_kv")
        arrays[name], options[scale] = quantize(arrays[name], codes)
    return arrays, options


PAGES = ("k", "v", "k_cache", "v_cache")
YARN = RopeScaling.yarn(4.0, 64)
DYNAMIC = RopeScaling.dynamic(2.0, 4)
DROPOUT = {"dropout_p": 0.3, "seed": 5}
EXTRA = {"return_extra": True}

VARIANTS = {
    "attention": lambda new: (dense(new), CAUSAL),
    "attention lse": lambda new: (dense(new), {"return_lse": True, "softcap": 2.0}),
    "attention scores": lambda new: (dense(new), {**scores(new), **slopes(new)}),
    "attention mask": lambda new: (dense(new), block_mask(new)),
    "attention offset": lambda new: (dense(new), {**CAUSAL, "q_start": 30, "k_start": 11, **slopes(new)}),
    "attention dropout": lambda new: (dense(new), {**DROPOUT, **CAUSAL}),
    "attention wide": lambda new: (dense(new), {"return_lse": True, **wide(new)}),
    "attention bhsd": lambda new: (bhsd(new), {"layout": "bhsd", "window_size": (4, 2)}),
    "attention_backward": lambda new: backward(new, "attention", dense(new), **CAUSAL),
    "attention_backward delta": of_whole_rows,
    "attention_backward wide": wide_dout,
    "attention_backward slopes": lambda new: backward(new, "attention", dense(new), **slopes(new)),
    "attention_backward mask": lambda new: backward(new, "attention", dense(new), **block_mask(new)),
    "attention_backward extra": lambda new: with_options(
        backward(new, "attention", dense(new), **scores(new)), **EXTRA
    ),
    "attention_merge": lambda new: (
        halves(new, "batch seqlen_q nheads head_dim_v", "batch nheads seqlen_q"),
        {},
    ),
    "attention_merge bhsd": lambda new: (
        halves(new, "batch nheads seqlen_q head_dim_v", "batch nheads seqlen_q"),
        {"layout": "bhsd"},
    ),
    "attention_merge packed": lambda new: (
        halves(new, "total nheads head_dim", "nheads total", np.float64),
        {},
    ),
    "attention_varlen": lambda new: (packed(new), CAUSAL),
    "attention_varlen lse": lambda new: (packed(new, (3,)), {**CAUSAL, "return_lse": True}),
    "attention_varlen_backward": lambda new: backward(new, "attention_varlen", packed(new), **CAUSAL),
    "attention_varlen_backward dropout": lambda new: backward(
        new, "attention_varlen", packed(new), **DROPOUT
    ),
    "attention_varlen_backward extra": lambda new: with_options(
        backward(new, "attention_varlen", packed(new), **CAUSAL, **new.normal(F32, sinks="nheads")), **EXTRA
    ),
    "attention_varlen used": packed_used,
    "attention_varlen pages": packed_pages,
    "attention_decode": cache,
    "attention_varlen wide": lambda new: (packed(new, (3,)), {"return_lse": True, **wide(new)}),
    "attention_decode wide": lambda new: with_options(cache(new), return_lse=True, **wide(new)),
    "attention_decode paged": paged_cache,
    "attention_decode int8": lambda new: quantized(new, paged_cache(new), np.int8),
    "attention_varlen e4m3": lambda new: quantized(new, packed_pages(new), np.uint8),
    "rope": lambda new: (rope(new), {}),
    "rope q": lambda new: (rope(new, second=None), {"positions": 7, "interleaved": True}),
    "rope positions": lambda new: (
        rope(new),
        {**new.integers(0, 99, np.int64, positions="batch seqlen"), "rotary_dim": 6},
    ),
    "rope packed yarn": lambda new: (
        new.normal(q="seqlen nheads head_dim"),
        {**new.integers(-9, 9, np.int64, positions="seqlen"), "scaling": YARN},
    ),
    "rope bhsd": lambda new: (new.normal(q="batch nheads seqlen head_dim"), {"layout": "bhsd"}),
    "rope llama3": lambda new: (rope(new, second=None), {"scaling": RopeScaling.llama3(8.0, 64)}),
    "rope_backward": lambda new: (rope(new, "dq", "dk"), {"scaling": DYNAMIC}),
    "rope_append_kv": append,
    "rope_append_kv pages": append_pages,
    "rope_append_kv slots": append_slots,
    "rope_append_kv int8": lambda new: quantized(new, append_pages(new), np.int8),
}


def with_options(made: Made, **options: Any) -> Made:
    return made[0], {**made[1], **options}
