"""Pages under scripts/docs/pages/tasks print the output in their text."""

from __future__ import annotations

import functools
import re

import pytest

from scripts.docs import snippets, stage
from tests.support.compilers import needs_nvrtc


@functools.cache
def printed_by(page):
    """Output of a page's blocks. A failing block raises."""
    text = (stage.PAGES / "tasks" / f"{page}.md").read_text(encoding="utf-8")
    return "\n".join(snippets.run_page(text, f"{page}.md"))


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("attention", ["True 32 MiB of scores", "True\nTrue False", "runs on"]),
        ("decoder_layer", ["\nTrue\n", "layer  keeps   32 KiB"]),
        ("model_folder", ["config.json model.safetensors", "b'class ", "there is no 'model.layers.2."]),
        ("resume", ["states after [4, 8]", "same weights: True"]),
        ("lora", ["has changed: False", "the same loss: True"]),
    ],
)
def test_page(page, words):
    printed = printed_by(page)
    assert [w for w in words if w not in printed] == []


def test_a_run_resumes_with_the_same_losses():
    losses = re.findall(r"^batch (8|9), loss ([\d.]+)", printed_by("resume"), re.M)
    assert len(losses) == 4
    assert losses[:2] == losses[2:]


def test_adapters_lower_the_loss_and_merge():
    printed = printed_by("lora")
    before, after = map(float, re.search(r"pages: ([\d.]+), adapted ([\d.]+)", printed).groups())
    assert after < before - 0.1
    adapted, merged = map(float, re.search(r"adapters ([\d.]+), merged ([\d.]+)", printed).groups())
    assert merged == pytest.approx(adapted, abs=2e-4)


def test_a_gradient_is_the_change_of_the_loss():
    change, expected = map(float, re.findall(r"-?\d+\.\d{3}", printed_by("decoder_layer")))
    assert change == pytest.approx(expected, rel=0.01)


def test_ternary_training_loses_less_than_rounding():
    printed = printed_by("bitnet")
    single, rounded = map(
        float, re.search(r"float32 ([\d.]+), rounded to ternary ([\d.]+)", printed).groups()
    )
    (trained,) = map(float, re.findall(r"trained as ternary ([\d.]+)", printed))
    assert abs(trained - single) < 0.05 < rounded - single
    assert re.findall(r"2\.00 bits per weight, loss ([\d.]+)", printed) == [f"{trained:.2f}"]


@needs_nvrtc
def test_each_step_of_a_kernel_gains_what_the_page_says():
    printed = printed_by("write_kernel")
    assert "272.03" in printed
    assert "shared-memory race" in printed
    steps = ("naive", "online", "tiles", "padded", "vectors")
    counts = {
        s: [int(n.replace(",", "")) for n in re.findall(rf"^  {s} +([\d,]+)", printed, re.M)] for s in steps
    }
    sectors, requests, replays, instructions = zip(*counts.values(), strict=True)
    assert sectors[0] > 30 * sectors[1] > 300 * sectors[2]
    assert sectors[2:] == sectors[2:3] * 3
    assert requests[0] > 2 * requests[1] > 80 * requests[2]
    assert [r > 0 for r in replays] == [False, False, True, False, False]
    assert instructions[4] < 0.8 * instructions[3]
