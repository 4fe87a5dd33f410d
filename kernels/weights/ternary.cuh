// Ternary weights in 2 bits (format w2), and integer products of their codes.
//
// A row is K codes, padded to a multiple of 64. code = trit + 1; padding is 1. A word holds 16 codes, interleaved so
// that four neighbours along K are the four bytes of a plane:
//
//     word       byte 3    byte 2    byte 1    byte 0        plane i = word & 0x03030303 << 2i:
//     bits 7-6   code 15   code 14   code 13   code 12       its bytes are 4^i times codes 4i .. 4i + 3
//     bits 5-4   code 11   code 10   code  9   code  8
//     bits 3-2   code  7   code  6   code  5   code  4       A plane lines up with four int8 activations.
//     bits 1-0   code  3   code  2   code  1   code  0
//
// Products use the unsigned codes: sum t q = sum (t + 1) q - sum q, and sum q is one number per token.
#pragma once
#include "dtype.cuh"

constexpr int kUnit = 64;  // codes per 16-byte vector; rows are padded to it

struct q8 { signed char bits; };  // int8 activations

namespace ptx {

// sum += the four products of unsigned with signed bytes. The __dp4a intrinsics only take equal signs.
__device__ __forceinline__ int dp4a(unsigned codes, unsigned q, int sum) {
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(codes), "r"(q));
    return sum;
}

__device__ __forceinline__ uint4 load_shared4(unsigned address) {
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "r"(address));
    return words;
}

}  // namespace ptx

// Four sums, of planes 0 to 3: 1, 4, 16 and 64 times the products. Half an instruction per weight and product, with no
// shift and no sign extension. Exact while 64 * 2 * 127 * (codes / 4) < 2^31: half a million codes.
struct PlaneSums {
    int plane[4];

    __device__ __forceinline__ void add(unsigned word, const uint4& q) {  // q: activations of the 16 codes
        plane[0] = ptx::dp4a(word & 0x03030303u, q.x, plane[0]);
        plane[1] = ptx::dp4a(word & 0x0c0c0c0cu, q.y, plane[1]);
        plane[2] = ptx::dp4a(word & 0x30303030u, q.z, plane[2]);
        plane[3] = ptx::dp4a(word & 0xc0c0c0c0u, q.w, plane[3]);
    }

    __device__ __forceinline__ int total() const {
        return (plane[0] + (plane[1] >> 2)) + ((plane[2] >> 4) + (plane[3] >> 6));
    }
};

// A float that narrows to the T nearest to x. float16 must be rounded once, as NumPy does, so the float keeps a sticky
// bit in its last place. (bfloat16 rounds through the nearest float, as ml_dtypes does.)
template <typename T> __device__ __forceinline__ float before_narrowing(double x) {
    if constexpr (sizeof(T) == 2 && !Packed<T>::kWideRange) {
        const float cut = __double2float_rz(x);
        return __uint_as_float(__float_as_uint(cut) | (x == x && static_cast<double>(cut) != x));
    } else {
        return static_cast<float>(x);
    }
}
