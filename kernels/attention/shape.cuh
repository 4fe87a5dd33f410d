// Sizes, strides and scalars of an attention problem, passed by value; problem.py mirrors it.
//
// Strides are in elements; the stride of head_dim is 1. With VARLEN or SEQUSED_K, seqlen_q and seqlen_k are those
// of the longest sequence.
#pragma once
#include "scores.cuh"

typedef long long int64;

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;  // scores are in units of log2

// ln sum exp of a row, from its largest score in units of log2 and the sum of the weights relative to it.
template <typename T> __device__ __forceinline__ T lse_of(float row_max, float row_sum) {
    if constexpr (sizeof(T) == 4) return fmaf(row_max, kLn2, logf(row_sum));
    else return fma(static_cast<double>(row_max), 0.69314718055994531, log(static_cast<double>(row_sum)));
}

struct RowStrides { int64 batch, row, head; };

struct AttentionShape {
    RowStrides q, k, v, out;               // with PAGED, the batch stride of k and v is that of a page
    RowStrides k_scale, v_scale;           // of quantized pages, the same
    int64 lse_batch, lse_head;             // queries are adjacent
    int64 out_split, lse_split;            // SPLIT: stride between splits
    int64 bias[4], block_mask[4];          // batch, head, query (block), key (block); 0 if broadcast
    int64 block_table_batch;
    int64 alibi_batch;                     // 0: all sequences share the slopes
    unsigned long long seed;               // DROPOUT: unless it is in an array
    int seqlen_q, seqlen_k;
    int nheads, group;                     // group = nheads / nheads_kv, the query heads per key head
    int head_dim, head_dim_v;              // multiples of 8
    int window_left, window_right;         // visible keys left and right of the diagonal; 2^30: unlimited
    int block_q, block_k, page_size;
    int num_splits;
    AttentionScores scores;
};
