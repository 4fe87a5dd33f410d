// Elements of quantized pages: one byte each, with a float scale per row. A number is about code * scale.
//
//   s8      an integer from -127 to 127
//   e4m3    sign, 4 bits of exponent, 3 of fraction; 0x7f and 0xff are NaN
//
// f16 and bf16 hold every code exactly. No conversion instruction is used (only sm_89 and later have one for e4m3): bits
// move to where the wider type has them, and one operation per pair corrects the offset or the exponent. That takes 1.5
// to 2.5 instructions per code.
#pragma once
#include "ptx.cuh"

struct s8 {
    unsigned char bits;
    static constexpr float kLargest = 127.0f;
    static constexpr bool kHasNan = false;
};

struct e4m3 {
    unsigned char bits;
    static constexpr float kLargest = 448.0f;
    static constexpr bool kHasNan = true;
};

template <typename T> constexpr bool kIsCode = sizeof(T) == 1;

// Bytes 2 pair and 2 pair + 1 of a word, as the low or the high bytes of two halves.
__device__ __forceinline__ unsigned low_bytes(unsigned word, int pair, unsigned high = 0) {
    return __byte_perm(word, high, pair == 0 ? 0x4140 : 0x4342);
}

__device__ __forceinline__ unsigned high_bytes(unsigned word, int pair) {
    return __byte_perm(word, 0, pair == 0 ? 0x1404 : 0x3424);
}

// Two codes of a word as a word of f16 or bf16; numbers also of NaN.
template <typename T, typename Code> __device__ __forceinline__ unsigned decode_pair(unsigned word, int pair);

// 0x6400 + b is 1024 + b; b = code + 128.
template <> __device__ __forceinline__ unsigned decode_pair<f16, s8>(unsigned word, int pair) {
    return ptx::subtract_f16x2(low_bytes(word ^ 0x80808080u, pair, 0x64646464u), 0x64806480u);
}

// 0x4300 + b is 128 + b for the lower seven bits; the sign adds -128 or -256.
template <> __device__ __forceinline__ unsigned decode_pair<bf16, s8>(unsigned word, int pair) {
    const unsigned code = low_bytes(word, pair);
    return ptx::fma_bf16x2(code & 0x007f007fu | 0x43004300u, 0x3f803f80u, code & 0x00800080u | 0xc300c300u);
}

// The exponents' biases differ by 8, and multiplying by 2^8 makes subnormal numbers right too.
template <> __device__ __forceinline__ unsigned decode_pair<f16, e4m3>(unsigned word, int pair) {
    const unsigned code = high_bytes(word, pair);
    return ptx::multiply_f16x2(code & 0x80008000u | (code & 0x7f007f00u) >> 1, 0x5c005c00u);
}

// The same with 120.
template <> __device__ __forceinline__ unsigned decode_pair<bf16, e4m3>(unsigned word, int pair) {
    const unsigned code = high_bytes(word, pair);
    return ptx::fma_bf16x2(code & 0x80008000u | (code & 0x7f007f00u) >> 4, 0x7b807b80u, 0x80008000u);
}

// The four codes of a word as numbers of T, exactly: two words of f16 or bf16, four of float.
template <typename T, typename Code> __device__ __forceinline__ void decode(unsigned word, unsigned* number) {
    if constexpr (sizeof(T) == 4) {
        unsigned half[2];
        decode<f16, Code>(word, half);
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            float value[2];
            Packed<f16>::widen(half[i], value);
            number[2 * i] = __float_as_uint(value[0]), number[2 * i + 1] = __float_as_uint(value[1]);
        }
    } else {
        number[0] = decode_pair<T, Code>(word, 0), number[1] = decode_pair<T, Code>(word, 1);
        const unsigned nan = Code::kHasNan ? (word & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u : 0;
        if (nan != 0) {
            number[0] |= (high_bytes(nan, 0) >> 15) * 0x7fffu, number[1] |= (high_bytes(nan, 1) >> 15) * 0x7fffu;
        }
    }
}

template <typename Code> __device__ __forceinline__ float widened_code(Code code) {
    unsigned number[4];
    decode<float, Code>(code.bits, number);
    return __uint_as_float(number[0]);
}

// The nearest code, ties to even. |x| is at most kLargest.
template <typename Code> __device__ __forceinline__ unsigned encode(float x);

template <> __device__ __forceinline__ unsigned encode<s8>(float x) { return __float2int_rn(x) & 0xff; }

template <> __device__ __forceinline__ unsigned encode<e4m3>(float x) {
    const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    unsigned code;
    if (size < 0x3c800000u) {  // 2^-6: numbers below are multiples of 2^-9, the value of the last bit of 2^14
        code = __float_as_uint(__uint_as_float(size) + 0x1p14f) - 0x46800000u;
    } else {
        code = (size + 0x7ffffu + (size >> 20 & 1) >> 20) - (120 << 3);
    }
    return code | bits >> 24 & 0x80u;
}
