"""The examples under scripts/ run, check themselves, and notice a wrong kernel."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops import models
from tests.support.compilers import needs_nvrtc
from tests.support.processes import python

SMALL = [
    "--hidden",
    "64",
    "--nheads",
    "4",
    "--nheads-kv",
    "2",
    "--ffn",
    "96",
    "--seqlen",
    "70",
    "--repeats",
    "1",
]
LABELS = ("attention, causal", "residual + rmsnorm", "swiglu_mlp", "whole layer")


@pytest.fixture
def decoder_layer(example):
    return example("decoder_layer")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decoder_layer(decoder_layer, dtype, monkeypatch):
    reports = []
    monkeypatch.setattr(
        decoder_layer, "report", lambda rows, title: reports.append([label for label, *_ in rows])
    )
    assert decoder_layer.main([*SMALL, "--dtype", dtype]) == 0
    (labels,) = reports
    assert set(LABELS) <= set(labels)


def test_decoder_layer_runs_as_a_file():
    printed = python("scripts/examples/decoder_layer.py", *SMALL, "--dtype", "float32", COLUMNS="200")
    assert all(label in printed for label in LABELS)
    assert " MB" in printed


@pytest.mark.parametrize("columns", ["20", "200"])
@pytest.mark.parametrize("milliseconds", [0.01, 1e7])
def test_decoder_layer_prints_labels_in_one_piece(decoder_layer, columns, milliseconds, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    labels = ("residual + rmsnorm", "whole layer")
    decoder_layer.report([(label, milliseconds, 1, 1, 0.0, 1.0) for label in labels], "title")
    printed = capsys.readouterr().out
    assert all(label in printed for label in labels)
    assert f"{milliseconds:.2f} ms" in printed


def test_decoder_layer_reads_real_text(decoder_layer):
    tokens = decoder_layer.text_tokens(4096)
    assert tokens.shape == (1, 4096)
    assert tokens.dtype == np.uint8
    assert b"assert" in tokens.tobytes()  # the first help topic


@pytest.mark.parametrize("op", ["rmsnorm", "rope", "attention", "swiglu_mlp"])
def test_decoder_layer_notices_a_wrong_op(decoder_layer, op, monkeypatch, capsys):
    right, definition = decoder_layer.OPS[op]

    def wrong(*arrays, **options):
        result = right(*arrays, **options)
        first = result[0] if isinstance(result, tuple) else result
        first.flat[first.size // 2] += 0.01
        return result

    monkeypatch.setitem(decoder_layer.OPS, op, (wrong, definition))
    assert decoder_layer.main(SMALL) == 1
    assert "outside the tolerance" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--nheads", "7"], ["--nheads-kv", "3"], ["--seqlen", "0"], ["--dtype", "int8"]]
)
def test_decoder_layer_refuses_impossible_shapes(decoder_layer, options, capsys):
    with pytest.raises(SystemExit) as stop:
        decoder_layer.main([*SMALL, *options])
    assert stop.value.code == 2


@needs_nvrtc
def test_simple_attention(example, capsys):
    assert example("simple_attention").main(["--tiny"]) == 0
    printed = capsys.readouterr().out
    assert "textbook formula" in printed
    assert "The CUDA C++ kernels on the emulator" in printed


def test_simple_attention_without_a_compiler(example, monkeypatch, capsys):
    module = example("simple_attention")
    monkeypatch.setattr(module, "compiler_missing", lambda backend: "there is no NVRTC")
    assert module.main(["--tiny"]) == 0
    assert "there is no NVRTC. pip install '.[emulator]'" in capsys.readouterr().out


@pytest.mark.parametrize("result", range(4))
def test_simple_attention_notices_a_wrong_result(example, monkeypatch, capsys, result):
    module = example("simple_attention")
    right = module.attend

    def wrong(*inputs, backend=None, **where):
        results = right(*inputs, backend=backend, **where)
        if backend is None:
            results[result].flat[0] += 1e-3
        return results

    monkeypatch.setattr(module, "attend", wrong)
    monkeypatch.setattr(module, "compiler_missing", lambda backend: "not asked")
    assert module.main(["--tiny"]) == 1
    assert "larger than the formula's allows" in capsys.readouterr().err


def test_mixed_precision(example, monkeypatch, capsys):
    module, kept = example("mixed_precision"), {}
    report = module.report
    monkeypatch.setattr(module, "report", lambda runs, title: (kept.update(runs), report(runs, title)))
    sizes = ["--steps", "12", "--batch", "2", "--seqlen", "32", "--growth-interval", "4"]
    assert module.main(["--tiny", *sizes]) == 0
    single, bf16, fp16 = (kept[dtype] for dtype in module.DTYPES)
    first = fp16.skipped[0]
    assert first == 0
    for step, (before, after) in enumerate(zip(fp16.scales, fp16.scales[1:], strict=False)):
        assert (after == before / 2) == (step in fp16.skipped)
    taken = [loss for step, loss in enumerate(fp16.losses) if step not in fp16.skipped]
    assert taken[-1] < fp16.losses[0] - 0.3
    assert single.skipped == bf16.skipped == []
    np.testing.assert_allclose(bf16.losses, single.losses, rtol=0.01)
    assert fp16.losses[0] == pytest.approx(single.losses[0], rel=1e-3)
    assert fp16.nbytes["params"] * 2 == single.nbytes["params"] == fp16.nbytes["master"]
    printed = capsys.readouterr().out
    assert printed.count("overflow: skipped") == len(fp16.skipped)
    assert "minus that of float32" in printed


def test_memory_optimization(example, capsys):
    assert example("memory_optimization").main(["--tiny", "--batch", "2", "--seqlen", "32"]) == 0
    printed = capsys.readouterr().out
    assert all(printed.count(f" {policy} ") >= 2 for policy in models.POLICIES)
    assert "an arena of" in printed
    assert "Llama-3-8B" in printed


def test_memory_optimization_notices_another_loss(example, monkeypatch, capsys):
    module = example("memory_optimization")
    make_step = module.make_step

    def wrong(config, o):
        step = make_step(config, o)
        return lambda policy: step(policy) + 1e-6 * (policy == "mlp")

    monkeypatch.setattr(module, "make_step", wrong)
    assert module.main(["--tiny", "--batch", "2", "--seqlen", "32"]) == 1
    assert "the losses differ" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_speculative(example, capsys, temperature):
    sizes = ["--hidden", "32", "--count", "8", "--widths", "2", "2"]
    assert example("speculative").main([*sizes, "--temperature", temperature]) == 0
    printed = capsys.readouterr().out
    assert int(printed.split(" passes")[0].split()[-1]) < 8
    assert "trees of 7 tokens" in printed


def test_speculative_notices_another_text(example, monkeypatch, capsys):
    module = example("speculative")
    monkeypatch.setattr(module.inference, "generate", lambda *args, **options: [[0] * 8])
    assert module.main(["--hidden", "32", "--count", "8"]) == 1
    assert "the texts differ" in capsys.readouterr().err
