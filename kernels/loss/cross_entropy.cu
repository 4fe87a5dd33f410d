// Cross-entropy of logits with target classes, forward and backward.
//
//   logits, dlogits       (rows, cols) DTYPE and GRADIENT, last axis contiguous, row strides in elements
//   targets               (rows,) int or long long        class_weight (cols,)
//   dloss, loss, lse      (rows,)                         all float
//
// With u = softcap tanh(z / softcap), or z, target y, own = 1 - label_smoothing, others = label_smoothing / cols:
//
//   forward    loss = own w_y (lse - u_y) + others sum(w (lse - u)) + z_loss lse^2                moves rows cols elements
//   backward   p = exp(u - lse) / sum(exp(u - lse))                                             moves 2 rows cols elements
//              dz = dloss (p (own w_y + others sum(w) + 2 z_loss lse) - others w - own w_y [j = y]) du/dz
//   total      the sum of the losses, or dloss, divided by the sum of w_y; of few numbers, by one block in double
//
// lse is rounded: a float holds that of logits near 1e7 to the nearest integer. So lse - u is computed as
// (max - u) + log(sum), and p divides by the sum of the row's exponentials: backward reads a row again, from the L2 cache.
//
// Rows compute in float and round once; p - 1 is formed before it is rounded. A row whose target is ignored is not read:
// loss 0, lse -inf, gradient 0. One whose target is not a class has loss and gradient NaN. In place is allowed: each
// gradient is written by the thread that read its logit, or, where it is narrower and overlaps another thread's logit,
// after a barrier. Memory-bound: one exponential per element, two in backward.
//
// Macros:
//   DTYPE    f16, bf16 or f32        GRADIENT   f16 or bf16 with f32; undefined: the same
//   ACCESS   elements per access: a vector of 16 bytes, or 1 where not all rows are aligned to vectors
//   PLAIN    1: without softcap, without sums over the row that label smoothing and class weights need
#include "columns.cuh"
#include "math.cuh"
#include "number.cuh"

#ifndef GRADIENT
#define GRADIENT DTYPE
#endif
typedef DTYPE scalar;
typedef GRADIENT narrow;

constexpr bool kPlain = PLAIN, kNarrows = sizeof(narrow) < sizeof(scalar);
constexpr int kVec = 16 / sizeof(scalar), kMaxThreads = 512, kTotalThreads = 512;
constexpr int kUnroll = 4;  // vectors in flight per thread
typedef float Values[kVec];
typedef Columns<kVec, kUnroll, false> RowColumns;

struct Options {
    long long ignore_index;
    int wide, weighted;  // targets of 64 bits; with class weights
    float own, others, z_loss, softcap;
};

__device__ __forceinline__ long long target_of(const void* targets, long long row, const Options& o) {
    return o.wide ? static_cast<const long long*>(targets)[row] : static_cast<const int*>(targets)[row];
}

// The weight of a row, 0 if it is ignored, NaN if its target is not a class.
__device__ __forceinline__ float weight_of(long long target, const float* class_weight, long long cols, const Options& o) {
    if (target == o.ignore_index) return 0.0f;
    if (target < 0 || target >= cols) return __int_as_float(0x7fffffff);
    return o.weighted ? class_weight[target] : 1.0f;
}

// u of a logit, and du/dz. u is rounded alike in every kernel: no FMA may include the product.
__device__ __forceinline__ float capped(float z, const Options& o, float& slope) {
    slope = 1.0f;
    if (kPlain || o.softcap == 0.0f) return z;
    const float t = tanhf(z / o.softcap);
    slope = fmaf(-t, t, 1.0f);
    return __fmul_rn(o.softcap, t);
}

// A block's view of the row of this thread. Rows that are ignored or beyond the last one have no elements.
struct Row {
    RowColumns columns;
    long long target;
    bool exists, kept;

    __device__ __forceinline__ Row(const void* targets, long long rows, long long cols, const Options& o)
        : Row((long long)blockIdx.x * blockDim.y + threadIdx.y, targets, rows, cols, o) {}

private:
    __device__ __forceinline__ Row(long long row, const void* targets, long long rows, long long cols, const Options& o)
        : Row(row, row < rows ? target_of(targets, row, o) : o.ignore_index, rows, cols, o) {}

    __device__ __forceinline__ Row(long long row, long long y, long long rows, long long cols, const Options& o)
        : columns{row, y == o.ignore_index ? 0 : cols}, target(y), exists(row < rows), kept(y != o.ignore_index) {}
};

