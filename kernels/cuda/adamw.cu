// AdamW: one step of parameters and moments, in place.
//
//   params (n,) PARAM    grads (n,) GRAD    m, v (n,) float    master (n,) float    mask (n,) bytes, 0 where none decays
//
//   g = scale grads,  m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
//   p = p - decay p - size m / (sqrt(v) correction + eps)
//
//   factors   one thread: from step, learning rate and the like to scale, decay, size and correction, in double
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
//   ACCESS        elements per access: 4, or 1 for unaligned arrays
#include "columns.cuh"
#include "number.cuh"
#include "philox.cuh"

constexpr int kThreads = 256, kTile = 256, kVec = 4, kParts = 2;
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

// To a bfloat16, still as a float: up or down, by 16 random bits. What is exact stays, and what is not finite; a finite
// number stays finite.
__device__ __forceinline__ float stochastic(float x, unsigned random) {
    const unsigned word = __float_as_uint(x), up = word + random;
    const bool stays = (up & 0x7f800000u) == 0x7f800000u || (word & 0x7f800000u) == 0x7f800000u;
    if (x != x) return x;
    return __uint_as_float((stays ? word : up) & 0xffff0000u);
}

extern "C" __global__ void __launch_bounds__(kThreads)
adamw_step(PARAM* params, const GRAD* grads, float* m, float* v, float* master, const unsigned char* mask,
           const double* factors, unsigned long long seed, Options o, long long n) {
    if (factors[kSkip] != 0.0) return;
    const long long tile = (long long)blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    Part w[kParts], g[kParts], first[kParts], second[kParts];
    long long at[kParts];
    int count[kParts];
    #pragma unroll
    for (int i = 0; i < kParts; ++i) {
        at[i] = tile * kTile + (i * 32 + lane) * kVec;
        count[i] = int(max(min(n - at[i], (long long)kVec), 0ll));
        take(grads + at[i], count[i], g[i]);
        take(m + at[i], count[i], first[i]);
        take(v + at[i], count[i], second[i]);
        if constexpr (MASTER) take(master + at[i], count[i], w[i]);
        else take(params + at[i], count[i], w[i]);
    }
    const float scale = float(factors[kScale]), decay = float(factors[kDecay]), size = float(factors[kSize]);
    const float correction = float(factors[kCorrection]);
    #pragma unroll
    for (int i = 0; i < kParts; ++i) {
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            const bool decays = decay != 0.0f && (!o.masked || (e < count[i] && mask[at[i] + e]));  // 0 * inf would be NaN
            const float x = __fmul_rn(g[i][e], scale);
            first[i][e] = __fadd_rn(__fmul_rn(o.beta1, first[i][e]), __fmul_rn(o.rest1, x));
            second[i][e] = __fadd_rn(__fmul_rn(o.beta2, second[i][e]), __fmul_rn(__fmul_rn(o.rest2, x), x));
            const float below = __fadd_rn(__fmul_rn(__fsqrt_rn(second[i][e]), correction), o.eps);
            const float update = __fdiv_rn(__fmul_rn(size, first[i][e]), below);
            if (decays) w[i][e] = __fsub_rn(w[i][e], __fmul_rn(decay, w[i][e]));
            w[i][e] = __fsub_rn(w[i][e], update);
        }
        give(m + at[i], count[i], first[i]);
        give(v + at[i], count[i], second[i]);
        if constexpr (MASTER) give(master + at[i], count[i], w[i]);
    }
    if (kRounds && o.is_stochastic) {
        const unsigned long long counter = tile * 32 + lane, step = (unsigned long long)factors[kStep];
        unsigned words[4] = {unsigned(counter), unsigned(counter >> 32), unsigned(step), unsigned(step >> 32)};
        philox4x32(words, unsigned(seed), unsigned(seed >> 32));
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            w[0][e] = stochastic(w[0][e], words[e] & 0xffffu);
            w[1][e] = stochastic(w[1][e], words[e] >> 16);
        }
    }
    #pragma unroll
    for (int i = 0; i < kParts; ++i) give(params + at[i], count[i], w[i]);
}
