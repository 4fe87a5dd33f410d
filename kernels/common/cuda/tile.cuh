// Tiles of a matrix in shared memory, swizzled so that neither reads nor writes have bank conflicts.
//
// ldmatrix reads one 16-byte chunk from each of 8 rows; a copy writes whole rows. If rows are a multiple of 128 bytes
// (all 32 banks), chunk c of row r is at c ^ (r & 7):
//
//              chunk   0 1 2 3 4 5 6 7
//     row 0            0 1 2 3 4 5 6 7         If rows are an odd multiple of 64 bytes, two of them share
//     row 1            1 0 3 2 5 4 7 6         a line of banks, and the chunk is at c ^ ((r / 2) & 3).
//     row 2            2 3 0 1 6 7 4 5
#pragma once
#include "ptx.cuh"

// kPairs: for float accumulators. There a quad stores two chunks of a row at a time, and a half-warp 4 rows.
template <typename T, int kRows_, int kCols_, bool kPairs = false> struct Tile {
    using Scalar = T;
    static constexpr int kRows = kRows_, kCols = kCols_;
    static constexpr int kRowBytes = kCols_ * sizeof(T);
    static constexpr int kChunk = 16 / sizeof(T);  // elements
    static constexpr int kChunks = kRowBytes / 16;
    static constexpr int kGroup = kRowBytes % 128 == 0 ? 8 : 4;  // chunks that the swizzle permutes among themselves
    static constexpr int kBytes = kRows * kRowBytes;
    static_assert(kRowBytes % (kPairs ? 128 : 64) == 0 && kRows % 8 == 0, "no permutation for such rows");

    static __device__ __forceinline__ int key(int row) {
        if (kPairs) return (row & 3) * 2 + (row >> 2 & 1);
        return kGroup == 8 ? row & 7 : row >> 1 & 3;
    }

    static __device__ __forceinline__ unsigned at(unsigned tile, int row, int chunk) {
        return tile + row * kRowBytes + ((chunk ^ key(row)) << 4);
    }
};

// The address of the two chunks (32 bytes) that a lane reads of its row in step i: `first` XOR 32 i within the
// permuted group. Rows 8 or 16 below have the same key, so one register, one or three XORs of it, and immediate
// offsets reach the whole tile.
template <typename TileT> struct LaneAddress {
    static constexpr int kSpan = TileT::kGroup * 16;  // bytes of a permuted group
    unsigned first;

    LaneAddress() = default;
    __device__ __forceinline__ LaneAddress(unsigned first) : first(ptx::opaque(first)) {}
    __device__ __forceinline__ LaneAddress(unsigned tile, int row, int chunk)
        : LaneAddress(TileT::at(tile, row, chunk)) {}

    __device__ __forceinline__ unsigned at(int i, int rows_down) const {
        return (first ^ i * 32 % kSpan) + (i * 32 / kSpan * kSpan + rows_down * TileT::kRowBytes);
    }
};

// Copies a tile: rows [0, rows) or all of them, and columns [0, cols), where cols is a multiple of a chunk. The rest
// is zero-filled. The caller guarantees cols > kCols - kSpare. Threads are adjacent along a row, so that they read
// whole lines of global memory:
//
//     thread t copies rows t / kAcross + kDown i, last one first, and chunks t % kAcross + kAcross j
//
// row_at(row) returns the global address of the thread's column() in that row of the tile. It is called once per row.
// Rows from `rows` on are not read, so their addresses may be anything.
//
// Source: the dtype in global memory. If it is not that of the tile, the copy goes to a separate place, from which
// each thread fills its chunks of the tile (KeyRows::decode): elements of a chunk adjacent, and threads in order.
template <typename TileT, int kThreads, typename Source = typename TileT::Scalar> struct Copy {
    static constexpr bool kInPlace = sizeof(Source) == sizeof(typename TileT::Scalar);
    static constexpr int kChunkBytes = TileT::kChunk * sizeof(Source);
    static constexpr int kAcross = TileT::kGroup, kDown = kThreads / kAcross;
    static constexpr int kMine = (TileT::kRows + kDown - 1) / kDown;
    static constexpr int kStep = kDown < TileT::kRows ? kDown : TileT::kRows;  // spacing of a thread's rows and tiles
    static constexpr int kLast = TileT::kRows - kStep;
    static constexpr int kBytes = TileT::kRows * TileT::kCols * sizeof(Source);
    static_assert(TileT::kRows % kStep == 0, "the rows of successive tiles are evenly spaced");
    static_assert(kDown % 8 == 0, "a thread's rows have one key");

    static __device__ __forceinline__ int row() { return threadIdx.x / kAcross; }
    static __device__ __forceinline__ int column() { return threadIdx.x % kAcross * TileT::kChunk; }

    // Applies `rule` to the words this thread copied, once they have arrived. Compact rather than fast: for rare cases.
    template <typename Rule> static __device__ __forceinline__ void each_word(unsigned char* tile, Rule rule) {
        each_chunk(tile, [&](uint4& x) { x.x = rule(x.x), x.y = rule(x.y), x.z = rule(x.z), x.w = rule(x.w); });
    }

    // The bits that `test` returns for any of them.
    template <typename Test> static __device__ __forceinline__ unsigned any_word(unsigned char* tile, Test test) {
        unsigned any = 0;
        each_chunk(tile, [&](const uint4& x) { any |= test(x.x) | test(x.y) | test(x.z) | test(x.w); });
        return any;
    }

    template <typename Use> static __device__ __forceinline__ void each_chunk(unsigned char* tile, Use use) {
        #pragma unroll 1
        for (int i = 0; i < kMine * (TileT::kChunks / kAcross); ++i) {
            const int at = row() + i / (TileT::kChunks / kAcross) * kDown;
            if (TileT::kRows % kDown != 0 && at >= TileT::kRows) break;
            const int chunk = threadIdx.x % kAcross + i % (TileT::kChunks / kAcross) * kAcross;
            use(*reinterpret_cast<uint4*>(tile + TileT::at(0, at, chunk)));
        }
    }

    // The thread's first chunk of a tile.
    static __device__ __forceinline__ unsigned at(unsigned tile) {
        return kInPlace ? TileT::at(tile, row(), threadIdx.x % kAcross) : tile + threadIdx.x * kChunkBytes;
    }

    // From there to chunk j of the thread's row i, in bytes.
    static __device__ __forceinline__ constexpr int offset(int i, int j) {
        return kInPlace ? i * kDown * TileT::kRowBytes + j * kAcross * 16
                        : (i * (TileT::kChunks / kAcross) + j) * kStep * kAcross * kChunkBytes;
    }

    template <int kSpare, typename RowAt>
    static __device__ __forceinline__ void start(unsigned to, bool whole, int rows, int cols, RowAt row_at) {
        #pragma unroll
        for (int i = kMine - 1; i >= 0; --i) {
            const int at = row() + i * kDown;
            if (TileT::kRows % kDown != 0 && at >= TileT::kRows) continue;
            const auto* from = row_at(at);
            #pragma unroll
            for (int j = 0; j < TileT::kChunks / kAcross; ++j) {
                const bool exists = (j + 1) * kAcross * TileT::kChunk <= TileT::kCols - kSpare ||
                                    column() + j * kAcross * TileT::kChunk < cols;
                ptx::cp_async<kChunkBytes>(to + offset(i, j), from + j * kAcross * TileT::kChunk,
                                           exists && (whole || at < rows) ? kChunkBytes : 0);
            }
        }
    }
};