// Increase of a sum of w (maximum - u) when the maximum grows; `weights`: the sum of w, 0 before the first element.
__device__ __forceinline__ float growth(float weights, float maximum, float grown) {
    return weights == 0.0f ? 0.0f : weights * (grown - maximum);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads)
cross_entropy_forward(const void* targets, const float* class_weight, const scalar* logits, float* loss, float* lse,
                      int has_lse, Options o, long long rows, long long cols, long long logits_stride) {
    __shared__ RowSums<3>::Scratch scratch;
    const Row row(targets, rows, cols, o);
    logits += row.columns.row * logits_stride;

    float row_max = kNothing, sums[3] = {};  // of exponentials relative to the maximum, of w (maximum - u), of w
    row.columns.each([&](int, long long column, int count) {
        Values u, w;
        fetch<ACCESS, Cache::kDefault>(logits + column, count, u);
        if (!kPlain && o.others > 0.0f && o.weighted) fetch<1, Cache::kDefault>(class_weight + column, count, w);
        float grown = row_max;
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            float slope;
            u[e] = e < count ? capped(u[e], o, slope) : -infinity();
            grown = fmaxf(grown, u[e]);
        }
        sums[0] *= exponential(row_max - grown);
        if (!kPlain) sums[1] += growth(sums[2], row_max, grown);
        row_max = grown;
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            sums[0] += exponential(u[e] - row_max);
            if (kPlain || o.others == 0.0f || e >= count) continue;
            const float weight = o.weighted ? w[e] : 1.0f;
            sums[1] = fmaf(weight, row_max - u[e], sums[1]);
            sums[2] += weight;
        }
    });
    const float thread_max = row_max;
    row_max = over_row<true, kMaxThreads>(thread_max);
    sums[0] *= exponential(thread_max - row_max);
    if (!kPlain) sums[1] += growth(sums[2], thread_max, row_max);
    RowSums<3>{scratch}(sums);
    if (threadIdx.x > 0 || !row.exists) return;
    const float log_sum = logf(sums[0]), whole = row_max + log_sum;
    if (has_lse) lse[row.columns.row] = row.kept ? whole : -infinity();
    float value = 0.0f;
    if (row.kept) {
        const bool is_class = row.target >= 0 && row.target < cols;
        float slope, at = is_class ? capped(widened(logits[row.target]), o, slope) : 0.0f;
        // the difference first: a loss near 0 keeps its digits, as does one of large logits
        value = o.own * weight_of(row.target, class_weight, cols, o) * ((row_max - at) + log_sum);
        if (!kPlain && o.others > 0.0f) value += o.others * fmaf(sums[2], log_sum, sums[1]);
        value = fmaf(o.z_loss * whole, whole, value);
    }
    loss[row.columns.row] = value;
}

// Values shared by a row's gradients. scale: the factor of exp(u - lse).
struct RowGradient {
    float factor, lse, own, scale;
    long long target;

    // Replaces those of `count` logits by gradients.
    __device__ __forceinline__ void operator()(Values& u, const float* class_weight, long long column, int count,
                                               const Options& o) const {
        Values w;
        if (!kPlain && o.others > 0.0f && o.weighted) fetch<1, Cache::kDefault>(class_weight + column, count, w);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            float slope;
            const float p = exponential(capped(u[e], o, slope) - lse);
            const float weight = kPlain || !o.weighted || o.others == 0.0f ? 1.0f : w[e];
            const float share = fmaf(p, scale, -o.others * weight);
            u[e] = factor * (share - (column + e == target ? own : 0.0f)) * slope;
        }
    }
};

// Gradients that are narrower than the logits, in whose memory they may be: those of a round overlap logits of it
// and of earlier ones. All threads of the block take part; `end` is 0 in rows without gradients.
__device__ __forceinline__ void narrowed_gradients(const RowGradient& gradient, const scalar* logits, narrow* dlogits,
                                                   const float* class_weight, long long end, long long cols,
                                                   bool exists, const Options& o) {
    const long long step = (long long)blockDim.x * kVec;
    for (long long start = threadIdx.x * kVec; start - threadIdx.x * kVec < cols; start += kUnroll * step) {
        Values u[kUnroll];
        #pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const long long column = start + i * step;
            #pragma unroll
            for (int e = 0; e < kVec; ++e) u[i][e] = 0.0f;
            const int count = int(min(end - column, (long long)kVec));
            if (count > 0) fetch<ACCESS, Cache::kOnce>(logits + column, count, u[i]);
            if (count > 0) gradient(u[i], class_weight, column, count, o);
        }
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const long long column = start + i * step;
            const int count = int(min(cols - column, (long long)kVec));
            if (exists && count > 0) put<ACCESS>(dlogits + column, count, u[i]);
        }
    }
}

