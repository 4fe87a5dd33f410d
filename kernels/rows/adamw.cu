// AdamW: one step of parameters and moments, in place.
//
//   params (n,) PARAM    grads (n,) GRAD    m, v (n,) float    master (n,) float    mask (n,) bytes, 0 where none decays
//   or m (n,) int8 and v (n,) uint8, with float scales (tiles,) of m and of sqrt(v)
//
//   g = scale grads,  m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
//   p = p - decay p - size m / (sqrt(v) correction + eps)
//
//   factors   one thread: from step, learning rate and others to scale, decay, size and correction, in double
//   step      moves each array once: 28 bytes per parameter in float
//
// No operation is fused with another, so that bits are those of other devices.
//
// A warp has a tile of 256 elements, a lane two vectors of it. With the counter (32 tile + lane, step) of Philox, a lane
// draws 16 bits for each of its elements:
//
//   element   0 1 2 3 | 4 5 6 7 | ... | 124 .. 127 | 128 .. 131 | ...
//   lane      0       | 1       | ... | 31         | 0          | ...
//   bits      lower half of words 0, 1, 2, 3       | upper half
//
// Macros:
//   PARAM, GRAD   f16, bf16 or f32
//   MASTER        1: the step is master's, and params receive it rounded
//   STATES        32, or 8: a code c represents scale c |c| / most^2, where most is the largest code
//   ACCESS        elements per access: 4, or 1 for unaligned arrays
#include "columns.cuh"
#include "number.cuh"
#include "philox.cuh"

constexpr int kThreads = 256, kTile = 256, kVec = 4, kParts = 2, kPartStep = 32 * kVec;
constexpr bool kRounds = sizeof(PARAM) == 2;  // params are rounded

struct Options { float beta1, rest1, beta2, rest2, eps; int masked, is_stochastic; };
enum Factor { kScale, kDecay, kSize, kCorrection, kSkip, kStep };

extern "C" __global__ void
adamw_factors(const void* step_array, const void* lr_array, const void* scale_array, const void* skip_array,
              long long step_value, double lr_value, double scale_value, int step_kind, int lr_kind, int scale_kind,
              int skip_kind, double beta1, double beta2, double weight_decay, double* factors) {
    const double step = fmax(number({double(step_value), step_kind, 0}, step_array), 1.0);
    const double lr = number({lr_value, lr_kind, 0}, lr_array);
    factors[kScale] = number({scale_value, scale_kind, 0}, scale_array);
    factors[kDecay] = lr * weight_decay;
    factors[kSize] = lr / (1.0 - pow(beta1, step));
    factors[kCorrection] = 1.0 / sqrt(1.0 - pow(beta2, step));
    factors[kSkip] = number({0.0, skip_kind, 0}, skip_array) != 0.0;
    factors[kStep] = step;
}

typedef float Part[kVec];

// Of the last vector the first `count` elements exist; of none beyond, any.
template <typename T> __device__ __forceinline__ void take(const T* p, int count, Part& value) {
    if (ACCESS == kVec && count == kVec) fetch<ACCESS, Cache::kOnce>(p, count, value);
    else fetch<1, Cache::kOnce>(p, count, value);
}

template <typename T> __device__ __forceinline__ void give(T* p, int count, const Part& value) {
    if (ACCESS == kVec && count == kVec) put<ACCESS>(p, count, value);
    else put<1>(p, count, value);
}

// A moment of a lane's vectors; those of kBits = 8 are codes, and `scale` that of the warp's tile, its largest magnitude.
template <int kBits, typename Code, int kMost> struct Moment {
    typedef Code Stored;
    static constexpr float kLargest = kMost;

    static __device__ __forceinline__ void fetch_part(const Code* p, int count, const float* scale, Part& value) {
        __align__(kVec) Code code[kVec] = {};
        if (ACCESS == kVec && count == kVec) {
            *reinterpret_cast<unsigned*>(code) = __ldcs(reinterpret_cast<const unsigned*>(p));
        } else {
            #pragma unroll
            for (int e = 0; e < kVec; ++e) code[e] = e < count ? p[e] : 0;
        }
        const float unit = __fdiv_rn(*scale, kLargest * kLargest);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) value[e] = __fmul_rn(float(code[e]) * fabsf(float(code[e])), unit);
    }

    static __device__ __forceinline__ void keep(Code* p, float* scale, const int (&count)[kParts],
                                                const Part (&value)[kParts]) {
        unsigned top = 0;  // bits of magnitudes have the order of the numbers, NaN above infinity
        #pragma unroll
        for (int i = 0; i < kParts; ++i) {
            #pragma unroll
            for (int e = 0; e < kVec; ++e) top = max(top, __float_as_uint(fabsf(value[i][e])));
        }
        const float largest = __uint_as_float(__reduce_max_sync(kFullWarp, top));
        if (threadIdx.x % 32 == 0) *scale = largest;
        #pragma unroll
        for (int i = 0; i < kParts; ++i) put_part(p + i * kPartStep, count[i], largest, value[i]);
    }

    static __device__ __forceinline__ void put_part(Code* p, int count, float scale, const Part& value) {
        __align__(kVec) Code code[kVec];
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            const float part = scale > 0.0f ? __fdiv_rn(fabsf(value[e]), scale) : 0.0f;
            const float near = rintf(__fmul_rn(__fsqrt_rn(part), kLargest));
            int c = near <= kLargest ? int(near) : kMost;
            if (kMost > 127 && c == 0 && value[e] != 0.0f) c = 1;  // a step divides by it
            code[e] = Code(value[e] < 0.0f ? -c : c);
        }
        if (ACCESS == kVec && count == kVec) {
            *reinterpret_cast<unsigned*>(p) = *reinterpret_cast<const unsigned*>(code);
        } else {
            #pragma unroll
            for (int e = 0; e < kVec; ++e) {
                if (e < count) p[e] = code[e];
            }
        }
    }
};

