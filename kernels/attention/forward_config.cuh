// Constants and types derived from the macros of forward_sm80.cu, and a block's share of the problem.
#pragma once
#include "dropout.cuh"
#include "shape.cuh"
#include "key_rows.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "online_softmax.cuh"
#include "scalar.cuh"
#include "tile.cuh"

typedef DTYPE scalar;
typedef PAGE_DTYPE page_scalar;

constexpr bool kCodes = kIsCode<page_scalar>;  // quantized pages: numbers in shared memory, codes on their way
constexpr Mask kMask = Mask::MASK;
constexpr int kThreads = 32 * WARPS_M * WARPS_N;
constexpr int kSlabs = BLOCK_M / WARPS_M / 16, kRows = 2 * kSlabs;  // slabs of 16 rows per warp; rows per lane
constexpr int kWarpN = BLOCK_N / WARPS_N;                           // keys of a tile per warp
constexpr int kTilesS = kWarpN / 8, kTilesO = HEAD_DIM_V / 8;       // 16 x 8 accumulators
constexpr bool kRounded = sizeof(DTYPE) == 2 && !DROPOUT;  // one more tile of O sums P as it is rounded to DTYPE
constexpr int kTilesAcc = kTilesO + kRounded;
constexpr bool kKeepsQuery = PACK_GQA && !kPlainScores;             // plain scores need it in masked tiles only
constexpr int kSteps = HEAD_DIM * sizeof(scalar) / 32;              // mma steps of Q K^T

// 160 of 255 registers for matrices leave enough for addresses, row state and loads in flight. A float32 Q would
// have to be kept as two TF32 halves.
constexpr bool kQInRegisters = sizeof(scalar) == 2 && 4 * kSlabs * (kTilesS + kTilesO + kSteps) <= 160;

typedef Tile<scalar, BLOCK_M, HEAD_DIM> TileQ;
typedef Tile<scalar, BLOCK_N, HEAD_DIM> TileK;
typedef Tile<scalar, BLOCK_N, HEAD_DIM_V> TileV;

// Fewer than 32 of HEAD_DIM columns are zero-filled, but more may be in the last part of V.
constexpr int kSpare = 32, kSpareV = VALUE_PARTS > 1 ? HEAD_DIM_V : kSpare;
constexpr Pages kPages = static_cast<Pages>(PAGED);
typedef KeyRows<TileK, kThreads, kPages, kSpare, page_scalar> RowsK;
typedef KeyRows<TileV, kThreads, kPages, kSpareV, page_scalar> RowsV;

// O is staged in shared memory in the output type, or in float if several warps hold partial sums.
typedef typename ChooseType<SPLIT, float, OUT>::type out_scalar;
typedef typename ChooseType<WIDE_LSE && !SPLIT, double, float>::type lse_scalar;
typedef typename ChooseType<(WARPS_N > 1), float, out_scalar>::type staged;
typedef Tile<staged, BLOCK_M * WARPS_N, HEAD_DIM_V, sizeof(staged) == 4> TileO;
struct Part { float row_max, weight; };  // one per row and warp, stored behind the tile

constexpr int kOffsetV = TileK::kBytes, kBehindV = kOffsetV + TileV::kBytes;
constexpr int kOffsetOddK = ONE_K || kCodes ? 0 : kBehindV;
constexpr int kOffsetCodesK = kQInRegisters && TileQ::kBytes > kBehindV ? TileQ::kBytes : kBehindV;
constexpr int kOffsetCodesV = kOffsetCodesK + RowsK::Loader::kBytes;
constexpr int kOffsetScales = kOffsetCodesV + RowsV::Loader::kBytes;
constexpr int kBehindScales = kOffsetScales + (4 * BLOCK_N + 127) / 128 * 128;  // a tile begins at a line of banks
constexpr int kOffsetQ = kCodes                  ? (kQInRegisters ? 0 : kBehindScales)
                         : ONE_K || kQInRegisters ? kBehindV
                                                  : kBehindV + TileK::kBytes;

