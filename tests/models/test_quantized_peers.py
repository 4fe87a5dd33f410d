"""Models that bitsandbytes and compressed-tensors quantise, against transformers' logits."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops import models
from gpu_ops.reference.weights.packed_formats import FORMATS

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
    return weights.layers[0].down.formats


@pytest.mark.parametrize(
    ("table", "nested"),
    [
        ("nf4", False),
        ("nf4", True),
        ("fp4", False),
        ("fp4", True),
    ],
)
def test_bitsandbytes(table, nested, torch, tmp_path):
    pytest.importorskip("bitsandbytes", reason="scripts/test_peers.sh installs it")
    import transformers

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=table,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=nested,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain(torch, tmp_path / "plain"), quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "packed")
    # Its packed product rounds to bfloat16 on a CPU with AVX512_BF16, even for float32.
    model = model.dequantize(dtype=torch.float32)
    format = f"{table}_nested" if nested else table
    assert check(torch, model, tmp_path / "packed") == ((128, format),)


@pytest.mark.parametrize("shape", [(512, 4096), (48, 320), (3, 64)])
@pytest.mark.parametrize("table", ["nf4", "fp4"])
def test_nested_scales(table, shape, torch, rng):
    """Codes of weights, of scales and the factors by its kernel for any device: its CPU build rounds scales to
    65,536 steps first. Its mean of the scales is summed in float32."""
    pytest.importorskip("bitsandbytes", reason="scripts/test_peers.sh installs it")
    from bitsandbytes import functional

    w = (rng.standard_normal(shape) * 0.02).astype(np.float32)
    codes, state = functional.quantize_4bit(
        torch.from_numpy(w), blocksize=64, quant_type=table, compress_statistics=True
    )
    matrix = gpu_ops.quantize(w, f"{table}_nested")
    format = FORMATS[f"{table}_nested"].for_columns(shape[1])
    fields = format.split(matrix.blocks()[0].reshape(-1, format.nbytes))
    offset, steps = fields.scale[0, 1], fields.run_scales.reshape(-1)
    assert abs(state.offset.item() - offset) <= 1e-6 * offset
    absmax = torch.from_numpy(np.abs(w.reshape(-1, 64)).max(axis=1) - offset)
    quantize = torch.ops.bitsandbytes.quantize_blockwise.default
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    right, factors = quantize._op_dk(key, absmax, state.state2.code, 256)
    np.testing.assert_array_equal(steps, right.numpy())
    np.testing.assert_array_equal(
        fields.codes[:, ::2] << 4 | fields.codes[:, 1::2], codes.numpy().reshape(len(fields.codes), -1)
    )
    of_block = np.arange(len(fields.codes)) * (format.block // 64) // 256
    np.testing.assert_array_equal(fields.scale[:, 0], factors.numpy()[of_block])
    state.absmax, state.offset, state.state2.absmax = (
        torch.from_numpy(steps.copy()),
        torch.tensor(offset),
        factors,
    )
    np.testing.assert_array_equal(matrix.dequantize(), functional.dequantize_4bit(codes, state).numpy())


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