// dloss: of each row (step 1) or of all (step 0), times all factors. weight_sum: of the classes.
extern "C" __global__ void __launch_bounds__(kMaxThreads)
cross_entropy_backward(const void* targets, const float* class_weight, const float* dloss, const float* weight_sum,
                       const float* lse, const scalar* logits, narrow* dlogits, long long dloss_step, Options o,
                       long long rows, long long cols, long long logits_stride, long long dlogits_stride) {
    const Row row(targets, rows, cols, o);
    logits += row.columns.row * logits_stride, dlogits += row.columns.row * dlogits_stride;
    const float row_lse = row.kept ? lse[row.columns.row] : 0.0f;
    float row_sum = 0.0f;
    row.columns.each([&](int, long long column, int count) {
        Values u;
        fetch<ACCESS, Cache::kDefault>(logits + column, count, u);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            float slope;
            row_sum += e < count ? exponential(capped(u[e], o, slope) - row_lse) : 0.0f;
        }
    });
    row_sum = over_row<false, kMaxThreads>(row_sum);
    if (!kNarrows && !row.exists) return;
    if (!kNarrows && !row.kept) {
        RowColumns{row.columns.row, cols}.each([&](int, long long column, int count) {
            put<ACCESS>(dlogits + column, count, Values{});
        });
        return;
    }
    RowGradient gradient{};
    if (!kNarrows || row.kept) {
        const float own = o.own * weight_of(row.target, class_weight, cols, o);
        const float total = o.weighted && o.others > 0.0f ? *weight_sum : float(cols);
        const float scale = (own + o.others * total + 2.0f * o.z_loss * row_lse) / row_sum;
        gradient = {dloss[row.columns.row * dloss_step], row_lse, own, scale, row.target};
    }
    if (kNarrows) {
        narrowed_gradients(gradient, logits, dlogits, class_weight, row.columns.end, cols, row.exists, o);
        return;
    }
    row.columns.each([&](int, long long column, int count) {
        Values u;
        fetch<ACCESS, Cache::kOnce>(logits + column, count, u);
        gradient(u, class_weight, column, count, o);
        put<ACCESS>(dlogits + column, count, u);
    });
}

enum Sum { kCount = kFurther, kRows };  // further kinds of numbers

// result[0] = above / below, 0 if below is 0; result[1], if sum_weights, the sum of the class weights. `above`: the sum
// of the rows' losses (kRows), or a number; `below`: the sum of the rows' weights (kCount), or a number.
extern "C" __global__ void __launch_bounds__(kTotalThreads)
cross_entropy_total(const void* targets, const float* class_weight, const void* above_array, const void* below_array,
                    float* result, Number above, Number below, int sum_weights, Options o, long long rows,
                    long long cols) {
    __shared__ double scratch[3][kTotalThreads];
    double sums[3] = {};  // of losses, weights of rows, weights of classes
    for (long long i = threadIdx.x; i < rows; i += kTotalThreads) {
        if (above.kind == kRows) sums[0] += static_cast<const float*>(above_array)[i];
        if (below.kind == kCount) sums[1] += weight_of(target_of(targets, i, o), class_weight, cols, o);
    }
    for (long long i = threadIdx.x; sum_weights && i < cols; i += kTotalThreads) sums[2] += class_weight[i];
    #pragma unroll
    for (int i = 0; i < 3; ++i) scratch[i][threadIdx.x] = sums[i];
    for (int half = kTotalThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 3; ++i) {
            if (threadIdx.x < half) scratch[i][threadIdx.x] += scratch[i][threadIdx.x + half];
        }
    }
    if (threadIdx.x > 0) return;
    const double divisor = below.kind == kCount ? scratch[1][0] : number(below, below_array);
    const double dividend = above.kind == kRows ? scratch[0][0] : number(above, above_array);
    result[0] = divisor == 0.0 ? 0.0f : float(dividend / divisor);
    if (sum_weights) result[1] = float(scratch[2][0]);
}
