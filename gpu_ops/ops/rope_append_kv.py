"""rope_append_kv: from the projections to rotated queries and a longer key/value cache, in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays
from gpu_ops.core.checks import Axes
from gpu_ops.core.device import Device
from gpu_ops.core.dispatch import Plan, choose, op
from gpu_ops.core.kinds import are_apart
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.ops.rope_append_kv_checks import (
    caches_of,
    check_slots,
    longest_of,
    place_of,
    token_positions,
    used_rows,
    weights_of,
)
from gpu_ops.ops.rope_options import (
    inv_freq_of,
    later_tables,
    rotary_dim_of,
    rows_and_bounds,
    scaling_of,
    theta_of,
)
from gpu_ops.ops.rope_tables import frequencies, rope_tables

__all__ = ["rope_append_kv"]


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
        ignored and may be -1. No two new tokens may share a row of a page.
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
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    Array like ``q``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written. What ``seqused_k``, ``block_table`` and ``slot_mapping`` say is checked for arrays
        in host memory. On a GPU that would wait for it: there a token whose place is outside the cache is not stored,
        and of two with one place, either is.

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
    weights = weights_of(arrays, axes, q_weight, k_weight)
    dtype = checks.float_dtype(name, q=q_, k=k_, v=v_, **weights)
    paged = packed or block_table is not None
    caches = caches_of(arrays, axes, k_cache, v_cache, q_.dtype, paged=paged)
    place = place_of(arrays, axes, seqused_k, block_table, slot_mapping)
    eps = checks.number(name, "eps", eps, above=0.0)
    weight_offset = checks.number(name, "weight_offset", weight_offset)
    interleaved = checks.flag(name, "interleaved", interleaved)
    scaling = scaling_of(name, scaling)
    theta = theta_of(name, theta, scaling)
    rotary_dim = rotary_dim_of(name, rotary_dim, axes["head_dim"], scaling)
    where = token_positions(arrays, axes, positions, place)
    longest = longest_of(arrays, axes, seqlen, scaling, where, place)
    inv_freq = inv_freq_of(name, scaling, rotary_dim, theta, longest)
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
            computed = checks.computing_dtype(dtype)
            cos, sin, rows = rope_tables(where.on_host(), *where.bounds, inv_freq, attention_factor, computed)
            cpu.append(*operands, cos=cos, sin=sin, rows=rows, rotary_dim=rotary_dim, **common)
        else:
            from gpu_ops.kernels.lower import rope_append_kv as gpu

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

    def again() -> Callable[..., Any]:
        from gpu_ops.kernels.numba_cpu import rope_append_kv as cpu
        from gpu_ops.kernels.numba_cpu.lengths import mapped

        new, slots = Arrays(name).new, caches[0].shape[:2]
        differ = mapped(slots[0] * slots[1]) if packed else None
        computed = checks.computing_dtype(dtype)
        how: dict[str, Any] = {
            "eps": eps, "weight_offset": weight_offset, "interleaved": interleaved, "rotary_dim": rotary_dim,
        }  # fmt: skip
        tables = later_tables(name, scaling, rotary_dim, theta, longest, computed, lasting=seqlen is not None)
        rows_of = None if packed else used_rows(name, axes, paged=paged)

        def append(
            q: Array, k: Array, v: Array, k_cache: Array, v_cache: Array, *, seqused_k: Any = None,
            block_table: Array | None = None, slot_mapping: Array | None = None, q_weight: Array | None = None,
            k_weight: Array | None = None, positions: Array | None = None, out: Array | None = None,
            **options: Any,
        ) -> Any:  # fmt: skip
            given: dict[str, Any] = {
                "seqused_k": seqused_k, "block_table": block_table, "slot_mapping": slot_mapping,
                "q_weight": q_weight, "k_weight": k_weight,
            }  # fmt: skip
            read = [x for x in (q, k, v, positions, *given.values()) if x is not None]
            if not are_apart([k_cache, v_cache], read):  # it has to say why
                call = rope_append_kv.plan  # type: ignore[attr-defined]
                return call(q, k, v, k_cache, v_cache, positions=positions, out=out, **given, **options).run()
            if slot_mapping is not None:
                if differ is not None and not differ(slot_mapping):  # it has to say where
                    check_slots(name, slot_mapping, *slots)
                given["slot_mapping"] = slot_mapping[None]
            if rows_of is not None:
                at = rows_of(seqused_k, block_table)
            if positions is not None:
                at = rows_and_bounds(name, positions)
            result = new(q.shape, q.dtype, "the rotated q") if out is None else out
            cos, sin, rows = tables(*at)
            operands = [*(x[None] if packed else x for x in (q, result, k, v)), k_cache, v_cache]
            cpu.append(*operands, cos=cos, sin=sin, rows=rows, **(given | how))
            return result

        return append

    remembered = again if choice.compiled and q_.size else None
    return Plan(name, choice, problem, config, run, writes=caches, again=remembered)


def _cannot(dtype: str, head_dim: int, rotary_dim: int, tokens: int, interleaved: bool) -> dict[str, str]:
    from gpu_ops.kernels.lower.rope_append_kv import raw_cannot

    why = raw_cannot(dtype, head_dim, rotary_dim, tokens, interleaved=interleaved)
    return {"raw": why} if why else {}
