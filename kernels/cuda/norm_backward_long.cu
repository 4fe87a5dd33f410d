// RMSNorm and LayerNorm, backward, of rows of any length. What and which macros: norm_backward.cu, norm.cuh.
//
// A block that has a row to itself would keep, beside x and dy, sums of dweight and dbias of all its columns: 8 to 16
// bytes per column, more than an SM has beyond about 16384 to 32768 columns. In L2 they would move more bytes than x
// and dy do. Here a block has some columns of many rows instead, and its sums in registers; what the rows need to know
// of themselves is found before:
//
//   1. backward_rows      a block per row         reads x, dy            means (rows,): of m n, in LayerNorm then of m
//   2. backward_columns   a thread per vector     reads x, dy again      dx, partial (slices, cols)
//                         and slice of rows
//
// 5 rows cols elements move, 3 of them if x and dy of the rows stay in L2; no thread of 2 waits for another.
#include "norm.cuh"

constexpr int kSums = kLayer ? 2 : 1;

extern "C" __global__ void __launch_bounds__(384)
ENTRY(backward_rows)(const scalar* dy, const scalar* x, const scalar* weight, const float* mean, const float* rstd,
                     float* means, long long rows, int cols, long long dy_stride, long long x_stride,
                     float inverse_cols, float weight_offset, int llama) {
    __shared__ RowSums<kSums>::Scratch scratch;
    RowSums<kSums> row_sum(scratch);
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const float row_mean = kLayer ? mean[r] : 0.0f, row_rstd = rstd[r];
        float sums[kSums] = {};
        #pragma unroll 2
        for (unsigned c = threadIdx.x * VEC; c < cols; c += blockDim.x * VEC) {
            const vec row_dy = load<vec, ACCESS, Cache::kDefault>(dy + r * dy_stride + c);
            const vec row_x = load<vec, ACCESS, Cache::kDefault>(x + r * x_stride + c);
            const vec w = load<vec, ACCESS, Cache::kConstant>(weight + c);
            #pragma unroll
            for (int k = 0; k < vec::kWords; ++k) {
                const Gradients g = gradients(row_dy.word[k], row_x.word[k], w.word[k], row_mean, row_rstd,
                                              weight_offset, llama);
                #pragma unroll
                for (int e = 0; e < kPerWord; ++e) {
                    sums[0] = fmaf(g.m[e], g.n[e], sums[0]);
                    if constexpr (kLayer) sums[1] += g.m[e];
                }
            }
        }
        row_sum(sums);
        if (threadIdx.x == 0) {
            #pragma unroll
            for (int i = 0; i < kSums; ++i) means[i * rows + r] = sums[i] * inverse_cols;
        }
    }
}

// gridDim.x = slices of rows * strips of columns: blocks that run together have adjacent columns.
extern "C" __global__ void __launch_bounds__(128)
ENTRY(backward_columns)(const scalar* dy, const scalar* x, const scalar* weight, const float* mean, const float* rstd,
                        const float* means, const scalar* dresidual, scalar* dx, float* partial, long long rows,
                        int cols, int rows_per_slice, long long dy_stride, long long x_stride,
                        long long dresidual_stride, long long dx_stride, float weight_offset, int llama,
                        int has_dresidual) {
    const int strips = (cols / VEC + blockDim.x - 1) / blockDim.x;
    const int slice = blockIdx.x / strips, slices = gridDim.x / strips;
    const unsigned c = (blockIdx.x % strips * blockDim.x + threadIdx.x) * VEC;
    if (c >= cols) return;
    const vec w = load<vec, ACCESS, Cache::kConstant>(weight + c);

    quad sums[kSums][kQuads] = {};
    const long long first = (long long)slice * rows_per_slice, end = min(rows, first + rows_per_slice);
    #pragma unroll 1
    for (long long r = first; r < end; ++r) {  // dx may be dy: a thread reads what it will write
        const vec row_dy = load<vec, ACCESS, Cache::kOnce>(dy + r * dy_stride + c);
        vec row_x = load<vec, ACCESS, Cache::kOnce>(x + r * x_stride + c);
        vec extra = {};
        if (has_dresidual) extra = load<vec, ACCESS, Cache::kOnce>(dresidual + r * dresidual_stride + c);
        const float row_mean = kLayer ? mean[r] : 0.0f, row_rstd = rstd[r];
        const float mean_mn = means[r], mean_m = means[(kSums - 1) * rows + r];
        const vec packed = fresh(w);  // else its floats are kept
        #pragma unroll
        for (int k = 0; k < vec::kWords; ++k) {
            const Gradients g = gradients(row_dy.word[k], row_x.word[k], packed.word[k], row_mean, row_rstd,
                                          weight_offset, llama);
            row_x.word[k] = input_gradient(g, row_rstd, mean_mn, mean_m, extra.word[k], has_dresidual);
            #pragma unroll
            for (int e = 0; e < kPerWord; ++e) {
                add(sums[0][k / kQuadWords], k % kQuadWords * kPerWord + e, g.dy[e], g.n_seen[e]);
                if constexpr (kLayer) add(sums[1][k / kQuadWords], k % kQuadWords * kPerWord + e, g.dy[e], 1.0f);
            }
        }
        store<ACCESS>(dx + r * dx_stride + c, row_x);
    }
    #pragma unroll
    for (int of = 0; of < kSums; ++of) {
        #pragma unroll
        for (int q = 0; q < kQuads; ++q) {
            store<kQuad>(partial + ((long long)of * slices + slice) * cols + c + q * kQuad, sums[of][q]);
        }
    }
}
