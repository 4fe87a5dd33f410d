"""Device presets: consistency of rows, and selection without the card."""

from __future__ import annotations

import dataclasses

import pytest

from gpu_ops.errors import OptionError
from gpu_ops.presets import ARCHES, PRESETS, Arch, select_preset

CARDS = [p for p in PRESETS.values() if not p.generic]
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0))


def test_every_promised_card_is_there():
    geforce = {"RTX 3090 Ti", "RTX 4090", "RTX 5080", "RTX 5090"}
    datacentre = {"T4", "A100-40", "A100-80", "L40S", "H100 SXM", "H100 PCIe", "H200", "B200"}
    assert {p.name for p in CARDS} == geforce | datacentre


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_each_capability_has_a_generic_row_no_faster_than_its_cards(capability):
    row = select_preset(capability)
    assert row.generic
    assert row.arch.compute_capability == capability
    for card in CARDS:
        if card.arch is row.arch:
            assert (row.sms, row.memory_gbps) <= (card.sms, card.memory_gbps)
            assert row.peaks.float16 <= card.peaks.float16


@pytest.mark.parametrize("preset", CARDS, ids=lambda p: p.name)
def test_published_products(preset):
    """CUDA cores, from the product pages: an independent check of SMs x cores per SM."""
    cores = {
        "RTX 3090 Ti": 10752,
        "RTX 4090": 16384,
        "RTX 5080": 10752,
        "RTX 5090": 21760,
        "T4": 2560,
        "A100-40": 6912,
        "A100-80": 6912,
        "L40S": 18176,
        "H100 SXM": 16896,
        "H100 PCIe": 14592,
        "H200": 16896,
        "B200": 18944,
    }
    assert preset.sms * preset.arch.fp32_per_sm_clk == cores[preset.name]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sms": 0}, "0 SMs"),
        ({"sms": 168}, "implies 930 MHz"),  # twice the SMs at the same peak
        ({"boost_mhz": 2500}, "implies"),
        ({"l2_bytes": 6}, "L2"),
        ({"memory_gbps": 1.008}, "bandwidth"),
        ({"source": ""}, "no source"),
        ({"arch": ARCHES["sm_89"]}, "has float8"),
        ({"arch": ARCHES["sm_75"]}, "has no bfloat16"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(PRESETS["RTX 3090 Ti"], **change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"float16_acc16": 320.0}, "float16_acc16 peak implies"),  # the sparse figure
        ({"float16": 100.0, "bfloat16": 100.0}, "full or half rate"),
        ({"bfloat16": 160.0}, "bfloat16 runs at"),
        ({"tf32": 80.0}, "tf32 is"),
        ({"int8": 640.0}, "int8 runs at"),
    ],
)
def test_a_peak_that_contradicts_the_others_is_refused(change, says):
    row = PRESETS["RTX 3090 Ti"]
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(row, peaks=dataclasses.replace(row.peaks, **change))


def test_an_architecture_checks_its_limits():
    sm_86 = ARCHES["sm_86"]
    with pytest.raises(ValueError, match="can opt in to 101376 bytes"):
        dataclasses.replace(sm_86, smem_per_block_optin=100 * 1024)
    with pytest.raises(ValueError, match="whole warps"):
        dataclasses.replace(sm_86, max_threads_per_sm=1500)
    with pytest.raises(ValueError, match="float8 without bfloat16"):
        dataclasses.replace(sm_86, has_bfloat16=False, has_float8=True)
    assert {a.compute_capability for a in ARCHES.values()} == set(CAPABILITIES)
    assert all(isinstance(a, Arch) and a.registers_per_sm == 65536 for a in ARCHES.values())


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h200", "H200"),
        (" RTX 4090 ", "RTX 4090"),
        ("sm_86", "sm_86"),
        ("SM_90", "sm_90"),
        ("sm_90a", "sm_90"),
        ("8.6", "sm_86"),
        ("120", "sm_120"),
        ((8, 9), "sm_89"),
        ((10, 3), "sm_100"),  # the nearest older minor version: its binaries run
        ("sm_121", "sm_120"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("Tesla T4", "T4"),
    ],
)
def test_selection(spelling, name):
    assert select_preset(spelling).name == name


@pytest.mark.parametrize(
    "other",
    [
        "NVIDIA GeForce RTX 3090",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA H100 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "Quadro T4000",
        "NVIDIA GeForce RTX 4080",
    ],
)
def test_other_cards_are_not_mistaken_for_a_preset(other):
    with pytest.raises(OptionError, match="no preset for"):
        select_preset(other)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ("H100", "'H100 SXM', 'H100 PCIe'"),
        ("a100", "'A100-40', 'A100-80'"),
        ("RTX 4080", "'RTX 5080', 'RTX 4090'"),
    ],
)
def test_near_names_are_suggested(other, names):
    with pytest.raises(OptionError, match=f"did you mean {names}"):
        select_preset(other)


def test_environment_selects_without_the_card(monkeypatch):
    monkeypatch.delenv("GPU_OPS_ARCH", raising=False)
    with pytest.raises(OptionError, match="GPU_OPS_ARCH=sm_86"):
        select_preset()
    monkeypatch.setenv("GPU_OPS_ARCH", "sm_86")
    assert select_preset().arch.smem_per_block_optin == 99 * 1024
    assert select_preset("H200").name == "H200"  # an argument has priority over the environment
    for wrong in ("junk", "sm_20"):
        monkeypatch.setenv("GPU_OPS_ARCH", wrong)
        with pytest.raises(OptionError, match="GPU_OPS_ARCH: no preset for"):
            select_preset()
        with pytest.raises(OptionError, match="select_preset: no preset for"):
            select_preset(wrong)


@pytest.mark.parametrize("wrong", ["", "sm_", "sm_20", "6.1", (7, 0), "RTX", "sm_8x"])
def test_unknown_devices_are_refused_with_a_list(wrong, monkeypatch):
    monkeypatch.delenv("GPU_OPS_ARCH", raising=False)
    with pytest.raises(OptionError, match="sm_86"):
        select_preset(wrong)
