// Scalar functions that the hardware only approximates.
#pragma once

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// 1 / sqrt(x), accurate to little more than half an ulp: one Newton step, with the residual 1 - x r^2 formed by fused
// multiply-adds. x > 0, infinite or NaN.
__device__ __forceinline__ float rsqrt_accurate(float x) {
    const float r = rsqrtf(x);
    const float xr = x * r;
    const float xr_low = fmaf(x, r, -xr);  // x r = xr + xr_low
    const float residual = fmaf(-xr_low, r, fmaf(-xr, r, 1.0f));
    return x < infinity() ? fmaf(0.5f * residual, r, r) : r;
}

// Factor that scales values before their squares are summed again, after a first sum left float's range although
// the values did not. 1 if no second sum is needed. Squares of float16 never leave the range.
//
//   sum is infinite (or NaN)   2^-80   |x| < 2^128 becomes < 2^48, squares < 2^96
//   sum < 2^-80                2^64    |x| < 2^-40 becomes < 2^24; not needed if eps hides the lost bits
template <bool kWideRange> __device__ __forceinline__ float square_scale(float sum, float eps) {
    if (!kWideRange) return 1.0f;
    if (!(sum < infinity())) return 0x1p-80f;
    return sum < 0x1p-80f && eps < 0x1p-80f ? 0x1p64f : 1.0f;
}
