"""Models of ternary layers: an MLP of BitNet from packed weights, and quantisation of the weights of a model."""

from __future__ import annotations

import io

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import TernaryLinear, TernaryMatrix, quantize_model
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.reference.weights import ternary as reference
from tests.support.compare import random

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("gate", ["squared relu", "swiglu"])
@pytest.mark.parametrize("format", ["hf_bitnet", "tq2_0", "tl2", "w2"])
def test_an_mlp_runs_from_packed_weights(gate, format, rng):
    """Packed bytes of three layers give the results of unpacked trits, in an eighth of the memory of bfloat16."""
    hidden, ffn = 256, 512
    dense = {
        "gate": random(rng, (ffn, hidden), np.float32, 0.05),
        "up": random(rng, (ffn, hidden), np.float32, 0.05),
        "down": random(rng, (hidden, ffn), np.float32, 0.05),
    }
    weights, report = quantize_model(dense)
    packed = {
        name: TernaryMatrix(w.to(format).codes, w.scale, w.shape, format) for name, w in weights.items()
    }
    layers = {name: TernaryLinear(w) for name, w in packed.items()}
    bf16 = sum(2 * w.size for w in dense.values())
    assert 7.7 < bf16 / sum(layer.nbytes for layer in layers.values()) < 9.7
    assert report.bytes_before == 2 * bf16

    def mlp(x, linear):
        g, up = linear("gate", x), linear("up", x)
        if gate == "swiglu":
            h = gpu_ops.swiglu(g, up)
        else:
            h = np.square(np.maximum(g, 0)) * up
        return linear("down", h)

    def unpacked(name, x):
        t, scale = weights[name].trits(), float(weights[name].scale)
        q, token = reference.quantize_activations(x)
        return ((q.astype(np.int64) @ t.T) * scale * token[:, None]).astype(np.float32)

    x = random(rng, (5, hidden), np.float32)
    y = mlp(x, lambda name, x: layers[name](x))
    np.testing.assert_array_equal(y, mlp(x, lambda name, x: TernaryLinear(weights[name])(x)))
    expected = mlp(x, unpacked)
    # one step of an int8 activation
    np.testing.assert_allclose(y, expected, atol=1e-2 * np.abs(expected).max())


# ---- a model's weights -------------------------------------------------------------------------------------


@pytest.fixture
def model(rng):
    return {
        "embed_tokens.weight": random(rng, (50, 64), BF16),
        "layers.0.input_norm.weight": np.ones(64, np.float32),
        "layers.0.mlp.up.weight": random(rng, (128, 64), np.float16),
        "layers.0.mlp.down.weight": random(rng, (64, 128), BF16),
        "layers.0.positions": np.arange(6, dtype=np.int64).reshape(2, 3),
        "lm_head.weight": random(rng, (50, 64), np.float32),
    }


def test_quantize_model(model):
    quantized, report = quantize_model(model)
    assert list(quantized) == list(model)
    rows = {row.name: row for row in report.rows}
    for name, w in model.items():
        row, made = rows[name], quantized[name]
        if ".mlp." not in name:
            assert made is w
            assert row.kept == ("int64" if "positions" in name else "skipped")
            assert row.bytes_after == row.bytes_before == w.nbytes
            continue
        assert isinstance(made, TernaryMatrix)
        exact = w.astype(np.float64)
        error = np.linalg.norm(exact - made.dequantize(np.float64)) / np.linalg.norm(exact)
        assert row.relative_error == pytest.approx(error, rel=1e-6)
        assert 0.45 < row.relative_error < 0.6  # normal weights lose about half of their norm
        assert (row.density, row.bits_per_weight) == (made.density, made.bits_per_weight)
        assert (row.bytes_before, row.bytes_after) == (w.nbytes, made.nbytes)
    assert report.bytes_after < report.bytes_before == sum(w.nbytes for w in model.values())


def test_quantize_model_takes_patterns_and_methods(model):
    quantized, _ = quantize_model(model, skip=("*.down.*", "*head*"), method="twn", group_size=32)
    kinds = {name: isinstance(w, TernaryMatrix) for name, w in quantized.items()}
    assert [name for name, packed in kinds.items() if packed] == [
        "embed_tokens.weight",
        "layers.0.mlp.up.weight",
    ]
    assert quantized["layers.0.mlp.up.weight"].group_size == 32
    with pytest.raises(OptionError, match=r"quantize_model: skip='\*\.dwn\.\*' matches none of the 6 names"):
        quantize_model(model, skip=("*.dwn.*",))
    with pytest.raises(ShapeError, match=r"quantize_model: layers.0.mlp.up.weight: .*group_size=100"):
        quantize_model(model, group_size=100)
    model["layers.0.mlp.up.weight"][3, 3] = np.nan
    with pytest.raises(OptionError, match=r"quantize_model: layers.0.mlp.up.weight: .*NaN"):
        quantize_model(model)
    with pytest.raises(DTypeError, match="weights is list"):
        quantize_model([1])
    with pytest.raises(OptionError, match="quantize_model: weights has a name 1, which is no string"):
        quantize_model({1: np.ones((2, 2), np.float32)})
    for skip in (None, 5, [1], ("*", None)):
        with pytest.raises(OptionError, match="quantize_model: skip must be patterns"):
            quantize_model({}, skip=skip)


def test_the_report_prints(model):
    from rich.console import Console

    _, report = quantize_model(model)
    text = str(report)
    file = io.StringIO()
    Console(file=file, width=120).print(report)
    for printed in (text, file.getvalue()):
        for row in report.rows:
            assert row.name in printed
            assert (row.kept or f"{row.relative_error:.3f}") in printed
        assert f"{report.bytes_before:,} bytes to {report.bytes_after:,}" in printed
    assert not str(quantize_model({})[1]).startswith("\n")


def test_zeros_have_no_error():
    quantized, report = quantize_model({"w": np.zeros((3, 64), np.float32)})
    assert (report.rows[0].density, report.rows[0].relative_error) == (0.0, 0.0)
    assert not quantized["w"].trits().any()
