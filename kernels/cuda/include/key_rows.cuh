// The rows of K or V of one sequence and head, as a thread copies them tile by tile: one after the other, or
// in pages.
#pragma once
#include "attention_shape.cuh"
#include "tile.cuh"

template <typename TileT, int kThreads, bool kPaged> class KeyRows {
public:
    using Loader = Copy<TileT, kThreads>;
    using Scalar = typename TileT::Scalar;

    // first: row 0 of the head, in page 0 if there are pages.
    __device__ __forceinline__ KeyRows(const Scalar* first, const RowStrides& stride, const int* pages, int page_size)
        : column_(first + Loader::column()), stride_(stride), pages_(pages), page_size_(page_size) {}

    // Starts to copy tile n; all of it exists, or rows up to seqlen_k.
    template <bool kWhole> __device__ __forceinline__ void load(unsigned tile, int n, int seqlen_k, int cols) const {
        const int first = n * TileT::kRows;
        if constexpr (kPaged) {
            Loader::template start<kWhole>(tile, seqlen_k - first, cols, [&](int row, int) {
                // No page is looked up that holds no key.
                const unsigned key = min(first + row, seqlen_k - 1), page = key / page_size_;
                return column_ + pages_[page] * stride_.batch + (key - page * page_size_) * stride_.row;
            });
        } else {
            const Scalar* at = ptx::opaque(column_ + (first + Loader::row()) * stride_.row);
            Loader::template start<kWhole>(tile, seqlen_k - first, cols, [&](int, int i) {
                if (i > 0) at = ptx::opaque(at + Loader::kDown * stride_.row);
                return at;
            });
        }
    }

    // One number: slow.
    __device__ __forceinline__ Scalar at(int key, int col) const {
        const int page = kPaged ? key / page_size_ : 0;
        const int64 first = kPaged ? pages_[page] * stride_.batch : 0;
        return column_[first + (key - page * static_cast<int>(page_size_)) * stride_.row + col - Loader::column()];
    }

private:
    const Scalar* column_;  // the thread's, of row 0
    RowStrides stride_;     // batch: from page to page
    const int* pages_;
    unsigned page_size_;
};
