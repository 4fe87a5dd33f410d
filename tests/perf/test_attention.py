"""perf's attention grids and peers: their cases, counts and results that can be checked without a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import perf
from gpu_ops.reference.attention.backward import attention_backward as reference_backward
from gpu_ops.reference.attention.forward import attention as reference_attention
from gpu_ops.reference.attention.forward import attention_decode as reference_decode
from perf import (
    attention_grids,
    attention_options,
    attention_paged,
    bench_attention,
    case,
    cli,
    harness,
    memory,
    report,
)
from perf import attention_peers as peers
from perf.attention_grids import Shape
from perf.case import DTYPES, RunOptions
from perf.stats import Limits
from tests.perf.case import FAST, LIMITS


def grid(name, **how):
    return bench_attention.cases(RunOptions(device="cuda", grid=name, **how))


def problems(name):
    return list(attention_grids.GRIDS[name](attention_grids.DTYPES, ()))


def test_the_fields_grid():
    listed = problems("field")
    assert all(p.shape.batch * p.shape.seqlen_q == 16384 for p in listed)
    assert all(p.shape.nheads * p.shape.head_dim == 2048 for p in listed)
    assert all(p.shape.nheads == p.shape.nheads_kv and p.shape.seqlen_q == p.shape.seqlen_k for p in listed)
    for dtype in ("bfloat16", "float16"):
        cells = {(p.shape.head_dim, p.shape.seqlen_q, p.causal) for p in listed if p.dtype == dtype}
        lengths = (512, 1024, 2048, 4096, 8192, 16384)
        assert cells == {(d, s, c) for d in (64, 128, 256) for s in lengths for c in (False, True)}
    assert {p.shape.seqlen_q for p in listed if p.dtype == "float32"} == {512, 1024, 2048, 4096}


def test_the_grids_of_grouped_heads():
    shapes = {p.shape for p in problems("gqa") if p.dtype == "bfloat16"}
    assert shapes == {Shape(1, s, s, 64, 8, 128) for s in (2048, 4096, 8192, 16384, 32768)}
    shapes = {p.shape for p in problems("decode") if p.dtype == "float16"}
    heads, lengths = ((32, 8), (64, 8), (32, 1)), (1024, 4096, 16384, 65536)
    assert shapes == {Shape(b, 1, s, *h, 128) for b in (1, 8, 32, 128) for s in lengths for h in heads}
    assert {p.kind for p in problems("decode")} == {"decode"}


@pytest.mark.parametrize("name", attention_grids.GRIDS)
def test_a_grid_becomes_cases(name):
    cases = grid(name)
    assert len({c.key for c in cases}) == len(cases) == len(problems(name))
    assert all(c.numba is not None and c.naive is not None and c.torch is not None for c in cases)
    assert {tuple(c.peers) for c in cases} == {
        ("torch flash", "torch cudnn", "torch efficient", "torch math")
    }
    assert {c.dtype for c in grid(name, dtypes=("float16",))} == {"float16"}
    assert all("S640" in c.shape or "Sk640" in c.shape for c in grid(name, seqlens=(640,)))


def test_operations_and_bytes():
    shape = Shape(2, 3, 5, 4, 2, 8)
    assert shape.flops(causal=False) == 4 * 2 * 4 * (3 * 5) * 8
    assert shape.flops(causal=True) == 4 * 2 * 4 * (3 + 4 + 5) * 8  # the last query sees all 5 keys
    queries, keys = 2 * 3 * 4 * 8, 2 * 5 * 2 * 8
    assert shape.nbytes(2) == 2 * (2 * queries + 2 * keys)
    by_shape = {c.shape: c for c in grid("field", dtypes=("bfloat16",)) if c.name == "forward causal"}
    longest = by_shape["B1 S16384 H16 D128"]
    assert longest.flops == 4 * 16 * (16384 * 16385 // 2) * 128
    assert longest.bytes == 4 * 16384 * 2048 * 2
    assert longest.in_flops


def test_decoding_is_told_in_bytes_of_the_copy_bandwidth():
    """This includes a single key head, where there are many operations per byte."""
    cases = grid("decode", dtypes=("bfloat16",))
    assert not any(c.in_flops for c in cases)
    assert {c.bandwidth for c in cases} == {"copy"}
    largest = max(cases, key=lambda c: c.bytes)
    assert largest.bytes == 2 * (128 * 65536 * 8 * 128 * 2 + 2 * 128 * 64 * 128)


def test_a_mixed_batch_counts_what_each_sequence_sees():
    mixed = attention_paged.mixed(attention_paged.Batch(3, 2, 8, 4, 2, 16), "bfloat16", "cpu")
    assert mixed.flops == 4 * 4 * 16 * ((6 + 7 + 8) + 2 * 8)
    assert mixed.bytes == 2 * 16 * (2 * (3 + 2) * 4 + 2 * 3 * 8 * 2)


def test_quantized_pages_count_a_byte_per_element_and_their_scales():
    shape = Shape(3, 1, 50, 4, 2, 16)
    plain, int8 = (attention_paged.decode(shape, "bfloat16", codes, "cpu") for codes in ("", "int8"))
    assert plain.bytes == 2 * (2 * 3 * 4 * 16 + 2 * 3 * 50 * 2 * 16)
    assert plain.bytes - int8.bytes == 2 * 3 * 50 * 2 * (16 - 4)


@pytest.mark.parametrize("codes", ["", *attention_paged.QUANTIZED])
def test_decoding_from_pages(codes):
    """Results agree with the plain formula, as does the part that is recomputed after a measurement."""
    case = attention_paged.decode(Shape(3, 1, 50, 4, 2, 16), "bfloat16", codes, "cpu")
    x = case.make(np.random.default_rng(0))
    exact, rounded = (case.reference(x, precision) for precision in ("float64", "naive"))
    for call in (case.naive, case.ours):
        close(call(x)(), exact, rounded, "bfloat16")
    part, out = case.sample(x, exact)
    np.testing.assert_array_equal(case.reference(part, "float64"), out)


def test_sixteen_bits_are_judged_by_a_16_bit_matmul():
    assert LIMITS.seconds(8e11, 0, "copy", half=True) == (1.0, "matmul")
    assert LIMITS.seconds(8e11, 0, "copy") == (8.0, "matmul")
    assert Limits(1.0, 1.0, 2.0).seconds(4.0, 0, "copy", half=True) == (2.0, "matmul")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_gpu_baseline_computes_attention(dtype, causal):
    """NumPy arrays answer the same calls as CuPy's."""
    x = attention_options.data(np.random.default_rng(0), Shape(2, 19, 31, 6, 2, 8), DTYPES[dtype])
    exact = reference_attention(x["q"], x["k"], x["v"], causal=causal)
    naive = reference_attention(x["q"], x["k"], x["v"], causal=causal, precision="naive")
    close(peers.device_forward(causal, x)(), exact, naive, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_gpu_baseline_computes_gradients(dtype, causal):
    x = attention_options.data(np.random.default_rng(0), Shape(2, 19, 31, 6, 2, 8), DTYPES[dtype], ("dout",))
    arrays = (x["dout"], x["q"], x["k"], x["v"], None, None)  # the reference computes its own out and lse
    exact = reference_backward(*arrays, causal=causal)
    naive = reference_backward(*arrays, causal=causal, precision="naive")
    for results in zip(peers.device_backward(causal, x)(), exact, naive, strict=True):
        close(*results, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("nheads_kv", [1, 2, 6])
def test_the_gpu_baseline_decodes(dtype, nheads_kv):
    shape = Shape(3, 1, 40, 6, nheads_kv, 16)
    x = attention_options.data(np.random.default_rng(0), shape, DTYPES[dtype], ("seqused_k",))
    exact = reference_decode(x["q"], x["k"], x["v"], seqused_k=x["seqused_k"])
    naive = reference_decode(x["q"], x["k"], x["v"], seqused_k=x["seqused_k"], precision="naive")
    close(peers.device_decode(x)(), exact, naive, dtype)


def close(got, exact, naive, dtype):
    assert got.dtype == DTYPES[dtype]
    assert got.shape == exact.shape
    error, allowed = (np.abs(case.to_float64(y) - case.to_float64(exact)).max() for y in (got, naive))
    assert error <= 2 * allowed + 2 * {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}[dtype]


@pytest.mark.parametrize("name", ["math", "flash"])
def test_torchs_backends(name):
    pytest.importorskip("torch", reason="the torch peers need torch: pip install torch")
    x = attention_options.data(np.random.default_rng(0), Shape(1, 24, 24, 4, 4, 16), DTYPES["float32"])
    forward = next(c for c in bench_attention.cases(RunOptions()) if c.name == "forward causal")
    actual = forward.contender(f"torch {name}")(x)().numpy().transpose(0, 2, 1, 3)
    np.testing.assert_allclose(actual, reference_attention(x["q"], x["k"], x["v"], causal=True), atol=1e-5)


def test_a_large_cache_is_checked_in_part(monkeypatch):
    x = attention_options.data(
        np.random.default_rng(0), Shape(3, 1, 40, 6, 2, 16), DTYPES["float32"], ("seqused_k",)
    )
    out = reference_decode(x["q"], x["k"], x["v"], seqused_k=x["seqused_k"])
    whole, same = bench_attention.sample_group(x, out)
    assert whole is x
    assert same is out
    monkeypatch.setattr(bench_attention, "WHOLE", 0)
    part, rows = bench_attention.sample_group(x, out)
    assert rows.shape == (1, 1, 3, 16)
    again = reference_decode(part["q"], part["k"], part["v"], seqused_k=part["seqused_k"])
    np.testing.assert_allclose(again, rows, rtol=0, atol=1e-12)


@pytest.fixture
def small(monkeypatch):
    """Small decode case, measured as on CUDA except for the place of its inputs and the timer."""
    monkeypatch.setattr(harness, "make_inputs", lambda case, config: case.make(np.random.default_rng(0)))
    monkeypatch.setattr(harness, "timer_for", lambda config: harness.timed)
    monkeypatch.setattr(harness, "release", lambda config: None)
    monkeypatch.setattr(harness, "check", lambda *_: None)
    without_gpu = SimpleNamespace(power=lambda call, seconds: None)
    monkeypatch.setattr(perf, "cuda", without_gpu, raising=False)
    return bench_attention.decode(Shape(1, 1, 64, 2, 1, 16), "float32", "cuda")


def test_a_contender_that_cannot_run_is_left_out_and_told(small):
    def no_kernel(inputs):
        raise RuntimeError("no kernel for float32")

    def too_large():
        raise MemoryError("17 GiB")

    broken = replace(small, numba=no_kernel, naive=lambda inputs: too_large)
    result = harness.run_case(broken, RunOptions(device="cuda", use_torch=False), LIMITS, effort=FAST)
    assert set(result.timings) == {"ours"}
    assert result.left_out == {"numba": "RuntimeError: no kernel for float32", "naive": "MemoryError: 17 GiB"}
    assert not result.failure
    row = result.row()
    assert {name: row[f"left_out_{name}"] for name in result.left_out} == result.left_out


def test_ours_is_never_left_out(small):
    def broken(inputs):
        raise RuntimeError("no kernel")

    config = RunOptions(device="cuda", use_torch=False)
    result = harness.run_case(replace(small, ours=broken), config, LIMITS, effort=FAST)
    assert result.failure == "RuntimeError: no kernel"
    assert not result.passed


def test_nothing_is_left_out_on_the_cpu(small):
    def broken(inputs):
        raise RuntimeError("a mistake")

    config = RunOptions(use_torch=False)
    result = harness.run_case(replace(small, naive=broken), config, LIMITS, effort=FAST)
    assert result.failure == "RuntimeError: a mistake"


def test_peers_are_timed_measured_and_shown(small, monkeypatch):
    class Probe:
        asked: tuple[str, ...] = ()

        def growth(self, case, config, contender):
            self.asked += (contender,)
            return memory.Growth(10, 5)

    monkeypatch.setattr(harness, "have_torch", lambda: True)
    with_peers = replace(
        small, torch=small.naive, peers={"torch math": small.naive, "torch flash": small.naive}
    )
    probe = Probe()
    result = harness.run_case(with_peers, RunOptions(device="cuda"), LIMITS, probe, FAST)
    assert set(result.timings) == {"ours", "numba", "naive", "torch", "torch math", "torch flash"}
    assert probe.asked == ("ours", "naive", "torch math")
    headings = [str(column.header) for column in report.table("attention", [result]).columns]
    assert headings[-6:] == ["x naive", "x torch", "x numba", "x torch math", "x torch flash", "error"]
    on_cpu = harness.prepare_contenders(with_peers, with_peers.make(np.random.default_rng(0)), RunOptions())
    assert {c.name for c in on_cpu} == {"ours", "naive", "torch"}


@pytest.mark.parametrize("device", ["cpu", "cuda", "emulator"])
def test_every_device_has_forward_backward_decode_and_mixed(device):
    names = {c.name.split()[0] for c in bench_attention.cases(RunOptions(device=device, seqlens=(64,)))}
    assert names == {"forward", "backward", "decode", "mixed"}
    options = bench_attention.cases(RunOptions(device=device, grid="options"))
    assert [c.name.split()[0] for c in options[:2]] == ["forward", "backward"]


def test_the_command_line_knows_the_grids(capsys):
    assert cli.main(argv=["--grid", "gqa", "--device", "cuda", "--list", "--dtype", "bfloat16"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 20
    assert listed[-1] == "attention | backward causal | B1 S32768 H64/8 D128 | bfloat16"
    for arguments, message in (
        (["--grid", "large", "--list"], "attention: field, gqa, decode, options, pages"),
        (["--grid", "field", "--op", "rope", "--list"], "none for this op"),
    ):
        with pytest.raises(SystemExit) as exit_:
            cli.main(argv=arguments)
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", attention_grids.GRIDS)
def test_a_tiny_grid_runs_on_the_cpu(name, monkeypatch):
    monkeypatch.setattr(attention_grids, "TOKENS", 64)
    config = RunOptions(grid=name, seqlens=(32,), dtypes=("float32",), use_torch=False)
    for entry in bench_attention.cases(config)[:2]:
        result = harness.run_case(entry, config, LIMITS, effort=FAST)
        assert result.passed, (entry.key, result.failure or result.error)
        assert set(result.timings) == {"ours", "naive"}
