"""Handwritten PTX: forms that compilers rarely generate, and malformed text."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from gpu_ops.emulator import EmulatorError, PtxError, SanitizerError, UnknownInstruction, launch
from gpu_ops.emulator.linker import link
from gpu_ops.emulator.machine import Machine
from gpu_ops.emulator.parser import parse

HEAD = """.version 8.0
.target sm_80
.address_size 64
"""
REGISTERS = """.visible .entry k(.param .u64 x, .param .u64 y)
{
    .reg .pred %p<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<16>;
    .reg .f32 %f<8>;
    .reg .b64 %rd<16>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd1, %rd1, %rd3;
    add.s64 %rd2, %rd2, %rd3;
    ld.global.u32 %r2, [%rd1];
"""
STORE = """
    st.global.u32 [%rd2], %r3;
    ret;
}
"""


def run(body, x, before="", threads=None):
    """Run ``body``, which computes %r3 from %r2 (element of ``x``) and %r1 (number of the thread)."""
    x = np.asarray(x).astype(np.int32)
    y = np.zeros_like(x)
    launch(HEAD + before + REGISTERS + body + STORE, "k", 1, threads or x.size, (x, y))
    return y


def line_of(body, text, before=""):
    source = (HEAD + before + REGISTERS + body + STORE).splitlines()
    return next(i for i, line in enumerate(source, 1) if text in line)


TABLE = """
    brx.idx %r2, targets;
    targets: .branchtargets A, B, C, B;
A:  mov.u32 %r3, 10;
    bra.uni END;
B:  add.s32 %r3, %r1, 100;
    bra END;
C:  mov.u32 %r3, 30;
END:
"""


def test_table_of_branches():
    x = np.array([0, 1, 2, 3] * 12)
    np.testing.assert_array_equal(
        run(TABLE, x), np.choose(x, [10, np.arange(48) + 100, 30, np.arange(48) + 100])
    )


def test_branch_outside_the_table():
    with pytest.raises(SanitizerError, match="branch index 4 of 4") as caught:
        run(TABLE, [0, 1, 4])
    assert caught.value.kind == "out of bounds"
    assert "thread (2,0,0)" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.cc.u32 %r4, %r2, 0xffffffff; addc.u32 %r3, 0, 0;", lambda x, t: x > 0),
        ("mov.b32 {%h1, %h2}, %r2; mov.b32 %r3, {%h2, %h1};", lambda x, t: (x << 16) | (x >> 16)),
        ("setp.gt.s32 %p1|%p2, %r2, 3; selp.s32 %r3, 1, 0, %p2;", lambda x, t: x <= 3),
        ("mov.u32 %r3, 7; setp.gt.s32 %p1, %r2, 3; @%p1 mov.u32 %r3, %r2;", lambda x, t: np.where(x > 3, x, 7)),
        ("mov.u32 %r3, %lanemask_lt; popc.b32 %r3, %r3;", lambda x, t: t % 32),
        ("mov.u32 %r3, %ntid.x; mad.lo.s32 %r3, %r3, 10, %nctaid.x;", lambda x, t: np.full(x.size, x.size * 10 + 1)),
        ("mov.f32 %f1, 0f40400000; cvt.rzi.s32.f32 %r3, %f1;", lambda x, t: np.full(x.size, 3)),
        ("shfl.sync.idx.b32 %r3|%p1, %r2, 0, 31, -1;", lambda x, t: x[t // 32 * 32]),
        ("{ .reg .b32 %r2; mov.u32 %r2, 5; add.s32 %r3, %r2, %r1; }", lambda x, t: 5 + t),
        ("setp.lt.u32 %p1, %r1, 40; barrier.cta.red.popc.u32 %r3, 0, %p1;", lambda x, t: np.full(x.size, 40)),
        ("setp.lt.u32 %p1, %r1, 40; bar.red.or.pred %p2, 3, 64, !%p1; selp.u32 %r3, 1, 0, %p2;", lambda x,
         t: np.ones(x.size)),
        ("ld.global.s8 %r3, [%rd1];", lambda x, t: x.astype(np.int8)),
        ("st.global.u8 [%rd1], -2; ld.volatile.global.u16 %r3, [%rd1];", lambda x, t: (x & 0xFF00 | 0xFE) & 0xFFFF),
        ("ld.global.v2.b16 {%h1, %h2}, [%rd1]; cvt.s32.s16 %r3, %h1;", lambda x, t: x.astype(np.int16)),
        ("st.local.u32 [place+4], %r2; mov.u64 %rd5, place; cvta.local.u64 %rd6, %rd5; ld.u32 %r3, [%rd6+4];",
         lambda x, t: x),
        ("mov.u32 %r3, rows; ld.global.u32 %r3, [rows+8];", lambda x, t: np.full(x.size, 30)),
        (
            "{ .param .b32 a; .param .b32 r; st.param.b32 [a], %r2; call.uni (r), add_ten, (a); "
            "ld.param.b32 %r3, [r]; }",
            lambda x, t: x + 10,
        ),
        ("mov.u32 %r3, 0; L: add.s32 %r3, %r3, 2; setp.lt.u32 %p1, %r3, %r2; @%p1 bra L;", lambda x,
         t: np.maximum(2, (x + 1) // 2 * 2)),
        ("mov.u32 %r3, %r1; and.b32 %r4, %r1, 1; setp.eq.u32 %p1, %r4, 1; @%p1 exit;", lambda x,
         t: np.where(t % 2, 0, t)),
    ],
)  # fmt: skip
def test_forms(body, expected, rng):
    before = """
