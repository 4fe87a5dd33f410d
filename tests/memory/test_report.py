"""``python -m gpu_ops memory``: terms, cards, exit codes and mistakes."""

from __future__ import annotations

import json

import pytest

from gpu_ops import __main__ as cli
from gpu_ops import memory, models
from gpu_ops.cli import memory_report
from gpu_ops.presets import PRESETS
from tests.support.processes import python

TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def shown(capsys, *arguments, status=0):
    """Lines that the command prints, split in words, by first word."""
    assert cli.main(["memory", *arguments]) == status
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    return {words[0]: words for words in lines}, lines


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


@pytest.mark.parametrize("train", [False, True])
def test_terms_are_those_of_the_estimate(folder, capsys, train):
    options = ("--train", "--policy", "layer") if train else ()
    rows, _ = shown(
        capsys, "--model", str(folder), "--batch", "3", "--seqlen", "40", "--card", "H200", *options
    )
    config, sizes = models.LlamaConfig.from_hf(folder), {"batch": 3, "seqlen": 40, "dtype": "bfloat16"}
    if train:
        estimate = memory.estimate(config, **sizes, policy="layer", device="H200")
    else:
        estimate = memory.estimate_inference(config, **sizes, device="H200")
    assert rows["peak"][1] == f"{estimate.peak:,}"
    assert rows["weights"][1] == f"{2 * config.parameters:,}"
    numbers = {n: int(rows[n][1].replace(",", "")) for n in ("activations", "workspaces")}
    assert numbers == {
        "activations": estimate.parts["activations"] - estimate.workspaces,
        "workspaces": estimate.workspaces,
    }
    assert ("gradients" in rows) == ("optimizer" in rows) == train
    assert ("KV" in rows) == (not train)
    assert rows["H200"][-1] == "left"


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "fp32"])
def test_dtype_of_the_cache(dtype, folder, capsys):
    sizes = ("--batch", "3", "--seqlen", "40", "--card", "H200")
    rows, _ = shown(capsys, "--model", str(folder), *sizes, "--kv-dtype", dtype)
    config, named = models.LlamaConfig.from_hf(folder), {"fp32": "float32"}.get(dtype, dtype)
    assert rows["KV"][2] == f"{memory.kv_cache_bytes(config, batch=3, seqlen=40, dtype=named):,}"


def test_adapters_on_a_packed_base(folder, capsys):
    sizes = ("--batch", "3", "--seqlen", "40", "--card", "RTX 4090", "--train", "--policy", "layer")
    form = ("--format", "q4_0", "--pack-tables", "--rank", "4", "--projections", "qkv,down")
    (folder / "config.json").write_text(json.dumps(TINY | {"intermediate_size": 192}))
    rows, lines = shown(capsys, "--model", str(folder), *sizes, *form)
    config = models.LlamaConfig.from_hf(folder)
    plan = memory.estimate(
        config,
        batch=3,
        seqlen=40,
        dtype="bfloat16",
        policy="layer",
        device="RTX 4090",
        weights=memory.Weights("q4_0", True, 4, ("qkv", "down")),
    )
    for name in ("weights", "adapters", "gradients", "optimizer"):
        assert rows[name][1] == f"{plan.parts[name]:,}"
    assert rows["peak"][1] == f"{plan.peak:,}"
    matrices = sum(rows * cols for name, (rows, *more) in config.shapes().items() for cols in more)
    norms = config.parameters - matrices
    assert plan.parts["weights"] == matrices // 32 * 18 + 2 * norms
    assert "bfloat16, q4_0 with tables, LoRA of rank 4, batch 3 x 40 tokens" in " ".join(lines[1])


def test_every_card_is_judged(capsys):
    rows, lines = shown(capsys, "--model", "llama-3-8b", "--batch", "8", "--dtype", "bfloat16")
    assert "llama-3-8b, inference: bfloat16, batch 8 x 4096 tokens" in map(" ".join, lines)
    assert " ".join(rows["planned"]) == "planned for B200; 1 GiB = 1.07 GB; by default --seqlen 4096"
    assert rows["each"][-3:] == ["its", "own", "kernels:"]
    assert rows["KV"][2] == f"{4 << 30:,}"
    names = {preset.name.split()[0] for preset in PRESETS.values() if not preset.generic}
    assert names <= set(rows)
    assert rows["B200"][-4] == "yes,"
    assert rows["T4"][-4] == "no,"


def test_no_room_is_an_exit_code(capsys):
    rows, _ = shown(capsys, "--model", "LLAMA-3-70B", "--card", "T4", "--dtype", "fp16", status=1)
    assert rows["T4"][-1] == "short"


