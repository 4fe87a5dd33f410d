// Adds the partial products of a split-K GEMM (gemm_sm80.cu, gemv.cu), in a fixed order: the same bits every time.
//
//   parts  (splits, rows, cols) float, contiguous        c  (rows, cols) DTYPE, row stride in elements
//   residual  like c, added before c is rounded; c itself or null        bias  (cols) DTYPE; null: none
//
// Reads splits * rows * cols floats, mostly from L2, and writes rows * cols values.
//
// Macros: DTYPE; WIDTH 4 (cols, strides and addresses are multiples of 4 elements) or 1: columns per thread.
//   grid   (ceil(rows * cols / WIDTH / 256))     block 256
#include "scalar.cuh"

typedef long long int64;
typedef DTYPE scalar;

extern "C" __global__ void __launch_bounds__(256)
gemm_sum(const float* parts, scalar* c, const scalar* residual, const scalar* bias, int64 rows, int64 cols,
         int64 stride, int64 residual_stride, int splits) {
    const int64 i = (blockIdx.x * 256ll + threadIdx.x) * WIDTH;
    if (i >= rows * cols) return;
    float sum[4] = {};
    for (int split = 0; split < splits; ++split) {
        if constexpr (WIDTH == 4) {
            float part[4];
            load_four(parts + split * rows * cols + i, part);
            #pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += part[e];
        } else {
            sum[0] += parts[split * rows * cols + i];
        }
    }
    const int64 row = i / cols, col = i % cols;
    const scalar* const more[2] = {residual ? residual + row * residual_stride + col : nullptr,
                                   bias ? bias + col : nullptr};
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
        if (!more[j]) continue;
        if constexpr (WIDTH == 4) {
            float x[4];
            load_four(more[j], x);
            #pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += x[e];
        } else {
            sum[0] += widened(*more[j]);
        }
    }
    scalar* const to = c + row * stride + col;
    if constexpr (WIDTH == 4) store_four(to, sum);
    else *to = narrowed<scalar>(sum[0]);
}
