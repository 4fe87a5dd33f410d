// c += a b of one tensor-core step, 32 bytes of A wide: 16 columns of 16-bit numbers, or 8 of float.
//
// A float has 24 significant bits, a tensor-core operand 11 of them. It is cut in two, and the three products that
// matter are added up, the small ones first:
//
//     x = big + small        x y = small_x big_y + big_x small_y + big_x big_y        (2^-21 of x y is lost)
#pragma once
#include "ptx.cuh"

template <typename T> __device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    ptx::mma<T>(c, a, b0, b1);
}

__device__ __forceinline__ unsigned small_part(unsigned x) {
    return __float_as_uint(__uint_as_float(x) - __uint_as_float(x & 0xffffe000u));
}

template <> __device__ __forceinline__ void multiply<f32>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned small_a[4] = {small_part(a[0]), small_part(a[1]), small_part(a[2]), small_part(a[3])};
    ptx::mma<f32>(c, small_a, b0, b1);
    ptx::mma<f32>(c, a, small_part(b0), small_part(b1));
    ptx::mma<f32>(c, a, b0, b1);
}
