// Activations of gated MLPs, silu, gelu (erf) and gelu_tanh, and their derivatives, in float.
//
//   act(g) = g c(g), where c rises from 0 to 1       act'(g) = c + g c'
//
//   kSilu       c = sigmoid(g)
//   kGelu       c = Phi(g), the normal distribution function
//   kGeluTanh   c = sigmoid(sqrt(8 / pi) (g + 0.044715 g^3))
//
// activated<kActivation, T>(g) gives both; what is not used costs nothing. T is the type that a result will be
// rounded to. For float the exponential is exact to a unit or two; 16 bits take the hardware's and a shorter
// polynomial, whose error is a twentieth of their rounding or less. Instructions for 16 bits, two of them MUFU:
//
//               value   both
//   kSilu         6      10
//   kGelu        15      19
//   kGeluTanh     9      15
//
// Small values are as accurate as large ones: no c is formed as 1 - something close to 1, nor from the hardware's
// tanh, whose error of 2^-11 would be all there is of a small c. A c below 2^-126 is 0.
//
// Limits: act(-inf) = -0, act(inf) = inf, act'(-inf) = 0, act'(inf) = 1; NaN stays NaN. Where inf * 0 would appear
// the infinite factor is first clamped; fminf and fmaxf drop a NaN, which another factor then still has.
#pragma once
#include "ptx.cuh"

enum class Activation { kSilu, kGelu, kGeluTanh };

struct Activated { float value, slope; };

namespace detail {

constexpr float kLargest = 0x1.fffffep127f;
constexpr float kSaturated = 40.0f;  // from here on all c are 0 or 1, and c' is 0

// e^x from x in units of kUnit, a factor that constants take in.
template <typename T> struct Exponential {
    static constexpr float kUnit = 1.4426950408889634f;
    static __device__ __forceinline__ float of(float units) { return ptx::exp2(units); }
};

template <> struct Exponential<f32> {
    static constexpr float kUnit = 1.0f;
    static __device__ __forceinline__ float of(float units) { return expf(units); }
};

// 1 / (1 + e), the sigmoid of -log e, and 1 - that without cancellation.
struct Sigmoid { float value, rest; };

__device__ __forceinline__ Sigmoid sigmoid(float e) {
    const float value = ptx::reciprocal(1.0f + e);
    return {value, fminf(e, kLargest) * value};
}

// exp(a^2 / 2) Phi(-a) for 0 <= a: a polynomial in t = 1 / (1 + s a), the minimax fit on [0, 14] in relative error.
template <typename T> __device__ __forceinline__ float scaled_tail(float a) {  // 1.3e-5, a degree less: 1.3e-4
    const float t = ptx::reciprocal(fmaf(0.36f, a, 1.0f));
    float p = -0.09851565064401883f;
    p = fmaf(p, t, 0.25438745322444895f);
    p = fmaf(p, t, 0.035116411429421075f);
    p = fmaf(p, t, 0.168695763592363f);
    p = fmaf(p, t, 0.14012407502635446f);
    return fmaf(p, t, 0.0001912894154714915f);
}

template <> __device__ __forceinline__ float scaled_tail<f32>(float a) {  // 5.8e-8
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

// Of a = |g|: act(g) = max(g, 0) - a Phi(-a); below 0 act'(g) is Phi(-a) - a phi(a), above it 1 minus that. Near 0 the
// rounding of t makes that wrong by up to 6 units of float, which takes a series there: Phi(g) = 1/2 + g q(g^2), a
// minimax fit of 7e-10.
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
    const float inner = near * fmaf(3.0f * kCubic, near * near, kLinear);  // of the sigmoid: g times its slope
    return {fmaxf(g, -kLargest) * c.value, fmaf(c.value * c.rest, inner, c.value)};
}

}  // namespace detail

template <Activation kActivation, typename T> __device__ __forceinline__ Activated activated(float g) {
    if constexpr (kActivation == Activation::kSilu) return detail::silu<T>(g);
    else if constexpr (kActivation == Activation::kGelu) return detail::gelu<T>(g);
    else return detail::gelu_tanh<T>(g);
}
