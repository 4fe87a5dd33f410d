"""scripts/issue_gate.py: the instructions of a memory-bound kernel that count, and detection of a heavy kernel."""

from __future__ import annotations

import re

import pytest

from gpu_ops.kernels.compiler import jit, toolkit
from scripts import inspect_kernels, issue_gate
from tests.support.compilers import needs_nvrtc, needs_ptxas, write

needs_nvdisasm = pytest.mark.skipif(
    toolkit.tool("nvdisasm") is None, reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm"
)


def sass(*lines: str) -> str:
    """Listing in the format of nvdisasm; lines that begin with a dot are labels."""
    return "\n".join(
        f"{line}:" if line.startswith(".") else f"        /*{16 * i:04x}*/ {line} ;"
        for i, line in enumerate(lines)
    )


LOOP = (
    "S2R R0, SR_TID.X",
    ".L_x_0",
    "LDG.E.EF.128 R4, [R2.64]",
    "LDG.E.128.CONSTANT R8, [R12.64]",  # weights, from a cache
    "FFMA R4, R4, R8, RZ",
    "STG.E.128 [R2.64], R4",
    "@P0 BRA `(.L_x_0)",
    "STG.E [R6.64], R4",
    "EXIT",
)


def test_the_loop_with_the_widest_accesses_counts():
    count = issue_gate.count(sass(*LOOP))
    assert count is not None
    assert (count.instructions, count.bytes_moved) == (5, 2 * 32 * 16)
    assert count.opcodes["FFMA"] == 1


def test_without_a_loop_the_whole_kernel_counts():
    count = issue_gate.count(sass(*(line for line in LOOP if "BRA" not in line)))
    assert count is not None
    assert (count.instructions, count.bytes_moved) == (7, 2 * 32 * 16 + 32 * 4)
    assert issue_gate.count(sass("S2R R0, SR_TID.X", "EXIT")) is None


def test_the_way_of_whole_vectors_counts():
    """Single elements behind a branch do not count; of two paths the longer does; predicated instructions count."""
    count = issue_gate.count(
        sass(
            ".L_x_0",
            "@P1 BRA `(.L_x_1)",
            "LDG.E.128 R4, [R2.64]",
            "BRA `(.L_x_2)",
            ".L_x_1",
            *4 * ["LDG.E.U16 R4, [R2.64]", "IADD3 R9, R9, 0x1, RZ"],
            ".L_x_2",
            "@!P2 FADD R4, R4, R5",
            "@P2 BRA `(.L_x_3)",
            *3 * ["MUFU.EX2 R4, R4"],
            ".L_x_3",
            "STG.E.128 [R2.64], R4",
            "@P0 BRA `(.L_x_0)",
            "EXIT",
        )
    )
    assert count is not None
    assert count.bytes_moved == 2 * 32 * 16
    assert count.opcodes == {**{"BRA": 4, "LDG.E.128": 1, "FADD": 1, "MUFU.EX2": 3, "STG.E.128": 1}}


def test_a_sum_over_a_warp_counts_five_times():
    """An inner loop over shuffles counts five times; code after the end that jumps back into the loop is no loop."""
    count = issue_gate.count(
        sass(
            ".L_x_0",
            "LDG.E.128 R4, [R2.64]",
            ".L_x_1",
            "SHFL.BFLY PT, R5, R4, R6, 0x1f",
            "@P1 BRA `(.L_x_1)",
            "@P2 BRA `(.L_x_9)",
            ".L_x_2",
            "STG.E.128 [R2.64], R4",
            "@P0 BRA `(.L_x_0)",
            "EXIT",
            ".L_x_9",
            "BRA `(.L_x_2)",
        )
    )
    assert count is not None
    assert count.opcodes["SHFL.BFLY"] == 5
    assert count.bytes_moved == 2 * 32 * 16


@pytest.mark.parametrize("is_product", [False, True])
def test_the_stores_of_an_epilogue_do_not_count(is_product):
    """A tensor-core product reads in the main loop and stores after it; another kernel stages what it then stores."""
    count = issue_gate.count(
        sass(
            ".L_x_0",
            "S2R R0, SR_TID.X",
            ".L_x_1",
            "LDG.E.EF R4, [R2.64]",
            *is_product * ["HMMA.16816.F32 R4, R4, R8, R4"],
            "@P1 BRA `(.L_x_1)",
            "STG.E.128 [R2.64], R4",
            "@P0 BRA `(.L_x_0)",
            "EXIT",
        )
    )
    assert count is not None
    assert count.bytes_moved == 32 * 4 + (0 if is_product else 32 * 16)