def test_a_card_that_cannot_run_it_says_why(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # each card on one line
    rows, _ = shown(capsys, "--model", str(folder), "--seqlen", "8", "--dtype", "fp64")
    assert "float64" in rows["A100-40"]
    assert rows["T4"][-1] == "left"  # a T4 has Numba kernels only
    arguments = ("--model", str(folder), "--card", "A100-40", "--dtype", "fp64")
    assert cli.main(["memory", *arguments]) == 2
    assert "float64 has Numba kernels only" in capsys.readouterr().err


def test_without_compilers_the_cpus_plan_stands_in(folder, capsys, monkeypatch):
    monkeypatch.setattr(memory_report, "unavailable", lambda device, backend: "no compiler")
    rows, lines = shown(capsys, "--model", str(folder), "--seqlen", "8", "--card", "H200")
    assert rows["H200"][-1] == "left"
    assert ".[emulator]" in " ".join(lines[-1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "pass --model"),
        (("--model", __file__), "is not a config.json; pass that file, its folder"),
        (("--model", "lama-3-8b"), "did you mean llama-3-8b?"),
        (("--model", "nothing/there"), "no model and no file"),
        (("--model", "llama-3-8b", "--batch", "0"), "--batch must be"),
        (("--model", "llama-3-8b", "--seqlen", "4k"), "--seqlen must be"),
        (("--model", "a" * 300), "no model and no file"),
        (("--model", "a\0b"), "no model and no file"),
        (("--model", "llama-3-8b", "--batch", "9" * 5000), "--batch has 5000 digits"),
        (("--model", "llama-3-8b", "--batch", "0" * 5000), "--batch must be"),
        (("--model", "llama-3-8b", "--batch", str(10**13)), "batch must lie in [1, 16777216]"),
        (("--model", "llama-3-8b", "--seqlen", str(10**13), "--train"), "seqlen must lie in [1, 16777216]"),
        (("--model", "llama-3-8b", "--dtype", "bf17"), "did you mean 'bf16'"),
        (("--model", "llama-3-8b", "--kv-dtype", "int4"), "did you mean 'int8'"),
        (("--model", "llama-3-8b", "--kv-dtype", "int8", "--train"), "kv-dtype is of inference"),
        (("--model", "llama-3-8b", "--format", "nf5"), "allowed: 'q4_0'"),
        (("--model", "llama-3-8b", "--pack-tables"), "format="),
        (("--model", "llama-3-8b", "--rank", "0"), "--rank must be"),
        (("--model", "llama-3-8b", "--projections", "qkv"), "pass --rank"),
        (("--model", "llama-3-8b", "--rank", "4", "--projections", "q"), "projections='q' is unknown"),
        (("--model", "llama-3-8b", "--train", "--format", "nf4"), "are frozen"),
        (("--model", "smollm2-135m", "--format", "q4_k"), "multiple of 256, in layers.0.qkv"),
        (("--model", "llama-3-8b", "--card", "A1000"), "no preset for 'A1000'"),
        (("--model", "llama-3-8b", "--train", "--policy", "all"), "policy='all'"),
    ],
)
def test_a_mistake_is_a_line_on_stderr(arguments, words, capsys):
    assert cli.main(["memory", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"model_type": "mistral", "sliding_window": "all"}, "sliding_window must be an integer"),
    ],
)
def test_a_wrong_config_is_a_line_on_stderr(change, words, folder, capsys):
    (folder / "config.json").write_text(json.dumps(TINY | change))
    assert cli.main(["memory", "--model", str(folder / "config.json")]) == 2
    assert words in capsys.readouterr().err
    (folder / "config.json").write_text("{")
    assert cli.main(["memory", "--model", str(folder)]) == 2
    assert "is no JSON" in capsys.readouterr().err


def test_it_is_plain_text_in_a_pipe(folder):
    printed = python(
        "-m", "gpu_ops", "memory", "--model", folder, "--seqlen", 8, "--card", "H200", COLUMNS="20"
    )
    assert "\x1b" not in printed
    assert any(line.split()[:2] == ["H200", "141"] for line in printed.splitlines())


def test_cheaper_ways_to_train(folder, capsys):
    _, lines = shown(capsys, "--model", str(folder), "--seqlen", "40", "--train", "--card", "h200")
    config, sizes = models.LlamaConfig.from_hf(folder), {"batch": 1, "seqlen": 40, "dtype": "bfloat16"}
    layer = memory.estimate(config, **sizes, policy="layer", device="H200").peak
    assert ["policy", "layer", f"{layer / 2**20:.2f}", f"{layer / 1e6:.2f}"] in lines
    lora = memory.Weights(rank=16)
    peak = memory.estimate(config, **sizes, policy="layer", device="H200", weights=lora).peak
    words = ["LoRA", "of", "rank", "16,", "policy", "layer"]
    assert [*words, f"{peak / 2**20:.2f}", f"{peak / 1e6:.2f}"] in lines


def test_json(folder, capsys):
    arguments = ["memory", "--model", str(folder), "--seqlen", "40", "--train", "--json"]
    assert cli.main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    config = models.LlamaConfig.from_hf(folder)
    plan = memory.estimate(config, batch=1, seqlen=40, dtype="bfloat16", device="B200")
    assert (answer["device"], answer["peak"]) == ("B200", plan.peak)
    assert sum(answer["terms"].values()) == plan.peak
    assert {row["card"] for row in answer["cards"] if row["fits"]} > {"H200", "RTX 4090"}
