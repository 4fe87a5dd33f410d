// Softmax over the last axis, forward and backward (Milakov and Gimelshein 2018).
//
//   x, y, dy, dx   (rows, cols) DTYPE, last axis contiguous, row strides in elements
//   mask           (outer, middle, inner, cols) MASK with outer * middle * inner = rows; strides in elements, 0 where
//                  it broadcasts; column_stride is 0 or 1
//
//   forward    t = scale * x + mask,  y = exp(t - max(t)) / sum(exp(t - max(t)))     moves 2 rows cols elements
//   backward   dx = scale * y * (dy - sum(dy * y))                                   moves 3 rows cols elements
//
// Both compute in float and round once. In place is allowed (y = x, dx = dy): each element is read and written by the
// same thread. Of a row without visible elements the maximum is kNothing and the sum 0; y is 0 then. A NaN reaches
// the sum, and so all of its row.
//
// Macros:
//   DTYPE    f16, bf16 or f32
//   MASK     f16, bf16, f32, visible (bool) or nothing (no mask)
//   ACCESS   elements per access: a vector of 16 bytes, or 1 where some row is not aligned to vectors
//   VECS     vectors per thread and array in registers; 0: the row is longer and read twice
//
// blockDim = (threads per row, rows per block). Thread t of a row's T owns the same elements for any alignment, so that
// sums have the same bits:
//
//   row       | v0 | v1 | ... | v(T-1) | v(T) | ... | part of a vector
//   thread      0    1    ...   T-1      0
#include "math.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "vec.cuh"

typedef DTYPE scalar;
struct visible { unsigned char value; };
struct nothing {};

constexpr int kVec = 16 / sizeof(scalar);
constexpr bool kHeld = VECS > 0;
constexpr int kVecs = kHeld ? VECS : 1;
constexpr int kMaxThreads = 512;  // 32 floats of a row in each leave room for two blocks on an SM
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNothing = -3.4028235e38f;  // finite, so that -inf - kNothing is -inf

typedef float Values[kVec];

// For masks: 1 for a visible element, 0 for a hidden one; 0 without a mask.
__device__ __forceinline__ float widened(visible x) { return x.value; }
__device__ __forceinline__ float widened(nothing) { return 0.0f; }

template <Cache kCache, typename T> __device__ __forceinline__ void fetch_vector(const T* p, Values& value) {
    constexpr int kPart = kVec * sizeof(T) > 16 ? 16 / sizeof(T) : kVec;  // a float mask of 16-bit x takes two accesses
    #pragma unroll
    for (int i = 0; i < kVec; i += kPart) {
        const Vec<T, kPart> part = load<Vec<T, kPart>, kPart, kCache>(p + i);
        #pragma unroll
        for (int e = 0; e < kPart; ++e) value[i + e] = element(part, e);
    }
}

template <Cache kCache> __device__ __forceinline__ void fetch_vector(const visible* p, Values& value) {
    unsigned word[kVec / 4];
    detail::read_words<kCache, kVec>(p, word);
    #pragma unroll
    for (int e = 0; e < kVec; ++e) value[e] = word[e / 4] >> 8 * (e % 4) & 255;
}

template <Cache kCache> __device__ __forceinline__ void fetch_vector(const nothing*, Values&) {}

// kVec elements, the first `count` of which exist.
template <Cache kCache, typename T> __device__ __forceinline__ void fetch(const T* p, int count, Values& value) {
    if constexpr (ACCESS == kVec) {
        fetch_vector<kCache>(p, value);
    } else {
        #pragma unroll
        for (int e = 0; e < kVec; ++e) value[e] = e < count ? widened(p[e]) : 0.0f;
    }
}

__device__ __forceinline__ void put(scalar* p, int count, const Values& value) {
    if constexpr (ACCESS == kVec) {
        store<kVec>(p, packed<scalar, kVec>(value));
    } else {
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            if (e < count) p[e] = narrowed<scalar>(value[e]);
        }
    }
}

struct Max {
    static constexpr float kStart = kNothing;
    static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

struct Sum {
    static constexpr float kStart = 0.0f;
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

// Over the threads of a row, which are part of a warp or a whole block; called once by each Op.
template <typename Op> __device__ __forceinline__ float over_row(float value) {
    const int width = blockDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int offset = min(width, 32) / 2; offset > 0; offset /= 2) {
        value = Op::of(value, __shfl_xor_sync(kFullWarp, value, offset));
    }
    if (width <= 32) return value;
    __shared__ float scratch[kMaxThreads / 32];
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    value = lane < width / 32 ? scratch[lane] : Op::kStart;
    for (int offset = 16; offset > 0; offset /= 2) value = Op::of(value, __shfl_xor_sync(kFullWarp, value, offset));
    return value;
}

__device__ __forceinline__ float exponential(float t) { return ptx::exp2(t * kLog2e); }

// Which columns are this thread's. Rows beyond the last one have no columns, but take part in shuffles.
struct Columns {
    long long row, end;

