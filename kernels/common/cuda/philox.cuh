// Philox 4x32-10: 128 random bits for every counter and key (Salmon et al. 2011). Two wide products and two XORs of
// three words per round.
#pragma once
#include "ptx.cuh"

typedef unsigned long long Seed;

// seed: null if the number that came with the launch counts
__device__ __forceinline__ Seed seed_of(const Seed* seed, Seed number) { return seed == nullptr ? number : *seed; }

// Replaces a counter by its random words. The seed is the key.
__device__ __forceinline__ void philox4x32(unsigned (&c)[4], Seed seed) {
    const unsigned key0 = static_cast<unsigned>(seed), key1 = static_cast<unsigned>(seed >> 32);
    #pragma unroll
    for (int i = 0; i < 10; ++i) {
        const unsigned long long p0 = ptx::multiply_wide(c[0], 0xD2511F53u), p1 = ptx::multiply_wide(c[2], 0xCD9E8D57u);
        const unsigned k0 = key0 + i * 0x9E3779B9u, k1 = key1 + i * 0xBB67AE85u;
        c[0] = static_cast<unsigned>(p1 >> 32) ^ c[1] ^ k0, c[1] = static_cast<unsigned>(p1);
        c[2] = static_cast<unsigned>(p0 >> 32) ^ c[3] ^ k1, c[3] = static_cast<unsigned>(p0);
    }
}