@pytest.mark.parametrize(
    ("opcode", "arch", "pipe", "share"),
    [
        # 1024 bytes take A100 1024 / 13.39 clocks, RTX 4090 1024 / 3.125; a warp takes a pipe 32 / lanes.
        ("FFMA", "sm_80", "fp32", 200 / 2 / (1024 / 13.390)),
        ("FFMA", "sm_89", "issue", 202 / 4 / (1024 / 3.125)),
        ("LOP3.LUT", "sm_89", "int", 200 / 2 / (1024 / 3.125)),
        ("MUFU.EX2", "sm_89", "special", 200 * 2 / (1024 / 3.125)),
        ("DADD", "sm_89", "double", 200 * 16 / (1024 / 3.125)),
        ("LDS.128", "sm_89", "l1", (200 + 2) * 4 / (1024 / 3.125)),
    ],
)
def test_the_busiest_pipe_decides(opcode, arch, pipe, share):
    text = sass("LDG.E.128 R4, [R2.64]", *200 * [f"{opcode} R4, R4, R4"], "STG.E.128 [R2.64], R4")
    verdict = issue_gate.judge("rope[]", arch, text)
    assert verdict.pipe == pipe
    assert verdict.share == pytest.approx(share, rel=1e-3)
    assert bool(verdict.problem) == (share > 1)


HEAVY = """
extern "C" __global__ void swiglu_heavy(float4* x) {
    const long long i = blockIdx.x * 256LL + threadIdx.x;
    float4 v = x[i];
    #pragma unroll
    for (int k = 0; k < STEPS; ++k) v = {v.x * v.y + v.z, v.y * v.z + v.w, v.z * v.w + v.x, v.w * v.x + v.y};
    x[i] = v;
}
"""


@needs_nvrtc
@needs_ptxas
@needs_nvdisasm
def test_a_heavy_kernel_is_caught(tmp_path, monkeypatch, capsys):
    """On an A100 1024 bytes take 76 clocks, and a step of its 64 lanes takes 2."""
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path / "cache"))
    write(tmp_path, "heavy.cu", HEAVY)

    def check(steps: int) -> tuple[int, str]:
        kernel = jit.CudaKernel("heavy", "swiglu_heavy", (("STEPS", steps),), tmp_path)
        monkeypatch.setattr(jit, "all_variants", lambda arch: iter([jit.Variant(kernel, 256)]))
        status = inspect_kernels.main(["--check", "--arch", "sm_80", "sm_86"])
        return status, capsys.readouterr().out

    status, out = check(4)
    assert status == 0, out
    assert re.search(r"1 judged against memory: up to 0\.\d\d of", out)  # there is no card for sm_86
    status, out = check(80)
    assert status == 1
    assert re.search(r"on sm_80: fp32 takes 2\.\d\d times as long as memory on A100-80, 1.0 is allowed", out)
    monkeypatch.setattr(issue_gate, "EXCUSES", (issue_gate.Excuse("swiglu_heavy", "sm_80", 3.0, "a test"),))
    assert check(80)[0] == 0


@needs_nvrtc
@needs_ptxas
@needs_nvdisasm
@pytest.mark.parametrize(
    ("norm", "vecs", "most"), [("rmsnorm", 2, 38), ("layernorm", 1, 37.5), ("layernorm", 2, 35)]
)
def test_what_the_backward_of_norms_issues(norm, vecs, most):
    """Instructions per 16-bit element, with dresidual and, in RMSNorm, the rounding of Llama."""
    words = {"NORM": norm, "DTYPE": "bf16", "VEC": 8, "ACCESS": 8, "VECS": vecs, "TEAM": 0}
    kernel = jit.CudaKernel("norm/backward", f"{norm}_backward", tuple(words.items()))
    assert kernel in {variant.kernel for variant in jit.all_variants("sm_90")}
    compiled = jit.assemble(jit.compile_kernel(kernel, "sm_90"), "sm_90")
    count = issue_gate.count(inspect_kernels.sass(compiled.cubin, compiled.entry))
    assert count.bytes_moved == 4 * vecs * 32 * 16  # dy, x, dresidual and dx
    assert count.instructions <= most * 8 * vecs


def test_one_kernel_per_op_and_dtype_is_judged_and_excuses_are_for_kernels_that_exist():
    labels = [variant.kernel.label for variant in jit.all_variants("sm_80")]
    judged = issue_gate.judged(labels)
    families = {re.sub(r"\[.*", "", label) for label in judged}
    assert {"rmsnorm_forward", "layernorm_backward", "rope", "softmax_backward", "ternary_gemv"} <= families
    assert {"gemm", "attention_backward"}.isdisjoint(families)
    assert sum(label.startswith("rmsnorm_backward") for label in judged) == 3  # float16, bfloat16, float32
    assert not [label for label in judged if "ACCESS=1" in label]
    assert judged < issue_gate.judged(labels, every=True)
    for excuse in issue_gate.EXCUSES:
        assert [label for label in judged if re.match(excuse.label, label)], excuse
