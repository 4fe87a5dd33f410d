// Tiles of a matrix in shared memory: rows of 16-byte chunks, permuted so that neither side meets a bank
// twice.
//
// ldmatrix reads one chunk of each of 8 rows at a time, a copy writes whole rows. With rows a multiple of the
// 128 bytes of all banks, chunk c of row r therefore lies at c ^ (r & 7):
//
//              chunk   0 1 2 3 4 5 6 7
//     row 0            0 1 2 3 4 5 6 7         an odd multiple of 64 bytes: two rows to a line of banks,
//     row 1            1 0 3 2 5 4 7 6         and c ^ ((r / 2) & 3)
//     row 2            2 3 0 1 6 7 4 5
#pragma once
#include "ptx.cuh"

//
// kPairs: for float accumulators, of which a row's quad writes two chunks at a time, 4 rows of them at once.
template <typename T, int kRows_, int kCols_, bool kPairs = false> struct Tile {
    using Scalar = T;
    static constexpr int kRows = kRows_, kCols = kCols_;
    static constexpr int kRowBytes = kCols_ * sizeof(T);
    static constexpr int kChunk = 16 / sizeof(T);  // elements
    static constexpr int kChunks = kRowBytes / 16;
    static constexpr int kGroup = kRowBytes % 128 == 0 ? 8 : 4;  // chunks that change places with one another
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

// Where a lane finds 32 bytes (two chunks) of its row in step i: at the first, exclusive or 32 i within the bytes that
// change places with one another. Rows 8 or 16 further down have the same key: a register, one or three exclusive ors
// of it and constants make all addresses of a tile.
template <typename TileT> struct LaneAddress {
    static constexpr int kSpan = TileT::kGroup * 16;  // bytes that change places with one another
    unsigned first;

    LaneAddress() = default;
    __device__ __forceinline__ LaneAddress(unsigned first) : first(ptx::opaque(first)) {}
    __device__ __forceinline__ LaneAddress(unsigned tile, int row, int chunk)
        : LaneAddress(TileT::at(tile, row, chunk)) {}

    __device__ __forceinline__ unsigned at(int i, int rows_down) const {
        return (first ^ i * 32 % kSpan) + (i * 32 / kSpan * kSpan + rows_down * TileT::kRowBytes);
    }
};

// Copies a tile, rows [0, rows) of it or the whole, and columns [0, cols), a multiple of a chunk; zeros elsewhere. The
// caller knows of columns that they are more than kCols - kSpare. Threads lie side by side along a row, for whole
// lines of global memory:
//
//     thread t has rows t / kAcross + kDown i, the last first, and chunks t % kAcross + kAcross j
//
// row_at(row) is where in global memory this row of the tile has the thread's column(); it is asked once per row. From
// `rows` on it is not read and may be anywhere.
template <typename TileT, int kThreads> struct Copy {
    static constexpr int kAcross = TileT::kGroup, kDown = kThreads / kAcross;
    static constexpr int kMine = (TileT::kRows + kDown - 1) / kDown;
    static constexpr int kStep = kDown < TileT::kRows ? kDown : TileT::kRows;  // from row to row, and tile to tile
    static constexpr int kLast = TileT::kRows - kStep;
    static_assert(TileT::kRows % kStep == 0, "the rows of successive tiles are evenly spaced");
    static_assert(kDown % 8 == 0, "a thread's rows have one key");

    static __device__ __forceinline__ int row() { return threadIdx.x / kAcross; }
    static __device__ __forceinline__ int column() { return threadIdx.x % kAcross * TileT::kChunk; }

    // Applies rule to the words that this thread has copied, when they have arrived: for rare cases, and
    // small.
    template <typename Rule> static __device__ __forceinline__ void each_word(unsigned char* tile, Rule rule) {
        #pragma unroll 1
        for (int i = 0; i < kMine * (TileT::kChunks / kAcross); ++i) {
            const int at = row() + i / (TileT::kChunks / kAcross) * kDown;
            if (TileT::kRows % kDown != 0 && at >= TileT::kRows) break;
            const int chunk = threadIdx.x % kAcross + i % (TileT::kChunks / kAcross) * kAcross;
            uint4& x = *reinterpret_cast<uint4*>(tile + TileT::at(0, at, chunk));
            x.x = rule(x.x), x.y = rule(x.y), x.z = rule(x.z), x.w = rule(x.w);
        }
    }

    // The thread's first chunk in a tile.
    static __device__ __forceinline__ unsigned at(unsigned tile) {
        return TileT::at(tile, row(), threadIdx.x % kAcross);
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
                ptx::cp_async16(to + i * kDown * TileT::kRowBytes + j * kAcross * 16,
                                from + j * kAcross * TileT::kChunk, exists && (whole || at < rows) ? 16 : 0);
            }
        }
    }
};
