// Sums over a row that a team of blocks shares: team b is blocks b * team .. (b + 1) * team - 1.
//
// A block publishes each sum in one 64-bit word together with the number of the exchange. A reader that finds the
// number has the sum, without fence or flag. Thread t polls for block t. All blocks get the same bits.
//
//   exchange  (teams, 2, blocks of a team, kMost) words, zeroed      word: exchange number, from 1 | the sum
//
// Exchanges alternate between the two buffers. A word is written again two exchanges later; by then its writer has
// every block's sums of the exchange in between, and each block had read the older words before it sent those. Blocks
// wait for each other, so the whole grid must be resident: a cooperative launch.
#pragma once
#include "reduce.cuh"

template <int kMost, int kLeast = 0> class TeamSums {
public:
    using Word = unsigned long long;

    __device__ __forceinline__ TeamSums(RowSums<kMost, kLeast>& block_sum, Word* exchange, int team)
        : block_sum_(block_sum), team_(team),
          exchange_(exchange + (long long)(blockIdx.x / team) * 2 * team * kMost) {}

    template <int kMany> __device__ __forceinline__ void operator()(float (&value)[kMany], int thread) {
        block_sum_(value, thread);
        ++number_;
        Word* const words = exchange_ + (number_ & 1) * team_ * kMost;
        #pragma unroll
        for (int i = 0; i < kMany; ++i) {
            if (thread == 0) write(words + blockIdx.x % team_ * kMost + i, value[i]);
            value[i] = 0.0f;
        }
        for (int block = thread; block < team_; block += blockDim.x) add_when_there(words + block * kMost, value);
        block_sum_(value, thread);
    }

private:
    __device__ __forceinline__ void write(Word* word, float sum) const {
        const Word tagged = Word(number_) << 32 | __float_as_uint(sum);
        asm volatile("st.relaxed.gpu.global.b64 [%0], %1;"
                     :: "l"(__cvta_generic_to_global(word)), "l"(tagged) : "memory");
    }

    template <int kMany> __device__ __forceinline__ void add_when_there(const Word* words, float (&value)[kMany]) const {
        Word tagged[kMany];
        bool there;
        do {
            there = true;
            #pragma unroll
            for (int i = 0; i < kMany; ++i) {
                asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];"
                             : "=l"(tagged[i]) : "l"(__cvta_generic_to_global(words + i)) : "memory");
            }
            #pragma unroll
            for (int i = 0; i < kMany; ++i) there &= unsigned(tagged[i] >> 32) == number_;
        } while (!there);
        #pragma unroll
        for (int i = 0; i < kMany; ++i) value[i] += __uint_as_float(unsigned(tagged[i]));
    }

    RowSums<kMost, kLeast>& block_sum_;
    const int team_;
    Word* const exchange_;
    unsigned number_ = 0;
};
