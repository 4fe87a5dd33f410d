"""Fused multiply-add in every rounding mode, compiled: with it every sum and product of up to 32 bits.

To nearest it is LLVM's fma, an instruction of the CPU or a function of its C library. For the other modes the
product of two float32 is exact in float64, the error of their sum is a float64 too (Knuth's TwoSum), and
the nearest float32 moves by one where the error says so.

Besides PTX's modes there is *odd*: truncated, with the last bit set if that lost anything. Such a float32 is
neither an f16 or bf16 value nor halfway between two unless it is exact, so rounding it to one of these
gives what rounding the exact value would (Boldo and Melquiond, "Emulation of FMA and correctly rounded
sums", IEEE Transactions on Computers 57(4), 2008).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import intrinsic

from gpu_ops.emulator.ahead import ufunc

__all__ = ["MODE", "fma", "fma32"]

MODE = {name: np.uint8(number) for number, name in enumerate(("odd", "rz", "rm", "rp"))}
_ODD, _DOWN, _UP = 0, 2, 3


@intrinsic  # type: ignore[untyped-decorator]
def _llvm_fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, b, c), codegen


@ufunc("float32(float32, float32, float32)", "float64(float64, float64, float64)")
def fma(a, b, c):  # type: ignore[no-untyped-def]
    """``a * b + c`` to nearest even, of float32 or float64."""
    return _llvm_fma(a, b, c)


@ufunc("float32(float32, float32, float32, uint8)")
def fma32(a, b, c, mode):  # type: ignore[no-untyped-def]
    """``a * b + c`` of float32, rounded as ``MODE`` says."""
    product = np.float64(a) * np.float64(b)
    term = np.float64(c)
    total = product + term
    part = total - product
    rest = (product - (total - part)) + (term - part)  # NaN if the total is not finite
    result = np.float32(total)
    # Of the sign of exact - result: what rounding to float32 lost is 0 or outweighs the rest.
    error = (total - np.float64(result)) + rest
    bits = np.int64(result.view(np.uint32))
    magnitude, sign = bits & 0x7FFFFFFF, bits >> 31
    inexact = np.int64((error < 0) | (error > 0))
    # An inexact result, even 0, has the sign of the exact one. No branches: they would be mispredicted.
    magnitude -= inexact & np.int64((error > 0) == (sign == 1)) & np.int64(magnitude != 0)  # truncated
    outward = np.int64(mode == _DOWN) & sign | np.int64(mode == _UP) & (sign ^ 1)
    magnitude += inexact & outward
    magnitude |= inexact & np.int64(mode == _ODD)
    # Rounded down, an exact zero is -0 unless both terms are +0.
    negative_term = np.int64(np.signbit(product)) | np.int64(np.signbit(term))
    sign |= np.int64(mode == _DOWN) & np.int64(magnitude == 0) & (inexact ^ 1) & negative_term
    return np.uint32(sign << 31 | magnitude).view(np.float32)
