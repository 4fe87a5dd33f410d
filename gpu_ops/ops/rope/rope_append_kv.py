"""Rotation of projected queries and keys and append to a key/value cache, in one pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, bounds_of, store
from gpu_ops.core.call import Bound, Call, CheckValues
from gpu_ops.core.op import op
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.attention.options import check_scales, update_scales
from gpu_ops.ops.rope.frequencies import Frequencies, RotaryArguments, Rotation
from gpu_ops.ops.rope.options import (
    Rows,
    last_on_device,
    read_positions,
    rows_and_bounds,
    widened,
    widens,
)

__all__ = [
    "AppendCheck",
    "CacheArguments",
    "NormArguments",
    "PlaceArguments",
    "read_tokens",
    "rope_append_kv",
]


@op(cuda=True, kernels="rope.rope_append_kv", written=("k_cache", "v_cache", "k_scale", "v_scale"))
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
    k_scale: Any = None,
    v_scale: Any = None,
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
    workspace: Any = None,
) -> Bound:
    """QK-norm, rotary embedding and the cache write in one pass.

    Per token, :func:`rmsnorm` over each head (only with weights) and :func:`rope`, with one rounding at the end::

        out           = rope(rmsnorm(q, q_weight))
        k_cache[slot] = rope(rmsnorm(k, k_weight))
        v_cache[slot] = v

    Call :func:`attention_decode` on the caches next, with ``seqused_k + seqlen``.

    Parameters
    ----------
    q : array (batch, seqlen, nheads, head_dim)
        Queries of the new tokens. float16, bfloat16, float32 or float64, the same for all arrays. q, k and v may be
        views of one packed projection: ``qkv.reshape(batch, seqlen, -1, head_dim)[:, :, :nheads]``. With
        ``slot_mapping`` (total, nheads, head_dim): tokens of any sequences.
    k, v : arrays (batch, seqlen, nheads_kv, head_dim), or (total, nheads_kv, head_dim)
    k_cache, v_cache : arrays (batch, max_seqlen, nheads_kv, head_dim)
        Changed in place, only in the rows of the new tokens. With ``block_table`` or ``slot_mapping``: pages,
        (num_pages, page_size, nheads_kv, head_dim). They may not share memory with each other or any other array.
    seqused_k : int32 array (batch,)
        Number of keys of each sequence already in its cache: token i becomes key ``seqused_k[b] + i``.
    block_table : int32 array (batch, max_pages), optional
        Key j of sequence b is in page ``block_table[b, j // page_size]``. Entries that no new token needs are
        ignored and may be -1. No two new tokens may share a row of a page.
    slot_mapping : int64 array (total,), instead of seqused_k
        Slot of each token: page * page_size + row. Negative: not stored (padding). No two tokens may share a slot.
    k_scale, v_scale : float32 arrays (num_pages, page_size, nheads_kv), optional
        Scales of quantized pages, changed in place with them. Pages are int8 or float8_e4m3fn, or uint8 with the bits
        of float8_e4m3fn for libraries without it. The scale of a head of a token is ``max|x| / largest``, with
        largest 127 or 448, and the page gets ``x / scale`` rounded to nearest even. (A scale per page would grow as
        tokens arrive, and the page would be rewritten.) Tokens are then float16, bfloat16 or float32.
    q_weight, k_weight : arrays (head_dim,), optional
        Weights of the norms of q's and k's heads; both or neither. With neither, heads are not normalised.
    eps, weight_offset
        Options of the norms, see :func:`rmsnorm`.
    positions : integers, optional
        Same as in :func:`rope`. Default: ``seqused_k[b] + i``; required with ``slot_mapping``.
    theta, rotary_dim, interleaved, scaling, seqlen
        Same as in :func:`rope`.
    out : array like q, optional
        Receives the rotated q. ``out=q`` works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory for calls that a CUDA graph captures; this op needs none.

    Returns
    -------
    Array like ``q``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written. ``seqused_k``, ``block_table`` and ``slot_mapping`` in host memory are
        checked. On a GPU they are not, since that would wait for it: a token whose place is outside the cache is not
        stored, and of two tokens with the same place, either one is.

    Notes
    -----
    Reads and writes each element once. Separate norm, rotation and copies move q and k two or three times. Arithmetic
    is float32 (float64 for float64).

    The error of an element of a quantized page is at most ``scale / 2`` for int8, and the larger of ``|x| / 16`` and
    ``scale / 1024`` for float8_e4m3fn. A head of zeros, or whose scale would be below 1.2e-38, has scale 0. A head
    with a NaN or an infinity has scale NaN.

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
    call = Call("rope_append_kv", device, backend, workspace)
    place = PlaceArguments(seqused_k, block_table, slot_mapping, positions)
    norm = NormArguments(q_weight, k_weight, eps, weight_offset)
    rotary = RotaryArguments(theta, rotary_dim, interleaved, scaling, seqlen)
    cache = CacheArguments(k_cache, v_cache, k_scale, v_scale)
    return _bind(call, {"q": q, "k": k, "v": v}, cache, place, norm, rotary, out)


def _bind(
    call: Call,
    tokens: Mapping[str, Any],
    caches: CacheArguments,
    place: PlaceArguments,
    norm: NormArguments,
    rotary: RotaryArguments,
    out: Any,
) -> Bound:
    x = read_tokens(call, tokens, packed=place.packed)
    weights = norm.read(call)
    dtype = checks.float_dtype(call.op, **x, **weights)
    positions = place.read(call)
    cache = caches.update(call, x["q"].dtype, paged=place.paged)
    norm.check(call, dtype)
    frequencies = rotary.check(call, dtype)
    call.write("rotated q", x["q"].shape, x["q"].dtype, out, in_place="q")
    seqlen = 0 if place.packed else call.axes["seqlen"]

    rotation = frequencies.rotation

    def problem() -> str:
        into = f"{'pages' if place.paged else 'cache'} {cache.shape}"
        into += f" of {cache.dtype}" if cache.dtype != x["q"].dtype else ""
        qk_norm = "QK-norm, " if weights else ""
        return f"q {x['q'].shape}, k and v {x['k'].shape} {dtype} into {into}, {qk_norm}{rotation}"

    return call.bind(
        problem=problem,
        unsupported=_unsupported(dtype, x["q"].shape, rotation),
        check_values=AppendCheck(call.op, cache.shape[0], cache.shape[1], seqlen, frequencies).for_call(
            call, positions
        ),
    )


@uninterrupted  # it imports
def _unsupported(dtype: str, shape: tuple[int, ...], r: Rotation) -> dict[str, str]:
    from gpu_ops.kernels.rope.rope_append_kv import raw_cannot

    tokens, head_dim = math.prod(shape[:-2]), shape[-1]
    why = raw_cannot(dtype, head_dim, r.rotary_dim, tokens, interleaved=r.interleaved)
    return {"raw": why} if why else {}


@lowers("rope_append_kv", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.rope.rope_append_kv import rope_append_kv as reference

    packed = spec.get("slot_mapping") is not None
    tokens = ("q", "k", "v", "k_cache", "v_cache")
    scales = ("k_scale", "v_scale") if spec.get("k_scale") is not None else ()
    optional = ("seqused_k", "block_table", "slot_mapping", "q_weight", "k_weight", *scales)
    options = ("eps", "weight_offset", "theta", "rotary_dim", "interleaved", "scaling")
    fixed: dict[str, Any] = {name: spec[name] for name in options}

    def run(views: Mapping[str, Any]) -> None:
        arrays: list[Any] = [views[name] for name in tokens]
        keywords = fixed | {name: views.get(name) for name in optional}
        positions = views["rows"][0] if packed else views["rows"]
        updated = reference(*arrays, positions=positions, seqlen=views["seqlen"], **keywords)
        store(views, ("rotated q", "k_cache", "v_cache", *scales), updated)

    builder.call(run, "NumPy, float64")


def read_tokens(call: Call, tokens: Mapping[str, Any], *, packed: bool) -> dict[str, Array]:
    """Read q, k and v of the new tokens."""
    leading = "total" if packed else "batch seqlen"
    arrays = {name: call.read(name, x) for name, x in tokens.items()}
    for (name, x), heads in zip(arrays.items(), ("nheads", "nheads_kv", "nheads_kv"), strict=True):
        call.axes.bind(name, x, f"{leading} {heads} head_dim")
    return arrays


@dataclass(frozen=True)
class CacheArguments:
    """Caches and their scales, as the caller passed them."""

    k_cache: Any
    v_cache: Any
    k_scale: Any
    v_scale: Any

    def update(self, call: Call, dtype: np.dtype[Any], *, paged: bool) -> Array:
        """Declare the caches and return the keys' cache. Call it after reading all inputs: they may not overlap."""
        arrays = {"k_cache": self.k_cache, "v_cache": self.v_cache}
        caches = {name: call.update(name, x) for name, x in arrays.items()}
        rows = "num_pages page_size" if paged else "batch max_seqlen"
        for name, cache in caches.items():
            call.axes.bind(name, cache, f"{rows} nheads_kv head_dim")
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        if check_scales(call, caches, scales, dtype, paged=paged):
            update_scales(call, self.k_scale, self.v_scale)
        else:
            for name, cache in caches.items():
                checks.exactly(call.op, name, cache, cache.shape, dtype)
        return caches["k_cache"]


@dataclass(frozen=True)
class NormArguments:
    """Arguments of the norms of q's and k's heads, as the caller passed them."""

    q_weight: Any
    k_weight: Any
    eps: Any
    weight_offset: Any

    def read(self, call: Call) -> dict[str, Array]:
        """Read both weights, or neither."""
        weights = {"q_weight": self.q_weight, "k_weight": self.k_weight}
        missing = [name for name, weight in weights.items() if weight is None]
        if len(missing) == 1:
            raise OptionError(f"{call.op}: {missing[0]} is missing; pass q_weight and k_weight, or neither")
        return (
            {} if missing else {name: call.read(name, weight, "head_dim") for name, weight in weights.items()}
        )

    def check(self, call: Call, dtype: str) -> None:
        call.option(
            eps=checks.epsilon(call.op, self.eps, dtype),
            weight_offset=checks.computable(call.op, "weight_offset", self.weight_offset, dtype),
        )


@dataclass(frozen=True)
class PlaceArguments:
    """Arguments that give the positions of tokens and their places in the cache, as the caller passed them."""

    seqused_k: Any
    block_table: Any
    slot_mapping: Any
    positions: Any

    @property
    def packed(self) -> bool:
        """Whether tokens are along one axis and have slots."""
        return self.slot_mapping is not None

    @property
    def paged(self) -> bool:
        return self.packed or self.block_table is not None

    def read(self, call: Call) -> Array | None:
        """Check shapes and dtypes; return the positions, or None: a token's position is its row in its sequence."""
        if self.packed:
            self._read_slots(call)
        else:
            self._read_lengths(call)
        if self.positions is None:
            if self.packed:
                raise OptionError(
                    f"{call.op}: slot_mapping says where tokens are kept; pass positions= as well"
                )
            return None
        if isinstance(self.positions, (int, float, np.number)):
            raise ShapeError(
                f"{call.op}: positions is the number {self.positions}; pass an array, or seqused_k alone"
            )
        return read_positions(call, self.positions, "packed" if self.packed else "bshd")

    def _read_slots(self, call: Call) -> None:
        if self.seqused_k is not None or self.block_table is not None:
            raise OptionError(
                f"{call.op}: slot_mapping says where every token goes; pass it without seqused_k and block_table, "
                "or those without it"
            )
        slots = call.read("slot_mapping", self.slot_mapping)
        checks.exactly(call.op, "slot_mapping", slots, (call.axes["total"],), np.dtype(np.int64))

    def _read_lengths(self, call: Call) -> None:
        if self.seqused_k is None:
            raise OptionError(
                f"{call.op}: where do the tokens go? Pass seqused_k=, the keys of each sequence that its cache "
                "holds already, or slot_mapping="
            )
        int32 = np.dtype(np.int32)
        used = call.read("seqused_k", self.seqused_k)
        checks.exactly(call.op, "seqused_k", used, (call.axes["batch"],), int32)
        table = call.optional("block_table", self.block_table, "batch max_pages")
        if table is not None:
            checks.exactly(call.op, "block_table", table, table.shape, int32)


@dataclass(frozen=True)
class AppendCheck:
    """Hook of ``rope_append_kv``: checks that every new token has a separate row, and looks up its cos and sin."""

    op: str
    num_pages: int
    page_size: int
    seqlen: int
    """Number of new tokens of each sequence; 0 with slots."""
    frequencies: Frequencies

    def for_call(self, call: Call, positions: Array | None) -> CheckValues | None:
        """The hook of a call; None if kernels need nothing from the host."""
        if not call.on_cuda:
            return self.on_host
        return self.on_device if self.frequencies.by_length or widens(positions) else None

    def on_host(self, views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
        slots, positions = views.get("slot_mapping"), views.get("positions")
        if slots is None:
            rows = self._new_rows(views["seqused_k"], views.get("block_table"), backend)
        elif backend != "cpu" or not self._slots_differ(slots):
            self._check_slots(slots)
        if positions is not None:
            rows = rows_and_bounds(self.op, positions)
        options, tables = self.frequencies.lookup(backend, *rows)
        return options, tables or widened(positions)

    def on_device(self, views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The hook for CUDA arrays. It waits for positions or lengths only if the frequencies depend on them."""
        positions, options = views.get("positions"), {}
        if self.frequencies.by_length:
            last = last_on_device(self.op, views["seqused_k"] if positions is None else positions)
            options = self.frequencies.at(last if positions is not None else last + self.seqlen).options
        return options, widened(positions)

    def _new_rows(self, used: Array, table: Array | None, backend: str) -> Rows:
        """Rows of the new tokens in their sequences, after checking their places."""
        steps = self._steps
        if not len(used) or not self.seqlen:
            return used[:, None] + steps, 0, -1
        if backend != "cpu":
            self._check_used(used, table)
            rows = used[:, None] + steps
            return rows, *bounds_of(rows)
        lengths = self._find_lengths(used, table)
        shortest, longest, sound, _ = lengths[-1].tolist()
        if not sound or (table is not None and not self._rows_differ(used, table)):
            self._check_used(used, table)
        starts = lengths[:-1, 3:]
        return starts if self.seqlen == 1 else starts + steps, shortest, longest + self.seqlen - 1

    @functools.cached_property
    def _steps(self) -> Array:
        return np.arange(self.seqlen)

    # On the CPU compiled kernels check first; if they find an error, the functions below report it.

    @functools.cached_property
    @uninterrupted
    def _find_lengths(self) -> Callable[[Array, Array | None], Array]:
        from gpu_ops.kernels.common.cpu.lengths import cached

        return cached(seqlen_q=0, new=self.seqlen, page_size=self.page_size, num_pages=self.num_pages)

    @functools.cached_property
    @uninterrupted
    def _rows_differ(self) -> Callable[[Array, Array], bool]:
        from gpu_ops.kernels.common.cpu.lengths import apart

        return apart(self.seqlen, self.page_size)

    @functools.cached_property
    @uninterrupted
    def _slots_differ(self) -> Callable[[Array], bool]:
        from gpu_ops.kernels.common.cpu.lengths import mapped

        return mapped(self.num_pages * self.page_size)

    def _check_slots(self, slots: Array) -> None:
        count = self.num_pages * self.page_size
        if slots.size and bounds_of(slots)[1] >= count:
            beyond = np.flatnonzero(slots >= count)
            raise OptionError(
                f"{self.op}: slot_mapping[{beyond[0]}] is {slots[beyond[0]]}; {self.num_pages} pages of "
                f"{self.page_size} have slots in [0, {count}), negative ones store nothing"
            )
        if (pair := _two_of_one(slots)) is not None:
            raise OptionError(
                f"{self.op}: slot_mapping[{pair[0]}] and slot_mapping[{pair[1]}] are both {slots[pair[0]]}; no two "
                "tokens may share a slot, give one of them its own, or a negative one to store it nowhere"
            )

    def _check_used(self, used: Array, table: Array | None) -> None:
        """Check that every new token has a row in its sequence's cache and, with pages, a separate page row."""
        op, seqlen, page_size = self.op, self.seqlen, self.page_size
        capacity = page_size if table is None else page_size * table.shape[1]
        lengths = used.tolist()
        if not 0 <= min(lengths) <= max(lengths) <= capacity - seqlen:
            raise OptionError(
                f"{op}: seqused_k must lie in [0, {capacity - seqlen}] for {seqlen} new tokens in a cache of "
                f"{capacity}; got {np.array2string(used, threshold=8)}"
            )
        if table is None:
            return
        self._check_pages(used, table)
        rows = used[:, None] + np.arange(seqlen)
        cols = rows // page_size
        slots = np.take_along_axis(table, cols, axis=1) * np.int64(page_size) + rows % page_size
        if (pair := _two_of_one(slots.ravel())) is not None:
            (b, i), (c, j) = (divmod(token, seqlen) for token in pair)
            page, row = divmod(int(slots[b, i]), page_size)
            raise OptionError(
                f"{op}: token {i} of sequence {b} and token {j} of sequence {c} both go to row {row} of page {page}, "
                f"which is block_table[{b}, {cols[b, i]}] and block_table[{c}, {cols[c, j]}]; no two new tokens may "
                "share a row, give the sequences pages of their own"
            )

    def _check_pages(self, used: Array, table: Array) -> None:
        if not (table.view(np.uint32) >= self.num_pages).any():  # -1 is large too
            return
        end, page = used[:, None] + (self.seqlen - 1), np.arange(table.shape[1])
        needed = (page >= used[:, None] // self.page_size) & (page <= end // self.page_size)
        bad = np.argwhere(needed & ((table < 0) | (table >= self.num_pages)))
        if len(bad):
            b, i = (int(n) for n in bad[0])
            raise OptionError(
                f"{self.op}: block_table[{b}, {i}] is {int(table[b, i])}, not a page in [0, {self.num_pages}), but "
                f"sequence {b} grows from {int(used[b])} to {int(used[b]) + self.seqlen} keys"
            )


def _two_of_one(slots: Array) -> tuple[int, int] | None:
    """Indices of two tokens with the same nonnegative slot."""
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    same = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0))
    return (int(order[same[0]]), int(order[same[0] + 1])) if len(same) else None
