// A thread's view of the rows of K or V of one sequence and head, contiguous or paged, as it copies them tile by
// tile from right to left.
#pragma once
#include "attention_shape.cuh"
#include "tile.cuh"

enum class Pages {
    kNone,   // contiguous
    kRows,   // each row looks up its page
    kTiles,  // all rows of a tile share a page
};

template <typename TileT, int kThreads, Pages kPages, int kSpare> class KeyRows {
public:
    using Loader = Copy<TileT, kThreads>;
    using Scalar = typename TileT::Scalar;

    // first: row 0 of the head; in page 0 if paged.
    __device__ __forceinline__ KeyRows(const Scalar* first, const RowStrides& stride, const int* pages, int page_size)
        : at_(first + Loader::column()), stride_(stride), pages_(pages), page_size_(page_size) {}

    // Moves from row 0 to the first tile to load, n.
    __device__ __forceinline__ void seek(int n) {
        if constexpr (!kPaged) at_ += (n * TileT::kRows + Loader::kLast + Loader::row()) * stride_.row;
    }

    __device__ __forceinline__ void skip(int tiles) {
        if constexpr (!kPaged) at_ -= tiles * TileT::kRows * stride_.row;
    }

    // Starts copying tile n and moves on to tile n - 1. whole: all its rows exist; otherwise only those below seqlen_k.
    // A thread's rows are evenly spaced, also across tiles: one subtraction per row, no address arithmetic per tile.
    __device__ __forceinline__ void load(unsigned to, int n, bool whole, int seqlen_k, int cols) {
        const int first = n * TileT::kRows;
        const Scalar* at = at_;
        if constexpr (kPages == Pages::kTiles) at = row_of(first) + (Loader::kLast + Loader::row()) * stride_.row;
        Loader::template start<kSpare>(to, whole, seqlen_k - first, cols, [&](int row) {
            if constexpr (kPages == Pages::kRows) {
                // Never look up a page that holds no key.
                return row_of(whole ? first + row : min(first + row, seqlen_k - 1));
            } else {
                const Scalar* now = at;
                at = ptx::opaque(now - Loader::kStep * stride_.row);
                return now;
            }
        });
        if constexpr (!kPaged) at_ = at;
    }

    // One element, before seek(). Slow.
    __device__ __forceinline__ Scalar at(int key, int col) const {
        return (kPaged ? row_of(key) : at_ + key * stride_.row)[col - Loader::column()];
    }

private:
    static constexpr bool kPaged = kPages != Pages::kNone;

    // The thread's column of a row, by its page.
    __device__ __forceinline__ const Scalar* row_of(unsigned key) const {
        const unsigned page = key / page_size_;
        return at_ + pages_[page] * stride_.batch + (key - page * page_size_) * stride_.row;
    }

    const Scalar* at_;   // the thread's column of row 0; after seek(), unpaged, of its last row in the next tile
    RowStrides stride_;  // batch: stride between pages
    const int* pages_;
    unsigned page_size_;
};
