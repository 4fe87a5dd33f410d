"""rope_append_kv: from the projections to rotated queries and a longer key/value cache, in one pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu_ops import checks
from gpu_ops.arrays import Array, Arrays
from gpu_ops.checks import Axes
from gpu_ops.devices import Device
from gpu_ops.dispatch import Plan, choose, op
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.rope_options import BY_LENGTH, Positions, positions_of, rotary_dim_of, scaling_of, theta_of
from gpu_ops.rope_scaling import RopeScaling
from gpu_ops.rope_tables import frequencies, rope_tables

__all__ = ["rope_append_kv"]

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


@op(cuda=True)
def rope_append_kv(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    seqused_k: Any = None,
    block_table: Any = None,
    slot_mapping: Any = None,
    q_weight: Any = None,
    k_weight: Any = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    positions: Any = None,
    theta: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: RopeScaling | None = None,
    seqlen: int | None = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """QK-norm, rotary embedding and the cache write in one pass, from the projections to what attention reads.

    Per token, with :func:`rmsnorm` over each head (only with weights) and :func:`rope`, but nothing rounded
    between them::

        out           = rope(rmsnorm(q, q_weight))
        k_cache[slot] = rope(rmsnorm(k, k_weight))
        v_cache[slot] = v

    Call :func:`attention_decode` on the caches next, with ``seqused_k + seqlen``.

    Parameters
    ----------
    q : array (batch, seqlen, nheads, head_dim)
        The new tokens. float16, bfloat16, float32 or float64, as all other arrays. q, k and v may be views of one
        packed projection: ``qkv.reshape(batch, seqlen, -1, head_dim)[:, :, :nheads]``. With ``slot_mapping``
        (total, nheads, head_dim): tokens of any sequences.
    k, v : arrays (batch, seqlen, nheads_kv, head_dim), or (total, nheads_kv, head_dim)
    k_cache, v_cache : arrays (batch, max_seqlen, nheads_kv, head_dim)
        Changed in place: the rows of the new tokens, nothing else. With ``block_table`` or ``slot_mapping``:
        pages, (num_pages, page_size, nheads_kv, head_dim).
    seqused_k : int32 array (batch,)
        Keys of each sequence that are in its cache already: token i becomes key ``seqused_k[b] + i``.
    block_table : int32 array (batch, max_pages), optional
        Key j of sequence b is in page ``block_table[b, j // page_size]``. Entries that no new token needs are
        ignored and may be -1.
    slot_mapping : int64 array (total,), instead of seqused_k
        Where each token goes: page * page_size + row. Negative: nowhere, for padding. No two tokens may share one.
    q_weight, k_weight : arrays (head_dim,), optional
        Weights of the norms of q's and k's heads; both or neither. Neither: no norm.
    eps, weight_offset
        Of the norms, as in :func:`rmsnorm`.
    positions : integers, optional
        As in :func:`rope`. Default: ``seqused_k[b] + i``; with ``slot_mapping`` there is none.
    theta, rotary_dim, interleaved, scaling, seqlen
        As in :func:`rope`.
    out : array like q, optional
        Receives the rotated q; may be ``q`` itself: in place.

    Returns
    -------
    Array like ``q``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written. What ``seqused_k``, ``block_table`` and ``slot_mapping`` say is checked for arrays
        in host memory. On a GPU that would wait for it: there a token whose place is outside the cache is not stored.

    Notes
    -----
    Moves each element once in and once out, where a norm, a rotation and two copies move those of q and k twice
    or three times. The maths is float32 (float64 for float64) with one rounding at the end.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> q, k = np.ones((1, 2, 4, 8), np.float32), np.ones((1, 2, 1, 8), np.float32)
    >>> k_cache, v_cache = np.zeros((2, 1, 16, 1, 8), np.float32)
    >>> used = np.array([5], np.int32)
    >>> gpu_ops.rope_append_kv(q, k, k, k_cache, v_cache, seqused_k=used).shape
    (1, 2, 4, 8)
    >>> v_cache[0, :, 0, 0]
    array([0., 0., 0., 0., 0., 1., 1., 0., 0., 0., 0., 0., 0., 0., 0., 0.], dtype=float32)
    """
    name = "rope_append_kv"
    arrays = Arrays(name)
    q_, k_, v_ = arrays.read("q", q), arrays.read("k", k), arrays.read("v", v)
    packed = slot_mapping is not None
    axes = Axes(name)
    tokens = "total" if packed else "batch seqlen"
    for label, x, heads in (("q", q_, "nheads"), ("k", k_, "nheads_kv"), ("v", v_, "nheads_kv")):
        axes.bind(label, x, f"{tokens} {heads} head_dim")
    weights = _weights(arrays, axes, q_weight, k_weight)
    dtype = checks.float_dtype(name, q=q_, k=k_, v=v_, **weights)
    paged = packed or block_table is not None
    caches = _caches(arrays, axes, k_cache, v_cache, q_.dtype, paged=paged)
    place = _place(arrays, axes, seqused_k, block_table, slot_mapping)
    eps = checks.number(name, "eps", eps, above=0.0)
    weight_offset = checks.number(name, "weight_offset", weight_offset)
    interleaved = checks.flag(name, "interleaved", interleaved)
    scaling = scaling_of(name, scaling)
    theta = theta_of(name, theta, scaling)
    rotary_dim = rotary_dim_of(name, rotary_dim, axes["head_dim"], scaling)
    where = _positions(arrays, axes, positions, place)
    longest = _longest(arrays, axes, seqlen, scaling, where, place)
    inv_freq = scaling.inv_freq(rotary_dim, theta, longest)
    attention_factor = scaling.attention_factor_at(longest)
    out_ = arrays.write("out", out, q_.shape, q_.dtype, in_place="q")
    cannot = _cannot(dtype, axes["head_dim"], rotary_dim, math.prod(q_.shape[:-2]), interleaved)
    choice = choose(name, device, backend, arrays, cannot=cannot)

    def compute(on: Device | None) -> Array:
        result = arrays.new(q_.shape, q_.dtype, "the rotated q") if out_ is None else out_
        if choice.backend == "reference":
            from gpu_ops.reference.rope_append_kv import rope_append_kv as reference

            assert where is not None
            host = where.on_host()
            result[...], caches[0][...], caches[1][...] = reference(
                q_, k_, v_, caches[0], caches[1], **place, **weights, eps=eps, weight_offset=weight_offset,
                positions=host[0] if packed else host, theta=theta, rotary_dim=rotary_dim,
                interleaved=interleaved, scaling=scaling, seqlen=longest,
            )  # fmt: skip
            return result
        operands = [*(x[None] if packed else x for x in (q_, result, k_, v_)), *caches]
        slots = place["slot_mapping"]
        common: dict[str, Any] = {
            **place, "slot_mapping": None if slots is None else slots[None], **weights, "eps": eps,
            "weight_offset": weight_offset, "interleaved": interleaved,
        }  # fmt: skip
        if on is None:
            from gpu_ops.kernels.numba_cpu import rope_append_kv as cpu

            assert where is not None
            computed = np.float64 if dtype == "float64" else np.float32
            cos, sin, rows = rope_tables(where.on_host(), *where.bounds, inv_freq, attention_factor, computed)
            cpu.append(*operands, cos=cos, sin=sin, rows=rows, rotary_dim=rotary_dim, **common)
        else:
            from gpu_ops.kernels import rope_append_kv as gpu

            turns = None if positions is None or where is None else where.on_device()
            gpu.append(
                on, choice.backend, *operands, positions=turns,
                frequencies=frequencies(on, choice.backend, inv_freq), attention_factor=attention_factor, **common,
            )  # fmt: skip
        return result

    def run() -> Any:
        with arrays.on(choice) as on:
            result = compute(on)
            return arrays.give(result) if out is None else out

    def problem() -> str:
        kept = "pages" if paged else "cache"
        norm = "" if q_weight is None else "QK-norm, "
        pairing = "interleaved" if interleaved else "half-split"
        return (
            f"q {q_.shape}, k and v {k_.shape} {dtype} into {kept} {caches[0].shape}, "
            f"{norm}rotary_dim {rotary_dim} {pairing}, scaling {scaling.kind}"
        )

    def config() -> str:
        if choice.device != "cpu":
            return arrays.launches(choice, compute)
        if choice.backend == "reference":
            return "NumPy, float64"
        from gpu_ops.kernels.numba_cpu import rope_append_kv as cpu

        return cpu.config(*(x[None] if packed else x for x in (q_, k_)))

    return Plan(name, choice, problem, config, run, writes=caches)


def _cannot(dtype: str, head_dim: int, rotary_dim: int, tokens: int, interleaved: bool) -> dict[str, str]:
    from gpu_ops.kernels.rope_append_kv import raw_cannot

    why = raw_cannot(dtype, head_dim, rotary_dim, tokens, interleaved=interleaved)
    return {"raw": why} if why else {}


def _weights(arrays: Arrays, axes: Axes, q_weight: Any, k_weight: Any) -> dict[str, Any]:
    given = {"q_weight": q_weight, "k_weight": k_weight}
    missing = [name for name, weight in given.items() if weight is None]
    if len(missing) == 1:
        raise OptionError(f"{arrays.op}: {missing[0]} is missing; pass q_weight and k_weight, or neither")
    if missing:
        return dict.fromkeys(given)
    weights: dict[str, Any] = {}
    for name, weight in given.items():
        weights[name] = read = arrays.read(name, weight)
        axes.bind(name, read, "head_dim")
    return weights


def _caches(
    arrays: Arrays, axes: Axes, k_cache: Any, v_cache: Any, dtype: np.dtype[Any], *, paged: bool
) -> tuple[Array, Array]:
    found = arrays.update("k_cache", k_cache, dtype), arrays.update("v_cache", v_cache, dtype)
    rows = "num_pages page_size" if paged else "batch max_seqlen"
    for name, cache in zip(("k_cache", "v_cache"), found, strict=True):
        axes.bind(name, cache, f"{rows} nheads_kv head_dim")
    return found


def _place(arrays: Arrays, axes: Axes, seqused_k: Any, block_table: Any, slot_mapping: Any) -> dict[str, Any]:
    """The arrays that say where tokens go, checked; what lies on a GPU is checked there, token by token."""
    op = arrays.op
    if slot_mapping is not None:
        if seqused_k is not None or block_table is not None:
            raise OptionError(f"{op}: slot_mapping says where every token goes; pass it without seqused_k and "
                              "block_table, or those without it")  # fmt: skip
        slots = arrays.read("slot_mapping", slot_mapping)
        checks.exactly(op, "slot_mapping", slots, (axes["total"],), _INT64)
        if not arrays.on_cuda:
            _check_slots(op, slots, axes["num_pages"], axes["page_size"])
        return {"seqused_k": None, "block_table": None, "slot_mapping": slots}
    if seqused_k is None:
        raise OptionError(
            f"{op}: where do the tokens go? Pass seqused_k=, the keys of each sequence that its cache holds "
            "already, or slot_mapping="
        )
    used = arrays.read("seqused_k", seqused_k)
    checks.exactly(op, "seqused_k", used, (axes["batch"],), _INT32)
    table = None if block_table is None else arrays.read("block_table", block_table)
    if table is not None:
        axes.bind("block_table", table, "batch max_pages")
        checks.exactly(op, "block_table", table, table.shape, _INT32)
    if not arrays.on_cuda and axes["seqlen"]:
        _check_used(op, axes, used, table)
    return {"seqused_k": used, "block_table": table, "slot_mapping": None}


def _check_slots(op: str, slots: Array, num_pages: int, page_size: int) -> None:
    beyond = np.flatnonzero(slots >= num_pages * page_size)
    if len(beyond):
        raise OptionError(
            f"{op}: slot_mapping[{beyond[0]}] is {slots[beyond[0]]}; {num_pages} pages of {page_size} have "
            f"slots in [0, {num_pages * page_size}), negative ones store nothing"
        )


def _check_used(op: str, axes: Axes, used: Array, table: Array | None) -> None:
    """Every new token has a row in its sequence's cache, and with pages the row has a page."""
    seqlen = axes["seqlen"]
    page_size = axes["max_seqlen" if table is None else "page_size"]
    capacity = page_size if table is None else page_size * table.shape[1]
    if ((used < 0) | (used > capacity - seqlen)).any():
        raise OptionError(
            f"{op}: seqused_k must lie in [0, {capacity - seqlen}] for {seqlen} new tokens in a cache of {capacity}; "
            f"got {np.array2string(used, threshold=8)}"
        )
    if table is None:
        return
    page = np.arange(table.shape[1])
    needed = (page >= used[:, None] // page_size) & (page <= (used[:, None] + (seqlen - 1)) // page_size)
    bad = np.argwhere(needed & ((table < 0) | (table >= axes["num_pages"])))
    if len(bad):
        b, i = (int(n) for n in bad[0])
        raise OptionError(
            f"{op}: block_table[{b}, {i}] is {int(table[b, i])}, not a page in [0, {axes['num_pages']}), but "
            f"sequence {b} grows from {int(used[b])} to {int(used[b]) + seqlen} keys"
        )


def _positions(arrays: Arrays, axes: Axes, positions: Any, place: dict[str, Any]) -> Positions | None:
    """Of every token; None: the rows in its sequence that arrays on a GPU say."""
    op, used = arrays.op, place["seqused_k"]
    if positions is None:
        if used is None:
            raise OptionError(f"{op}: slot_mapping says where tokens are kept; pass positions= as well")
        if arrays.on_cuda:
            return None
        turns = used[:, None] + np.arange(axes["seqlen"])
        return Positions(turns, 0, axes["seqlen"], turns.size)
    where = positions_of(op, arrays, positions, axes, "bshd" if used is not None else "packed")
    if where.array is None:
        raise ShapeError(f"{op}: positions is the number {positions}; pass an array, or seqused_k alone")
    if not arrays.on_cuda:
        where.check_bounds(op)
    return where


def _longest(
    arrays: Arrays,
    axes: Axes,
    seqlen: Any,
    scaling: RopeScaling,
    where: Positions | None,
    place: dict[str, Any],
) -> int:
    """The length that some scalings go by; of positions on a GPU, which must be waited for, only for those."""
    if seqlen is not None:
        return checks.integer(arrays.op, "seqlen", seqlen, low=0)
    if arrays.on_cuda and scaling.kind not in BY_LENGTH:
        return 0
    if where is not None:
        return max(where.bounds[1] + 1, 0)
    return int(place["seqused_k"].max()) + axes["seqlen"] if axes["batch"] else 0
