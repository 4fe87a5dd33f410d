// Scalars and pairs in the storage types.
#pragma once
#include "dtype.cuh"
#include "math.cuh"

__device__ __forceinline__ float widened(float x) { return x; }

template <typename T> __device__ __forceinline__ float widened(T x) {
    float value[2];
    Packed<T>::widen(x.bits, value);
    return value[0];
}

template <typename T> __device__ __forceinline__ T narrowed(float x) {
    if constexpr (sizeof(T) == 4) {
        return x;
    } else {
        const float pair[2] = {x, 0.0f};
        return {static_cast<unsigned short>(Packed<T>::narrow(pair))};
    }
}

template <typename T> __device__ __forceinline__ void store_pair(unsigned char* to, const float (&pair)[2]) {
    if constexpr (sizeof(T) == 4) *reinterpret_cast<float2*>(to) = make_float2(pair[0], pair[1]);
    else *reinterpret_cast<unsigned*>(to) = Packed<T>::narrow(pair);
}

// The word with its non-finite values replaced by zero.
template <typename T> __device__ __forceinline__ unsigned only_finite(unsigned word) {
    float value[2];
    Packed<T>::widen(word, value);
    #pragma unroll
    for (int i = 0; i < Packed<T>::kPerWord; ++i) value[i] = fabsf(value[i]) < infinity() ? value[i] : 0.0f;
    return Packed<T>::narrow(value);
}

// The sign bits of the word's values that are not finite: those whose exponent is all ones. Other bits are zero.
template <typename T> __device__ __forceinline__ unsigned special_bits(unsigned word);
template <> __device__ __forceinline__ unsigned special_bits<f32>(unsigned word) {
    return (word & 0x7f800000u) + 0x00800000u & 0x80000000u;
}
template <> __device__ __forceinline__ unsigned special_bits<bf16>(unsigned word) {
    return (word & 0x7f807f80u) + 0x00800080u & 0x80008000u;
}
template <> __device__ __forceinline__ unsigned special_bits<f16>(unsigned word) {
    return (word & 0x7c007c00u) + 0x04000400u & 0x80008000u;
}

template <typename T> __device__ __forceinline__ void store_four(T* to, const float (&value)[4]) {
    if constexpr (sizeof(T) == 4) *reinterpret_cast<float4*>(to) = {value[0], value[1], value[2], value[3]};
    else *reinterpret_cast<uint2*>(to) = make_uint2(Packed<T>::narrow(value), Packed<T>::narrow(value + 2));
}

// sum += weight x, where an infinity counts whatever its weight: 0 * inf would be NaN.
__device__ __forceinline__ void add_weighted(float (&sum)[4], const float4& x, float weight) {
    const float value[4] = {x.x, x.y, x.z, x.w};
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[i] = fabsf(value[i]) < infinity() ? fmaf(value[i], weight, sum[i]) : sum[i] + value[i];
    }
}

template <typename T> __device__ __forceinline__ void load_four(const T* from, float (&value)[4]) {
    if constexpr (sizeof(T) == 4) {
        const float4 x = *reinterpret_cast<const float4*>(from);
        value[0] = x.x, value[1] = x.y, value[2] = x.z, value[3] = x.w;
    } else {
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        Packed<T>::widen(x.x, value);
        Packed<T>::widen(x.y, value + 2);
    }
}
