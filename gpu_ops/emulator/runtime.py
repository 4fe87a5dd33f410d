"""Functions of CUDA's device runtime, in PTX, that kernels call without a body: the barrier of a cooperative grid."""

from __future__ import annotations

from functools import cache

from gpu_ops.emulator.parser import parse
from gpu_ops.emulator.syntax import Module

# The barrier of cooperative groups: each block adds 1, the first one 2^31 less the others, so that the top bit of the
# count flips once all have arrived. %envreg1 and %envreg2 hold the address of the count.
_PTX = """
.version 8.0
.target sm_80
.address_size 64
.func (.param .b64 handle) cudaCGGetIntrinsicHandle(.param .b32 scope)
{
    .reg .b32 %low, %high;
    .reg .b64 %at;
    mov.u32 %low, %envreg2;
    mov.u32 %high, %envreg1;
    mov.b64 %at, {%low, %high};
    st.param.b64 [handle], %at;
    ret;
}
.func (.param .b32 status) cudaCGSynchronize(.param .b64 handle, .param .b32 flags)
{
    .reg .pred %p;
    .reg .b32 %a, %b, %c, %add, %old;
    .reg .b64 %at;
    ld.param.u64 %at, [handle];
    setp.eq.u64 %p, %at, 0;
    @%p trap;
    bar.sync 0;
    mov.u32 %a, %tid.x;
    mov.u32 %b, %tid.y;
    mov.u32 %c, %tid.z;
    or.b32 %a, %a, %b;
    or.b32 %a, %a, %c;
    setp.ne.u32 %p, %a, 0;
    @%p bra MET;
    mov.u32 %a, %ctaid.x;
    mov.u32 %b, %ctaid.y;
    mov.u32 %c, %ctaid.z;
    or.b32 %a, %a, %b;
    or.b32 %a, %a, %c;
    setp.ne.u32 %p, %a, 0;
    mov.u32 %a, %nctaid.x;
    mov.u32 %b, %nctaid.y;
    mov.u32 %c, %nctaid.z;
    mul.lo.u32 %a, %a, %b;
    mul.lo.u32 %a, %a, %c;
    sub.u32 %add, 0x80000001, %a;
    selp.u32 %add, 1, %add, %p;
    atom.add.u32 %old, [%at], %add;
WAIT:
    ld.acquire.gpu.u32 %a, [%at];
    xor.b32 %a, %a, %old;
    setp.ge.s32 %p, %a, 0;
    @%p bra WAIT;
MET:
    bar.sync 0;
    st.param.b32 [status], 0;
    ret;
}
"""


@cache
def module() -> Module:
    return parse(_PTX)