template <typename Code, int kMost> struct Moment<32, Code, kMost> {
    typedef float Stored;

    static __device__ __forceinline__ void fetch_part(const float* p, int count, const float*, Part& value) {
        take(p, count, value);
    }

    static __device__ __forceinline__ void keep(float* p, float*, const int (&count)[kParts],
                                                const Part (&value)[kParts]) {
        #pragma unroll
        for (int i = 0; i < kParts; ++i) give(p + i * kPartStep, count[i], value[i]);
    }
};

typedef Moment<STATES, signed char, 127> First;
typedef Moment<STATES, unsigned char, 255> Second;

// To a bfloat16, still as a float: up or down, by 16 random bits. What is exact stays, and what is not finite; a finite
// number stays finite.
__device__ __forceinline__ float stochastic(float x, unsigned random) {
    const unsigned word = __float_as_uint(x), up = word + random;
    const bool stays = (up & 0x7f800000u) == 0x7f800000u || (word & 0x7f800000u) == 0x7f800000u;
    if (x != x) return x;
    return __uint_as_float((stays ? word : up) & 0xffff0000u);
}

extern "C" __global__ void __launch_bounds__(kThreads)
adamw_step(PARAM* params, const GRAD* grads, First::Stored* m, Second::Stored* v, float* m_scale, float* v_scale,
           float* master, const unsigned char* mask, const double* factors, unsigned long long seed, Options o,
           long long n) {
    const long long tile = (long long)blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    if (factors[kSkip] != 0.0 || tile * kTile >= n) return;
    const int lane = threadIdx.x % 32;
    const long long at = tile * kTile + lane * kVec;
    params += at, grads += at, m += at, v += at, master += at, mask += at, m_scale += tile, v_scale += tile;
    Part w[kParts], g[kParts], first[kParts], second[kParts];
    int count[kParts];
    #pragma unroll
    for (int i = 0; i < kParts; ++i) {
        const int to = i * kPartStep;
        count[i] = int(max(min(n - at - to, (long long)kVec), 0ll));
        take(grads + to, count[i], g[i]);
        First::fetch_part(m + to, count[i], m_scale, first[i]);
        Second::fetch_part(v + to, count[i], v_scale, second[i]);
        if constexpr (MASTER) take(master + to, count[i], w[i]);
        else take(params + to, count[i], w[i]);
    }
    const float scale = float(factors[kScale]), decay = float(factors[kDecay]), size = float(factors[kSize]);
    const float correction = float(factors[kCorrection]);
    #pragma unroll
    for (int i = 0; i < kParts; ++i) {
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            const bool masked_out = o.masked && e < count[i] && !mask[i * kPartStep + e];
            const float x = __fmul_rn(g[i][e], scale);
            if (STATES == 8) second[i][e] = __fmul_rn(second[i][e], second[i][e]);
            first[i][e] = __fadd_rn(__fmul_rn(o.beta1, first[i][e]), __fmul_rn(o.rest1, x));
            second[i][e] = __fadd_rn(__fmul_rn(o.beta2, second[i][e]), __fmul_rn(__fmul_rn(o.rest2, x), x));
            const float root = __fsqrt_rn(second[i][e]);
            const float below = __fadd_rn(__fmul_rn(root, correction), o.eps);
            if (STATES == 8) second[i][e] = root;
            if (decay != 0.0f && !masked_out) w[i][e] = __fsub_rn(w[i][e], __fmul_rn(decay, w[i][e]));  // not 0 * inf
            w[i][e] = __fsub_rn(w[i][e], __fdiv_rn(__fmul_rn(size, first[i][e]), below));
        }
    }
    First::keep(m, m_scale, count, first);
    Second::keep(v, v_scale, count, second);
    #pragma unroll
    for (int i = 0; MASTER && i < kParts; ++i) give(master + i * kPartStep, count[i], w[i]);
    if (kRounds && o.is_stochastic) {
        const unsigned long long counter = tile * 32 + lane, step = (unsigned long long)factors[kStep];
        unsigned words[4] = {unsigned(counter), unsigned(counter >> 32), unsigned(step), unsigned(step >> 32)};
        philox4x32(words, seed);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            w[0][e] = stochastic(w[0][e], words[e] & 0xffffu);
            w[1][e] = stochastic(w[1][e], words[e] >> 16);
        }
    }
    #pragma unroll
    for (int i = 0; i < kParts; ++i) give(params + i * kPartStep, count[i], w[i]);
}
