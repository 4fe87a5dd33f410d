// Effect of options on the scores of attention; problem.py mirrors the structure and sets the macros.
//
//   s = softmax_scale q k^T, then softcap tanh(s / softcap), - slope |i + offset - j|, + bias
//   offset = seqlen_k - seqlen_q + ahead
//
//   SOFTCAP ALIBI SINKS   0 or 1
//   DROPOUT               0 or 1: of the weights, see dropout.cuh
//   BIAS                  kNone, kSame (DTYPE), kFloat
#pragma once
#include "ptx.cuh"

enum class Bias { kNone, kSame, kFloat };

struct AttentionScores {
    float scale_log2;                      // |softmax_scale| log2(e), > 0
    float softcap_in, softcap_log2;        // |softmax_scale| / softcap and softcap log2(e)
    int negate;                            // softmax_scale < 0
    int ahead;                             // only for ALiBi; the host includes it in windows
    unsigned dropped;                      // 2^32 dropout_p: with DROPOUT, random bits below it drop a weight
    float keep_scale, keep_scale_log2;     // 1 / (1 - dropout_p) and its log2
    int query0, key0;                      // positions of the first query and key, multiples of 16 and 32: of dropout
};

#ifdef SOFTCAP  // a kernel that computes scores
constexpr Bias kBias = Bias::BIAS;

// A lower finite bias is raised to this one: in units of log2 it would overflow to -inf and hide its key.
constexpr float kLowestBias = -2.28e38f;

// The scale of plain scores folds into the FMA that computes the exponent.
constexpr bool kPlainScores = !SOFTCAP && !ALIBI && kBias == Bias::kNone;

// tanh.approx errs by half a unit of float16. That is too much for float32: a cap that is large relative to the scores
// magnifies the error of small ones.
template <typename scalar> __device__ __forceinline__ float soft_sign(float x) {
    if constexpr (sizeof(scalar) == 2) return ptx::tanh(x);
    else return tanhf(x);
}

// Turns a product q k^T into its score without ALiBi and bias, in units of log2.
template <typename scalar> __device__ __forceinline__ void make_score(float& x, const AttentionScores& scores) {
    if constexpr (SOFTCAP) x = scores.softcap_log2 * soft_sign<scalar>(x * scores.softcap_in);
    else x *= scores.scale_log2;
}

// The same with SOFTCAP, for gradients; returns the derivative of the cap.
template <typename scalar> __device__ __forceinline__ float cap_score(float& x, const AttentionScores& scores) {
    const float t = soft_sign<scalar>(x * scores.softcap_in);
    x = scores.softcap_log2 * t;
    return fmaf(-t, t, 1.0f);
}
#endif
