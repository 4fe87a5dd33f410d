"""Adapters trained over packed weights: the losses of the unpacked weights, and exact resumption."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops import models, training
from gpu_ops.errors import OptionError

CONFIG = models.LlamaConfig(vocab=96, hidden=64, ffn=128, nlayers=2, nheads=4, nheads_kv=2)
STEPS = 20


class Run:
    """Adapters of rank 4 on a base, with the states of their optimizer."""

    def __init__(self, base, dtype):
        shapes = models.lora_shapes(CONFIG, 4)
        self.flat = training.FlatParams.from_shapes(shapes, dtype=dtype, device="cpu")
        self.flat.assign(models.initial_lora(shapes))
        self.model = models.with_lora(base, self.flat.params)
        self.grads = models.lora_grads(self.model, self.flat.grads)

    def losses(self, steps):
        """Losses up to this number of steps."""
        text = np.arange(2000) % 96 // 8
        batches, losses = training.Batches(text, 2, 16), []
        for step in range(self.flat.steps, steps):
            ids, targets = batches.at(step)
            self.flat.zero_grad()
            losses.append(
                models.loss_and_grads(
                    ids, targets, self.model, CONFIG, grads=self.grads, policy="layer"
                ).item()
            )
            norm, found_inf = gpu_ops.global_norm(self.flat.buffers["grads"])
            self.flat.step(lr=1e-2, grad_scale=training.clip_coefficient(norm, 1.0), skip=found_inf)
        return losses


@pytest.fixture
def folder(tmp_path):
    weights = models.Llama.of(models.initial_weights(CONFIG, std=0.2), CONFIG)
    models.save(tmp_path / "model", weights, CONFIG)
    return tmp_path / "model"


@pytest.mark.parametrize(("format", "dtype"), [("nf4", "float32"), ("q4_0", "bfloat16")])
def test_losses_are_those_of_the_unpacked_base(format, dtype, folder):
    packed, _ = models.load(folder, dtype=dtype, format=format)
    arrays = {
        name: x.dequantize(dtype) if isinstance(x, gpu_ops.PackedMatrix) else x
        for name, x in packed.arrays().items()
    }
    runs = [Run(base, dtype) for base in (packed, models.Llama.of(arrays, CONFIG))]
    losses, expected = (run.losses(STEPS) for run in runs)
    assert losses == expected
    assert losses[-1] < losses[0] - 0.1
    for name, x in runs[1].flat.state().items():
        np.testing.assert_array_equal(runs[0].flat.state()[name], x, name)


def test_a_resumed_run_has_the_bits_of_one_that_did_not_stop(folder, tmp_path):
    whole = Run(models.load(folder, format="nf4")[0], "float32")
    losses = whole.losses(12)
    first = Run(models.load(folder, format="nf4")[0], "float32")
    before = first.losses(7)
    training.save_state(tmp_path / "state", first.flat.state())
    second = Run(models.load(folder, format="nf4")[0], "float32")
    training.load_state(tmp_path / "state", like=second.flat.state())
    assert before + second.losses(12) == losses
    for name, x in whole.flat.params.items():
        np.testing.assert_array_equal(second.flat.params[name], x, name)


def test_a_packed_base_has_no_gradient(folder):
    base, _ = models.load(folder, format="nf4")
    grads = {name: np.zeros(shape, np.float32) for name, shape in CONFIG.shapes().items()}
    ids = np.zeros((1, 4), np.int32)
    with pytest.raises(OptionError, match="frozen"):
        models.loss_and_grads(ids, ids, base, CONFIG, grads=models.Llama.of(grads, CONFIG))
