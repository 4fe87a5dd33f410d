// GEMM on tensor cores, with mma.sync (sm_80 and later).
//
//   C = A B^T      A (m, k), B (n, k) DTYPE, C (m, n) OUT; accumulates in float       2 m n k flops
//
// A block computes BLOCK_M x BLOCK_N of C and walks over K in tiles of BLOCK_K, pipelined STAGES deep. A warp keeps
// WARP_M x WARP_N of it in registers: for every 32 bytes of K it reads WARP_M + WARP_N rows from shared memory and
// issues WARP_M WARP_N / 128 mma. Concurrent blocks cover a square of C, so that L2 serves their operands.
//
//   loads        gemm_operand.cuh    global to shared memory (cp.async, edges zero-filled), shared memory to registers
//   main loop    gemm_mainloop.cuh
//   epilogue     gemm_epilogue.cuh   activation, or sum with an existing array; stores
//
// Macros, all required:
//   DTYPE       f16, bf16, or f32 (3 x TF32)
//   OUT         the same, or f32
//   A_ALONG_K   1: a is (m, k) in memory, 0: (k, m)
//   B_ALONG_K   1: b is (n, k), 0: (k, n)
//   PAIRS       kOne   a0, b0
//               kTwo   blockIdx.z chooses: c = a0 b0^T or c1 = a1 b1^T
//               kSum   c = a0 b0^T + a1 b1^T
//   EPILOGUE    kStore, kAdd, kLinear (c1, h: residual, bias)
//               kGate, kGateKeep (b0 and b1 are the weights of gate and up, PAIRS is kOne)
//               kGateBackward (a1 and b1 are gate and up, (m, n) with the stride stride_b[1])
//   ACTIVATION  kSilu, kGelu, kGeluTanh
//   ALIGNED     1: addresses, row strides and row lengths are multiples of 16 bytes (those of total, as for c)
//   EXACT       1: f32 by scalar FMA, for small k
//   BLOCK_M  BLOCK_N  BLOCK_K  WARPS_M  WARPS_N  STAGES     kernels/gemm/config.py
//
//   gemm(a0, a1, b0, b1, c, c1, h, total, shape); arrays that the variant does not use may be null
//   grid   (tiles of C, splits, 2 with kTwo, else 1). Each split sums part of K, and c is then (splits, m, n) float.
//          With kGate and kGateKeep a tile has BLOCK_N / 2 columns of c.
//   block  32 WARPS_M WARPS_N
//   shared STAGES (BLOCK_M + BLOCK_N) BLOCK_K sizeof(DTYPE)
#include "gemm_epilogue.cuh"
#include "gemm_mainloop.cuh"

enum class Pairs { kOne, kTwo, kSum };

typedef DTYPE scalar;
typedef OUT out_scalar;

constexpr Pairs kPairs = Pairs::PAIRS;
constexpr Epilogue kEpilogue = Epilogue::EPILOGUE;
constexpr bool kGate = kEpilogue == Epilogue::kGate || kEpilogue == Epilogue::kGateKeep;
constexpr int kThreads = 32 * WARPS_M * WARPS_N;
constexpr int kSlabs = BLOCK_M / WARPS_M / 16, kTiles = BLOCK_N / WARPS_N / 8;
constexpr int kColumns = kGate ? BLOCK_N / 2 : BLOCK_N;  // of c, per block

typedef OperandTile<scalar, A_ALONG_K, BLOCK_M, BLOCK_K>::type TileA;
typedef OperandTile<scalar, B_ALONG_K, BLOCK_N, BLOCK_K>::type TileB;
typedef Loader<TileA, A_ALONG_K, BLOCK_K, kThreads, ALIGNED> LoaderA;
typedef Loader<TileB, B_ALONG_K, BLOCK_K, kThreads, ALIGNED, kGate> LoaderB;
typedef Product<TileA, TileB, A_ALONG_K, B_ALONG_K, kSlabs, kTiles, BLOCK_K, STAGES,
                EXACT> Sums;
typedef Finish<kEpilogue, Activation::ACTIVATION, out_scalar, kSlabs, kTiles, ALIGNED> Last;

static_assert(BLOCK_M % (16 * WARPS_M) == 0 && BLOCK_N % (16 * WARPS_N) == 0, "ldmatrix reads 16 rows");
static_assert(BLOCK_K * sizeof(scalar) % 64 == 0, "rows of a tile are whole groups of chunks");
static_assert(!EXACT || sizeof(scalar) == 4, "16-bit products are exact");
static_assert(!kGate || kPairs == Pairs::kOne, "the pair of B's is gate and up");
static_assert(WARPS_M * WARPS_N * Last::Staged::kBytes <= STAGES * Sums::kStageBytes, "C leaves through the stages");

extern __shared__ __align__(128) unsigned char dynamic_shared[];

extern "C" __global__ void __launch_bounds__(kThreads)
gemm(const scalar* a0, const scalar* a1, const scalar* b0, const scalar* b1, out_scalar* c, out_scalar* c1,
     out_scalar* h, const float* total, const __grid_constant__ GemmShape shape) {
    const int pair = kPairs == Pairs::kTwo ? blockIdx.z : 0;
    if (pair) a0 = a1, b0 = b1, c = c1;
    int row0, col0;
    block_tile<BLOCK_M, kColumns>(shape.m, shape.n, row0, col0);

    // This split's tiles of K. The tiles of the second pair follow those of the first.
    const int one = (shape.k + BLOCK_K - 1) / BLOCK_K, all = kPairs == Pairs::kSum ? 2 * one : one;
    const int share = (all + gridDim.y - 1) / gridDim.y, begin = min(static_cast<int>(blockIdx.y) * share, all);
    const int tiles = min(share, all - begin);

    const unsigned shared = ptx::shared_address(dynamic_shared);
    const int warp = threadIdx.x / 32, warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
    LoaderA from_a;
    LoaderB from_b;
    const auto start = [&](int tile) {
        const bool second = kPairs == Pairs::kSum && tile >= one;
        const int k = (second ? tile - one : tile) * BLOCK_K;
        from_a = LoaderA({second ? a1 : a0, shape.stride_a}, {}, row0, shape.m, k, shape.k);
        from_b = LoaderB({second ? b1 : b0, shape.stride_b[second || pair]}, {b1, shape.stride_b[1]}, col0, shape.n,
                         k, shape.k);
    };
    start(begin);
    Sums sums;
    sums.run(shared, warp_m * kSlabs * 16, warp_n * kTiles * 8, tiles, [&](unsigned stage, int n) {
        if (kPairs == Pairs::kSum && n > 0 && begin + n == one) start(one);
        from_a.load(stage);
        from_b.load(stage + TileA::kBytes);
    });
    __syncthreads();  // the stages can be reused

    const Results<out_scalar, scalar> results{c + blockIdx.y * shape.split_c, c1, h, total, a1, b1,
                                              shape.stride_c[pair], shape.stride_c[1], shape.stride_total,
                                              shape.stride_b[1], shape.m, shape.n};
    Last::run(sums.acc, results, row0 + warp_m * kSlabs * 16, col0 + warp_n * Last::kColumns,
              dynamic_shared + warp * Last::Staged::kBytes);
}