static_assert(kSlabs == 1 || kSlabs == 2, "a warp has 16 or 32 rows");
static_assert(kWarpN % 16 == 0, "ldmatrix.x4 reads 16 keys");
static_assert(!kCodes || (PAGED && !ONE_K), "quantized rows lie in pages; K has one buffer, its codes another");
static_assert(!ONE_K || !kQInRegisters, "Q in registers leaves its place to a second K");
static_assert(!BLOCK_MASK || !PACK_GQA, "the heads of a group may have different block masks");
static_assert(!DROPOUT || !PACK_GQA, "rows 8 apart are queries 8 apart: they share random words");

extern __shared__ __align__(128) unsigned char dynamic_shared[];

struct Tiles { int begin, end, all_begin, all_end; };  // some row sees [begin, end); all rows see [all_begin, all_end)

// A block's share of the problem, from its grid position. Recomputed where it is needed again, to save registers.
struct Work {
    int batch, split;
    int head, kv_head, group;           // with PACK_GQA, head is the first of the group
    int q_begin, seqlen_q, k_begin, seqlen_k;
    int row0, rows;                     // the block's first row; rows in all
    int column0, columns;               // the block's columns of out

    static __device__ __forceinline__ Work of(const AttentionShape& shape, const int* cu_seqlens_q,
                                              const int* cu_seqlens_k, const int* seqused_k) {
        const int x = ptx::opaque(blockIdx.x), y = ptx::opaque(blockIdx.y), batch = ptx::opaque(blockIdx.z);
        const int grid_x = ptx::opaque(gridDim.x);
        const int blocks_m = SPLIT ? grid_x / shape.num_splits : grid_x;
        const int m = SPLIT ? x % blocks_m : x;
        Work work;
        work.batch = batch;
        work.split = SPLIT ? x / blocks_m : 0;
        work.group = shape.group;
        work.kv_head = PACK_GQA ? y / VALUE_PARTS : y / VALUE_PARTS / shape.group;
        work.head = PACK_GQA ? work.kv_head * shape.group : y / VALUE_PARTS;
        work.q_begin = VARLEN ? cu_seqlens_q[batch] : 0;
        work.k_begin = VARLEN && !PAGED ? cu_seqlens_k[batch] : 0;
        work.seqlen_q = VARLEN ? cu_seqlens_q[batch + 1] - work.q_begin : shape.seqlen_q;
        work.seqlen_k = SEQUSED_K ? seqused_k[batch]
                        : VARLEN  ? cu_seqlens_k[batch + 1] - work.k_begin
                                  : shape.seqlen_k;
        work.rows = PACK_GQA ? work.seqlen_q * shape.group : work.seqlen_q;
        // Causal: the longest rows first, so that short ones fill the tail.
        work.row0 = (kMask == Mask::kCausal ? blocks_m - 1 - m : m) * BLOCK_M;
        work.column0 = y % VALUE_PARTS * HEAD_DIM_V;
        work.columns = VALUE_PARTS > 1 ? min(HEAD_DIM_V, shape.head_dim_v - work.column0) : shape.head_dim_v;
        return work;
    }

    __device__ __forceinline__ int query(int row) const { return PACK_GQA ? row / group : row; }
    __device__ __forceinline__ int head_of(int row) const { return PACK_GQA ? head + row % group : head; }
    __device__ __forceinline__ int shift() const { return seqlen_k - seqlen_q; }

    __device__ __forceinline__ Tiles tiles(const AttentionShape& shape) const {
        const int last = min(row0 + BLOCK_M, rows) - 1;
        const KeyRange keys = KeyRange::of<kMask>(query(row0) + shift(), query(last) + shift(), seqlen_k,
                                                  shape.window_left, shape.window_right);
        Tiles tiles{keys.begin / BLOCK_N, (keys.end + BLOCK_N - 1) / BLOCK_N,
                    (keys.all_begin + BLOCK_N - 1) / BLOCK_N, keys.all_end / BLOCK_N};
        if constexpr (SPLIT) {
            const int share = (max(tiles.end - tiles.begin, 0) + shape.num_splits - 1) / shape.num_splits;
            tiles.begin += split * share;
            tiles.end = min(tiles.end, tiles.begin + share);
        }
        return tiles;
    }
};
