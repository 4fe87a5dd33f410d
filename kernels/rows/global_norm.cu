// Euclidean norm of arrays, in a fixed order: the same bits for any grid, and as kernels/rows/cpu/global_norm.py.
//
//   global_norm_blocks   x (n,) DTYPE, contiguous      norms (ceil(n / kBlock),) double, one for each block of x; reads x once
//   global_norm_total    norms (n,) double             norm, found_inf (1,) float; of all arrays, by one block
//
// Thread t has lanes 4 t .. 4 t + 3 of 4 kThreads. Lane i adds the squares of elements i, i + 4 kThreads, ... of its block
// and keeps the rounding errors of additions (Dekker's two-sum), so that only the squares are rounded. That takes 8
// instructions an element, less than memory takes; GeForce cards add only 2 doubles per clock and SM. Lanes are added in
// double: four neighbours, then halves of the threads.
//
//      element    0  1  2  3 | 4  5  6  7 | ... | 252 .. 255      next step: 256 elements on
//      thread          0     |      1     | ... |     63
//
// A block whose squares leave float's range is read again, with values scaled by a power of two. So is one of zeros.
//
// Macros:
//   DTYPE    f16, bf16 or f32
//   ACCESS   elements per access: 4, or 1 where x is not aligned to 4 elements
#include "columns.cuh"
#include "math.cuh"

typedef DTYPE scalar;

constexpr int kThreads = 64, kTotalThreads = 512;
constexpr int kVec = 4, kSteps = 64, kUnroll = 8;  // kUnroll vectors in flight per thread
constexpr int kBlock = kThreads * kVec * kSteps;

struct Lane {
    float sum, error;

    __device__ __forceinline__ void add_square(float x) {
        const float square = __fmul_rn(x, x);  // never part of a fused multiply-add
        const float large = fmaxf(sum, square), small = fminf(sum, square);
        sum += square;
        error += small - (sum - large);
    }

    // The error of a sum that is not finite is NaN.
    __device__ __forceinline__ double whole() const { return double(sum) + (sum < infinity() ? double(error) : 0.0); }
};

// The sum over the threads of a block: halves, in order. All threads get it.
template <int kMany> __device__ __forceinline__ double over_threads(double value, double (&scratch)[kMany]) {
    __syncthreads();  // the last sum has been read
    scratch[threadIdx.x] = value;
    for (int half = kMany / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
    }
    __syncthreads();
    return scratch[0];
}

template <bool kWhole> __device__ __forceinline__ double thread_sum(const scalar* x, int count, float scale) {
    Lane lanes[kVec] = {};
    #pragma unroll kUnroll
    for (int step = 0; step < kSteps; ++step) {
        const int at = (step * kThreads + threadIdx.x) * kVec;
        float value[kVec];
        if constexpr (kWhole) fetch<ACCESS, Cache::kOnce>(x + at, kVec, value);
        else fetch<1, Cache::kOnce>(x + at, count - at, value);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) lanes[e].add_square(value[e] * scale);
    }
    return (lanes[0].whole() + lanes[1].whole()) + (lanes[2].whole() + lanes[3].whole());
}

// Squares of values from 2^64 on overflow in float, and those below 2^-63 lose bits. A sum below 2^-80 stays in range when
// it grows by 2^200, and bits lost next to larger ones do not count. Squares of float16 never leave the range.
__device__ __forceinline__ float rescale(double squares) {
    if (!Packed<scalar>::kWideRange) return 1.0f;
    return squares < 0x1p-80 ? 0x1p100f : squares < 0x1p126 ? 1.0f : 0x1p-80f;
}

extern "C" __global__ void __launch_bounds__(kThreads)
global_norm_blocks(const scalar* x, double* norms, long long n) {
    __shared__ double scratch[kThreads];
    const long long start = (long long)blockIdx.x * kBlock;
    const int count = int(min(n - start, (long long)kBlock));
    const auto sum = [&](float scale) {
        const double part = count == kBlock ? thread_sum<true>(x + start, count, scale)
                                            : thread_sum<false>(x + start, count, scale);
        return over_threads(part, scratch);
    };
    double squares = sum(1.0f);
    const float scale = rescale(squares);
    if (scale != 1.0f) squares = sum(scale);
    if (threadIdx.x == 0) norms[blockIdx.x] = sqrt(squares) / double(scale);
}

extern "C" __global__ void __launch_bounds__(kTotalThreads)
global_norm_total(const double* norms, float* norm, float* found_inf, long long n) {
    __shared__ double scratch[kTotalThreads];
    double sum = 0.0;
    for (long long i = threadIdx.x; i < n; i += kTotalThreads) sum += __dmul_rn(norms[i], norms[i]);
    sum = over_threads(sum, scratch);
    if (threadIdx.x > 0) return;
    *norm = float(sqrt(sum));
    *found_inf = sum < double(infinity()) ? 0.0f : 1.0f;
}
