"""The examples under scripts/ run, check themselves, and notice a wrong kernel."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from processes import ROOT, python

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
def decoder_layer(monkeypatch):
    path = ROOT / "scripts" / "examples" / "decoder_layer.py"
    spec = importlib.util.spec_from_file_location("decoder_layer", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "decoder_layer", module)  # dataclasses look themselves up
    spec.loader.exec_module(module)
    # The first changes malloc for the rest of the process, the second collects garbage; the run as a file has both.
    monkeypatch.setattr(module, "keep_nothing", lambda: None)
    monkeypatch.setattr(module, "peak_growth", lambda call: (0, call()))
    return module


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decoder_layer(decoder_layer, dtype, monkeypatch):
    reports = []
    monkeypatch.setattr(
        decoder_layer, "report", lambda rows, title: reports.append([row.label for row in rows])
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
    decoder_layer.report(
        [decoder_layer.Row(label, milliseconds, 1, 1, 0.0, 1.0) for label in labels], "title"
    )
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
