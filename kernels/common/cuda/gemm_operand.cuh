// GEMM operands: from global memory to a tile in shared memory, and from there to registers.
//
// Rows of A are rows of the result, rows of B are its columns; both have K columns. In memory an operand lies
//
//   along K        (rows, K)    C = A B^T           tile: ROWS x BLOCK_K, read by ldmatrix
//   across K       (K, rows)    C = A B, A^T B      tile: BLOCK_K x ROWS, read by ldmatrix.trans; floats one by one
//
// Rows and columns of a tile beyond the operand's edge are zero.
#pragma once
#include "tile.cuh"

typedef long long int64;

template <typename T, bool kAlongK, int kRows, int kBlockK> struct OperandTile {
    // A lane loads single floats, and a warp touches two chunks of 4 rows at once: kPairs avoids their conflicts.
    typedef Tile<T, kBlockK, kRows, sizeof(T) == 4> Across;
    typedef Tile<T, kRows, kBlockK> Along;
    template <bool, typename X, typename> struct Choose { typedef X type; };
    template <typename X, typename Y> struct Choose<false, X, Y> { typedef Y type; };
    typedef typename Choose<kAlongK, Along, Across>::type type;
};

// A thread's share in copying an operand, tile by tile along K. As in Copy (tile.cuh), threads are adjacent along a row
// of the tile: thread t copies rows t / kAcross + kDown i and chunks t % kAcross + kAcross j.
//
// kInterleaved, for an operand along K: two matrices of the same size share the tile, 8 rows of each in turn. Their
// accumulators for the same elements of the result are then adjacent:
//
//     tile row          0 .. 7     8 .. 15    16 .. 23    24 .. 31
//     matrix, row      0, 0 .. 7  1, 0 .. 7   0, 8 .. 15  1, 8 .. 15
//
// kAligned: addresses, row strides and row lengths are multiples of 16 bytes. Otherwise elements are loaded one by one,
// synchronously.
template <typename TileT, bool kAlongK, int kBlockK, int kThreads, bool kAligned, bool kInterleaved = false>
class Loader {
    typedef typename TileT::Scalar Scalar;
    static constexpr int kAcross = TileT::kGroup, kDown = kThreads / kAcross;
    static constexpr int kMine = (TileT::kRows + kDown - 1) / kDown, kChunksMine = TileT::kChunks / kAcross;
    static constexpr int kRowStep = kInterleaved ? kDown / 2 : kDown;  // in memory
    static_assert(kDown % (kInterleaved ? 16 : 8) == 0, "a thread's rows have one key, and one matrix");
    static_assert(!kInterleaved || kAlongK, "rows are interleaved");

    const Scalar* at_;  // this thread's first element of the next tile
    int64 stride_;      // of rows in memory
    int rows_, cols_;   // rows and columns left, from that element on

public:
    struct Matrix { const Scalar* first; int64 stride; };

    Loader() = default;

    // Covers rows [first, rows) of the operand, from column k to k_end. other: the second of two interleaved matrices.
    __device__ __forceinline__ Loader(Matrix matrix, Matrix other, int first, int rows, int k, int k_end) {
        int row = threadIdx.x / kAcross;
        const int col = threadIdx.x % kAcross * TileT::kChunk;
        if constexpr (kInterleaved) {
            if (row / 8 % 2) matrix = other;
            row = row / 16 * 8 + row % 8;
        }
        const int row0 = (kAlongK ? first : k) + row, col0 = (kAlongK ? k : first) + col;
        stride_ = matrix.stride;
        at_ = matrix.first + row0 * stride_ + col0;
        rows_ = (kAlongK ? rows : k_end) - row0;
        cols_ = (kAlongK ? k_end : rows) - col0;
    }

