// Sizes, strides and scalars of attention backward, passed by value; kernels/attention/backward_raw.py mirrors
// it.
//
// Strides are in elements; the stride of head_dim is 1. With VARLEN, seqlen_q and seqlen_k are those of the longest
// sequence, and batch strides are 0.
//
// The kernels hand each other arrays with rows of one head adjacent and every sequence padded to whole kPad rows:
//
//   statistics      (batch, nheads, rows) of Statistics
//   rests           (batch, nheads, rows) float: of rows whose lse is_coarse, the others are not written
//   dq_sum          (batch, nheads, rows / 16, HEAD_DIM / 8, 4, 32) float: accumulators of mma.sync in the layout of
//                   registers, so that a warp adds 32 adjacent floats at a time
//   dk_sum, dv_sum  (parts, batch, nheads_kv, rows / 16, HEAD_DIM(_V) / 8, 4, 32) float, the same, for parts > 1
#pragma once
#include "shape.cuh"
#include "math.cuh"

constexpr int kPad = 64;

// dq, dk and dv: of DTYPE, of float, or of float and added to what they hold.
enum class Grads { kPlain, kFloat, kAdded };

// Inputs of a row of P: P = 2^(score - lse), dS = P (dP - delta). With dropout P includes the factor
// 1 / (1 - dropout_p) of the weights that are kept, and delta its inverse: the others only need dP = 0.
//
// A large lse is too coarse: float32 of -1e9 + log(100) is -1e9, and keys that all have this bias would weigh 1 each
// instead of 1 / 100. There lse is the largest score of the row, and P = 2^(score - lse - rest), with the log2 of the
// sum of the weights relative to it.
template <bool kSplit> struct Statistics;
template <> struct __align__(8) Statistics<false> {
    float lse;    // in units of log2; +inf for rows that see no key and for padding, so that P is 0
    float delta;  // sum over head_dim_v of dout * out

    static __device__ __forceinline__ Statistics of(float lse, float delta, float) { return {lse, delta}; }
    __device__ __forceinline__ float rest() const { return 0.0f; }
};
// Of an lse in double: lse + rest, whatever its size.
template <> struct __align__(16) Statistics<true> {
    float lse, delta, rest_, unused;

    static __device__ __forceinline__ Statistics of(float lse, float delta, float rest) {
        return {lse, delta, rest, 0.0f};
    }
    __device__ __forceinline__ float rest() const { return rest_; }
};

// Below this a float errs by 2^-11 at most, a double by 2^-13.
template <bool kSplit> constexpr float kCoarse = kSplit ? 0x1p40f : 0x1p13f;

template <bool kSplit> __device__ __forceinline__ bool is_coarse(float lse) {
    return fabsf(lse) >= kCoarse<kSplit> && fabsf(lse) < infinity();
}

struct BackwardShape {
    RowStrides q, k, v, out, dout, dq, dk, dv;
    RowStrides wide_dout;                  // of dout in float, which dout is rounded from
    int64 lse[3], delta[3];                // batch, head, query
    int64 bias[4], dbias[4], block_mask[4];  // batch, head, query (block), key (block); 0 if broadcast
    int64 alibi_batch;                     // 0: all sequences share the slopes
    int64 padded_batch, padded_head;       // rows of statistics and dq_sum
    int64 padded_batch_k, padded_head_k, padded_part;  // rows of dk_sum and dv_sum
    unsigned long long seed;               // DROPOUT: unless it is in an array
    int parts, part_heads;                 // into which the query heads of a group are divided, and how many each has
    int batch;
    int bias_shape[4];                     // of dbias: 1, or the full length
    int seqlen_q, seqlen_k;
    int nheads, group;                     // group = nheads / nheads_kv, the query heads per key head
    int head_dim, head_dim_v;              // multiples of 8
    int window_left, window_right;         // visible keys left and right of the diagonal; 2^30: unlimited
    int block_q, block_k;
    float scale;                           // softmax_scale
    AttentionScores scores;                // with the sign of softmax_scale in its factors
};

// Position of a sequence in q, k and the padded arrays.
struct Sequence {
    int number, q_begin, seqlen_q, k_begin, seqlen_k;

    template <bool kPacked>
    static __device__ __forceinline__ Sequence of(const BackwardShape& shape, int number, const int* starts_q,
                                                  const int* starts_k) {
        if constexpr (!kPacked) return {number, 0, shape.seqlen_q, 0, shape.seqlen_k};
        const int q = starts_q[number], k = starts_k[number];
        return {number, q, starts_q[number + 1] - q, k, starts_k[number + 1] - k};
    }

    __device__ __forceinline__ int shift() const { return seqlen_k - seqlen_q; }

    // Its first row in the padded arrays of a head, or of a key head.
    template <bool kPacked> __device__ __forceinline__ int64 padded(const BackwardShape& shape, int head) const {
        const int64 first = kPacked ? int64(q_begin / kPad + number) * kPad : number * shape.padded_batch;
        return first + head * shape.padded_head;
    }
    template <bool kPacked> __device__ __forceinline__ int64 padded_k(const BackwardShape& shape, int head) const {
        const int64 first = kPacked ? int64(k_begin / kPad + number) * kPad : number * shape.padded_batch_k;
        return first + head * shape.padded_head_k;
    }
};
