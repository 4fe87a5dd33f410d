// Products of many tokens with packed weights: the GEMM of gemm/gemm_sm80.cu, whose tiles of weights are decoded on
// their way to shared memory.
//
//   c = x w^T + residual + bias       x (m, k), w (n, k) in panels, c (m, n)       2 m n k flops
//
// A weight is decoded to float, rounded to DTYPE and multiplied in the order of gemm_sm80.cu, with the bits of the
// unpacked matrix. Each tile of tokens decodes all weights again.
//
//   x         cp.async, STAGES tiles deep, as in gemm_sm80.cu
//   weights   a warp decodes kCount weights of a panel's 32 rows at a time: a row is a lane, which stores whole chunks.
//             Codes of one more tile wait in registers while a tile is multiplied.
//
// Macros: those of packed.cuh; DTYPE OUT EPILOGUE (kStore, kLinear) ALIGNED (for x, c and addends) EXACT BLOCK_M
// BLOCK_N BLOCK_K WARPS_M WARPS_N STAGES as in gemm_sm80.cu
//
//   packed_gemm(x, panels, values, c, residual, bias, total, shape)     total is null; grid, block and shared memory
//                                                                       as for gemm_sm80.cu
#include "gemm_epilogue.cuh"
#include "gemm_mainloop.cuh"
#include "packed.cuh"

typedef DTYPE scalar;
typedef OUT out_scalar;

constexpr int kWarps = WARPS_M * WARPS_N, kSlabs = BLOCK_M / WARPS_M / 16, kTiles = BLOCK_N / WARPS_N / 8;

typedef OperandTile<scalar, true, BLOCK_M, BLOCK_K>::type TileX;
typedef OperandTile<scalar, true, BLOCK_N, BLOCK_K>::type TileW;
typedef Loader<TileX, true, BLOCK_K, 32 * kWarps, ALIGNED> Tokens;
typedef Product<TileX, TileW, true, true, kSlabs, kTiles, BLOCK_K, STAGES, EXACT> Sums;
typedef Finish<Epilogue::EPILOGUE, Activation::kSilu, out_scalar, kSlabs, kTiles, ALIGNED> Last;

static_assert((BLOCK & BLOCK - 1) == 0, "blocks and tiles divide each other");
static_assert(TileW::kChunks == TileW::kGroup, "chunks of a row are its first chunk XOR a constant");
static_assert(kWarps * Last::Staged::kBytes <= STAGES * Sums::kStageBytes, "C leaves through the stages");

// A warp's share in decoding the weights, tile by tile along K. With at most as many warps as panels a warp decodes all
// columns of its panels; otherwise the warps of a panel divide the columns. Groups of columns are a loop, and wait in
// registers one at a time: with all of a tile's, the compiler would keep those of two tiles.
class Weights {
    static constexpr int kPanels = BLOCK_N / kRows, kAlong = kWarps > kPanels ? kWarps / kPanels : 1;
    static constexpr int kMine = kPanels * kAlong / kWarps, kColumns = BLOCK_K / kAlong;  // panels, columns of a warp
    static constexpr int kLimit = 64 / sizeof(scalar), kCount = kColumns < kLimit ? kColumns : kLimit;
    static constexpr int kChunk = TileW::kChunk;
    static_assert(kAlong == 1 || kColumns == kCount, "a warp's groups are evenly spaced");

    const unsigned char* panel_[kMine];
    const float* table_;
    unsigned k_, end_;  // columns: of the group in registers; end of the split
    Codes<kCount> codes_[kMine];

    static __device__ __forceinline__ int panel() { return threadIdx.x / 32 % kPanels; }  // in a tile
    static __device__ __forceinline__ int column() { return threadIdx.x / 32 / kPanels * kColumns; }

