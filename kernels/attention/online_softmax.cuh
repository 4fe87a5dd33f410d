// Online softmax over tiles of scores (Milakov and Gimelshein 2018), in units of log2.
//
// A warp holds kSlabs accumulators of 16 rows. Row r = 2 slab + h of a lane is row 16 slab + 8 h + lane / 4 of the
// warp; the four lanes of a quad share it:
//
//                     columns 0 1 | 2 3 | 4 5 | 6 7                     s[slab][tile][2 h + e]:
//     row g            lane  4g     4g+1  4g+2  4g+3     h = 0          column 8 tile + 2 (lane % 4) + e
//     row g + 8        lane  4g     4g+1  4g+2  4g+3     h = 1
//
// Rescaling is lazy: the maximum in use may be up to 2^kHeadroom too small, so that after the first tiles O is
// rarely rescaled and the quad rarely shuffles. The final division uses the same maximum, so only range is lost, and
// 2^8 times a weight (float16) or a row sum (float) is far from overflow.
#pragma once
#include "ptx.cuh"

constexpr float kHeadroom = 8.0f;
constexpr float kCoarse = 1073741824.0f;  // 2^30: floats of this size are 64 apart
constexpr float kNothing = -3.4028235e38f;  // the maximum of no scores; finite, so that -inf - kNothing is -inf

template <int kSlabs> struct OnlineSoftmax {
    static constexpr int kRows = 2 * kSlabs;
    float minus_max[kRows];  // the negated maximum in use; equal in all lanes of the quad
    float row_sum[kRows];  // of this lane's columns

    __device__ __forceinline__ OnlineSoftmax() {
        #pragma unroll
        for (int r = 0; r < kRows; ++r) minus_max[r] = -kNothing, row_sum[r] = 0.0f;
    }

    // Turns scores into weights, in place. `scale` converts scores to units of log2.
    template <int kTiles, int kTilesO>
    __device__ __forceinline__ void weigh(float (&s)[kSlabs][kTiles][4], float (&acc_o)[kSlabs][kTilesO][4],
                                          float scale) {
        float tile_max[kRows];
        bool grown = false;
        #pragma unroll
        for (int r = 0; r < kRows; ++r) {
            tile_max[r] = fmaxf(s[r / 2][0][r % 2 * 2], s[r / 2][0][r % 2 * 2 + 1]);
            #pragma unroll
            for (int j = 1; j < kTiles; ++j) {
                tile_max[r] = fmaxf(fmaxf(tile_max[r], s[r / 2][j][r % 2 * 2]), s[r / 2][j][r % 2 * 2 + 1]);
            }
            grown |= fmaf(tile_max[r], scale, minus_max[r]) > kHeadroom;
        }
        if (__any_sync(0xffffffffu, grown)) raise(tile_max, acc_o, scale);
        #pragma unroll
        for (int r = 0; r < kRows; ++r) {
            #pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                #pragma unroll
                for (int e = r % 2 * 2; e < r % 2 * 2 + 2; ++e) {
                    s[r / 2][j][e] = ptx::exp2(fmaf(s[r / 2][j][e], scale, minus_max[r]));
                    row_sum[r] += s[r / 2][j][e];
                }
            }
        }
    }

    // The sum over the whole row, in all lanes of its quad.
    __device__ __forceinline__ float total(int r) const {
        const float half = row_sum[r] + __shfl_xor_sync(0xffffffffu, row_sum[r], 1);
        return half + __shfl_xor_sync(0xffffffffu, half, 2);
    }

private:
    template <int kTilesO>
    __device__ __forceinline__ void raise(const float (&tile_max)[kRows], float (&acc_o)[kSlabs][kTilesO][4],
                                          float scale) {
        #pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float m = fmaxf(tile_max[r], __shfl_xor_sync(0xffffffffu, tile_max[r], 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
            m = fminf(minus_max[r], m * -scale);
            const float alpha = ptx::exp2(m - minus_max[r]);
            minus_max[r] = m;
            row_sum[r] *= alpha;
            #pragma unroll
            for (int j = 0; j < kTilesO; ++j) {
                acc_o[r / 2][j][r % 2 * 2] *= alpha;
                acc_o[r / 2][j][r % 2 * 2 + 1] *= alpha;
            }
        }
    }
};