.global .align 4 .u32 rows[4] = {10, 20, 30};
.func (.param .b32 r) add_ten(.param .b32 a)
{
    .reg .b32 %r<3>;
    ld.param.b32 %r1, [a];
    add.s32 %r2, %r1, 10;
    st.param.b32 [r], %r2;
    ret;
}
"""
    x = rng.integers(0, 1000, 64)
    actual = run(".local .align 8 .b8 place[16];\n" + body, x, before)
    np.testing.assert_array_equal(actual, expected(x, np.arange(64)).astype(np.int32))


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("frobnicate.b32 %r3, %r2;", UnknownInstruction, "the emulator has no frobnicate.b32"),
        ("add.e4m3 %r3, %r2, %r1;", UnknownInstruction, "the emulator has no add.e4m3"),
        ("wgmma.fence.sync.aligned.f99;", UnknownInstruction, "does not have warpgroup products"),
        ("add.s32 %r3, %r2;", PtxError, "add.s32 wants 2 sources, got 1"),
        ("add.s32 %r3, %r2, %r99;", PtxError, "%r99 is neither a register nor a variable"),
        ("add.s32 %q3, %r2, %r1;", PtxError, "%q3 is not a register"),
        ("bra NOWHERE;", PtxError, "no label NOWHERE"),
        ("@%p9 mov.u32 %r3, 1;", PtxError, "no predicate %p9"),
        ("ld.global.v4.u32 {%r3, %r4}, [%rd1];", PtxError, "wants 4 registers"),
        ("bra;", PtxError, "these operands make no bra"),
        ("mov.u32 %r3, 1", PtxError, "expected ';'"),
        ("mov.u32 %r3, ?;", PtxError, r"unexpected '\?"),
    ],
)
def test_wrong_text_is_named_with_its_line(body, error, message):
    with pytest.raises(error, match=message) as caught:
        run(body, np.arange(32))
    line = line_of(body, body)
    # A missing ';' is reported on the next line.
    assert re.match(rf"PTX line ({line}|{line + 1}): ", str(caught.value))


def test_recursion_is_refused():
    before = ".func f()\n{\n    call.uni f;\n    ret;\n}\n"
    with pytest.raises(PtxError, match="recursion is not supported"):
        run("call.uni f; mov.u32 %r3, 0;", [1], before)


def test_a_function_without_a_body_traps_only_if_it_is_called():
    before = ".extern .func nosuch();\n"
    body = "mov.u32 %r3, 1; setp.gt.u32 %p1, %r2, 9; @!%p1 bra SKIP; call.uni nosuch; SKIP:\n"
    assert run(body, [3], before).tolist() == [1]
    with pytest.raises(SanitizerError, match="call of nosuch, which has no body here"):
        run(body, [10], before)


def test_broken_text_is_always_an_error_of_the_emulator():
    """Text with tokens cut, dropped, doubled or swapped raises no other exception."""
    text = HEAD + ".global .u32 rows[4] = {10, 20};\n" + REGISTERS + TABLE + STORE
    parts = re.findall(r"\s+|[\w.%$]+|.", text)
    rng = random.Random(3)
    refused = 0
    for _ in range(400):
        broken, at = list(parts), rng.randrange(len(parts))
        match rng.randrange(4):
            case 0:
                del broken[at:]
            case 1:
                del broken[at]
            case 2:
                broken[at] = rng.choice(parts)
            case _:
                broken.insert(at, rng.choice(parts))
        try:
            Machine(link(parse("".join(broken)), "k"))
        except EmulatorError:
            refused += 1
    assert refused > 200


BOUNDED = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry k() %s
{
  ret;
}
"""


