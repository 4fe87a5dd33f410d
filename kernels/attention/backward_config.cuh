// Constants and types derived from the macros of backward_sm80.cu, and a block's share of the problem.
#pragma once
#include "backward_scores.cuh"
#include "dropout.cuh"
#include "mma.cuh"
#include "tile.cuh"

enum class Rows { kKeys, kQueries };
constexpr Rows kOwn = Rows::ROWS;
constexpr bool kOwnsKeys = kOwn == Rows::kKeys;
constexpr bool kHalf = sizeof(scalar) == 2;

constexpr int kWarps = WARPS_R * WARPS_D, kThreads = 32 * kWarps;
constexpr int kRows = kOwnsKeys ? BLOCK_N : BLOCK_M;     // of the block's own
constexpr int kColumns = kOwnsKeys ? BLOCK_M : BLOCK_N;  // of a tile that passes
constexpr int kSlabs = kRows / WARPS_R / 16;             // of 16 rows per warp
constexpr int kLaneRows = 2 * kSlabs;
constexpr int kStrips = kColumns / (STRIP * WARPS_D);    // that a warp computes one after the other
constexpr int kTilesS = STRIP / 8;                       // 16 x 8 accumulators of S and dP
constexpr int kUnit = 32 / sizeof(scalar);               // columns in 32 bytes
constexpr int kUnitTiles = kUnit / 8;

// A warp owns every WARPS_D-th unit of the columns of its rows' gradients.
constexpr int kUnitsX = HEAD_DIM / kUnit / WARPS_D, kUnitsY = HEAD_DIM_V / kUnit / WARPS_D;

// True if rows of one tile may see different columns. Without, only rows and columns past the end are hidden, and
// those are zero.
constexpr bool kHides = kMask != Mask::kNone || kBias != Bias::kNone || BLOCK_MASK;

// x: K or Q, y: V or dO; rows: the block's own, columns: those that pass.
typedef Tile<scalar, kRows, HEAD_DIM> RowsX;
typedef Tile<scalar, kRows, HEAD_DIM_V> RowsY;
typedef Tile<scalar, kColumns, HEAD_DIM> ColumnsX;
typedef Tile<scalar, kColumns, HEAD_DIM_V> ColumnsY;
typedef Tile<scalar, kRows, kColumns> TileS;

// dS^T goes through shared memory for dQ; with WARPS_D > 1 P and dS do, since a warp then needs all columns of its
// rows.
constexpr bool kSharesS = WARPS_D > 1;
constexpr int kOffsetRowsY = RowsX::kBytes;
constexpr int kOffsetColumnsX = kOffsetRowsY + RowsY::kBytes;  // of the first stage, as the next two
constexpr int kOffsetColumnsY = kOffsetColumnsX + ColumnsX::kBytes;
constexpr int kOffsetStatistics = kOffsetColumnsY + ColumnsY::kBytes;
constexpr int kStageBytes = ColumnsX::kBytes + ColumnsY::kBytes + (kOwnsKeys ? kColumns * sizeof(RowStatistics) : 0);
constexpr int kOffsetS = kOffsetColumnsX + STAGES * kStageBytes;
constexpr int kOffsetP = kOffsetS + TileS::kBytes;

constexpr int kSpare = 32;  // fewer than 32 of HEAD_DIM columns are zero-filled

static_assert(kRows % (16 * WARPS_R) == 0 && kStrips * STRIP * WARPS_D == kColumns, "whole tiles");
static_assert(STRIP % 16 == 0 || (STRIP == 8 && kSharesS), "A operands from accumulators have 16 columns");
static_assert(STAGES == 1 || STAGES == 2, "a tile loads while the one before it is used");
static_assert(!kSharesS || kStrips == 1, "warps that share P compute all of it at once");
static_assert(HEAD_DIM % (WARPS_D * kUnit) == 0 && HEAD_DIM_V % (WARPS_D * kUnit) == 0, "whole units per warp");

extern __shared__ __align__(128) unsigned char dynamic_shared[];
