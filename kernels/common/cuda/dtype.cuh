// Storage types and their conversion to and from float, in which all kernels compute.
//
//   DTYPE   stored as   widen                      narrow (round to nearest even)
//   f16     16 bits     cvt.f32.f16                cvt.rn.f16x2.f32
//   bf16    16 bits     shift or mask              cvt.rn.bf16x2.f32
//   f32     32 bits     none                       none
//
// Values stay packed in 32-bit words (two 16-bit values, the first in the low half) until they are used, so a row in
// registers takes half as many. No toolkit header is included: cuda_bf16.h alone would dominate compile time, and
// it would need a toolkit to be installed.
#pragma once

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
typedef float f32;

template <bool kFirst, typename A, typename B> struct ChooseType { typedef A type; };
template <typename A, typename B> struct ChooseType<false, A, B> { typedef B type; };

template <typename T> struct Packed;

// kWideRange: squares can overflow or underflow in float although the values are finite and nonzero.
// kOnes: a word of ones.
template <> struct Packed<f32> {
    static constexpr int kPerWord = 1;
    static constexpr unsigned kOnes = 0x3f800000u;
    static constexpr bool kWideRange = true;
    static __device__ __forceinline__ void widen(unsigned word, float* value) { value[0] = __uint_as_float(word); }
    static __device__ __forceinline__ unsigned narrow(const float* value) { return __float_as_uint(value[0]); }
    static __device__ __forceinline__ void round(float*) {}
};

template <> struct Packed<bf16> {
    static constexpr int kPerWord = 2;
    static constexpr unsigned kOnes = 0x3f803f80u;
    static constexpr bool kWideRange = true;
    static __device__ __forceinline__ void widen(unsigned word, float* value) {
        value[0] = __uint_as_float(word << 16);  // a bfloat16 is the upper half of a float
        value[1] = __uint_as_float(word & 0xffff0000u);
    }
    static __device__ __forceinline__ unsigned narrow(const float* value) {
        unsigned word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(value[1]), "f"(value[0]));  // upper half first
        return word;
    }
    static __device__ __forceinline__ void round(float* value) { widen(narrow(value), value); }
};

template <> struct Packed<f16> {
    static constexpr int kPerWord = 2;
    static constexpr unsigned kOnes = 0x3c003c00u;
    static constexpr bool kWideRange = false;
    static __device__ __forceinline__ void widen(unsigned word, float* value) {
        asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
            : "=f"(value[0]), "=f"(value[1]) : "r"(word));
    }
    static __device__ __forceinline__ unsigned narrow(const float* value) {
        unsigned word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(value[1]), "f"(value[0]));
        return word;
    }
    static __device__ __forceinline__ void round(float* value) { widen(narrow(value), value); }
};
