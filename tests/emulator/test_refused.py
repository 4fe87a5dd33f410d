"""Features that the emulator lacks are refused by name, with the line; unusual but valid text is parsed."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.emulator import UnknownInstruction, launch

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
