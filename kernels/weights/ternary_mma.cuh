// Ternary weights as the left operand of tensor cores, activations as the right one: D is (weights, tokens).
//
// The order of k is free as long as both operands share it. Of 64 neighbours along K, lane 4 g + t takes the 16 of
// one word: word t of rows g and g + 8, and activations 16 t .. of token g, in `kChunks` vectors of 16 bytes. No
// permutation and no ldmatrix are needed; words are unpacked in registers:
//
//   activations   mma        codes per lane      per vector of activations, two steps s
//   int8          m16n8k32   8 per row           planes 2 s, 2 s + 1 as codes 0 .. 2 (ternary.cuh)
//   f16, bf16     m16n8k16   4                   plane 2 h + s as trits
//   f32           m16n8k8    2                   bytes 2 s, 2 s + 1 of plane h as trits; x as two TF32 parts
#pragma once
#include "mma.cuh"
#include "ternary.cuh"

typedef int IntAccumulator[4];

namespace ptx {

// c += a b, unsigned bytes times signed bytes.
__device__ __forceinline__ void mma_codes(IntAccumulator& c, const Operand& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ptx

__device__ __forceinline__ unsigned plane(unsigned word, int i) { return word >> 2 * i & 0x03030303u; }

// Two codes of a plane as a pair of trits. A byte above the code turns it into 1024 + code (f16) or 128 + code (bf16).
template <typename T> __device__ __forceinline__ unsigned trit_pair(unsigned codes, int pair) {
    const unsigned select = pair ? 0x4342 : 0x4140;
    if constexpr (sizeof(T) == 2 && Packed<T>::kWideRange) {
        return ptx::fma_bf16x2(__byte_perm(codes, 0x43, select), 0x3f803f80u, 0xc301c301u);  // * 1 - 129
    } else {
        return ptx::subtract_f16x2(__byte_perm(codes, 0x64, select), 0x64016401u);
    }
}

// The code in one byte of a plane as a float trit: 2^23 + code, minus 2^23 + 1.
__device__ __forceinline__ unsigned trit_float(unsigned codes, int byte) {
    return __float_as_uint(__uint_as_float(__byte_perm(codes, 0x4b000000u, 0x7440 | byte)) - 8388609.0f);
}

// The upper 11 bits of a float, and the rest. Trits are exact in TF32, so at most 2^-22 of x is lost.
__device__ __forceinline__ unsigned tf32_part(unsigned x) { return x & 0xffffe000u; }

__device__ __forceinline__ unsigned tf32_rest(unsigned x) {
    const float value = __uint_as_float(x);
    if (!(fabsf(value) < __uint_as_float(0x7f800000u))) return x;  // avoid infinity - infinity
    return round_tf32(__float_as_uint(value - __uint_as_float(tf32_part(x))));
}

// c += a b + x y, in TF32. The two are summed separately: tensor cores truncate sums; this way c is rounded instead.
__device__ __forceinline__ void add_products(Accumulator& c, const Operand& a, unsigned b0, unsigned b1,
                                             const Operand& x, unsigned y0, unsigned y1) {
    Accumulator step = {};
    ptx::mma<f32>(step, a, b0, b1);
    ptx::mma<f32>(step, x, y0, y1);
    #pragma unroll
    for (int r = 0; r < 4; ++r) c[r] += step[r];
}

template <typename T> struct Ternary {
    typedef Accumulator Sum;
    typedef float Number;
    static constexpr int kChunks = sizeof(T);  // 16-byte vectors per 16 activations

    // A lane's operand for step s of vector h: rows g and g + 8.
    static __device__ __forceinline__ void unpack(Operand& a, unsigned low, unsigned high, int h, int s) {
        if constexpr (sizeof(T) == 1) {
            a[0] = plane(low, 2 * s), a[1] = plane(high, 2 * s);
            a[2] = plane(low, 2 * s + 1), a[3] = plane(high, 2 * s + 1);
        } else if constexpr (sizeof(T) == 2) {
            const unsigned x = plane(low, 2 * h + s), y = plane(high, 2 * h + s);
            a[0] = trit_pair<T>(x, 0), a[1] = trit_pair<T>(y, 0);
            a[2] = trit_pair<T>(x, 1), a[3] = trit_pair<T>(y, 1);
        } else {
            const unsigned x = plane(low, h), y = plane(high, h);
            a[0] = trit_float(x, 2 * s), a[1] = trit_float(y, 2 * s);
            a[2] = trit_float(x, 2 * s + 1), a[3] = trit_float(y, 2 * s + 1);
        }
    }

    static __device__ __forceinline__ void multiply(Sum& c, const Operand& a, unsigned b0, unsigned b1) {
        if constexpr (sizeof(T) == 4) {
            add_products(c, a, tf32_rest(b0), tf32_rest(b1), a, tf32_part(b0), tf32_part(b1));
        } else {
            ptx::mma<T>(c, a, b0, b1);
        }
    }
};

template <> struct Ternary<q8> : Ternary<signed char> {
    typedef IntAccumulator Sum;
    typedef int Number;

    static __device__ __forceinline__ void multiply(Sum& c, const Operand& a, unsigned b0, unsigned b1) {
        ptx::mma_codes(c, a, b0, b1);
    }
};
