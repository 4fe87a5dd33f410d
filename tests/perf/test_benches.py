"""A tiny run of every bench, and of the command line."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from gpu_ops.inference import captured
from perf import bench_generate, case, cli, harness, runs
from perf.case import RunOptions
from tests.perf.case import FAST, LIMITS
from tests.support.processes import python

TINY = {
    "adamw": 512,
    "attention": 48,
    "attention_merge": 8,
    "cross_entropy": 4,
    "dropout": 8,
    "embedding": 8,
    "generate": 8,
    "global_norm": 8,
    "layernorm": 8,
    "rmsnorm": 8,
    "rope": 16,
    "rope_append_kv": 16,
    "sample": 2,
    "linear": 6,
    "linear_cross_entropy": 6,
    "softmax": 8,
    "swiglu": 4,
    "ternary": 2,
    "training": 16,
}


def test_every_bench_file_is_collected():
    assert set(cli.bench_names()) == set(TINY)


@pytest.mark.parametrize("op", sorted(TINY))
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("seqlens", [(), (8192, 512, 1024)])
def test_case_keys_are_unique_and_match_their_file(op, quick, seqlens):
    cases = cli.bench(op).cases(RunOptions(quick=quick, seqlens=seqlens))
    assert cases
    assert len({c.key for c in cases}) == len(cases)
    assert {c.op for c in cases} == {op}


@pytest.mark.parametrize("op", sorted(TINY))
def test_bench_smoke(op, monkeypatch):
    """Every quick case runs at a tiny size, is within tolerance, and its naive formula is right too."""
    monkeypatch.setattr(harness, "MAX_SETS", 2)  # copies of a table of 130 MB
    config = RunOptions(quick=True, seqlens=(TINY[op],), use_torch=False)
    for entry in cli.bench(op).cases(config):
        if entry.name == "mlp":
            # the weights take 700 MB for any number of tokens, so only the small problem is run
            assert harness.check(entry, {}, config).ok
            continue
        result = harness.run_case(entry, config, LIMITS, effort=FAST)
        assert result.passed, (entry.key, result.failure or result.error)
        assert "ours" in result.timings
        assert entry.naive is None or "naive" in result.timings


@pytest.mark.parametrize("op", sorted(TINY))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("who", ["naive", "torch"])
def test_the_baselines_compute_the_same(op, dtype, who):
    """A baseline that computes something else, or less, would make any ratio worthless."""
    if who == "torch":
        pytest.importorskip("torch", reason="the torch peers need torch: pip install torch")
    tolerance = 1e-3 if dtype == "float32" else 0.05
    seen = set()
    for entry in cli.bench(op).cases(RunOptions(seqlens=(TINY[op],), dtypes=(dtype,))):
        if entry.name in seen:
            continue
        seen.add(entry.name)
        inputs = entry.make_small(np.random.default_rng(0))
        exact = [np.asarray(r) for r in case.results(entry.reference(inputs, "float64"))]
        # int8 activations are an approximation that the dense baselines do not make
        allowed = 0.05 if "int8" in entry.name else tolerance
        prepare = getattr(entry, who)
        if prepare is None:
            continue
        actual = [to_array(r) for r in case.results(prepare(copy.deepcopy(inputs))())]
        assert len(actual) == len(exact)
        for have, expected in zip(actual, exact, strict=True):
            if op == "dropout":  # masks differ; elements that both keep do not
                assert abs(np.mean(have == 0) - inputs["p"]) < 0.02
                have, expected = (x * ((have != 0) & (expected != 0)) for x in (have, expected))
            assert np.abs(align(have, expected.shape) - expected).max() <= allowed * np.abs(expected).max(), (
                entry.key
            )


PACKED_MODELS = [
    entry
    for entry in cli.bench("generate").cases(RunOptions(seqlens=(20,), dtypes=("float32",)))
    if entry.name.partition(", ")[2] in bench_generate.PACKED
]


@pytest.mark.parametrize("entry", PACKED_MODELS, ids=lambda entry: f"{entry.name}, {entry.shape[20:30]}")
def test_llama_cpp_computes_the_same(entry):
    """llama.cpp rounds attention to float16 and quantises activations by other ties."""
    pytest.importorskip("llama_cpp", reason="the peer needs llama.cpp: pip install llama-cpp-python")
    inputs = entry.make_small(np.random.default_rng(3)) | {"activations": "int8"}
    have = entry.cpu_peers["llama.cpp"](inputs)()
    ours = entry.ours(inputs)()
    assert np.abs(have - ours).max() < 0.1 * ours.std()


def test_decoding_is_timed_as_an_engine_runs_it(monkeypatch):
    """After the first passes Python's part of a pass is left out; a prompt runs as usual."""
    passes = []
    forward = captured.next_logits
    monkeypatch.setattr(
        captured, "next_logits", lambda *args, **how: passes.append(1) or forward(*args, **how)
    )
    for entry, runs_as_usual in ((PACKED_MODELS[1], False), (PACKED_MODELS[0], True)):
        call = entry.ours(entry.make_small(np.random.default_rng(0)))
        first = np.array(call())
        passes.clear()
        assert np.array_equal(call(), first)
        assert bool(passes) == runs_as_usual


def to_array(result) -> np.ndarray:
    if hasattr(result, "detach"):
        result = result.detach().float().numpy()
    return case.to_float64(result)


def align(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Align axes: torch's attention has heads before positions."""
    if array.shape == shape or array.ndim != 4:
        return array
    swapped = array.transpose(0, 2, 1, 3)
    return swapped if swapped.shape == shape else array.reshape(shape)


def test_a_bench_runs_as_a_file_from_the_root(tmp_path):
    arguments = (
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--seqlen",
        8,
        "--quick",
        "--no-torch",
        "--no-memory",
    )
    printed = python("perf/bench_rmsnorm.py", *arguments, "--save", tmp_path)
    assert "cases within tolerance" in printed
    (path,) = tmp_path.glob("*.csv")
    assert {row["op"] for row in runs.load(path).rows} == {"rmsnorm"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "nothing"], "invalid choice"),
        (["--seqlen", "0"], "must be a whole number of at least 1"),
        (["--dtype", "int8"], "invalid choice"),
        (["--compare", "/nowhere.csv"], "--compare"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv=arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
