// The scores of attention backward, as backward_sm80.cu and backward_statistics.cu both compute them.
#pragma once
#include "backward_shape.cuh"
#include "scores.cuh"
#include "mask.cuh"
#include "scalar.cuh"

typedef DTYPE scalar;
typedef Statistics<WIDE_LSE> RowStatistics;
constexpr Mask kMask = Mask::MASK;

// A sequence and what decides its scores.
struct ScoredSequence {
    Sequence sequence;
    int batch;
    const float* alibi_slopes;
    const unsigned char* bias;
    const unsigned char* block_mask;

    // The arrays as given: of all sequences.
    __device__ __forceinline__ void set_arrays(const BackwardShape& shape, const float* all_slopes,
                                               const unsigned char* all_bias, const unsigned char* all_blocks) {
        if constexpr (ALIBI) alibi_slopes = all_slopes + batch * shape.alibi_batch;
        if constexpr (kBias != Bias::kNone) {
            bias = all_bias + batch * shape.bias[0] * (kBias == Bias::kFloat ? sizeof(float) : sizeof(scalar));
        }
        if constexpr (BLOCK_MASK) block_mask = all_blocks + batch * shape.block_mask[0];
    }

    __device__ __forceinline__ BlockMask blocks(const BackwardShape& shape, int head) const {
        return {block_mask + head * shape.block_mask[1], shape.block_mask[2], shape.block_mask[3], shape.block_q,
                shape.block_k};
    }
    __device__ __forceinline__ float bias_at(const BackwardShape& shape, int head, int query, int key) const {
        if constexpr (kBias == Bias::kNone) return 0.0f;
        const int64 at = head * shape.bias[1] + query * shape.bias[2] + key * shape.bias[3];
        if constexpr (kBias == Bias::kFloat) return reinterpret_cast<const float*>(bias)[at];
        else return widened(reinterpret_cast<const scalar*>(bias)[at]);
    }
    // In units of log2.
    __device__ __forceinline__ float slope(int head) const { return ALIBI ? alibi_slopes[head] * kLog2e : 0.0f; }

    // Does the query see the key? The same masks as for whole tiles, for one pair.
    __device__ __forceinline__ bool sees(const BackwardShape& shape, int head, int query, int key) const {
        if (query >= sequence.seqlen_q || key >= sequence.seqlen_k) return false;
        const int along = key - query - sequence.shift();
        bool visible = true;
        if (kMask != Mask::kNone) visible = along <= shape.window_right;
        if (kMask == Mask::kLocal) visible = visible && along >= -shape.window_left;
        if (BLOCK_MASK) visible = visible && blocks(shape, head).sees(query, key);
        return visible && bias_at(shape, head, query, key) != minus_infinity();
    }
};

// Turns a product q k^T into its score in units of log2, but for the scale of plain scores; returns the derivative of
// the cap. distance: |i + offset - j|.
__device__ __forceinline__ float make_gradient_score(float& x, const AttentionScores& scores, float slope,
                                                     float distance, float bias) {
    float slope_of_cap = 1.0f;
    if constexpr (SOFTCAP) slope_of_cap = cap_score<scalar>(x, scores);
    const float scale = SOFTCAP ? 1.0f : scores.scale_log2;
    if constexpr (ALIBI) x = fmaf(-slope, distance, SOFTCAP ? x : x * scale);
    if constexpr (kBias != Bias::kNone) {
        x = fmaf(bias < kLowestBias ? kLowestBias : bias, kLog2e, SOFTCAP || ALIBI ? x : x * scale);
    }
    return slope_of_cap;
}

// log2 of such a score's weight relative to `lse`.
__device__ __forceinline__ float exponent_of(float x, const AttentionScores& scores, float lse) {
    return kPlainScores ? fmaf(x, scores.scale_log2, -lse) : x - lse;
}
