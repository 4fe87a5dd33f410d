// The GEMM main loop: STAGES tiles of A and B in shared memory. While one is multiplied, the other STAGES - 1 load or
// wait.
//
//   shared memory   | A 0 | B 0 | A 1 | B 1 | ...    tile n is in stage n % STAGES
//   registers       acc[slab][tile]: rows 16 slab .., columns 8 tile .. of the warp's WARP_M x WARP_N
#pragma once
#include "gemm_operand.cuh"
#include "mma.cuh"
#include "tile_order.cuh"

struct GemmShape {
    int64 stride_a, stride_b[2], stride_c[2], stride_total, split_c;  // in elements; [1]: of b1, c1
    int m, n, k;
    int unused;
};

// kExact: multiply floats by FMA rather than on tensor cores. 3 x TF32 loses 2^-22 of a product, which would dominate
// the error of a short sum.
template <typename TileA, typename TileB, bool kAAlongK, bool kBAlongK, int kSlabs, int kTiles, int kBlockK,
          int kStages, bool kExact>
struct Product {
    typedef typename TileA::Scalar Scalar;
    static constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
    static constexpr int kSteps = kBlockK * sizeof(Scalar) / 32;

    Accumulator acc[kSlabs][kTiles];

    __device__ __forceinline__ Product() {
        #pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            #pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                #pragma unroll
                for (int r = 0; r < 4; ++r) acc[slab][j][r] = 0.0f;
            }
        }
    }

    // Accumulates `tiles` tiles. load(stage, n) starts copying tile n; row_a, row_b: the warp's first rows in A and B.
    template <typename Load>
    __device__ __forceinline__ void run(unsigned shared, int row_a, int row_b, int tiles, Load load) {
        #pragma unroll
        for (int n = 0; n < kStages - 1; ++n) {
            if (n < tiles) load(shared + n * kStageBytes, n);
            ptx::cp_async_commit();
        }
        unsigned now = shared, later = shared + (kStages - 1) * kStageBytes;
        const unsigned end = shared + kStages * kStageBytes;
        #pragma unroll 1
        for (int n = 0; n < tiles; ++n) {
            ptx::cp_async_wait<kStages - 2>();
            __syncthreads();  // tile n has arrived; no warp reads tile n - 1, whose stage the next load reuses
            if (n + kStages - 1 < tiles) load(later, n + kStages - 1);
            ptx::cp_async_commit();
            if constexpr (kExact) multiply_add_tile(now, row_a, row_b);
            else multiply_tile(now, row_a, row_b);
            now = now + kStageBytes == end ? shared : now + kStageBytes;
            later = later + kStageBytes == end ? shared : later + kStageBytes;
        }
        ptx::cp_async_wait<0>();  // only empty groups remain: shared memory may be reused
    }

private:
    __device__ __forceinline__ void multiply_tile(unsigned stage, int row_a, int row_b) {
        const Fragments<TileA, kAAlongK, true> rows_a(stage, row_a);
        const Fragments<TileB, kBAlongK, false> rows_b(stage + TileA::kBytes, row_b);
        #pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            Operand a[kSlabs];
            #pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) rows_a.read(a[slab], slab, k);
            #pragma unroll
            for (int j = 0; j < kTiles; j += 2) {
                unsigned b[4];
                rows_b.read(b, j / 2, k);
                #pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) {
                    multiply<Scalar>(acc[slab][j], a[slab], b[0], b[1]);
                    multiply<Scalar>(acc[slab][j + 1], a[slab], b[2], b[3]);
                }
            }
        }
    }

    // The same by scalar FMA. A lane reads the rows of A and B that belong to its accumulators.
    __device__ __forceinline__ void multiply_add_tile(unsigned stage, int row_a, int row_b) {
        const int lane = threadIdx.x % 32;
        #pragma unroll 1
        for (int k = 0; k < kBlockK; ++k) {
            float a[2 * kSlabs], b[2 * kTiles];
            #pragma unroll
            for (int i = 0; i < 2 * kSlabs; ++i) a[i] = one<TileA, kAAlongK>(stage, row_a + lane / 4 + 8 * i, k);
            #pragma unroll
            for (int i = 0; i < 2 * kTiles; ++i) {
                b[i] = one<TileB, kBAlongK>(stage + TileA::kBytes, row_b + lane % 4 * 2 + i / 2 * 8 + i % 2, k);
            }
            #pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                #pragma unroll
                for (int i = 0; i < 4 * kTiles; ++i) {
                    float& sum = acc[slab][i / 4][i % 4];
                    sum = fmaf(a[2 * slab + i % 4 / 2], b[i / 4 * 2 + i % 2], sum);
                }
            }
        }
    }

    template <typename TileT, bool kAlongK>
    static __device__ __forceinline__ float one(unsigned tile, int row, int k) {
        const int down = kAlongK ? row : k, across = kAlongK ? k : row;
        return __uint_as_float(ptx::load_shared(TileT::at(tile, down, across / TileT::kChunk) +
                                                across % TileT::kChunk * 4));
    }
};