@pytest.mark.parametrize(
    ("directive", "fits", "block", "message"),
    [
        (".maxntid 64, 1, 1", (8, 8), 65, "__launch_bounds__ .* allows 64"),
        (".maxntid 64", 64, (33, 2), "__launch_bounds__ .* allows 64"),
        (".reqntid 32, 2, 1", (32, 2), 64, r".reqntid asks for \(32, 2, 1\)"),
        (".reqntid 32", 32, 16, r".reqntid asks for \(32, 1, 1\)"),
    ],
)
def test_the_block_that_a_kernel_names(directive, fits, block, message):
    launch(BOUNDED % directive, "k", 1, fits, ())
    with pytest.raises(EmulatorError, match=message):
        launch(BOUNDED % directive, "k", 1, block, ())


# Features that the emulator lacks are refused by name, with the line; unusual but valid text is parsed.

pytest.importorskip("cuda.bindings.nvrtc")

CASES = {
    "tex": ("cudaTextureObject_t t, float* y", "y[0] = tex2D<float>(t, 1.f, y[1]);", "texture and surface"),
    "surface": ("cudaSurfaceObject_t t, float* y", "surf2Dwrite(y[0], t, 4, 0);", "texture and surface"),
    "mbarrier": (
        "float* y",
        'asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(0));',
        "mbarrier objects",
    ),
    "bulk": (
        "float* y",
        'asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%0];"'
        ' :: "r"(0), "l"(y));',
        r"bulk and tensor copies \(cp\.async\.bulk, TMA\)",
    ),
    "tensor": (
        "float* y",
        'asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], '
        '[%1, {%0, %0}], [%0];" :: "r"(0), "l"(y));',
        r"bulk and tensor copies \(cp\.async\.bulk, TMA\)",
    ),
    "arrive": (
        "float* y",
        'asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" :: "r"(0));',
        "mbarrier objects",
    ),
    "scalar video": (
        "unsigned* y",
        'asm("vadd.u32.u32.u32 %0, %1.b0, %2.b1;" : "=r"(y[0]) : "r"(y[1]), "r"(y[2]));',
        "scalar and SIMD video instructions",
    ),
    "SIMD video": (
        "unsigned* y",
        'asm("vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;" : "=r"(y[0]) : "r"(y[1]), "r"(y[2]), "r"(0));',
        "scalar and SIMD video instructions",
    ),
    "cluster": ("float* y", 'asm volatile("barrier.cluster.arrive.aligned;");', "thread block clusters"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_missing_feature_is_named_with_its_line(name):
    parameters, body, feature = CASES[name]
    source = f'extern "C" __global__ void k({parameters}) {{\n  if (threadIdx.x == 7)\n    {body}\n}}'
    prefix = [0] if "Object" in parameters else []
    with pytest.raises(UnknownInstruction, match=f"the emulator does not have .*{feature}") as caught:
        launch(source, "k", 1, 32, (*prefix, np.zeros(32, np.float32)), arch="sm_90")
    message = str(caught.value)
    assert message.startswith("PTX line ")
    assert f"kernel.cu line 3: {body[:40]}" in message


def test_a_texture_reference_in_ptx():
    text = """
.version 8.0
.target sm_80
.address_size 64
.global .texref image;
.visible .entry k(.param .u64 y)
{
    .reg .f32 %f<5>;
    tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [image, {1}];
    ret;
}
.visible .entry other(.param .u64 y)
{
    ret;
}
"""
    with pytest.raises(UnknownInstruction, match=r"PTX line 9: .* texture and surface instructions: tex\.1d"):
        launch(text, "k", 1, 32, (np.zeros(4),))
    launch(text, "other", 1, 32, (np.zeros(4),))  # only the kernels that use it are refused


def test_declarations_that_touch_the_brace():
    """Functions of <cuda_fp16.h> are inline PTX with ``{.reg.b16 h;``, without blanks."""
    source = r"""
#include <cuda_fp16.h>
extern "C" __global__ void k(const __half* x, float* y) {
  int t = threadIdx.x;
  __half v = x[t];
  y[t] = t % 4 == 0 ? hsin(v) : t % 4 == 1 ? hexp(v) : t % 4 == 2 ? hlog2(v) : hrcp(v);
}
"""
    x, y = np.linspace(0.5, 4, 64, dtype=np.float16), np.zeros(64, np.float32)
    launch(source, "k", 1, 64, (x, y))
    v = x.astype(np.float32)
    expected = np.choose(np.arange(64) % 4, [np.sin(v), np.exp(v), np.log2(v), 1 / v])
    np.testing.assert_allclose(y, expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("modifiers", ["", ".abs", ".NaN", ".abs.NaN"])
@pytest.mark.parametrize("operation", ["min", "max"])
def test_redux_of_floats(operation, modifiers):
    text = f"""
.version 8.6
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 x)
{{
    .reg .b32 %r<3>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [x];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2;
    ld.global.b32 %r2, [%rd1];
    redux.sync.{operation}{modifiers}.f32 %r2, %r2, 0xffffffff;
    st.global.b32 [%rd1], %r2;
    ret;
}}
"""
    x = np.array([[3, -5, -0.0, 0.0], [3, np.nan, 1, -7], [np.nan] * 4, [-0.0, 0.0, 0.0, -0.0]], np.float32)
    x = np.repeat(x, 8, axis=1)
    operands = np.abs(x) if "abs" in modifiers else x
    result = x.copy()
    launch(text, "k", 1, 128, (result,))
    for row, actual in zip(operands, result, strict=True):
        numbers = row[~np.isnan(row)]
        if numbers.size == 0 or (numbers.size < row.size and "NaN" in modifiers):
            assert (actual.view(np.uint32) == 0x7FFFFFFF).all()
            continue
        expected = sorted(numbers.tolist(), key=lambda v: (v, not np.signbit(v)))[
            0 if operation == "min" else -1
        ]
        assert (actual == expected).all()
        assert (np.signbit(actual) == np.signbit(expected)).all()


def test_redux_of_floats_that_does_not_exist():
    text = ".version 8.6\n.target sm_100a\n.address_size 64\n.visible .entry k()\n{\n.reg .b32 %r<3>;\n"
    text += "redux.sync.add.f32 %r1, %r2, 0xffffffff;\nret;\n}\n"
    with pytest.raises(UnknownInstruction, match=r"PTX line 7: the emulator has no redux\.sync\.add\.f32"):
        launch(text, "k", 1, 32, ())
