"""Choice of device and backend for a call: the argument, else the environment, else the first that can run it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import gpu_ops
from gpu_ops.core.dispatch import Choice, choose, has_cuda_kernels
from gpu_ops.core.op import Explanation
from gpu_ops.errors import DeviceError, OptionError
from tests.support.calls import OPS, call
from tests.support.compilers import needs_numba_cuda, needs_nvrtc
from tests.support.processes import python

X = np.ones((2, 4), np.float32)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("GPU_OPS_DEVICE", raising=False)
    monkeypatch.delenv("GPU_OPS_BACKEND", raising=False)


def test_the_compiled_backend_comes_first():
    assert choose("op", None, None) == Choice("cpu", "numba", "first choice", {})


def test_an_automatic_choice_moves_on_and_says_why():
    choice = choose("op", None, None, unsupported={"numba": "head_dim is odd"})
    assert (choice.backend, choice.reason) == ("reference", "next choice")
    assert choice.passed_over == {"numba": "head_dim is odd"}


def test_an_explicit_choice_that_cannot_run_raises_with_the_reason():
    with pytest.raises(DeviceError, match=r"numba: head_dim is odd"):
        choose("op", None, "numba", unsupported={"numba": "head_dim is odd"})


def test_when_nothing_can_run_every_reason_is_told():
    with pytest.raises(DeviceError, match=r"numba: one; reference: two"):
        choose("op", "cpu", None, unsupported={"numba": "one", "reference": "two"})


def test_the_environment_decides_where_the_caller_does_not(monkeypatch):
    monkeypatch.setenv("GPU_OPS_BACKEND", "reference")
    assert choose("op", None, None).backend == "reference"
    assert choose("op", None, "numba").backend == "numba"
    monkeypatch.setenv("GPU_OPS_BACKEND", "raw")
    with pytest.raises(OptionError, match="GPU_OPS_BACKEND='raw'"):
        choose("op", None, None)


@pytest.mark.parametrize("where", ["variable", "file"])
def test_without_numbas_compiler_ops_run_on_the_reference_and_say_so_once(where, tmp_path):
    if where == "file":
        pytest.importorskip("yaml")
        (tmp_path / ".numba_config.yaml").write_text("disable_jit: 1")
    code = (
        f"import os; os.chdir({str(tmp_path)!r})"
        + """
import logging
import numpy as np, gpu_ops
from gpu_ops.cli import warmup
said = []
logging.getLogger("gpu_ops").addFilter(lambda record: said.append(record.getMessage()))
x, w = np.ones((2, 8), np.float32), np.ones(8, np.float32)
assert np.allclose(gpu_ops.rmsnorm(x, w), 1) and np.allclose(gpu_ops.softmax(x), 1 / 8)
assert "numba: NUMBA_DISABLE_JIT is set" in str(gpu_ops.explain("softmax", x))
for call in (
    lambda: gpu_ops.softmax(x, backend="numba"),
    lambda: gpu_ops.softmax(x, device="emulator"),
    lambda: gpu_ops.emulator,
    warmup.variants,
):
    try:
        call()
    except gpu_ops.errors.DeviceError as error:
        assert "NUMBA_DISABLE_JIT" in str(error), error
    else:
        raise AssertionError
