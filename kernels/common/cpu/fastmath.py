"""exp, exp2 and tanh as polynomials: plain arithmetic that LLVM turns into vector code.

NumPy's and libm's exp are scalar calls inside a Numba loop, five times slower. Here the argument is split into
an integer n and a remainder in [-1/2, 1/2] (in units of log 2); a polynomial gives the remainder's part
and n goes straight into the exponent bits.

===========  =======  =================================================
dtype        degree   largest relative error of the polynomial
===========  =======  =================================================
float32      6        3.1e-9 (so rounding dominates: about 1e-7 in all)
float64      11       4.2e-18
===========  =======  =================================================

exp(x) is not exp2(x * log2(e)): rounding the product costs |x| units in the last place of the result.

tanh is 1 - 2 / (e^2x + 1), and below 0.625, where that cancels, x plus a series (float32: Cephes' tanhf, float64: its
tanh). A quotient of two polynomials is faster, but has an error of 5 units in the last place in float32, too much for
scores of attention that are capped at 50.

Results too small for a normal number are 0, -inf gives 0, +inf gives inf, NaN stays NaN.

Adding a large constant rounds to an integer; the ``reassoc`` fast-math flag would fold that away and
give garbage, so a kernel that uses this module must not have it (jit.CONTRACT is fine).
"""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.exp2 import LOG2E
from gpu_ops.kernels.common.cpu.codegen.numba_api import types
from gpu_ops.kernels.common.cpu.dtype import as_float32, as_float64, as_int64, as_uint32, like
from gpu_ops.kernels.common.cpu.jit import device_function, generic

_ROUND32 = np.float32(1.5 * 2.0**23)  # x + this - this == rint(x), with the integer in the low mantissa bits
_ROUND64 = 1.5 * 2.0**52
# log 2 in two parts, the first with so few digits that a product with n is exact
_LN2_HI32, _LN2_LO32 = np.float32(0.693359375), np.float32(-2.1219444005469057e-04)
_LN2_HI64, _LN2_LO64 = 0.6931471803691238, 1.9082149292705877e-10


@device_function
def tanh(x):
    """Hyperbolic tangent of float32 or float64, small results to full relative accuracy."""
    return _tanh(x, _below_one(x))


@device_function
def tanh_and_slope(x):
    """tanh(x) and 1 - tanh(x)^2, which has all its digits where tanh(x) is nearly 1."""
    rest = _below_one(x)
    return _tanh(x, rest), rest * (like(x, 2.0) - rest)


@device_function
def _below_one(x):
    """1 - |tanh(x)|."""
    e = exp(like(x, -2.0) * abs(x))
    return like(x, 2.0) * e / (like(x, 1.0) + e)


@device_function
def _tanh(x, rest):
    z, large = x * x, like(x, 1.0) - rest
    return x + x * z * _tanh_series(z) if z < like(x, 0.390625) else (large if x > 0 else -large)


@generic
def _tanh_series(z):
    """(tanh(x) - x) / x^3 of z = x^2."""
    return (lambda z: _tanh_series64(z)) if z == types.float64 else (lambda z: _tanh_series32(z))


@generic
def exp(x):
    """e**x for float32 or float64."""
    return (lambda x: exp_float64(x)) if x == types.float64 else (lambda x: exp_float32(x))


@generic
def exp2(x):
    """2**x for float32 or float64."""
    return (lambda x: exp2_float64(x)) if x == types.float64 else (lambda x: exp2_float32(x))


@device_function
def _clamp(x, low, high):
    """Clamp x; NaN passes through, unlike min(max(...))."""
    return low if x < low else (high if x > high else x)


@device_function
def _scale32(p, rounded):
    return p * as_float32((as_uint32(rounded) + np.uint32(127)) << np.uint32(23))


@device_function
def _scale64(p, rounded):
    return p * as_float64((as_int64(rounded) + np.int64(1023)) << np.int64(52))


@device_function
def exp2_float32(x):
    x = _clamp(x, np.float32(-127.0), np.float32(128.0))  # their exponent bits read 0 and inf
    rounded = x + _ROUND32
    f = x - (rounded - _ROUND32)
    p = np.float32(0.00015461444698564868)
    p = p * f + np.float32(0.001340042817761575)
    p = p * f + np.float32(0.009618056678524655)
    p = p * f + np.float32(0.05550327226670302)
    p = p * f + np.float32(0.24022650922288757)
    p = p * f + np.float32(0.6931472067028326)
    p = p * f + np.float32(1.0)
    return _scale32(p, rounded)


@device_function
def exp2_float64(x):
    x = _clamp(x, -1023.0, 1024.0)
    rounded = x + _ROUND64
    f = x - (rounded - _ROUND64)
    p = 4.45562673806549e-10
    p = p * f + 7.074192559576437e-09
    p = p * f + 1.0178058437521037e-07
    p = p * f + 1.321543255347277e-06
    p = p * f + 1.5252733838008908e-05
    p = p * f + 0.00015403530463664982
    p = p * f + 0.001333355814641074
    p = p * f + 0.00961812910758734
    p = p * f + 0.055504108664821604
    p = p * f + 0.24022650695910158
    p = p * f + 0.6931471805599453
    p = p * f + 1.0
    return _scale64(p, rounded)


@device_function
def exp_float32(x):
    x = _clamp(x, np.float32(-88.03), np.float32(88.73))
    rounded = x * np.float32(LOG2E) + _ROUND32
    n = rounded - _ROUND32
    r = x - n * _LN2_HI32 - n * _LN2_LO32
    p = np.float32(0.0013814540579915047)
    p = p * r + np.float32(0.00836874544620514)
    p = p * r + np.float32(0.04166838899254799)
    p = p * r + np.float32(0.1666652113199234)
    p = p * r + np.float32(0.4999999403953552)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return _scale32(p, rounded)


@device_function
def exp_float64(x):
    x = _clamp(x, -709.4, 710.0)
    rounded = x * LOG2E + _ROUND64
    n = rounded - _ROUND64
    r = x - n * _LN2_HI64 - n * _LN2_LO64
    p = 2.0958715906344595e-09
    p = p * r + 2.5111953971307783e-08
    p = p * r + 2.755714613723696e-07
    p = p * r + 2.7557235697483464e-06
    p = p * r + 2.4801587452759796e-05
    p = p * r + 0.00019841269894825146
    p = p * r + 0.0013888888888832424
    p = p * r + 0.008333333333317934
    p = p * r + 0.04166666666666675
    p = p * r + 0.16666666666666682
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return _scale64(p, rounded)


@device_function
def _tanh_series32(z):
    p = np.float32(-5.70498872745e-3)
    p = p * z + np.float32(2.06390887954e-2)
    p = p * z + np.float32(-5.37397155531e-2)
    p = p * z + np.float32(1.33314422036e-1)
    return p * z + np.float32(-3.33332819422e-1)


@device_function
def _tanh_series64(z):
    p = (-0.964399179425052238628 * z - 99.2877231001918586564) * z - 1614.68768441708447952
    return p / (((z + 112.811678491632931402) * z + 2235.48839060100448583) * z + 4844.06305325125486048)
