// Shared by the RMSNorm and LayerNorm kernels. Macros:
//
//   NORM    rmsnorm or layernorm; also the prefix of the entry points
//   DTYPE   f16, bf16 or f32
//   VEC     elements per vector; divides cols
//   ACCESS  elements per memory access: VEC, or 1 for arrays that are not aligned to a vector
//
// RMSNorm has no mean and no bias; LayerNorm has no weight_offset:
//
//   n = (x - mean) * rstd      y = n * (weight_offset + weight) + bias
#pragma once
#include "dtype.cuh"
#include "math.cuh"
#include "reduce.cuh"
#include "vec.cuh"

enum class Norm { rmsnorm, layernorm };

constexpr bool kLayer = Norm::NORM == Norm::layernorm;

#define NORM_JOIN_(norm, step) norm##_##step
#define NORM_JOIN(norm, step) NORM_JOIN_(norm, step)
#define ENTRY(step) NORM_JOIN(NORM, step)

typedef DTYPE scalar;
typedef Vec<scalar, VEC> vec;

// Sums for dweight and dbias are kept and written four floats at a time.
constexpr int kQuad = VEC < 4 ? VEC : 4, kQuads = VEC / kQuad;
typedef Vec<f32, kQuad> quad;

constexpr int kPerWord = VEC < vec::kPerWord ? VEC : vec::kPerWord;  // a single 16-bit value fills half of its word
constexpr int kQuadWords = kQuad / kPerWord;

// sum[e] += a b
__device__ __forceinline__ void add(quad& sum, int e, float a, float b) {
    sum.word[e] = __float_as_uint(fmaf(a, b, __uint_as_float(sum.word[e])));
}

// Contribution of one word (one or two values) to the gradients.
struct Gradients {
    float m[vec::kPerWord], n[vec::kPerWord];  // for dx: m = dy * (weight_offset + weight)
    float centred[vec::kPerWord];              // n / rstd
    float dy[vec::kPerWord], n_seen[vec::kPerWord];  // for dweight: n as the forward multiplied it with the weight
};

// llama rounds weight_offset + weight, m, and the n in dweight to DTYPE, as the forward pass does.
__device__ __forceinline__ Gradients gradients(unsigned dy, unsigned x, unsigned weight, float mean, float rstd,
                                               float weight_offset, int llama) {
    Gradients g;
    float gain[vec::kPerWord];
    Packed<scalar>::widen(dy, g.dy);
    Packed<scalar>::widen(x, g.n);
    Packed<scalar>::widen(weight, gain);
    #pragma unroll
    for (int e = 0; e < vec::kPerWord; ++e) {
        g.centred[e] = kLayer ? g.n[e] - mean : g.n[e];
        g.n[e] = g.centred[e] * rstd;
        g.n_seen[e] = g.n[e];
        if constexpr (!kLayer) gain[e] += weight_offset;
    }
    if (!kLayer && llama) {
        Packed<scalar>::round(g.n_seen);
        Packed<scalar>::round(gain);
    }
    #pragma unroll
    for (int e = 0; e < vec::kPerWord; ++e) g.m[e] = g.dy[e] * gain[e];
    if (!kLayer && llama) Packed<scalar>::round(g.m);
    return g;
}

// dx = rstd * (m - n * mean(m n) - mean(m)) + dresidual for one word; mean(m) only in LayerNorm. slope: rstd mean(m n)
__device__ __forceinline__ unsigned input_gradient(Gradients g, float rstd, float slope, float mean_m,
                                                   unsigned dresidual) {
    float more[vec::kPerWord];
    Packed<scalar>::widen(dresidual, more);
    #pragma unroll
    for (int e = 0; e < vec::kPerWord; ++e) {
        float m = fmaf(-g.centred[e], slope, g.m[e]);
        if constexpr (kLayer) m -= mean_m;
        g.m[e] = fmaf(rstd, m, more[e]);
    }
    return Packed<scalar>::narrow(g.m);
}
