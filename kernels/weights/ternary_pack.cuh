// Trits and their codes, four at a time as the bytes of a word; runs of 16 trits in memory; error flags.
#pragma once
#include "vec.cuh"

typedef unsigned char byte;

constexpr unsigned kOnes = 0x01010101u;

__device__ __forceinline__ unsigned codes_of(unsigned trits) { return ((trits & 3 * kOnes) + kOnes) & 3 * kOnes; }

// Trits of codes in which kZero represents 0. Code 3 gives +2.
template <int kZero = 1> __device__ __forceinline__ unsigned trits_of(unsigned codes) {
    return ((codes | 128 * kOnes) - kZero * kOnes) ^ 128 * kOnes;
}

__device__ __forceinline__ unsigned threes(unsigned codes) { return codes & codes >> 1 & kOnes; }

// 1 in each byte that is at least `low`. Bytes must be below 128.
__device__ __forceinline__ unsigned reach(unsigned bytes, unsigned low) {
    return (bytes + (128 - low) * kOnes) >> 7 & kOnes;
}

// Packs 16 codes into a word: codes 4i .. 4i + 3 go to its four bytes, at bits 2i.
__device__ __forceinline__ unsigned interleaved(const unsigned (&codes)[4]) {
    return codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6;
}

// Loads kWords words of bytes, of which `count` exist; the rest is 0. whole: one access if possible.
template <int kWords>
__device__ __forceinline__ void get(const byte* from, long long count, bool whole, unsigned (&word)[kWords]) {
    if (whole && count >= 4 * kWords) {
        detail::read_words<Cache::kOnce, 4 * kWords>(from, word);
        return;
    }
    #pragma unroll
    for (int i = 0; i < kWords; ++i) {
        word[i] = 0;
        #pragma unroll
        for (int b = 0; b < 4; ++b) {
            if (4 * i + b < count) word[i] |= static_cast<unsigned>(from[4 * i + b]) << (8 * b);
        }
    }
}

template <int kWords>
__device__ __forceinline__ void put(byte* to, long long count, bool whole, const unsigned (&word)[kWords]) {
    if (whole && count >= 4 * kWords) {
        detail::write_words<4 * kWords>(to, word);
        return;
    }
    #pragma unroll
    for (int b = 0; b < 4 * kWords; ++b) {
        if (b < count) to[b] = static_cast<byte>(word[b / 4] >> (8 * (b % 4)));
    }
}

// The codes of 16 trits, of which `count` exist; the rest is 0.
__device__ __forceinline__ void get_codes(const byte* trits, long long count, bool whole, unsigned (&codes)[4],
                                          unsigned& bad) {
    unsigned word[4];
    get(trits, count, whole, word);
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        codes[i] = codes_of(word[i]);
        bad |= (word[i] ^ trits_of(codes[i])) | threes(codes[i]);
    }
}

// Joins four runs of 16 trits, `apart` bytes from each other, into 16 bytes: run q at bits kFirst + kStep q. Runs from
// `many` on are padding, with bits 0.
template <int kFirst, int kStep>
__device__ __forceinline__ void join_runs(const byte* trits, long long apart, int many, long long count, bool whole,
                                          unsigned (&joined)[4], unsigned& bad) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) joined[i] = 0;
    #pragma unroll
    for (int q = 0; q < 4; ++q) {
        if (q >= many) continue;
        unsigned codes[4];
        get_codes(trits + q * apart, count, whole, codes, bad);
        #pragma unroll
        for (int i = 0; i < 4; ++i) joined[i] |= codes[i] << (kFirst + kStep * q);
    }
}

template <int kFirst, int kStep>
__device__ __forceinline__ void split_runs(const unsigned (&joined)[4], byte* trits, long long apart, int many,
                                           long long count, bool whole, unsigned& bad) {
    #pragma unroll
    for (int q = 0; q < 4; ++q) {
        unsigned out[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned codes = joined[i] >> (kFirst + kStep * q) & 3 * kOnes;
            bad |= q < many ? threes(codes) : codes;
            out[i] = trits_of(codes);
        }
        if (q < many) put(trits + q * apart, count, whole, out);
    }
}

// Stores one flag per block of threads.
__device__ __forceinline__ void report(int* flags, unsigned bad) {
    const int any = __syncthreads_or(bad != 0);
    if (threadIdx.x == 0) flags[blockIdx.y * gridDim.x + blockIdx.x] = any;
}
