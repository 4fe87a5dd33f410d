// Tiles of a matrix in shared memory: rows of 16-byte chunks, permuted so that neither side meets a bank twice.
//
// ldmatrix reads one chunk of each of 8 rows at a time, a copy writes whole rows. With rows a multiple of the 128
// bytes of all banks, chunk c of row r therefore lies at c ^ (r & 7):
//
//              chunk   0 1 2 3 4 5 6 7
//     row 0            0 1 2 3 4 5 6 7         an odd multiple of 64 bytes: two rows to a line of banks,
//     row 1            1 0 3 2 5 4 7 6         and c ^ ((r / 2) & 3)
//     row 2            2 3 0 1 6 7 4 5
#pragma once
#include "ptx.cuh"

template <typename T, int kRows_, int kCols_> struct Tile {
    using Scalar = T;
    static constexpr int kRows = kRows_;
    static constexpr int kRowBytes = kCols_ * sizeof(T);
    static constexpr int kChunk = 16 / sizeof(T);  // elements
    static constexpr int kChunks = kRowBytes / 16;
    static constexpr int kGroup = kRowBytes % 128 == 0 ? 8 : 4;  // chunks that change places with one another
    static constexpr int kBytes = kRows * kRowBytes;
    static_assert(kRowBytes % 64 == 0 && kRows % 8 == 0, "no permutation for such rows");

    static __device__ __forceinline__ int key(int row) { return kGroup == 8 ? row & 7 : (row >> 1) & 3; }

    static __device__ __forceinline__ unsigned at(unsigned tile, int row, int chunk) {
        return tile + row * kRowBytes + ((chunk ^ key(row)) << 4);
    }
};

// Where a lane finds 32 bytes (two chunks) of its row: in step i at base + (step ^ twist) + a constant. Rows 8 or 16
// further down have the same key, so that few registers hold all addresses of a tile.
template <typename TileT> struct LaneAddress {
    static constexpr int kSpan = TileT::kGroup * 16;  // bytes that change places with one another
    int row;    // of chunk 0, were it not permuted
    int twist;  // (chunk parity ^ key) * 16

    __device__ __forceinline__ LaneAddress(int lane_row, int lane_chunk)
        : row(lane_row * TileT::kRowBytes), twist((lane_chunk ^ TileT::key(lane_row)) << 4) {}

    __device__ __forceinline__ unsigned at(unsigned tile, int i, int rows_down) const {
        return tile + row + ((i * 32 % kSpan) ^ twist) + i * 32 / kSpan * kSpan + rows_down * TileT::kRowBytes;
    }
};

// Copies rows [0, rows) and columns [0, cols) of a matrix, zeros elsewhere; cols is a multiple of a chunk. Threads
// lie side by side along a row, for whole lines of global memory. row_at(r, inside) is the
// address of row r; outside, of anything: it is not read.
template <typename TileT, int kThreads, typename RowAt>
__device__ __forceinline__ void copy_tile_async(unsigned tile, int rows, int cols, RowAt row_at) {
    constexpr int kAcross = TileT::kGroup, kDown = kThreads / kAcross;
    static_assert(kDown % 8 == 0, "a thread's rows have one key");
    const int row0 = threadIdx.x / kAcross, chunk0 = threadIdx.x % kAcross;
    const unsigned to = TileT::at(tile, row0, chunk0);
    #pragma unroll
    for (int r = 0; r < (TileT::kRows + kDown - 1) / kDown; ++r) {
        const int row = row0 + r * kDown;
        if (TileT::kRows % kDown != 0 && row >= TileT::kRows) break;
        const bool inside = row < rows;
        const auto* from = row_at(row, inside) + chunk0 * TileT::kChunk;
        #pragma unroll
        for (int c = 0; c < TileT::kChunks / kAcross; ++c) {
            const bool column = (chunk0 + c * kAcross) * TileT::kChunk < cols;
            ptx::cp_async16(to + r * kDown * TileT::kRowBytes + c * kAcross * 16, from + c * kAcross * TileT::kChunk,
                               inside && column ? 16 : 0);
        }
    }
}
