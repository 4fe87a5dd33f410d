// Rotary position embedding of vectors in registers: the angles of a position, and the rotation of pairs by them.
//
// Only the fractional turn of an angle p * inv_freq matters, and positions are integers. So frequencies are stored as
// turns per position in 64-bit fixed point, inv_freq / 2 pi * 2^64 (gpu_ops/ops/rope/tables.py). A wrapping product
// drops whole turns without error; the remaining angle is off by p * 2^-65 turns. No cos/sin table is read, positions
// have no bound, and the result does not depend on which thread computes it.
//
//   turn, 64 bits   | quadrant: 2 bits | rest: 30 bits, signed | dropped: 2^-32 turns are 1.5e-9 radians |
//
// About 25 instructions per frequency, shared by all heads that a thread rotates.
//
//   half-split    pairs (first[i], second[i]) of two vectors, R / 2 elements apart    rotate(first, second, by)
//   interleaved   pairs (v[2 i], v[2 i + 1]) of one vector                            rotate(v, by)
#pragma once
#include "dtype.cuh"
#include "vec.cuh"

typedef unsigned long long Turn;  // in units of 2^-64 turn

// Scaled cos and sin of kSize adjacent frequencies at one position.
template <int N> struct Rotation {
    static constexpr int kSize = N;
    float cos[N], sin[N];
};

// cos and sin of a turn, with an error of at most 8e-8 (1.3 ulp near 1).
__device__ __forceinline__ void cos_sin(Turn turn, float& cos, float& sin) {
    const unsigned high = static_cast<unsigned>(turn >> 32);
    const unsigned quadrant = (high + 0x20000000u) >> 30;  // the nearest quarter turn; the rest is at most an eighth
    const float t = static_cast<float>(static_cast<int>(high << 2) >> 2) * 0x1p-29f;  // in eighths of a turn, -1 to 1
    const float t2 = t * t;
    // sin(pi/4 t) and cos(pi/4 t), interpolated at Chebyshev nodes to 1e-9. pi/4 is split in two; the polynomial
    // starts with its low part.
    float s = fmaf(fmaf(fmaf(-3.5954290e-5f, t2, 2.4900069e-3f), t2, -8.0745436e-2f), t2, -2.4276526e-8f);
    s = fmaf(t, 0.78539819f, t * s);
    float c = fmaf(fmaf(fmaf(3.5419528e-6f, t2, -3.2596139e-4f), t2, 1.5854338e-2f), t2, -3.0842513e-1f);
    c = fmaf(c, t2, 1.0f);
    // By quadrant: (c, s), (-s, c), (-c, -s), (s, -c).
    const bool odd = quadrant & 1;
    const unsigned negative_cos = ((quadrant + 1) << 30) & 0x80000000u, negative_sin = (quadrant << 30) & 0x80000000u;
    cos = __uint_as_float(__float_as_uint(odd ? s : c) ^ negative_cos);
    sin = __uint_as_float(__float_as_uint(odd ? c : s) ^ negative_sin);
}

// The rotation at a position. turns: N frequencies, aligned to 16 bytes if N is even. Both scales are the attention
// factor; a negative sin_scale rotates the other way (conjugate, backward).
template <int N>
__device__ __forceinline__ Rotation<N> rotation(const Turn* turns, long long position, float cos_scale,
                                                float sin_scale) {
    Turn per_position[N];
    if constexpr (N % 2 == 0) {
        #pragma unroll
        for (int i = 0; i < N; i += 2) {
            const ulonglong2 two = __ldg(reinterpret_cast<const ulonglong2*>(turns + i));
            per_position[i] = two.x, per_position[i + 1] = two.y;
        }
    } else {
        #pragma unroll
        for (int i = 0; i < N; ++i) per_position[i] = __ldg(turns + i);
    }
    Rotation<N> by;
    #pragma unroll
    for (int i = 0; i < N; ++i) {
        cos_sin(static_cast<Turn>(position) * per_position[i], by.cos[i], by.sin[i]);
        by.cos[i] *= cos_scale;
        by.sin[i] *= sin_scale;
    }
    return by;
}

// One pair.
__device__ __forceinline__ void rotate(float& x1, float& x2, float cos, float sin) {
    const float y1 = fmaf(x1, cos, -__fmul_rn(x2, sin));
    x2 = fmaf(x2, cos, __fmul_rn(x1, sin));
    x1 = y1;
}

// Half-split.
template <typename T, int N>
__device__ __forceinline__ void rotate(Vec<T, N>& first, Vec<T, N>& second, const Rotation<N>& by) {
    constexpr int kPerWord = Vec<T, N>::kPerWord;
    #pragma unroll
    for (int w = 0; w < Vec<T, N>::kWords; ++w) {
        float x1[kPerWord], x2[kPerWord];
        Packed<T>::widen(first.word[w], x1);
        Packed<T>::widen(second.word[w], x2);
        #pragma unroll
        for (int e = 0; e < kPerWord; ++e) {
            const int i = w * kPerWord + e;
            if (i < N) rotate(x1[e], x2[e], by.cos[i], by.sin[i]);  // a vector of one element fills half of its word
        }
        first.word[w] = Packed<T>::narrow(x1);
        second.word[w] = Packed<T>::narrow(x2);
    }
}

// Interleaved: N / 2 pairs.
template <typename T, int N> __device__ __forceinline__ void rotate(Vec<T, N>& v, const Rotation<N / 2>& by) {
    static_assert(N % 2 == 0, "a pair lies within one vector");
    #pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        float pair[2];
        if constexpr (sizeof(T) == 2) {
            Packed<T>::widen(v.word[i], pair);
            rotate(pair[0], pair[1], by.cos[i], by.sin[i]);
            v.word[i] = Packed<T>::narrow(pair);
        } else {
            pair[0] = __uint_as_float(v.word[2 * i]), pair[1] = __uint_as_float(v.word[2 * i + 1]);
            rotate(pair[0], pair[1], by.cos[i], by.sin[i]);
            v.word[2 * i] = __float_as_uint(pair[0]), v.word[2 * i + 1] = __float_as_uint(pair[1]);
        }
    }
}