    __device__ __forceinline__ Columns(long long rows, long long cols)
        : row((long long)blockIdx.x * blockDim.y + threadIdx.y), end(row < rows ? cols : 0) {}

    // f(i, column, count) for vector i of this thread.
    template <typename F> __device__ __forceinline__ void each(F f) const {
        long long column = threadIdx.x * kVec;
        const int step = blockDim.x * kVec;
        if constexpr (kHeld) {
            #pragma unroll
            for (int i = 0; i < kVecs; ++i, column += step) {
                if (column < end) f(i, column, int(min(end - column, (long long)kVec)));
            }
        } else {
            for (; column < end; column += step) f(0, column, int(min(end - column, (long long)kVec)));
        }
    }
};

// The axes of the mask before the last one.
struct MaskAxes {
    long long middle, inner, outer_stride, middle_stride, inner_stride, column_stride;

    __device__ __forceinline__ long long offset(long long row) const {
        const long long next = row / inner;
        return next / middle * outer_stride + next % middle * middle_stride + row % inner * inner_stride;
    }
};

__device__ __forceinline__ float score(float x, float scale, float mask, const visible*) {
    return mask != 0.0f ? x * scale : -infinity();
}

template <typename T> __device__ __forceinline__ float score(float x, float scale, float mask, const T*) {
    return fmaf(x, scale, mask);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads)
softmax_forward(const scalar* x, const MASK* mask, scalar* y, long long rows, long long cols, long long x_stride,
                long long y_stride, MaskAxes axes, float scale) {
    const Columns columns(rows, cols);
    x += columns.row * x_stride, y += columns.row * y_stride, mask += axes.offset(columns.row);

    const auto scores = [&](long long column, int count, Values& t) {
        Values added = {};
        fetch<kHeld ? Cache::kOnce : Cache::kDefault>(x + column, count, t);
        if (axes.column_stride) {
            fetch<Cache::kDefault>(mask + column, count, added);
        } else {
            #pragma unroll
            for (int e = 0; e < kVec; ++e) added[e] = widened(*mask);
        }
        #pragma unroll
        for (int e = 0; e < kVec; ++e) t[e] = e < count ? score(t[e], scale, added[e], mask) : -infinity();
    };

    float row_max = kNothing, row_sum = 0.0f;
    Values t[kVecs];
    if constexpr (kHeld) {
        #pragma unroll
        for (int i = 0; i < kVecs * kVec; ++i) t[i / kVec][i % kVec] = -infinity();
        columns.each([&](int i, long long column, int count) { scores(column, count, t[i]); });
        #pragma unroll
        for (int i = 0; i < kVecs * kVec; ++i) row_max = fmaxf(row_max, t[i / kVec][i % kVec]);
        row_max = over_row<Max>(row_max);
        #pragma unroll
        for (int i = 0; i < kVecs * kVec; ++i) {
            float& weight = t[i / kVec][i % kVec];
            weight = exponential(weight - row_max);
            row_sum += weight;
        }
    } else {
        columns.each([&](int, long long column, int count) {
            scores(column, count, t[0]);
            float grown = row_max;
            #pragma unroll
            for (int e = 0; e < kVec; ++e) grown = fmaxf(grown, t[0][e]);
            row_sum *= exponential(row_max - grown);
            #pragma unroll
            for (int e = 0; e < kVec; ++e) row_sum += exponential(t[0][e] - grown);
            row_max = grown;
        });
        const float thread_max = row_max;
        row_max = over_row<Max>(row_max);
        row_sum *= exponential(thread_max - row_max);
    }
    row_sum = over_row<Sum>(row_sum);

    const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
    columns.each([&](int i, long long column, int count) {
        if constexpr (!kHeld) scores(column, count, t[0]);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) t[i][e] = (kHeld ? t[i][e] : exponential(t[0][e] - row_max)) * inverse;
        put(y + column, count, t[i]);
    });
}

extern "C" __global__ void __launch_bounds__(kMaxThreads)
softmax_backward(const scalar* dy, const scalar* y, scalar* dx, long long rows, long long cols, long long dy_stride,
                 long long y_stride, long long dx_stride, float scale) {
    const Columns columns(rows, cols);
    dy += columns.row * dy_stride, y += columns.row * y_stride, dx += columns.row * dx_stride;

    Values gradient[kVecs], weight[kVecs];
    const auto read = [&](int i, long long column, int count) {
        fetch<kHeld ? Cache::kOnce : Cache::kDefault>(dy + column, count, gradient[i]);
        fetch<kHeld ? Cache::kOnce : Cache::kDefault>(y + column, count, weight[i]);
    };
    float dot = 0.0f;
    columns.each([&](int i, long long column, int count) {
        read(i, column, count);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) dot = fmaf(gradient[i][e], weight[i][e], dot);
    });
    dot = over_row<Sum>(dot);
    columns.each([&](int i, long long column, int count) {
        if constexpr (!kHeld) read(i, column, count);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) gradient[i][e] = scale * (weight[i][e] * (gradient[i][e] - dot));
        put(dx + column, count, gradient[i]);
    });
}
