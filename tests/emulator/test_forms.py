"""Registry of instruction forms: forms that PTX lacks, and forms that are registered twice."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gpu_ops.emulator.instructions import Unknown, family, forms, lookup
from gpu_ops.emulator.instructions.atomic import combine, in_order
from gpu_ops.emulator.instructions.matrix import mma
from gpu_ops.emulator.instructions.warp_ops import match, redux, shfl, vote
from tests.emulator.forms import expand, form_op

# Patterns with shell brace expansion.
UNKNOWN = """
ex2.f32 ex2.approx.bf16 ex2.approx.ftz.f16 tanh.approx.ftz.f32 sin.approx.f64 rcp.approx.f64 div.approx.f64
div.approx.full.f32 sqrt.full.f32 lg2.approx.f16 rsqrt.rn.f32
cvt.f32.s32 cvt.s32.f32 cvt.rn.s32.f32 cvt.rzi.f32.s32 cvt.f16.f32 cvt.rn.f32.f16 cvt.rni.f32.f64
cvt.rn.rz.f16.f32 cvt.rn.relu.f32.f64 cvt.ftz.f64.f16 cvt.rn.e4m3x2.f32 cvt.rna.f16.f32 cvt.rm.f16x2.f32
cvt.rna.relu.tf32.f32 cvt.pack.sat.u8.s32 cvt.pack.u16.s32 cvt.rn.u32.u16 cvt.u32 cvt.f16x2.e4m3x2
fma.f32 mad.rn.f16 add.rz.f16 add.relu.f32 fma.rn.sat.relu.f16 fma.rn.sat.bf16 add.rn.rz.f32 add.ftz.f64
div.f32 div.rn.f16 sqrt.sat.rn.f32 add.rn.rn.f32 add.approx.f32 min.abs.f32 max.NaN.f64 min.rn.f32
neg.ftz.bf16 abs.f32x2 min3.f64 min3.xorsign.abs.f32 add.full.f32
add add.{b32,cc.u16,sat.u32,sat.cc.s32} sub.{u16x2,s16x2,sat.s64} addc addc.{u16,sat.s32} mul.u32
mul.wide.{u64,s64} mul.hi.sat.s32 mad.{lo.sat.s32,hi.sat.u32,cc.u32,wide.cc.u32} {mul24,mad24}.lo.u64
mad24.lo.sat.s32 madc.wide.u32 sad.u16x2 {div,rem}.u16x2 {abs,neg}.{u32,s16x2}
{min,max}.relu.{u32,s64,u16x2} min.b32 dp4a.u32 dp2a.u32.u32 {popc,clz,brev}.{u32,b16} bfind bfind.{b32,u16}
fns.u32 bfe.{b32,u16} bfi.u32 szext.u32 szext.wrap.b32 bmsk.b32 bmsk.clamp.u32
and and.u32 cnot.pred lop3 lop3.xor.b32 lop3.b64 shl.{u32,s32,f32} shr.f16 shf.l.b32 shf.l.wrap.b64 prmt
prmt.b32.f5e prmt.u32 setp setp.lt setp.lt.b32 setp.lo.s32 setp.{ltu,num}.u32 setp.eq.ftz.{f64,bf16,s32}
setp.eq.ftz.and.f32 setp.eq.nand.f32 setp.hi.f32 setp.eq.{pred,tf32,u16x2} set.eq.u32 set.eq.u64.u32
set.eq.f16.bf16 set.eq.ftz.bf16.f32 set.eq.bf16x2.f16x2 set.eq.u16.f32 set.eq.f64.f64 selp selp.{pred,f16}
slct.b32.{u32,f64} slct.ftz.b32.s32 testp.f32 testp.zero.f32 testp.normal.f16 copysign.f16
"""

UNKNOWN_ATOMICS = ("max.f32", "add.f16", "noftz.add.f32", "inc.u64", "mul.u32")

UNKNOWN_MMAS = (
    "m8n8k4.row.col.f32.f16.f16.f32",  # the layout of sm_70
    "m16n8k16.col.row.f32.bf16.bf16.f32",
    "m16n8k16.row.col.f32.f16.bf16.f32",
    "m16n8k16.row.col.f16.f16.f16.f32",
    "m16n8k16.row.col.f16.bf16.bf16.f16",
    "m16n8k32.row.col.f32.bf16.bf16.f32",
    "m16n8k16.row.col.satfinite.f32.bf16.bf16.f32",
    "m16n8k256.row.col.s32.b1.b1.s32",
    "m16n8k16.row.col.s32.s8.s8.s32.and.popc",
    "m16n8k16.row.col.f32.bf16.bf16",
)

#: On arrays [1, 32]: x of uint32, and the active lanes.
UNKNOWN_WARP_OPS = {
    "shfl.sync.rotate": lambda x, on: shfl("rotate", x, x, x, x, on),
    "vote.sync.none": lambda x, on: vote("none", on, x, on),
    "match.some.sync": lambda x, on: match("some", x, x, on),
    "redux.sync.mul.u32": lambda x, on: redux("mul", "u32", x, x, on),
    "redux.sync.add.b32": lambda x, on: redux("add", "b32", x, x, on),
    "redux.sync.and.u32": lambda x, on: redux("and", "u32", x, x, on),
}


@pytest.mark.parametrize("form", expand(*UNKNOWN.split()))
def test_a_form_that_ptx_does_not_have(form):
    with pytest.raises(Unknown, match=re.escape(form)):
        form_op(form)


@pytest.mark.parametrize("form", UNKNOWN_ATOMICS)
@pytest.mark.parametrize("make", [combine, in_order])
def test_an_unknown_atomic(form, make):
    *modifiers, op, ptx_type = form.split(".")
    with pytest.raises(Unknown, match=re.escape(f"atom.{form}")):
        make(op, ptx_type, tuple(modifiers))


@pytest.mark.parametrize("form", UNKNOWN_MMAS)
def test_an_unknown_mma(form):
    with pytest.raises(Unknown, match=re.escape(f"mma.sync.aligned.{form}")):
        mma(("sync", "aligned", *form.split(".")))


@pytest.mark.parametrize("form", UNKNOWN_WARP_OPS)
def test_an_unknown_warp_op(form):
    with pytest.raises(Unknown, match=re.escape(form)):
        UNKNOWN_WARP_OPS[form](np.full((1, 32), 0xFFFFFFFF, np.uint32), np.ones((1, 32), np.bool_))


def test_unknown_opcode():
    with pytest.raises(Unknown, match=r"^frobnicate\.u32$"):
        lookup("frobnicate", ("u32",))


def test_two_factories_of_one_form_are_refused():
    with pytest.raises(ValueError, match=r"add\.s32 already"):
        forms("add.{s32,f99}")(lambda opcode, ptx_type: lookup(opcode, (ptx_type,)))
    with pytest.raises(ValueError, match=r"add of type f32 already"):
        family("add", types=("f32",))(lambda opcode, modifiers: lookup(opcode, modifiers))
