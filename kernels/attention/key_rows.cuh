// A thread's view of the rows of K or V of one sequence and head, contiguous or paged, as it copies them tile by
// tile from right to left. Rows of quantized pages (codes.cuh) are copied as they are, and turned into numbers when they
// have arrived.
#pragma once
#include "shape.cuh"
#include "codes.cuh"
#include "scalar.cuh"
#include "tile.cuh"

enum class Pages {
    kNone,   // contiguous
    kRows,   // each row looks up its page
    kTiles,  // all rows of a tile share a page
};

// The scales of quantized pages: of row 0 of the head in page 0, and strides between pages and rows.
struct RowScales {
    const float* first;
    RowStrides stride;
};

// Source: the dtype of the array, that of the tile or of codes.
template <typename TileT, int kThreads, Pages kPages, int kSpare, typename Source> class KeyRows {
public:
    using Loader = Copy<TileT, kThreads, Source>;
    using Scalar = typename TileT::Scalar;
    static constexpr bool kCodes = !Loader::kInPlace;

    // first: row 0 of the head; in page 0 if paged.
    __device__ __forceinline__ KeyRows(const Source* first, const RowStrides& stride, const int* pages, int page_size,
                                       const RowScales& scales)
        : at_(first + Loader::column()), stride_(stride), pages_(pages), page_size_(page_size), scales_(scales) {}

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
        const Source* at = at_;
        const float* scale = scales_.first;
        if constexpr (kPages == Pages::kTiles) {
            const Slot slot = slot_of(first);
            at += slot.offset(stride_) + (Loader::kLast + Loader::row()) * stride_.row;
            if constexpr (kCodes) {
                scale += slot.offset(scales_.stride) + (Loader::kLast + Loader::row()) * scales_.stride.row;
            }
        }
        int i = Loader::kMine;
        Loader::template start<kSpare>(to, whole, seqlen_k - first, cols, [&](int row) {
            if constexpr (kPages == Pages::kRows) {
                // Never look up a page that holds no key.
                const Slot slot = slot_of(whole ? first + row : min(first + row, seqlen_k - 1));
                if constexpr (kCodes) row_scale_[--i] = scale[slot.offset(scales_.stride)];
                return at + slot.offset(stride_);
            } else {
                if constexpr (kCodes) {
                    row_scale_[--i] = whole || first + row < seqlen_k ? *scale : 0.0f;  // else it may be NaN
                    scale -= Loader::kStep * scales_.stride.row;
                }
                const Source* now = at;
                at = ptx::opaque(now - Loader::kStep * stride_.row);
                return now;
            }
        });
        if constexpr (!kPaged) at_ = at;
    }

    // Fills this thread's chunks of `tile` with the numbers of the codes that it copied to `from`. kScaled: times the
    // scales of their rows, rounded; else `scale_of_row` gets those.
    template <bool kScaled>
    __device__ __forceinline__ void decode(unsigned char* tile, const unsigned char* from, float* scale_of_row) const {
        #pragma unroll
        for (int i = 0; i < Loader::kMine; ++i) {
            const int row = Loader::row() + i * Loader::kDown;
            if (TileT::kRows % Loader::kDown != 0 && row >= TileT::kRows) continue;
            #pragma unroll
            for (int j = 0; j < TileT::kChunks / Loader::kAcross; ++j) {
                const unsigned char* codes = from + Loader::at(0) + Loader::offset(i, j);
                unsigned number[4];
                if constexpr (Loader::kChunkBytes == 8) {
                    const uint2 word = *reinterpret_cast<const uint2*>(codes);
                    ::decode<Scalar, Source>(word.x, number);
                    ::decode<Scalar, Source>(word.y, number + 2);
                } else {
                    ::decode<Scalar, Source>(*reinterpret_cast<const unsigned*>(codes), number);
                }
                if constexpr (kScaled) scale(number, row_scale_[i]);
                const int chunk = threadIdx.x % Loader::kAcross + j * Loader::kAcross;
                *reinterpret_cast<uint4*>(tile + TileT::at(0, row, chunk)) =
                    make_uint4(number[0], number[1], number[2], number[3]);
            }
            if (!kScaled && threadIdx.x % Loader::kAcross == 0) scale_of_row[row] = row_scale_[i];
        }
    }

    // One element, before seek(). Slow.
    __device__ __forceinline__ float at(int key, int col) const {
        const Source x = (at_ + (kPaged ? slot_of(key).offset(stride_) : key * stride_.row))[col - Loader::column()];
        if constexpr (kCodes) return widened_code(x) * scales_.first[slot_of(key).offset(scales_.stride)];
        else return widened(x);
    }

private:
    static constexpr bool kPaged = kPages != Pages::kNone;

    struct Slot {
        int64 page;
        unsigned row;

        __device__ __forceinline__ int64 offset(const RowStrides& stride) const {
            return page * stride.batch + row * stride.row;
        }
    };

    __device__ __forceinline__ Slot slot_of(unsigned key) const {
        const unsigned page = key / page_size_;
        return {pages_[page], key - page * page_size_};
    }

    static __device__ __forceinline__ void scale(unsigned (&number)[4], float by) {
        constexpr int kPerWord = Packed<Scalar>::kPerWord;
        #pragma unroll
        for (int w = 0; w < 4; ++w) {
            float value[kPerWord];
            Packed<Scalar>::widen(number[w], value);
            #pragma unroll
            for (int e = 0; e < kPerWord; ++e) value[e] *= by;
            number[w] = Packed<Scalar>::narrow(value);
        }
    }

    const Source* at_;   // the thread's column of row 0; after seek(), unpaged, of its last row in the next tile
    RowStrides stride_;  // batch: stride between pages
    const int* pages_;
    unsigned page_size_;
    RowScales scales_;
    float row_scale_[kCodes ? Loader::kMine : 1];  // of the thread's rows in the tile that it loads
};
