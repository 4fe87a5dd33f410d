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

// The same for V with infinities and NaNs: 0 * inf is NaN, but what a row does not see, where its weight is 0, is not to
// reach it. They are left out of the product and looked for by two more: whether a row sees an inf, or a -inf; a NaN is
// both.
template <typename T> struct Special;

template <> struct Special<f32> {
    static constexpr unsigned kInfinity = 0x7f800000u, kOne = 0x3f800000u, kWidth = 32;
};
template <> struct Special<f16> {
    static constexpr unsigned kInfinity = 0x7c00u, kOne = 0x3c00u, kWidth = 16;
};
template <> struct Special<bf16> {
    static constexpr unsigned kInfinity = 0x7f80u, kOne = 0x3f80u, kWidth = 16;
};

// Applied to each number of a word.
template <typename T, typename Rule> __device__ __forceinline__ unsigned each(unsigned word, Rule rule) {
    if constexpr (Special<T>::kWidth == 32) return rule(word);
    else return rule(word & 0xffffu) | rule(word >> 16) << 16;
}

template <typename T>
__device__ __forceinline__ void multiply_seen(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    constexpr unsigned kInfinity = Special<T>::kInfinity, kOne = Special<T>::kOne;
    constexpr unsigned kSign = 1u << (Special<T>::kWidth - 1);
    const auto finite = [](unsigned x) { return (x & kInfinity) == kInfinity ? 0u : x; };
    const auto up = [](unsigned x) { return (x & ~kSign) >= kInfinity && x != (kInfinity | kSign) ? kOne : 0u; };
    const auto down = [](unsigned x) { return (x & ~kSign) >= kInfinity && x != kInfinity ? kOne : 0u; };
    multiply<T>(c, a, each<T>(b0, finite), each<T>(b1, finite));
    unsigned sees[4];
    for (int r = 0; r < 4; ++r) sees[r] = each<T>(a[r], [](unsigned x) { return x ? kOne : 0u; });
    float ups[4] = {}, downs[4] = {};
    ptx::mma<T>(ups, sees, each<T>(b0, up), each<T>(b1, up));
    ptx::mma<T>(downs, sees, each<T>(b0, down), each<T>(b1, down));
    for (int r = 0; r < 4; ++r) {
        if (ups[r] > 0.0f) c[r] += __int_as_float(0x7f800000);
        if (downs[r] > 0.0f) c[r] -= __int_as_float(0x7f800000);
    }
}
