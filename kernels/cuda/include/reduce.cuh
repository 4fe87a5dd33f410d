// Sums over the threads of a row.
//
// blockDim = (threads per row, rows per block). A row belongs to part of a warp (4, 8, 16 or 32 threads, several
// rows per block) or to a whole block (then one row, whole warps). All threads of the row get the sum, with the
// same bits: in a butterfly every lane adds the same pairs, and addition commutes.
#pragma once

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float value, int width) {
    for (int offset = width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
    return value;
}

// One barrier per sum: sums take turns with two buffers, and who writes one again has passed the barrier of the
// sum between, which nobody reaches before having read it.
class RowSum {
public:
    using Scratch = float[2][32];

    explicit __device__ __forceinline__ RowSum(Scratch& scratch) : scratch_(scratch) {}

    __device__ __forceinline__ float operator()(float value, int thread = threadIdx.x) {
        const int width = blockDim.x;
        value = warp_sum(value, min(width, 32));
        if (width <= 32) return value;
        const int warp = thread / 32, lane = thread % 32;
        if (lane == 0) scratch_[turn_][warp] = value;
        __syncthreads();
        value = lane < width / 32 ? scratch_[turn_][lane] : 0.0f;
        turn_ ^= 1;
        return warp_sum(value, 32);
    }

private:
    Scratch& scratch_;
    int turn_ = 0;
};
