"""Names of PTX features that the emulator lacks, for error messages.

The parser skips the operands of these instructions, and the machine refuses a program that contains one.
"""

from __future__ import annotations

from collections.abc import Sequence

# Opcodes by feature.
_OPCODES = {
    "texture and surface instructions": "tex tld4 txq suld sust sured suq istypep",
    "mbarrier objects": "mbarrier",
    "tensor memory (tcgen05)": "tcgen05",
    "warpgroup products (wgmma)": "wgmma",
    "tensor maps (TMA)": "tensormap",
    "thread block clusters": "mapa getctarank clusterlaunchcontrol",
    "stack allocation (alloca)": "alloca stacksave stackrestore",
    "the scalar and SIMD video instructions": (
        "vadd vsub vabsdiff vmin vmax vshl vshr vmad vset "
        "vadd2 vsub2 vavrg2 vabsdiff2 vmin2 vmax2 vset2 vadd4 vsub4 vavrg4 vabsdiff4 vmin4 vmax4 vset4"
    ),
}
_FEATURE = {opcode: feature for feature, opcodes in _OPCODES.items() for opcode in opcodes.split()}

#: State spaces of opaque handles, which PTX declares like types.
HANDLES = {".texref", ".samplerref", ".surfref"}


def feature(opcode: str, modifiers: Sequence[str]) -> str:
    """Name of the missing feature that an instruction belongs to; empty if there is none."""
    if opcode == "cp" and ("bulk" in modifiers or "reduce" in modifiers):
        return "bulk and tensor copies (cp.async.bulk, TMA)"
    if opcode == "cp" and "mbarrier" in modifiers:
        return _FEATURE["mbarrier"]
    if opcode in ("st", "red") and "async" in modifiers:
        return "asynchronous stores (st.async)"
    if opcode == "mma" and any(word.startswith("sp") for word in modifiers):
        return "sparse tensor-core products (mma.sp)"
    if opcode == "barrier" and "cluster" in modifiers:
        return _FEATURE["mapa"]
    return _FEATURE.get(opcode, "")
