"""Upper bounds of attention's speed on every card, from data sheets: the unit that limits each tile. No GPU needed.

A block multiplies BLOCK_M rows with BLOCK_N keys at a time. Each unit does part of the work of such a tile. At best
all units are busy at once, and the slowest sets the pace:

========  ====================================================================  =================================
unit      work of a tile                                                        rate
========  ====================================================================  =================================
tensor    2 BLOCK_M BLOCK_N (d + dv) operations, of float32 three times; of     the card's peak
          16 bits eight columns more, which sum the weights as rounded
shared    K and V: written once, read by each warp that has separate rows;      128 bytes per clock and SM
          Q, where it is not in registers: read by each warp that shares rows
exp2      BLOCK_M BLOCK_N, on the MUFU                                          16 per clock and SM, sm_75 to sm_120
issue     multiplications of 16 x 8 x 16, loads of fragments, copies of 16      4 warps per clock and SM
          bytes; of a score scale, exp2, maximum, sum, half a conversion; of
          float32 multiplications of 16 x 8 x 8, three instructions to cut a
          word of a fragment in two, four to add three products up
L2        K and V                                                               64 bytes per clock and SM
memory    of the whole problem: q, k, v and out once                            the card's bandwidth
========  ====================================================================  =================================

Clocks are boost clocks, and all SMs are busy to the end. The model leaves out latency, barriers, the bandwidth of
the L2 cache itself and power; all of them can only lower the bound. On sm_90 and sm_100 the peak is that of wgmma
and tcgen05. This kernel uses mma.sync, which does not reach it, so the bound is loose there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from gpu_ops.cli.terminal import print_table
from gpu_ops.kernels.attention.config import DeviceLimits, ForwardConfig, ForwardProblem, select_config
from gpu_ops.kernels.attention.problem import q_in_registers
from gpu_ops.presets import PRESETS, DevicePreset, select_preset
from perf.attention_grids import FIELD_HEAD_DIMS, TOKENS, WIDTH, Shape
from perf.case import DTYPES
from perf.report import make_table, short_dtype

SHARED, EXP2, ISSUE, L2 = 128, 16, 4, 64  # per clock and SM
SUMS = 8  # columns of the product P V that sum up P
UNITS = ("tensor", "shared", "exp2", "issue", "L2", "memory")
TITLE = "attention, forward: upper bounds from data sheets, not measured"
CAPTION = (
    "TFLOPS: the bound, by the operations that the formula counts · percentages: how busy each unit is then, full "
    "attention; the unit at 100 % is the limit · of peak: the bound over the card's peak"
)


@dataclass(frozen=True)
class Bound:
    """Seconds that each unit is busy with a problem."""

    config: ForwardConfig
    flops: float
    seconds: dict[str, float]

    @property
    def limit(self) -> str:
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def tflops(self) -> float:
        return self.flops / self.seconds[self.limit] / 1e12


def bound(
    card: DevicePreset, shape: Shape, dtype: str, *, causal: bool = False, config: ForwardConfig | None = None
) -> Bound:
    """Bound of one configuration; by default, of the one selected for this card."""
    itemsize = DTYPES[dtype].itemsize
    config = config or select_config(*problem(card, shape, dtype, causal))
    tiles = count_tiles(shape, config, causal)
    flops, clocks = work(config, itemsize)
    seconds = {"tensor": tiles * flops / peak(card, dtype)}
    seconds |= {unit: tiles * n / (card.sms * card.boost_mhz * 1e6) for unit, n in clocks.items()}
    seconds["memory"] = shape.nbytes(itemsize) / (card.memory_gbps * 1e9)
    return Bound(config, shape.flops(causal=causal), seconds)


def problem(
    card: DevicePreset, shape: Shape, dtype: str, causal: bool
) -> tuple[ForwardProblem, DeviceLimits]:
    """Problem in the form that ``select_config`` takes."""
    heads, lengths = (shape.nheads, shape.nheads_kv), (shape.seqlen_q, shape.seqlen_k)
    sizes = (shape.batch, *heads, *lengths, shape.head_dim, shape.head_dim)
    result = ForwardProblem(DTYPES[dtype].itemsize, *sizes, mask="kCausal" if causal else "kNone")
    return result, DeviceLimits(card.sms, card.arch.smem_per_block_optin)


def peak(card: DevicePreset, dtype: str) -> float:
    """Operations per second on tensor cores; one in float32 takes three in TF32."""
    tflops = card.peaks.tf32 if dtype == "float32" else getattr(card.peaks, dtype, None)
    if tflops is None:
        raise ValueError(f"{card.name} has no {dtype} on tensor cores")
    return float(tflops) * 1e12 / (3 if dtype == "float32" else 1)


def count_tiles(shape: Shape, config: ForwardConfig, causal: bool) -> int:
    """Number of tiles with a visible pair, over all heads, sequences and parts of the values."""
    group = shape.nheads // shape.nheads_kv if config.pack_gqa else 1
    rows, tile = shape.seqlen_q * group, config.tile
    count = 0
    for first in range(0, rows, tile.block_m):
        last_query = (min(first + tile.block_m, rows) - 1) // group
        hidden = shape.seqlen_q - min(last_query + 1, shape.seqlen_q) if causal else 0
        count += -(-max(shape.seqlen_k - hidden, 0) // tile.block_n)
    return count * shape.nheads // group * shape.batch * config.value_parts


def work(config: ForwardConfig, itemsize: int) -> tuple[float, dict[str, float]]:
    """(operations, clocks of an SM by unit) of a tile."""
    t, d, dv = config.tile, config.head_dim, config.head_dim_v
    scores = t.block_m * t.block_n
    products = scores * (d + dv + (SUMS if itemsize == 2 else 0))
    arriving = t.block_n * (d + dv) * itemsize
    k_read, v_read = (t.warps_m * t.block_n * columns * itemsize for columns in (d, dv))
    held = q_in_registers(itemsize, t.block_m, t.block_n, t.warps_m, t.warps_n, d, dv)
    q_read = 0 if held else t.warps_n * t.block_m * d * itemsize
    half = itemsize == 2
    # ldmatrix.x4 and cp.async move 16 bytes per lane
    instructions = (k_read + q_read + arriving) / 512 + 4 * scores / 32
    if half:
        instructions += products / (16 * 8 * 16) + v_read / 512 + 0.5 * scores / 32
    else:
        words = (k_read + v_read + q_read) / 4 + scores  # of all fragments, including P
        instructions += (3 + 4) * products / (16 * 8 * 8) + v_read / 128 + 3 * words / 32
    clocks = {
        "shared": (arriving + k_read + v_read + q_read) / SHARED,
        "exp2": scores / EXP2,
        "issue": instructions / ISSUE,
        "L2": arriving / L2,
    }
    return 2 * products, clocks


def run(dtypes: Sequence[str], seqlens: Sequence[int], console: Console) -> int:
    """Print the bounds of the field's grid; ``GPU_OPS_ARCH`` selects one card. Returns the exit code."""
    listed = [card for card in PRESETS.values() if not card.generic]
    cards = [select_preset()] if os.environ.get("GPU_OPS_ARCH") else listed
    cards = [card for card in cards if card.arch.compute_capability >= (8, 0)]  # sm_75 has no such kernel
    print_table(console, table(cards, dtypes or ("bfloat16",), seqlens or (4096,)))
    console.print(f"[dim]{CAPTION}[/]")
    return 0 if cards else 1


def table(cards: Sequence[DevicePreset], dtypes: Sequence[str], seqlens: Sequence[int]) -> Table:
    grid = make_table(TITLE, ("card", "shape", "dtype", "tile"), ("TFLOPS full", "causal", "of peak", *UNITS))
    for card in cards:
        for dtype in dtypes:
            for head_dim in FIELD_HEAD_DIMS:
                for seqlen in seqlens:
                    heads = WIDTH // head_dim
                    shape = Shape(max(1, TOKENS // seqlen), seqlen, seqlen, heads, heads, head_dim)
                    grid.add_row(card.name, str(shape), short_dtype(dtype), *cells(card, shape, dtype))
    return grid


def cells(card: DevicePreset, shape: Shape, dtype: str) -> list[str]:
    full, causal = (bound(card, shape, dtype, causal=causal) for causal in (False, True))
    tile, longest = full.config.tile, full.seconds[full.limit]
    name = f"{tile.block_m} x {tile.block_n}, {tile.warps} warps"
    speeds = [f"{full.tflops:.0f}", f"{causal.tflops:.0f}", f"{1e12 * full.tflops / peak(card, dtype):.0%}"]
    return [name, *speeds, *(f"{full.seconds[unit] / longest:.0%}" for unit in UNITS)]
