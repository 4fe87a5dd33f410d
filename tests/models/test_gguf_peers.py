"""Logits of models from GGUF files against Hugging Face transformers, which reads them too."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops import models
from tests.models.model_files import SIZES, written

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate", reason="transformers reads GGUF files with it: pip install accelerate")


@pytest.mark.parametrize("stored_as", ["F32", "Q8_0"])
# transformers does not read biases of a llama, head sizes or scalings.
@pytest.mark.parametrize("case", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(case, stored_as, tmp_path):
    written(gguf, tmp_path / "a.gguf", case, stored_as)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", attn_implementation="eager", dtype=torch.float32
    ).eval()
    ids = np.random.default_rng(0).integers(0, SIZES["vocab"], (2, 40))
    with torch.no_grad():
        right = model(torch.tensor(ids)).logits.double().numpy()
    weights, config = models.load(tmp_path / "a.gguf", dtype="float32")
    off = np.abs(models.logits(ids, weights, config) - right).max()
    assert off < 2e-5 * max(1.0, np.abs(right).max())
