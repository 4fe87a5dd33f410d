// Sizes, strides and scalars of an attention problem, passed by value; kernels/lower/attention_shape.py mirrors it.
//
// Strides count elements; that of head_dim is 1. seqlen_q and seqlen_k are those of every sequence, or with
// VARLEN and SEQUSED_K the longest.
#pragma once

typedef long long int64;

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;  // scores are in units of log2

struct RowStrides { int64 batch, row, head; };

struct AttentionShape {
    RowStrides q, k, v, out;               // of k and v with PAGED: batch is that of a page
    int64 lse_batch, lse_head;             // queries side by side
    int64 out_split, lse_split;            // SPLIT: from one part of the keys to the next
    int64 bias[4], block_mask[4];          // batch, head, query (block), key (block); 0 where broadcast
    int64 block_table_batch;
    int64 alibi_batch;                     // 0: the same slopes for every sequence
    int seqlen_q, seqlen_k;
    int nheads, group;                     // group = nheads / nheads_kv: query heads that share a key head
    int head_dim, head_dim_v;              // multiples of 8
    int window_left, window_right;         // keys visible left and right of the diagonal; 2^30: no limit
    int block_q, block_k, page_size;
    int num_splits;
    float scale_log2;                      // |softmax_scale| log2(e), > 0
    float softcap_in, softcap_log2;        // |softmax_scale| / softcap and softcap log2(e)
    int negate;                            // softmax_scale < 0
};
