"""``python -m perf --roofline``: bounds calculated by hand, the emulator's counts, and the order of bounds."""

from __future__ import annotations

import ml_dtypes
import pytest

from gpu_ops.kernels.attention.config import (
    DeviceLimits,
    ForwardConfig,
    ForwardProblem,
    ForwardTile,
    configs,
    select_config,
)
from gpu_ops.presets import PRESETS
from perf import cli, roofline
from perf.attention_grids import Shape
from perf.roofline import UNITS, bound, count_tiles, work
from tests.support.compilers import needs_nvrtc

CARDS = [p for p in PRESETS.values() if p.arch.compute_capability >= (8, 0)]
LONG = Shape(1, 16384, 16384, 16, 16, 128)


def config(tile, head_dim, itemsize=2, **changes):
    fields = {"head_dim": head_dim, "head_dim_v": head_dim, "value_parts": 1, "pack_gqa": False}
    return ForwardConfig(tile, **{**fields, **changes}, num_splits=1, grid=(1, 1, 1), shared_bytes=0)


@pytest.mark.parametrize(
    ("tile", "head_dim", "itemsize", "flops", "clocks"),
    [
        # 64 keys of 64 + 64 columns of 2 bytes arrive (16384) and are read by 4 warps; Q is in registers.
        # 8192 scores; 512 MMAs, 32 for sums + 128 ldmatrix + 32 cp.async + 4.5 * 256.
        (ForwardTile(128, 64, 4), 64, 2, 2 * 128 * 64 * 136, (81920 / 128, 512, 1856 / 4, 256)),
        # 32 keys of 256 columns: 16384 bytes, by 4 warps, and Q, 128 rows of 256 bytes, again for each tile.
        # 512 + 16 + 128 + 64 + 32 + 4.5 * 128.
        (ForwardTile(128, 32, 4), 128, 2, 2 * 128 * 32 * 264, (114688 / 128, 256, 1328 / 4, 256)),
        # Decoding: four warps share the 16 rows and read a quarter of the keys each. 132 + 64 + 64 + 4.5 * 32.
        (ForwardTile(16, 64, 1, 4), 128, 2, 2 * 16 * 64 * 264, (65536 / 128, 64, 404 / 4, 512)),
        # float32: 16 keys, 32 KB, by 4 warps, and 64 KB of Q. 3 MMAs and 4 sums of 2048 products, 3 instructions
        # for 1024 + 512 + 32 words, 64 KB by ldmatrix of K and Q each, 64 KB of V by words, 64 cp.async, 4 * 32.
        (ForwardTile(64, 16, 4), 256, 4, 2 * 64 * 16 * 512, (229376 / 128, 64, (3584 + 4704 + 960) / 4, 512)),
    ],
    ids=["Q in registers", "Q in shared memory", "decode", "float32"],
)
def test_the_work_of_a_tile_by_hand(tile, head_dim, itemsize, flops, clocks):
    assert work(config(tile, head_dim), itemsize) == (
        flops,
        dict(zip(("shared", "exp2", "issue", "L2"), clocks, strict=True)),
    )


