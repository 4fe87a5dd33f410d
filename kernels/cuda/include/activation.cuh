// Activations of gated MLPs, silu, gelu (erf) and gelu_tanh, and their derivatives, in float.
//
//   act(g) = g c(g), where c rises from 0 to 1       act'(g) = c + g c'
//
//   kSilu       c = sigmoid(g)                                               2 MUFU, about  6 instructions; 11 with act'
//   kGelu       c = Phi(g), the normal distribution function                 2              17               20
//   kGeluTanh   c = sigmoid(sqrt(8 / pi) (g + 0.044715 g^3))                 2               9               16
//
// activated<kActivation, T>(g) gives both; what is not used costs nothing. T is the type that the result will be
// rounded to: float takes the exact exponential (4 instructions more), and for 16 bits the error of the hardware's is
// far below the rounding. Small values keep their relative accuracy: no c is formed as 1 - something close to 1, nor
// from the hardware's tanh, whose error of 2^-11 would be all there is of a small c.
//
// Limits: act(-inf) = -0, act(inf) = inf, act'(-inf) = 0, act'(inf) = 1; NaN stays NaN. Where inf * 0 would appear the
// infinite factor is first clamped; fminf and fmaxf drop a NaN, which the other factor then still has. c below
// 2^-126 is 0.
#pragma once
#include "ptx.cuh"

enum class Activation { kSilu, kGelu, kGeluTanh };

struct Activated { float value, slope; };

namespace detail {

constexpr float kLargest = 0x1.fffffep127f;
constexpr float kSaturated = 40.0f;  // from here on all c are 0 or 1, and c' is 0

template <typename T> __device__ __forceinline__ float exponential(float x) {
    if constexpr (sizeof(T) == 4) return expf(x);
    else return ptx::exp2(1.4426950408889634f * x);
}

__device__ __forceinline__ float saturated(float g) { return fminf(fmaxf(g, -kSaturated), kSaturated); }

// rest = 1 - value, without cancellation.
struct Sigmoid { float value, rest; };

template <typename T> __device__ __forceinline__ Sigmoid sigmoid(float x) {
    const float e = exponential<T>(-x);
    const float value = ptx::reciprocal(1.0f + e);
    return {value, fminf(e, kLargest) * value};
}

// With a = |g|: Phi(-a) = exp(-a^2 / 2) P(1 / (1 + 0.3 a)), without branches. P is the minimax fit of
// exp(a^2 / 2) Phi(-a) on [0, 14] in relative error, 5.8e-8.
struct Normal { float phi, density; };

template <typename T> __device__ __forceinline__ Normal normal(float g) {
    const float t = ptx::reciprocal(fmaf(0.3f, fabsf(g), 1.0f));
    float p = 0.03837834852134263f;
    p = fmaf(p, t, -0.16916638279325766f);
    p = fmaf(p, t, 0.2286606067688054f);
    p = fmaf(p, t, -0.07650703619797662f);
    p = fmaf(p, t, 0.14253587883624855f);
    p = fmaf(p, t, 0.094683386164979f);
    p = fmaf(p, t, 0.12192037344142682f);
    p = fmaf(p, t, 0.11948768510479232f);
    p = fmaf(p, t, 7.169070897206087e-06f);
    const float e = exponential<T>(-0.5f * g * g);
    const float tail = e * p;
    return {g < 0.0f ? tail : 1.0f - tail, 0.3989422804014327f * e};
}

}  // namespace detail

template <Activation kActivation, typename T> __device__ __forceinline__ Activated activated(float g) {
    const float bounded = fmaxf(g, -detail::kLargest);
    if constexpr (kActivation == Activation::kSilu) {
        const detail::Sigmoid c = detail::sigmoid<T>(g);
        const float value = bounded * c.value;
        return {value, fmaf(fminf(value, detail::kLargest), c.rest, c.value)};
    } else if constexpr (kActivation == Activation::kGelu) {
        const detail::Normal c = detail::normal<T>(g);
        return {bounded * c.phi, fmaf(detail::saturated(g), c.density, c.phi)};
    } else {
        constexpr float kLinear = 1.5957691216057308f, kCubic = 0.044715f * kLinear;  // sqrt(8 / pi)
        const detail::Sigmoid c = detail::sigmoid<T>(g * fmaf(kCubic, g * g, kLinear));
        const float near = detail::saturated(g);
        const float inner = near * fmaf(3.0f * kCubic, near * near, kLinear);
        return {bounded * c.value, fmaf(c.value * c.rest, inner, c.value)};
    }
}
