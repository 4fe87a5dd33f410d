// Activations of gated MLPs (silu, gelu with erf, gelu_tanh, relu2) and their derivatives, in float.
//
//   act(g) = g c(g), where c rises from 0 to 1 (relu2: on)       act'(g) = c + g c'
//
//   kSilu       c = sigmoid(g)
//   kGelu       c = Phi(g), the normal distribution function
//   kGeluTanh   c = sigmoid(sqrt(8 / pi) (g + 0.044715 g^3))
//   kRelu2      c = max(g, 0)
//
// activated<kActivation, T>(g) returns both; an unused one costs nothing. T is the type that results are rounded to.
// float uses an exponential accurate to an ulp or two. 16-bit types use the hardware's exponential and a shorter
// polynomial, whose error is at most a twentieth of their rounding. Instructions for 16 bits, two of them MUFU:
//
//               value   both
//   kSilu         6      10
//   kGelu        15      19
//   kGeluTanh     9      15
//   kRelu2        3       4
//
// Small values are as accurate as large ones: c is never formed as 1 minus something close to 1, nor from tanh.approx,
// whose error of 2^-11 would swamp a small c. A c below 2^-126 is 0.
//
// Limits: act(-inf) = -0, act(inf) = inf, act'(-inf) = 0, act'(inf) = 1 (relu2: 0 and inf); NaN stays NaN. To avoid inf * 0, the infinite
// factor is clamped first. fminf and fmaxf drop a NaN, but the other factor still carries it.
#pragma once
#include "ptx.cuh"

enum class Activation { kSilu, kGelu, kGeluTanh, kRelu2 };

struct Activated { float value, slope; };

namespace detail {

constexpr float kLargest = 0x1.fffffep127f;
constexpr float kSaturated = 40.0f;  // beyond it every c is 0 or 1, and c' is 0

// e^x for x in units of kUnit. Callers fold kUnit into their constants.
template <typename T> struct Exponential {
    static constexpr float kUnit = 1.4426950408889634f;
    static __device__ __forceinline__ float of(float units) { return ptx::exp2(units); }
};

template <> struct Exponential<f32> {
    static constexpr float kUnit = 1.0f;
    static __device__ __forceinline__ float of(float units) { return expf(units); }
};

// value = 1 / (1 + e), the sigmoid of -log e; rest = 1 - value, without cancellation.
struct Sigmoid { float value, rest; };

__device__ __forceinline__ Sigmoid sigmoid(float e) {
    const float value = ptx::reciprocal(1.0f + e);
    return {value, fminf(e, kLargest) * value};
}

// exp(a^2 / 2) Phi(-a) for a >= 0: a minimax polynomial in t = 1 / (1 + s a), fitted on [0, 14] in relative error.
template <typename T> __device__ __forceinline__ float scaled_tail(float a) {  // error 1.3e-5; one degree less: 1.3e-4
    const float t = ptx::reciprocal(fmaf(0.36f, a, 1.0f));
    float p = -0.09851565064401883f;
    p = fmaf(p, t, 0.25438745322444895f);
    p = fmaf(p, t, 0.035116411429421075f);
    p = fmaf(p, t, 0.168695763592363f);
    p = fmaf(p, t, 0.14012407502635446f);
    return fmaf(p, t, 0.0001912894154714915f);
}

template <> __device__ __forceinline__ float scaled_tail<f32>(float a) {  // error 5.8e-8
    const float t = ptx::reciprocal(fmaf(0.3f, a, 1.0f));
    float p = 0.03837834852134263f;
    p = fmaf(p, t, -0.16916638279325766f);
    p = fmaf(p, t, 0.2286606067688054f);
    p = fmaf(p, t, -0.07650703619797662f);
    p = fmaf(p, t, 0.14253587883624855f);
    p = fmaf(p, t, 0.094683386164979f);
    p = fmaf(p, t, 0.12192037344142682f);
    p = fmaf(p, t, 0.11948768510479232f);
    return fmaf(p, t, 7.169070897206087e-06f);
}

template <typename T> __device__ __forceinline__ Activated silu(float g) {
    const Sigmoid c = sigmoid(Exponential<T>::of(-Exponential<T>::kUnit * g));
    const float value = fmaxf(g, -kLargest) * c.value;
    return {value, fmaf(fminf(value, kLargest), c.rest, c.value)};
}

// With a = |g|: act(g) = max(g, 0) - a Phi(-a). act'(g) = Phi(-a) - a phi(a) for g < 0, and 1 minus that for g > 0.
// Near 0 the rounding of t costs up to 6 ulp of float, so float uses a series there: Phi(g) = 1/2 + g q(g^2), a
// minimax fit with error 7e-10.
template <typename T> __device__ __forceinline__ Activated gelu(float g) {
    constexpr float kDensity = 0.3989422804014327f;  // phi(0) = 1 / sqrt(2 pi)
    const float a = fminf(fabsf(g), kSaturated), square = g * g;
    const float e = Exponential<T>::of(-0.5f * Exponential<T>::kUnit * square);
    const float p = scaled_tail<T>(a);
    const float slope = e * fmaf(-kDensity, a, p);
    const Activated far = {fmaf(-a, e * p, fmaxf(g, -0.0f)), g < 0.0f ? slope : 1.0f - slope};
    if constexpr (sizeof(T) < 4) return far;
    float q = -7.65420340e-06f;
    q = fmaf(q, square, 1.13486358e-04f);
    q = fmaf(q, square, -1.18632993e-03f);
    q = fmaf(q, square, 9.97332340e-03f);
    q = fmaf(q, square, -6.64903599e-02f);
    q = fmaf(q, square, 3.98942280e-01f);
    const float phi = fmaf(g, q, 0.5f);
    return square < 1.0f ? Activated{g * phi, fmaf(kDensity * g, e, phi)} : far;
}

template <typename T> __device__ __forceinline__ Activated gelu_tanh(float g) {
    constexpr float kLinear = 1.5957691216057308f, kCubic = 0.044715f * kLinear;  // sqrt(8 / pi)
    constexpr float kUnit = Exponential<T>::kUnit;
    const Sigmoid c = sigmoid(Exponential<T>::of(g * fmaf(-kUnit * kCubic, g * g, -kUnit * kLinear)));
    const float near = fminf(fmaxf(g, -kSaturated), kSaturated);
    const float inner = near * fmaf(3.0f * kCubic, near * near, kLinear);  // g times the slope of the inner function
    return {fmaxf(g, -kLargest) * c.value, fmaf(c.value * c.rest, inner, c.value)};
}

__device__ __forceinline__ Activated relu2(float g) {
    const float c = g < 0.0f ? 0.0f : g;  // fmaxf would drop a NaN
    return {c * c, 2.0f * c};
}

}  // namespace detail

template <Activation kActivation, typename T> __device__ __forceinline__ Activated activated(float g) {
    if constexpr (kActivation == Activation::kSilu) return detail::silu<T>(g);
    else if constexpr (kActivation == Activation::kGelu) return detail::gelu<T>(g);
    else if constexpr (kActivation == Activation::kGeluTanh) return detail::gelu_tanh<T>(g);
    else return detail::relu2(g);
}
