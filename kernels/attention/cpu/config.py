"""Tile selection for attention on the CPU, and the argument types of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gpu_ops.kernels.attention.cpu.tile import CALL, Call
from gpu_ops.kernels.common.cpu.codegen.memory import round_up
from gpu_ops.kernels.common.cpu.codegen.target import DOT_BFLOAT16, MAX_LANES
from gpu_ops.kernels.common.cpu.dtype import bits
from gpu_ops.kernels.common.cpu.jit import compute, read, types
from gpu_ops.kernels.common.cpu.parallel import launcher, most_threads, thread_count

Array = np.ndarray[Any, Any]

_ACCUMULATOR_BYTES, _L2 = 4, 1 << 20
_PRODUCTS_PER_NANOSECOND = 20  # of one thread, about
DECODE_ROWS = 16  # more query rows per KV head fill the lanes of the tiled kernel


def results_of(t: str) -> tuple[str, str]:
    """Default dtypes of out and lse."""
    return t, compute(t).name


# (dtype, dtype of the bias); forward also the dtypes of out and lse, and of k and v: those of quantized pages compile
# as they are needed
VARIANTS = tuple((t, bias) for t in ("float32", "bfloat16", "float16", "float64") for bias in (t, "float32"))
VARIANTS = tuple(dict.fromkeys(VARIANTS))
FORWARD_VARIANTS = tuple((t, bias, *results_of(t), t) for t, bias in VARIANTS)

OPTIONAL = (
    "block_table",
    "alibi_slopes",
    "sinks",
    "bias",
    "visible",
    "dropout_seed",
)  # arrays of a call, in the kernels' order


class Prepared(NamedTuple):
    """Prepared call for certain options and shapes."""

    run: Callable[..., None]
    scratch: Callable[[], int]
    """Upper bound of the bytes that ``run`` allocates while it runs."""


@dataclass(frozen=True)
class Config:
    """Tile sizes and partition of the work."""

    block_m: int  # queries per task: lanes
    block_n: int  # keys per tile
    heads: int  # adjacent query heads in the lanes
    n_splits: int  # parts of the keys; in the backward pass, of the query blocks
    kernel: str = "tiled"  # or "decode": block_m is then the query rows of a KV head; block_n not used

    def __str__(self) -> str:
        split = f", keys in {self.n_splits} parts" if self.n_splits > 1 else ""
        if self.kernel == "decode":
            return f"decode kernel, keys read once for {self.block_m} query rows per KV head{split}"
        packed = f", {self.heads} heads of a group side by side" if self.heads > 1 else ""
        return f"tiles of {self.block_m} queries x {self.block_n} keys{packed}{split}"


def select_config(
    batch: int,
    nheads: int,
    nheads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    num_splits: int = 0,
    *,
    decode: bool = False,
    dtype: Any = np.float32,
    dims: int = 256,
) -> Config:
    """Divide the work so that every thread has some, in tiles as large as that allows.

    ========  ===============================================================================================
    block_m   1024: each K and V element that is packed serves 1024 queries; half of it and so on while Q^T and
              O^T, which have ``dims`` columns together, are over an L2 cache, and while there are fewer than
              eight tasks per thread (from 512 on four), but at least 64
    block_n   128: S^T of a panel of queries takes 16 KiB and stays in the L1 cache; 256 where bfloat16 is
              multiplied in pairs, which makes the work per tile of O^T as long
    n_splits  parts of the keys, each a task: for decoding by estimated time (:func:`_decode_tasks`), in tiles
              if tasks are few
    ========  ===============================================================================================

    ``decode``: the decode kernel may run, if the query rows per KV head are few. It has neither bias nor block mask.
    """
    group = nheads // max(nheads_kv, 1)
    if decode and 0 < group * seqlen_q <= DECODE_ROWS:
        tasks = _decode_tasks(decode_nanoseconds(batch, nheads_kv, seqlen_k, dtype))
        n_splits = num_splits or max(1, -(-tasks // max(batch, 1)))
        return Config(group * seqlen_q, 0, group, n_splits, "decode")
    heads = group if seqlen_q < 64 else 1  # few queries: heads that share keys fill the lanes
    rows = max(heads * seqlen_q, 1)
    pairs = max(batch * nheads // heads, 1)
    wanted = 4 * thread_count()
    block_m = 1024
    while block_m > 64 and (
        pairs * -(-rows // block_m) < wanted * (1 + block_m // 1024)
        or block_m >= 2 * rows
        or block_m * dims * _ACCUMULATOR_BYTES > _L2
    ):
        block_m //= 2
    block_m = min(block_m, round_up.py_func(rows, MAX_LANES))
    tasks = pairs * -(-rows // block_m)
    block_n = 256 if DOT_BFLOAT16 and np.dtype(dtype).name == "bfloat16" else 128
    n_splits = num_splits
    if n_splits <= 0:  # at least two tiles per part; many queries keep the threads busy anyway
        parts = -(-wanted // tasks) if tasks < 2 * thread_count() and seqlen_q <= 64 else 1
        n_splits = max(1, min(parts, seqlen_k // (2 * block_n)))
    return Config(block_m, block_n, heads, n_splits)


def decode_nanoseconds(batch: int, nheads_kv: int, seqlen_k: int, dtype: Any) -> int:
    """Estimated time of one thread for all keys."""
    return 8 * np.dtype(dtype).itemsize * batch * nheads_kv * seqlen_k


def _decode_tasks(nanoseconds: int) -> int:
    """Number of tasks: of 250 us, or of 60 us, one per thread, from 160 us in total (waking and merging take 55)."""
    if nanoseconds < 160_000:
        return 1
    return min(4 * thread_count(), max(nanoseconds // 250_000, min(thread_count(), nanoseconds // 60_000)))


def make_call(
    q: Array, v: Array, batch: int, config: Config, *, given: dict[str, Array], **rest: Any
) -> Call:
    return Call(
        batch=batch,
        nheads=q.shape[2],
        heads=config.heads,
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        block_m=config.block_m,
        block_n=config.block_n,
        n_splits=config.n_splits,
        has_alibi="alibi_slopes" in given,
        has_bias="bias" in given,
        has_sinks="sinks" in given,
        **rest,
    )


def launcher_of(call: Call, passes: float = 1) -> Callable[..., None]:
    """Launcher for ``passes`` times the two products of the forward pass."""
    scores = call.batch * call.nheads * call.max_seqlen_q * call.max_seqlen_k
    return launcher(passes * scores * (call.head_dim + call.head_dim_v) / _PRODUCTS_PER_NANOSECOND)


def private_bytes(
    launch: Callable[..., None], n_tasks: int, sizes: Callable[..., None], *arguments: Any
) -> int:
    """Scratch bytes of all threads of a launch. ``sizes``: the kernel that counts the scratch of one thread."""
    size = np.zeros(1, np.int64)
    sizes(size, 1, *arguments)
    return most_threads(launch, n_tasks) * int(size[0])


def optional_arrays(dtype: np.dtype[Any]) -> Callable[[dict[str, Array]], tuple[Array, ...]]:
    """Function from optional arrays by name to the arrays of :data:`OPTIONAL`; missing arrays are empty."""
    no_bias, no_visible = bits(np.empty((0, 0, 0, 0), dtype)), np.empty((0, 0, 0, 0), np.bool_)
    no_table, no_slopes, no_sinks = np.empty((0, 0), np.int32), np.empty((0, 0)), np.empty(0)
    no_seed = np.empty(0, np.uint64)
    absent = no_table, no_slopes, no_sinks, no_bias, no_visible, no_seed

    def fill(given: dict[str, Array]) -> tuple[Array, ...]:
        if not given:
            return absent
        get, bias = given.get, given.get("bias")
        return (
            get("block_table", no_table),
            get("alibi_slopes", no_slopes),
            get("sinks", no_sinks),
            no_bias if bias is None else bits(bias),
            get("visible", no_visible),
            get("dropout_seed", no_seed),
        )

    return fill


def optional_types(bias: str) -> tuple[types.Type, ...]:
    """Types of the arrays of :data:`OPTIONAL`."""
    return (
        types.Array(types.int32, 2, "A", readonly=True),
        types.Array(types.float64, 2, "A", readonly=True),
        types.Array(types.float64, 1, "A", readonly=True),
        read(bias, 4),
        types.Array(types.boolean, 4, "A", readonly=True),
        types.Array(types.uint64, 1, "C", readonly=True),
    )


SEQUENCES = types.Array(types.int64, 2, "C", readonly=True)


ROWS = types.Array(types.float64, 3, "A", readonly=True)


def backward_types(t: str, bias: str) -> tuple[types.Type, ...]:
    """Types of the backward kernels' arguments: call, dout, q, k, v, lse, sequences, options, delta, two limits."""
    return (CALL, *(read(t, 4),) * 4, ROWS, SEQUENCES, *optional_types(bias), ROWS, *(types.float64,) * 2)