    // Starts copying a tile and moves on to the next.
    __device__ __forceinline__ void load(unsigned tile) {
        const unsigned to = ptx::opaque(TileT::at(tile, threadIdx.x / kAcross, threadIdx.x % kAcross));
        const Scalar* from = at_;
        #pragma unroll
        for (int i = 0; i < kMine; ++i) {
            if (TileT::kRows % kDown != 0 && threadIdx.x / kAcross + i * kDown >= TileT::kRows) break;
            #pragma unroll
            for (int j = 0; j < kChunksMine; ++j) {
                const int cols = i * kRowStep < rows_ ? cols_ - j * kAcross * TileT::kChunk : 0;
                copy(to + i * kDown * TileT::kRowBytes + j * kAcross * 16, from + j * kAcross * TileT::kChunk, cols);
            }
            from = ptx::opaque(from + kRowStep * stride_);
        }
        if constexpr (kAlongK) at_ += kBlockK, cols_ -= kBlockK;
        else at_ += kBlockK * stride_, rows_ -= kBlockK;
    }

private:
    static __device__ __forceinline__ void copy(unsigned to, const Scalar* from, int cols) {
        if constexpr (kAligned) {
            ptx::cp_async16(to, from, cols > 0 ? 16 : 0);
        } else {
            unsigned word[4] = {};
            #pragma unroll
            for (int e = 0; e < TileT::kChunk; ++e) {
                if (e >= cols) continue;
                if constexpr (sizeof(Scalar) == 4) word[e] = __float_as_uint(from[e]);
                else word[e / 2] |= from[e].bits << (16 * (e % 2));
            }
            ptx::store_shared(to, word);
        }
    }
};

// Fragments for mma.sync: 16 rows by 32 bytes of K at a time, as four 8 x 8 matrices (8 x 4 of float):
//
//     matrix q      0               1               2               3
//     A             rows 0 k 0      rows 8 k 0      rows 0 k 1      rows 8 k 1        k 1: the upper 16 bytes
//     B             rows 0 k 0      rows 0 k 1      rows 8 k 0      rows 8 k 1        rows 8: the next tile of C
template <typename TileT, bool kAlongK, bool kIsA> class Fragments {
    static constexpr bool kSingles = !kAlongK && sizeof(typename TileT::Scalar) == 4;

    static __device__ __forceinline__ int row_half(int q) { return kIsA ? q % 2 : q / 2; }
    static __device__ __forceinline__ int k_half(int q) { return kIsA ? q / 2 : q % 2; }

    typedef LaneAddress<TileT> Address;
    Address low_, high_;  // high_: single floats at K + 4

    // The warp's rows start at `first`; in a tile across K that is a column.
    static __device__ __forceinline__ Address address(unsigned tile, int first, int half) {
        const int lane = threadIdx.x % 32;
        if constexpr (kAlongK) {
            return {tile, first + lane % 8 + 8 * row_half(lane / 8), k_half(lane / 8)};
        } else {
            const int byte = first * static_cast<int>(sizeof(typename TileT::Scalar)), near = byte % Address::kSpan;
            tile += byte - near;
            if constexpr (kSingles) return {tile + lane / 4 % 4 * 4, lane % 4 + 4 * half, near / 16 + lane / 16};
            else return {tile, lane % 8 + 8 * k_half(lane / 8), near / 16 + row_half(lane / 8)};
        }
    }

public:
    __device__ __forceinline__ Fragments(unsigned tile, int first)
        : low_(address(tile, first, 0)), high_(address(tile, first, 1)) {}

    // Reads rows 16 i .. of the tile's step k.
    __device__ __forceinline__ void read(unsigned (&r)[4], int i, int k) const {
        if constexpr (kAlongK) {
            ptx::ldmatrix4(r, low_.at(k, 16 * i));
        } else if constexpr (kSingles) {
            #pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int unit = 2 * i + (kIsA ? q % 2 : q / 2);
                r[q] = ptx::load_shared(((kIsA ? q / 2 : q % 2) ? high_ : low_).at(unit, 8 * k));
            }
        } else {
            ptx::ldmatrix4_transposed(r, low_.at(i, 16 * k));
        }
    }
};
