// Sums of the rows of a matrix, in parts: the first step of a bias's gradient. sum.cu adds the parts.
//
//   x  (rows, cols) DTYPE, row stride in elements      parts  (gridDim.y, cols) float, contiguous
//
// Part p is the sum of rows p * each .. in their order. Reads x once, in whole sectors: rows * cols values.
//
// Macros: DTYPE; WIDTH 4 (cols, the stride and x are multiples of 4 elements) or 1: columns per thread.
//   grid   (ceil(cols / WIDTH / 256), ceil(rows / each))     block 256
#include "scalar.cuh"

typedef long long int64;
typedef DTYPE scalar;

extern "C" __global__ void __launch_bounds__(256)
column_sums(const scalar* x, float* parts, int64 stride, int rows, int cols, int each) {
    const int64 col = (blockIdx.x * 256ll + threadIdx.x) * WIDTH;
    if (col >= cols) return;
    const int first = blockIdx.y * each, last = min(rows, first + each);
    float sum[4] = {};
    #pragma unroll 4
    for (int row = first; row < last; ++row) {
        const scalar* const from = x + row * stride + col;
        if constexpr (WIDTH == 4) {
            float value[4];
            load_four(from, value);
            #pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += value[e];
        } else {
            sum[0] += widened(*from);
        }
    }
    float* const to = parts + blockIdx.y * static_cast<int64>(cols) + col;
    if constexpr (WIDTH == 4) store_four(to, sum);
    else *to = sum[0];
}
