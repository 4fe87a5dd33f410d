"""CUDA accepts every launch of every op for any shape: blocks, grids, shared memory.

Calls are bound and lowered, not run, on arrays that claim any size.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

import gpu_ops
from gpu_ops.cli.preset_report import card_limits
from gpu_ops.core.device import compiler_missing
from gpu_ops.core.dispatch import has_cuda_kernels
from gpu_ops.core.run import PreparedCall
from gpu_ops.errors import DeviceError, GpuOpsError
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.kernels.compiler.cubin import RESERVED
from gpu_ops.kernels.compiler.kernel import CudaKernel
from gpu_ops.kernels.program import Builder, Launch, LaunchTooLarge, Limits
from gpu_ops.presets import PRESETS
from gpu_ops.reference.weights.ternary_formats import FORMATS
from tests.support.calls import DTYPES, call
from tests.support.laws import NAMES

# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications
MAX_BLOCK, MAX_THREADS = (1024, 1024, 64), 1024
MAX_GRID = (2**31 - 1, 65535, 65535)

CARDS = [p for p in PRESETS.values() if p.arch.has_bfloat16]

ANY = (1, 2, 7, 97, 1000, 4096, 65535, 65536, 70001, 2**20 + 1, 2**31 - 1, 2**31 + 8)
SIZES = {
    **dict.fromkeys(("batch", "nheads_kv"), (1, 2, 3, 128, 65536, 70001)),
    **dict.fromkeys(("seqlen", "seqlen_q", "seqlen_k", "rows"), ANY),
    "group": (1, 2, 3, 8, 128),
    **dict.fromkeys(("head_dim", "head_dim_v"), (8, 16, 40, 64, 96, 128, 256, 512)),
    **dict.fromkeys(
        ("cols", "width", "hidden", "hidden_out", "ffn", "N"), (1, 2, 8, 97, 4096, 65537, 2**20, 2**31 + 8)
    ),
    "K": (256, 320, 4096, 65536 * 4),
    "seqlen_new": (1, 2, 97, 4096),
    "max_seqlen": (4096, 65536, 2**20),
    "total": (1, 97, 65536, 2**31 - 2),
    "page_size": (1, 16, 256, 4096),
    "bytes": (1,),
}
MOST_INTEGERS = 1 << 18  # real integers, because calls read their values
MOST_BYTES = 1 << 52


ADDRESSES = itertools.count(1)


def claimed(shape, dtype):
    """Array of this shape without memory, at a separate address; nothing may read it."""
    place = {"shape": tuple(shape), "typestr": f"|V{np.dtype(dtype).itemsize}", "version": 3}
    place["data"] = (1 + next(ADDRESSES) % 1023 << 52, False)
    return np.asarray(SimpleNamespace(__array_interface__=place)).view(dtype)


def sizes_for(rng):
    """Sizes by name; few are large at a time."""
    sizes = {name: values[int(rng.integers(min(4, len(values))))] for name, values in SIZES.items()}
    for name in rng.choice(list(SIZES), 3, replace=False):
        sizes[name] = SIZES[name][int(rng.integers(len(SIZES[name])))]
    sizes["nheads"] = sizes["nheads_kv"] * sizes.pop("group")
    sizes["packed"], sizes["pages"] = 2 * sizes["cols"], -(-sizes["max_seqlen"] // sizes["page_size"])
    sizes["gate_up"] = 2 * sizes["ffn"]
    sizes["num_pages"] = sizes["batch"] * sizes["pages"]
    sizes["seqlen_new"] = min(sizes["seqlen_new"], sizes["max_seqlen"])
    return sizes


def values_of(name, shape, sizes):
    """Integers whose values a call reads."""
    if name.startswith("cu_seqlens"):
        return np.array([0, sizes["total"] // 3, sizes["total"]], np.int32)
    if math.prod(shape) > MOST_INTEGERS:
        return None
    if name == "seqused_k":
        return np.full(shape, sizes["max_seqlen"] - sizes["seqlen_new"], np.int32)
    if name == "slot_mapping":
        return np.full(shape, -1, np.int64)
    if name == "block_table":
        return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    return np.zeros(shape, np.int64)


def enlarged(case, sizes):
    """Call with arrays of these sizes; None if they have too many integers to allocate, or too many bytes."""
    heads = ("batch", "nheads", "seqlen_q") if "batch" in case.axes.get("q", ()) else ("nheads", "total")
    axes = {"lse": heads, "out": case.axes.get("q", ()), **case.axes}
    changes = {}
    for name, x in {**case.arrays, **case.options}.items():
        if isinstance(x, TernaryMatrix):
            changes[name] = claimed_matrix(x, sizes["rows" if name == "x" else "N"], sizes["K"])
            if changes[name] is None:
                return None
        elif isinstance(x, np.ndarray):
            shape = tuple(int(a) if a.isdigit() else sizes[a] for a in axes.get(name, ()))
            if name not in axes and not name.startswith("cu_seqlens"):
                return None
            if name in axes and not shape:
                changes[name] = x  # a number, whose value a call may read
            elif x.dtype.kind == "i" and x.dtype.itemsize > 1:  # int8 are numbers or trits
                changes[name] = values_of(name, shape, sizes)
            elif math.prod(shape) * x.itemsize < MOST_BYTES:
                changes[name] = claimed(shape, x.dtype)
            if changes.get(name) is None:
                return None
    return case.having(**changes)


def claimed_matrix(w, n, k):
    group = {0: (), 1: (n,), 2: (n, k // 64)}[w.scale.ndim]
    if math.prod(group) > MOST_INTEGERS:
        return None
    codes = claimed(FORMATS["w2"].packed_shape((n, k)), np.uint8)  # kernels read it unchanged
    return TernaryMatrix._trusted(codes, np.ones(group, np.float32), (n, k), "w2")


def programs(case, backend):
    """Programs that would run on each card."""
    op = getattr(gpu_ops, case.op).op
    args, kwargs = tuple(case.arrays.values()), {**case.options, "device": "emulator", "backend": backend}
    bound = op.bind(args, kwargs)
    made = PreparedCall(bound, op.parameters, args, kwargs)
    values = (
        bound.check_values(made.views(bound, args, kwargs), made.backend)[0] if bound.check_values else {}
    )
    for card in CARDS:
        yield card, made.program(values, card_limits(card))


def attempt(case, kernels):
    """Launches with their cards, or the refusal that names the op."""
    try:
        lowered = programs(case, kernels)
        return [
            (card, step) for card, program in lowered for step in program.steps if isinstance(step, Launch)
        ], ""
    except GpuOpsError as error:
        return [], str(error)


def check(launch, card):
    """Check one launch against the limits of cuLaunchKernel."""
    grid, block = (*launch.grid, 1, 1)[:3], (*launch.block, 1, 1)[:3]
    assert all(1 <= n <= limit for n, limit in zip(block, MAX_BLOCK, strict=True)), launch
    assert math.prod(block) <= MAX_THREADS, launch
    assert all(1 <= n <= limit for n, limit in zip(grid, MAX_GRID, strict=True)), launch
    assert launch.shared <= card.arch.smem_per_block_optin, launch
    if launch.cooperative:
        shared = card.arch.smem_per_sm // (launch.shared + RESERVED)
        assert math.prod(grid) <= card.sms * min(shared, card.arch.max_threads_per_sm // math.prod(block)), (
            launch
        )


FROM_VALUES = (
    "ternary_pack",
    "ternary_unpack",
    "ternary_matmul both",
    "attention mask",
    "attention_backward mask",
    "sample arrays",
    "softmax mask",
)
WITH_KERNELS = [n for n in NAMES if has_cuda_kernels(n.split()[0]) and n not in FROM_VALUES]
TRIES = 24
TOO_LARGE = "more than a GPU launches at once"


@pytest.mark.parametrize("name", WITH_KERNELS)
@pytest.mark.parametrize("kernels", ["raw", "numba"])
def test_launches(name, kernels):
    if missing := compiler_missing(kernels):
        pytest.skip(missing)
    rng, launches = np.random.default_rng(5), 0
    for i in range(TRIES):
        sizes = sizes_for(rng)
        if name.startswith("rope"):  # its positions are real
            sizes["seqlen"] = min(sizes["seqlen"], MOST_INTEGERS)
        if "mlp" in name:  # one launch per chunk of rows
            sizes |= {axis: min(sizes[axis], 1000) for axis in ("batch", "rows", "ffn", "hidden")}
        case = enlarged(call(name, DTYPES[i % (3 if kernels == "raw" else 4)]), sizes)
        if case is None:
            continue
        launched, refusal = attempt(case, kernels)
        for card, step in launched:
            check(step, card)
        launches += len(launched)
        assert TOO_LARGE not in refusal or max(x.size for x in case.inputs.values()) > 2**33, refusal
    assert launches


@pytest.mark.skipif(
    compiler_missing("numba") is not None, reason="needs numba-cuda (pip install '.[emulator]')"
)
def test_a_grid_that_no_gpu_takes_is_refused():
    """It is refused before anything is allocated or written."""
    q, kv = claimed((2, 1 << 38, 2, 64), np.float32), claimed((2, 4, 2, 64), np.float32)
    with pytest.raises(DeviceError, match=rf"^attention: attention_forward.*{TOO_LARGE}; split the arrays"):
        str(gpu_ops.explain("attention", q, kv, kv, device="emulator", backend="numba"))


LONG = 2**31 + 8


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("linear", [(LONG, 8), (16, 8)]),
        ("linear", [(2, 8), (LONG, 8)]),
        ("linear", [(2, LONG), (2, LONG)]),
        ("linear_backward", [(LONG, 8), (LONG, 8), (8, 8)]),
        ("swiglu_mlp", [(1, 8), (8, 8), (8, 8), (LONG, 8)]),
        ("rmsnorm", [(2, LONG), (LONG,)]),
        ("layernorm", [(2, LONG), (LONG,)]),
    ],
)
def test_sizes_that_32_bits_do_not_hold_are_refused(op, shapes):
    arrays = [claimed(shape, np.float16) for shape in shapes]
    with pytest.raises(
        DeviceError, match=rf"^{op}: a size of 2\^31 or more .* the raw kernels.*; split the arrays"
    ):
        str(gpu_ops.explain(op, *arrays, device="emulator", backend="raw"))


@pytest.mark.parametrize("grid", [(2**31, 1, 1), (1, 65536, 1), (1, 1, 65536), (2**31,), (1, 2**16)])
def test_grids_beyond_an_axis(grid):
    with pytest.raises(LaunchTooLarge, match=r"x.* would take .* blocks"):
        Builder(Limits()).launch(CudaKernel("x", "x", ()), grid, (32, 1, 1), ())
