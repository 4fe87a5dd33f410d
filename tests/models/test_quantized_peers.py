"""Models that bitsandbytes and compressed-tensors quantise, against transformers' logits."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops import models

pytestmark = pytest.mark.peers

IDS = np.array([[5, 90, 17, 3, 40]])
SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def torch():
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


def plain(torch, where):
    """Save a model of random floats."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.05)
    model.save_pretrained(where)
    return where


def check(torch, model, where):
    """Compare our logits with theirs, of the same numbers in float32."""
    with torch.no_grad():
        right = model(torch.from_numpy(IDS)).logits.float().numpy()
    weights, config = models.load(where)
    y = models.logits(IDS, weights, config)
    assert abs(y - right).max() < 1e-5 * abs(right).max()
    return weights.layers[0].qkv


@pytest.mark.parametrize(
    ("table", "options"),
    [
        ("nf4", {}),
        ("nf4", {"bnb_4bit_use_double_quant": True}),
        ("fp4", {}),
    ],
)
def test_bitsandbytes(table, options, torch, tmp_path):
    pytest.importorskip("bitsandbytes", reason="scripts/test_peers.sh installs it")
    import transformers

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=table, bnb_4bit_compute_dtype=torch.float32, **options
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain(torch, tmp_path / "plain"), quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "packed")
    # Its packed product rounds to bfloat16 on a CPU with AVX512_BF16, even for float32.
    model = model.dequantize(dtype=torch.float32)
    assert check(torch, model, tmp_path / "packed").formats == ((256, table),)


@pytest.mark.parametrize(
    ("layout", "options", "format"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128}, "int4_g128"),
        (
            "pack-quantized",
            {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 64},
            "uint4_g64",
        ),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}, "int8_g128"),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, "e4m3_g128"),
    ],
)
def test_compressed_tensors(layout, options, format, torch, tmp_path):
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="scripts/test_peers.sh installs it"
    )
    import transformers
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    model = transformers.LlamaForCausalLM.from_pretrained(
        plain(torch, tmp_path / "plain"), dtype=torch.float32
    )
    arguments = quantization.QuantizationArgs(**options)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], format=layout, quantization_status="frozen"
    )
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            group = arguments.group_size or module.weight.shape[1]
            parts = module.weight.data.reshape(len(module.weight), -1, group)
            scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), arguments)
            module.weight_scale.data = scale.to(module.weight_scale.dtype)
            if not arguments.symmetric:
                module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
    with torch.no_grad():  # of the rounded weights, before they are packed
        right = model(torch.from_numpy(IDS)).logits.float().numpy()
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=layout)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "packed")
    compressor.update_config(tmp_path / "packed")
    weights, ours = models.load(tmp_path / "packed")
    assert weights.layers[0].qkv.formats == ((256, format),)
    assert abs(models.logits(IDS, weights, ours) - right).max() < 1e-5 * abs(right).max()
