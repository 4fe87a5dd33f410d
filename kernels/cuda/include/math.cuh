// Scalar functions that the hardware has only approximately.
#pragma once

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// 1 / sqrt(x), off by little more than half a unit in the last place: one Newton step whose residual
// 1 - x r^2 is formed exactly enough by fused multiply-adds. x > 0, infinite or NaN.
__device__ __forceinline__ float rsqrt_accurate(float x) {
    const float r = rsqrtf(x);
    const float xr = x * r;
    const float xr_low = fmaf(x, r, -xr);  // x r = xr + xr_low
    const float residual = fmaf(-xr_low, r, fmaf(-xr, r, 1.0f));
    return x < infinity() ? fmaf(0.5f * residual, r, r) : r;
}
