// Sums over the threads that share a row.
//
// blockDim = (threads per row, rows per block). A row has part of a warp (4, 8, 16 or 32 threads, several rows per
// block) or a whole block (one row, whole warps). All its threads get the sum with the same bits: in a butterfly
// every lane adds the same pairs, and addition commutes.
#pragma once

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float value, int width) {
    for (int offset = width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
    return value;
}

// Up to kMost sums at a time, with a single barrier. Calls alternate between two buffers: a thread that writes a buffer
// again has passed the barrier of the call in between, which no thread reaches before it has read that buffer.
//
// kLeast: threads that every row has, up to 32; butterflies are then unrolled, which takes fewer instructions and, below
// 32, a predicate per step. 0: a loop.
template <int kMost, int kLeast = 0> class RowSums {
public:
    using Scratch = float[2][kMost][32];

    explicit __device__ __forceinline__ RowSums(Scratch& scratch) : scratch_(scratch) {}

    template <int kMany> __device__ __forceinline__ void operator()(float (&value)[kMany], int thread = threadIdx.x) {
        static_assert(kMany <= kMost, "no room in the scratch");
        const int width = blockDim.x;
        #pragma unroll
        for (int i = 0; i < kMany; ++i) value[i] = part_sum(value[i], min(width, 32));
        if (width <= 32) return;
        const int warp = thread / 32, lane = thread % 32;
        #pragma unroll
        for (int i = 0; i < kMany; ++i) {
            if (lane == 0) scratch_[turn_][i][warp] = value[i];
        }
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < kMany; ++i) {
            value[i] = warp_sum(lane < width / 32 ? scratch_[turn_][i][lane] : 0.0f, 32);
        }
        turn_ ^= 1;
    }

    __device__ __forceinline__ float operator()(float value, int thread = threadIdx.x) {
        float one[1] = {value};
        (*this)(one, thread);
        return one[0];
    }

private:
    // As warp_sum.
    static __device__ __forceinline__ float part_sum(float value, int width) {
        if constexpr (kLeast == 0) return warp_sum(value, width);
        #pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            if (offset < kLeast || offset < width) value += __shfl_xor_sync(kFullWarp, value, offset);
        }
        return value;
    }

    Scratch& scratch_;
    int turn_ = 0;
};