@pytest.mark.parametrize(
    ("card", "dtype", "head_dim", "tflops", "limit"),
    [
        # 4096 products per SM and clock would do a tile in 1024 clocks, and its sums in 32: more than the 896 of
        # shared memory.
        ("A100-40", "bfloat16", 128, 312.0 * 256 / 264, "tensor"),
        ("RTX 4090", "float16", 128, 165.2 * 256 / 264, "tensor"),
        # 128 rows by 64 keys, Q in shared memory: 4 warps read 16 KB of K, of V, their 8 KB of Q; 32 KB arrive.
        # 2 * 128 * 64 * 256 operations in 192 KB / 128 clocks on 132 SMs at 1.98 GHz.
        ("H100 SXM", "bfloat16", 128, 4194304 / 1536 * 132 * 1.98e9 / 1e12, "shared"),
        # Two blocks of 96 columns of values would be 1.5 times the scores; two of 128 make 4/3 of 256 + 256.
        ("RTX 4090", "float32", 256, 82.6 / 3 * 2 / 3, "tensor"),
    ],
)
def test_bounds_by_hand(card, dtype, head_dim, tflops, limit):
    actual = bound(PRESETS[card], Shape(1, 16384, 16384, 2048 // head_dim, 2048 // head_dim, head_dim), dtype)
    assert actual.limit == limit
    assert actual.tflops == pytest.approx(tflops, rel=1e-9)


def test_tiles_of_a_triangle():
    """Rows 0-63 see 64 keys, 64-127 see 128: one and two tiles, or two and four with 96 more keys in front."""
    c = config(ForwardTile(64, 64, 4), 64)
    assert count_tiles(Shape(1, 128, 128, 1, 1, 64), c, True) == 1 + 2
    assert count_tiles(Shape(1, 128, 224, 1, 1, 64), c, True) == 3 + 4
    assert count_tiles(Shape(3, 100, 100, 8, 2, 64), c, False) == 3 * 8 * 2 * 2
    assert count_tiles(Shape(1, 128, 32, 1, 1, 64), c, True) == 0 + 1, "rows that see nothing"
    packed = config(ForwardTile(64, 64, 4), 64, pack_gqa=True)
    assert count_tiles(Shape(3, 16, 128, 8, 2, 64), packed, False) == 3 * 2 * 1 * 2


def test_a_causal_bound_counts_what_is_seen():
    full, causal = (bound(PRESETS["A100-40"], LONG, "bfloat16", causal=c) for c in (False, True))
    assert full.config.tile == causal.config.tile
    assert 0.98 * full.tflops < causal.tflops < full.tflops


@needs_nvrtc
def test_the_emulator_counts_the_same():
    """The counts are of one block; its Q and result add less than a tenth here."""
    from tests.attention.test_traffic import sampled

    seqlen, head_dim = 1024, 64
    device = sampled((0,), seqlen, head_dim, ml_dtypes.bfloat16)
    problem = ForwardProblem(2, 4, 16, 16, seqlen, seqlen, head_dim, head_dim)
    limits = device.limits
    chosen = select_config(problem, DeviceLimits(limits.sms, limits.smem_per_block_optin))
    flops, clocks = work(chosen, 2)
    tiles, profile = seqlen // chosen.tile.block_n, device.profile
    assert profile.multiply_adds["bf16"] == tiles * flops / 2
    counted = {
        "shared": profile.counts.waves,
        "exp2": profile.opcodes["ex2"].warps * 32 / roofline.EXP2,
        "L2": profile.bytes_read / roofline.L2,
    }
    for unit, count in counted.items():
        assert 1 <= count / (tiles * clocks[unit]) < 1.1, unit
    assert profile.counts.warps / roofline.ISSUE > tiles * clocks["issue"], "PTX has more than the least"


@pytest.mark.parametrize("card", CARDS, ids=lambda p: p.name)
def test_no_bound_is_above_the_peak(card):
    for dtype in ("float16", "bfloat16", "float32"):
        for head_dim, causal in ((64, False), (128, True), (256, False)):
            actual = bound(card, Shape(2, 1000, 3000, 8, 2, head_dim), dtype, causal=causal)
            assert tuple(actual.seconds) == UNITS
            assert 0 < actual.tflops * 1e12 <= roofline.peak(card, dtype)


@pytest.mark.parametrize("card", CARDS, ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_other_tile_could_be_faster_in_long_sequences(card, dtype):
    """select_config uses no data sheets, so its tiles must not be among those that data sheets rule out."""
    for head_dim in (64, 96, 128, 256):
        shape = Shape(4, 4096, 4096, 16, 16, head_dim)
        every = (c for _, c in configs(*roofline.problem(card, shape, dtype, False)) if c.num_splits == 1)
        best = max(bound(card, shape, dtype, config=c).tflops for c in every)
        assert bound(card, shape, dtype).tflops >= 0.99 * best, head_dim


def test_a_card_without_the_dtype():
    with pytest.raises(ValueError, match="T4 has no bfloat16"):
        roofline.peak(PRESETS["T4"], "bfloat16")


def test_the_command(capsys, monkeypatch):
    monkeypatch.delenv("GPU_OPS_ARCH", raising=False)
    assert cli.main(argv=["--roofline"]) == 0
    text = capsys.readouterr().out
    assert "from data sheets, not measured" in text
    assert "T4" not in text
    assert all(name in text for name in ("H100 SXM", "B200", "RTX 5090", *UNITS))
    monkeypatch.setenv("GPU_OPS_ARCH", "A100-40")
    assert cli.main(argv=["--roofline", "--dtype", "float32", "--seqlen", "2048", "8192"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "A100-40" in line]
    assert len(rows) == 6
    assert all("fp32" in row for row in rows)
    monkeypatch.setenv("GPU_OPS_ARCH", "T4")
    assert cli.main(argv=["--roofline"]) == 1
    for wrong in (["--op", "rmsnorm"], ["--dtype", "float64"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(argv=["--roofline", *wrong])
        assert exit_.value.code == 2
