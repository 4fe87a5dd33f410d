// c += a b, one tensor-core step over 32 bytes of A: 16 columns of 16-bit values, or 8 of float.
//
// float32 uses 3 x TF32. A float has 24 significant bits, a tensor-core operand 11. Each operand is split in two, and
// the three products that matter are added, small ones first:
//
//     x = big + small        x y = small_x big_y + big_x small_y + big_x big_y        (drops about 2^-22 of x y)
//
// big is rounded, not truncated: errors of truncation would all have one sign and add up. small has 12 bits at most, of
// which the tensor core drops the last.
#pragma once
#include "ptx.cuh"

// To 11 significant bits, ties away from zero, as cvt.rna.tf32 does in three machine instructions. Not for NaN, which
// may come out as a number; an infinity stays one, and so become the last 2^12 numbers before it.
__device__ __forceinline__ unsigned round_tf32(unsigned x) { return x + 0x1000u & 0xffffe000u; }

// NaN of an infinity or a NaN: `small` is then NaN, whatever `big` is.
struct Split {
    unsigned big, small;

    explicit __device__ __forceinline__ Split(unsigned x)
        : big(round_tf32(x)), small(__float_as_uint(__uint_as_float(x) - __uint_as_float(big))) {}
};

template <typename T>
__device__ __forceinline__ void multiply(Accumulator& c, const Operand& a, unsigned b0, unsigned b1) {
    ptx::mma<T>(c, a, b0, b1);
}

template <>
__device__ __forceinline__ void multiply<f32>(Accumulator& c, const Operand& a, unsigned b0, unsigned b1) {
    const Split x[4] = {Split(a[0]), Split(a[1]), Split(a[2]), Split(a[3])}, y[2] = {Split(b0), Split(b1)};
    const unsigned big[4] = {x[0].big, x[1].big, x[2].big, x[3].big};
    const unsigned small[4] = {x[0].small, x[1].small, x[2].small, x[3].small};
    Accumulator step = {};  // summed separately, so that the larger c is rounded once
    ptx::mma<f32>(step, small, y[0].big, y[1].big);
    ptx::mma<f32>(step, big, y[0].small, y[1].small);
    ptx::mma<f32>(step, big, y[0].big, y[1].big);
    #pragma unroll
    for (int r = 0; r < 4; ++r) c[r] += step[r];
}