assert len(said) == 1 and "NUMBA_DISABLE_JIT" in said[0], said
"""
    )
    python("-c", code, **({"NUMBA_DISABLE_JIT": "1"} if where == "variable" else {}))


WITHOUT_CUDA = [name for name in OPS if not has_cuda_kernels(name)]


@pytest.mark.parametrize("device", ["cuda", "emulator"])
@pytest.mark.parametrize("op", WITHOUT_CUDA)
def test_an_op_without_cuda_kernels_refuses_by_name(op, device, monkeypatch):
    example = call(op)
    says = f"^{op}: device='{device}', but this op has no CUDA kernels yet; .*rmsnorm.* have.*device='cpu'"
    with pytest.raises(DeviceError, match=says):
        example(device=device)
    monkeypatch.setenv("GPU_OPS_DEVICE", device)
    with pytest.raises(DeviceError, match=f"GPU_OPS_DEVICE='{device}'"):
        example()


@pytest.mark.parametrize("op", [name for name in OPS if has_cuda_kernels(name)])
def test_an_op_with_cuda_kernels_is_tested_on_them(op):
    room = getattr(gpu_ops, op).__module__.split(".")[2]
    tests = [file.read_text() for file in (Path(__file__).parents[1] / room).glob("test_*.py")]
    devices = re.compile(r"""^DEVICES = \("cpu", "emulator", "cuda"\)$""", re.MULTILINE)
    assert any(f"{op}(" in text and devices.search(text) for text in tests)


def test_without_a_gpu_cuda_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr("gpu_ops.core.device.cuda_missing", lambda: "no driver answers")
    with pytest.raises(
        DeviceError, match="rmsnorm: device='cuda', but there is no usable CUDA device: no driver"
    ):
        gpu_ops.rmsnorm(X, X[0], device="cuda")
    monkeypatch.setenv("GPU_OPS_DEVICE", "cuda")
    with pytest.raises(DeviceError, match="GPU_OPS_DEVICE='cuda', but there is no usable"):
        gpu_ops.rmsnorm(X, X[0])


def test_without_its_compilers_the_emulator_is_refused_with_the_remedy(monkeypatch):
    absent = "not installed; pip install '.[emulator]'"
    monkeypatch.setattr("gpu_ops.core.dispatch.unavailable", lambda device, backend: absent)
    with pytest.raises(DeviceError, match=r"on emulator can run this: raw: not installed; pip install '\.\["):
        gpu_ops.rmsnorm(X, X[0], device="emulator")


def test_float64_goes_past_the_cuda_kernels_to_numba():
    x = X.astype(np.float64)
    plan = gpu_ops.explain("rmsnorm", x, x[0], device="emulator")
    assert (plan.choice.backend, plan.choice.reason) == ("numba", "next choice")
    assert "raw: float64" in str(plan)
    with pytest.raises(DeviceError, match="raw: float64 has Numba kernels only"):
        gpu_ops.rmsnorm(x, x[0], device="emulator", backend="raw")


@needs_nvrtc
@needs_numba_cuda
def test_a_card_too_old_for_the_cuda_kernels_has_numba(monkeypatch):
    monkeypatch.setenv("GPU_OPS_ARCH", "sm_75")
    x = np.ones((2, 8), np.float32)
    plan = gpu_ops.explain("rmsnorm", x, x[0], device="emulator")
    assert plan.choice.backend == "numba"
    assert "need sm_80 or later, this is sm_75" in plan.choice.passed_over["raw"]
    with pytest.raises(DeviceError, match="sm_75"):
        gpu_ops.rmsnorm(x, x[0], device="emulator", backend="raw")
    y = gpu_ops.rmsnorm(x, x[0], device="emulator")
    np.testing.assert_allclose(y, 1, rtol=1e-5)


def test_explain_tells_the_launches_of_a_gpu_kernel():
    plan = str(gpu_ops.explain("rmsnorm", X, X[0], device="emulator", backend="raw"))
    assert "runs on   emulator, backend raw (asked for)" in plan
    assert "sm_80" in plan
    assert re.search(r"rmsnorm_forward float32 .*: grid \d+, block \d+", plan)


@pytest.mark.parametrize("device", ["", "gpu", "cuda:0", 0])
def test_an_unknown_device_is_an_error(device):
    with pytest.raises(OptionError, match="allowed: 'cpu'"):
        gpu_ops.rmsnorm(X, X[0], device=device)


def test_without_numba_the_reference_serves(monkeypatch):
    monkeypatch.setattr(
        "gpu_ops.core.dispatch.unavailable", lambda device, backend: "absent" if backend == "numba" else None
    )
    plan = gpu_ops.explain("rmsnorm", X, X[0])
    assert plan.choice.backend == "reference"
    assert "numba: absent" in str(plan)
    np.testing.assert_allclose(gpu_ops.rmsnorm(X, X[0]), 1.0, atol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_explain_tells_what_would_run_and_runs_nothing(op):
    example = call(op)
    plan = gpu_ops.explain(op, *example.arrays.values(), **example.options)
    assert isinstance(plan, Explanation)
    text = str(plan)
    assert re.match(rf"{op}: \S", text)
    assert f"backend {plan.choice.backend}" in text
    assert re.search(r"^  config    \S", text, re.MULTILINE)


@pytest.mark.parametrize("op", OPS)
def test_explain_takes_the_function_too(op):
    example = call(op)
    plans = [
        str(gpu_ops.explain(f, *example.arrays.values(), **example.options))
        for f in (getattr(gpu_ops, op), op)
    ]
    assert plans[0] == plans[1]


def test_explain_does_not_write_out():
    out = np.full_like(X, 7.0)
    assert str(gpu_ops.explain("rmsnorm", X, X[0], out=out))
    assert (out == 7.0).all()
    assert gpu_ops.rmsnorm(X, X[0], out=out) is out
    assert not (out == 7.0).any()


def test_attentions_gradients_explain_their_own_tiles(monkeypatch):
    """They differ from the tiles of the forward pass, which has a kernel for few queries."""
    from gpu_ops.kernels.attention.cpu import backward as attention_backward

    took = []
    make = attention_backward.make_call
    monkeypatch.setattr(attention_backward, "make_call", lambda *a, **k: took.append(a[3]) or make(*a, **k))
    for seqlen_q in (1, 40):
        q, k = np.ones((1, seqlen_q, 4, 8), np.float32), np.ones((1, 96, 1, 8), np.float32)
        out, lse = gpu_ops.attention(q, k, k, return_lse=True)
        text = str(gpu_ops.explain("attention_backward", out, q, k, k, out, lse))
        gpu_ops.attention_backward(out, q, k, k, out, lse)
        assert str(took[-1]) in text


def test_gradients_of_a_wide_result_explain_what_runs():
    """The plan shows the blocks that run; hidden_out may be larger than hidden."""
    dy, x, w, w_down = (np.ones(shape, np.float32) for shape in ((8, 4096), (8, 8), (64, 8), (4096, 64)))
    assert "blocks of 8 tokens" in str(gpu_ops.explain("swiglu_mlp_backward", dy, x, w, w, w_down))
