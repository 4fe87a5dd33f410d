// Visibility of keys to rows. The limits are computed once per row, so that an element costs one comparison of its
// constant column index with a register.
#pragma once
#include "shape.cuh"
#include "math.cuh"

enum class Mask {
    kNone,    // all keys
    kCausal,  // up to window_right keys right of the diagonal
    kLocal,   // and no more than window_left keys left of it
};

__device__ __forceinline__ float minus_infinity() { return -infinity(); }

// Key ranges for rows whose diagonals run from key `first` to key `last`: some row sees [begin, end), every row
// sees [all_begin, all_end).
struct KeyRange {
    int begin, end, all_begin, all_end;

    template <Mask kMask>
    static __device__ __forceinline__ KeyRange of(int first, int last, int seqlen_k, int left, int right) {
        KeyRange keys{0, seqlen_k, 0, seqlen_k};
        if constexpr (kMask != Mask::kNone) {
            keys.end = min(seqlen_k, last + right + 1);
            keys.all_end = min(seqlen_k, first + right + 1);
        }
        if constexpr (kMask == Mask::kLocal) {
            keys.begin = max(0, first - left);
            keys.all_begin = max(0, last - left);
        }
        return keys;
    }
};

// Sets scores outside a row's [begin, end) to -inf. Both limits are relative to this lane's first column; element
// [tile][e] is column 8 tile + e.
template <Mask kMask, int kTiles>
__device__ __forceinline__ void mask_row(float (&s)[kTiles][4], int h, int begin, int end) {
    #pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            bool visible = 8 * j + e < end;
            if constexpr (kMask == Mask::kLocal) visible = visible && 8 * j + e >= begin;
            s[j][2 * h + e] = visible ? s[j][2 * h + e] : minus_infinity();
        }
    }
}

// The block mask of one head: one byte per block_q queries by block_k keys, 0 if hidden.
struct BlockMask {
    enum Part { kNothing, kPart, kAll };
    const unsigned char* visible;
    int64 stride_q, stride_k;
    int block_q, block_k;

    // How much of keys [key, key_end) queries [query, query_end) see. A whole warp calls this and shares the lookups.
    __device__ __forceinline__ Part seen(int query, int query_end, int key, int key_end) const {
        const int first_q = query / block_q, first_k = key / block_k;
        const int across = (key_end - 1) / block_k - first_k + 1;
        const int blocks = ((query_end - 1) / block_q - first_q + 1) * across;
        bool any = false, all = true;
        for (int i = threadIdx.x % 32; i < blocks; i += 32) {
            const bool sees = visible[(first_q + i / across) * stride_q + (first_k + i % across) * stride_k];
            any |= sees, all &= sees;
        }
        if (__all_sync(0xffffffffu, all)) return kAll;
        return __any_sync(0xffffffffu, any) ? kPart : kNothing;
    }

    __device__ __forceinline__ bool sees(int query, int key) const {
        return visible[query / block_q * stride_q + key / block_k * stride_k];
    }
};

// Sets scores that the block mask hides from `query` to -inf. Columns from `end` on have no mask entry.
template <int kTiles>
__device__ __forceinline__ void mask_blocks(float (&s)[kTiles][4], int h, const BlockMask& mask, int query,
                                            int first, int end) {
    #pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (8 * j + e < end && !mask.sees(query, first + 8 * j + e)) s[j][2 * h + e] = minus_infinity();
        }
    }
}
