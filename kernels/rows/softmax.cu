// Softmax over the last axis, forward and backward (Milakov and Gimelshein 2018).
//
//   x, y, dy, dx   (rows, cols) DTYPE, last axis contiguous, row strides in elements
//   mask           (outer, middle, inner, cols) MASK, outer * middle * inner = rows; strides 0 where it broadcasts
//
//   forward    t = scale * x + mask,  y = exp(t - max(t)) / sum(exp(t - max(t)))     moves 2 rows cols elements
//   backward   dx = scale * y * (dy - sum(dy * y))                                   moves 3 rows cols elements
//
// Both compute in float and round once. In place is allowed (y = x, dx = dy): each element is read and written by the
// same thread. A row without visible elements has sum 0 and becomes 0. A NaN reaches the sum, and so its whole row.
// Memory-bound: two exponentials per element hide behind 4 to 8 bytes.
//
// Macros:
//   DTYPE    f16, bf16 or f32
//   MASK     f16, bf16, f32, visible (bool) or nothing (no mask)
//   ACCESS   elements per access: a vector of 16 bytes, or 1 where not all rows are aligned to vectors
//   VECS     vectors per thread and array in registers; 0: the row is longer and read twice
//
// blockDim = (threads per row, rows per block). Thread t owns vectors t, t + blockDim.x, ... of its row for any ACCESS,
// so that sums have the same bits wherever an array lies.
#include "columns.cuh"
#include "math.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "vec.cuh"

typedef DTYPE scalar;
struct visible { unsigned char value; };
struct nothing {};

constexpr bool kHeld = VECS > 0;
constexpr int kVec = 16 / sizeof(scalar), kVecs = kHeld ? VECS : 1, kMaxThreads = 512;
constexpr Cache kCache = kHeld ? Cache::kOnce : Cache::kDefault;
typedef float Values[kVec];
typedef Columns<kVec, kVecs, kHeld> RowColumns;

__device__ __forceinline__ float widened(visible x) { return x.value; }
__device__ __forceinline__ float widened(nothing) { return 0.0f; }

// A row of this thread's. Rows beyond the last one have no elements, but their threads take part in shuffles.
__device__ __forceinline__ RowColumns row_of_block(long long rows, long long cols) {
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    return {row, row < rows ? cols : 0};
}

// Of the mask; strides in elements, that of the columns 0 or 1.
struct MaskAxes { long long middle, inner, outer_stride, middle_stride, inner_stride, column_stride; };

template <typename T> __device__ __forceinline__ float score(float x, float scale, float mask, const T*) {
    return fmaf(x, scale, mask);
}

__device__ __forceinline__ float score(float x, float scale, float mask, const visible*) {
    return mask != 0.0f ? x * scale : -infinity();
}

// One block per SM is enough: aiming for more, ptxas spills for sm_100.
extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
softmax_forward(const scalar* x, const MASK* mask, scalar* y, long long rows, long long cols, long long x_stride,
                long long y_stride, MaskAxes axes, float scale) {
    const RowColumns columns = row_of_block(rows, cols);
    const long long next = columns.row / axes.inner;
    x += columns.row * x_stride, y += columns.row * y_stride;
    mask += next / axes.middle * axes.outer_stride + next % axes.middle * axes.middle_stride
          + columns.row % axes.inner * axes.inner_stride;

    const auto scores = [&](long long column, int count, Values& t) {
        Values added;
        fetch<ACCESS, kCache>(x + column, count, t);
        if (axes.column_stride) fetch<ACCESS, Cache::kDefault>(mask + column, count, added);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            if (!axes.column_stride) added[e] = widened(*mask);
            t[e] = e < count ? score(t[e], scale, added[e], mask) : -infinity();
        }
    };

    Values t[kVecs];
    float row_max = kNothing, row_sum = 0.0f;
    columns.each([&](int i, long long column, int count) {
        scores(column, count, t[i]);
        float grown = row_max;
        #pragma unroll
        for (int e = 0; e < kVec; ++e) grown = fmaxf(grown, t[i][e]);
        row_sum *= exponential(row_max - grown);
        row_max = grown;
        #pragma unroll
        for (int e = 0; e < kVec; ++e) row_sum += exponential(t[i][e] - row_max);
    });
    const float thread_max = row_max;
    row_max = over_row<true, kMaxThreads>(thread_max);
    row_sum = over_row<false, kMaxThreads>(row_sum * exponential(thread_max - row_max));
    const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
    columns.each([&](int i, long long column, int count) {
        if constexpr (!kHeld) scores(column, count, t[i]);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) t[i][e] = exponential(t[i][e] - row_max) * inverse;
        put<ACCESS>(y + column, count, t[i]);
    });
}

extern "C" __global__ void __launch_bounds__(kMaxThreads)
softmax_backward(const scalar* dy, const scalar* y, scalar* dx, long long rows, long long cols, long long dy_stride,
                 long long y_stride, long long dx_stride, float scale) {
    const RowColumns columns = row_of_block(rows, cols);
    dy += columns.row * dy_stride, y += columns.row * y_stride, dx += columns.row * dx_stride;
    Values gradient[kVecs], weight[kVecs];
    const auto read = [&](int i, long long column, int count) {
        fetch<ACCESS, kCache>(dy + column, count, gradient[i]);
        fetch<ACCESS, kCache>(y + column, count, weight[i]);
    };
    float dot = 0.0f;
    columns.each([&](int i, long long column, int count) {
        read(i, column, count);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) dot = fmaf(gradient[i][e], weight[i][e], dot);
    });
    dot = over_row<false, kMaxThreads>(dot);
    columns.each([&](int i, long long column, int count) {
        if constexpr (!kHeld) read(i, column, count);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) gradient[i][e] = scale * (weight[i][e] * (gradient[i][e] - dot));
        put<ACCESS>(dx + column, count, gradient[i]);
    });
}
