// Quantises activations to int8 per token: s = 127 / max(max|x|, 1e-5), q = round half to even (x s). 1 / s rescales
// the results.
//
// The exact result is x s in double, rounded once. Float is accurate to 2^-16, which is enough unless x s is near a
// half. Near halves, and once per token for s, double is used. A token with NaN or infinity has q = 0 and a NaN scale.
// Activations that are int8 already come with 1 / s, and are only read.
#pragma once
#include "math.cuh"
#include "ternary.cuh"
#include "vec.cuh"

constexpr float kRoundingBias = 12582912.0f;  // 1.5 * 2^23: floats of this size are integers; the low byte is q
constexpr float kNearHalf = 0.49996f;         // x s in float is off by up to 127 * 2^-23

struct TokenScale {
    double s, inverse;
    float s_near;

    // largest: the bits of max|x|. As integers they order like the values, NaN last.
    explicit __device__ TokenScale(unsigned largest) {
        const double absmax = fmax(static_cast<double>(__uint_as_float(largest)), 1e-5);
        const bool finite = largest < 0x7f800000u;
        s = finite ? 127.0 / absmax : 0.0;
        inverse = finite ? absmax / 127.0 : __longlong_as_double(0x7ff8000000000000ll);
        s_near = static_cast<float>(s);
    }
    explicit __device__ TokenScale(float given) : s(0.0), inverse(given), s_near(0.0f) {}
    TokenScale() = default;
};

__device__ __forceinline__ int byte_sum(unsigned q, int sum) {
    return __dp4a(static_cast<int>(q), 0x01010101, sum);
}

// Loads 16 bytes of a row of x, zeros from column k on. whole: rows are whole aligned vectors.
template <typename T> struct Activations {
    static constexpr int kSize = 16 / sizeof(T);
    typedef Vec<T, kSize> vec;

    static __device__ __forceinline__ vec get(const T* row, int column, int k, bool whole) {
        vec v = {};
        if (whole) {
            if (column < k) v = load<vec, kSize, Cache::kConstant>(row + column);
        } else {
            #pragma unroll
            for (int e = 0; e < kSize; ++e) {
                if (column + e >= k) break;
                unsigned x;
                detail::read_words<Cache::kConstant, sizeof(T)>(row + column + e, &x);
                v.word[e / vec::kPerWord] |= x << (e % vec::kPerWord * 16);
            }
        }
        return v;
    }

    static __device__ __forceinline__ unsigned largest(const vec& v, unsigned so_far) {
        #pragma unroll
        for (int e = 0; e < kSize; ++e) so_far = max(so_far, __float_as_uint(element(v, e)) & 0x7fffffffu);
        return so_far;
    }

    // Packs q of four neighbours into a word, the first in its low byte.
    static __device__ __forceinline__ void quantize(const vec& v, const TokenScale& scale, unsigned (&q)[kSize / 4]) {
        float biased[kSize], off = 0.0f;  // off: distance from an integer
        #pragma unroll
        for (int e = 0; e < kSize; ++e) {
            biased[e] = fmaf(element(v, e), scale.s_near, kRoundingBias);
            off = fmaxf(off, fabsf(fmaf(element(v, e), scale.s_near, kRoundingBias - biased[e])));
        }
        if (off > kNearHalf || scale.s_near == 0.0f) {  // rare
            #pragma unroll
            for (int e = 0; e < kSize; ++e) {
                const double exact = rint(static_cast<double>(element(v, e)) * scale.s);
                biased[e] = scale.s_near == 0.0f ? 0.0f : kRoundingBias + static_cast<float>(exact);
            }
        }
        #pragma unroll
        for (int i = 0; i < kSize / 4; ++i) {
            const unsigned low = __byte_perm(bits(biased[4 * i]), bits(biased[4 * i + 1]), 0x0040);
            const unsigned high = __byte_perm(bits(biased[4 * i + 2]), bits(biased[4 * i + 3]), 0x0040);
            q[i] = __byte_perm(low, high, 0x5410);
        }
    }

private:
    static __device__ __forceinline__ unsigned bits(float x) { return __float_as_uint(x); }
};

template <> struct Activations<q8> {
    static constexpr int kSize = 16;
    struct vec { unsigned word[4]; };

    static __device__ __forceinline__ vec get(const q8* row, int column, int k, bool whole) {
        vec v = {};
        if (whole) {
            if (column < k) detail::read_words<Cache::kConstant, 16>(row + column, v.word);
        } else {
            #pragma unroll
            for (int e = 0; e < kSize; ++e) {
                if (column + e >= k) break;
                v.word[e / 4] |= static_cast<unsigned char>(row[column + e].bits) << e % 4 * 8;
            }
        }
        return v;
    }

    static __device__ __forceinline__ void quantize(const vec& v, const TokenScale&, unsigned (&q)[4]) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = v.word[i];
    }
};
