// What the attention kernels, forward and backward, agree on about a score.
#pragma once
#include "mma.cuh"

enum class Bias { kNone, kSame, kFloat };

// A lower finite bias is raised to this one: in units of log2 it would overflow to -inf and hide its key.
constexpr float kLowestBias = -2.28e38f;

// tanh for softcap. tanh.approx errs by half a unit of float16. That is too much for float32: a cap that is large
// beside the scores magnifies the error of small ones.
template <typename T> __device__ __forceinline__ float soft_sign(float x) {
    if constexpr (sizeof(T) == 2) return ptx::tanh(x);
    else return tanhf(x);
}