    __device__ __forceinline__ void read() {
        const int64 block = k_ / BLOCK * static_cast<int64>(kBlockBytes);
        #pragma unroll
        for (int i = 0; i < kMine; ++i) {
            if (k_ < end_) codes_[i].read(panel_[i] + block, kCount < BLOCK ? k_ % BLOCK : 0, 0, threadIdx.x % 32);
            else codes_[i] = {};  // finite weights, for the zeros of x past the end
        }
    }

public:
    // Covers panels from `first` on, of k columns, and columns [begin, end). Panels past the last repeat it: their
    // products are not stored.
    __device__ __forceinline__ Weights(const unsigned char* weights, const float* table, int first, int panels, int k,
                                       int begin, int end)
        : table_(table), k_(begin + column()), end_(end) {
        const int64 bytes = k / BLOCK * static_cast<int64>(kBlockBytes);  // of a panel
        #pragma unroll
        for (int i = 0; i < kMine; ++i) {
            panel_[i] = weights + min(first + panel() + i * kWarps, panels - 1) * bytes;
        }
        read();
    }

    // Decodes a tile, and reads the first group of the next.
    __device__ __forceinline__ void load(unsigned tile) {
        const unsigned to = TileW::at(tile, panel() * kRows + threadIdx.x % 32, column() / kChunk);
        #pragma unroll 1
        for (int group = 0; group < kColumns / kCount; ++group) {
            const unsigned first = to ^ group * kCount / kChunk * 16;
            #pragma unroll
            for (int i = 0; i < kMine; ++i) {
                float weight[kCount];
                codes_[i].decode(table_, weight);
                #pragma unroll
                for (int e = 0; e < kCount; e += kChunk) {
                    ptx::store_shared((first ^ e / kChunk * 16) + i * kWarps * kRows * TileW::kRowBytes,
                                      packed<scalar, kChunk>(weight + e).word);
                }
            }
            k_ += kCount * kAlong;
            read();
        }
    }
};

extern __shared__ __align__(128) unsigned char dynamic_shared[];

// 16 bits: ptxas takes up to 255 registers rather than spill at 168. Floats spill at 255, and not at its own choice.
extern "C" __global__ void __launch_bounds__(32 * kWarps, sizeof(scalar) == 2)
packed_gemm(const scalar* x, const unsigned char* panels, const float* values, out_scalar* c,
            const out_scalar* residual, const out_scalar* bias, const float* total,
            const __grid_constant__ GemmShape shape) {
    __shared__ float table[kTableSize];
    copy_table(table, values);
    int row0, col0;
    block_tile<BLOCK_M, BLOCK_N>(shape.m, shape.n, row0, col0);
    const int all = (shape.k + BLOCK_K - 1) / BLOCK_K, share = (all + gridDim.y - 1) / gridDim.y;
    const int begin = min(static_cast<int>(blockIdx.y) * share, all), tiles = min(share, all - begin);

    const unsigned shared = ptx::shared_address(dynamic_shared);
    const int warp = threadIdx.x / 32, warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
    Tokens tokens({x, shape.stride_a}, {}, row0, shape.m, begin * BLOCK_K, shape.k);
    Weights weights(panels, table, col0 / kRows, (shape.n + kRows - 1) / kRows, shape.k, begin * BLOCK_K,
                    min((begin + tiles) * BLOCK_K, shape.k));
    Sums sums;
    sums.run(shared, warp_m * kSlabs * 16, warp_n * kTiles * 8, tiles, [&](unsigned stage, int) {
        tokens.load(stage);
        weights.load(stage + TileX::kBytes);
    });
    __syncthreads();  // the stages can be reused

    const Results<out_scalar, scalar> results{c + blockIdx.y * shape.split_c, const_cast<out_scalar*>(residual),
                                              const_cast<out_scalar*>(bias), total, nullptr, nullptr,
                                              shape.stride_c[0], shape.stride_c[1], 0, 0, shape.m, shape.n};
    Last::run(sums.acc, results, row0 + warp_m * kSlabs * 16, col0 + warp_n * Last::kColumns,
              dynamic_shared + warp * Last::Staged::kBytes);
}
