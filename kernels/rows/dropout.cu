// Dropout, forward and backward: the mask is drawn where it is used. See reference/rows/dropout.py.
//
//   x, y   (rows, cols) DTYPE, last axis contiguous, row strides in elements
//
//   y = x * (bits >= dropped ? factor : 0)            moves 2 rows cols elements
//
// In place is allowed: each element is read and written by the same thread. One call of Philox has the bits of four
// elements whose numbers n = offset + place begin with a multiple of four: 50 instructions, 20 of them wide products,
// which take 0.5 (float) to 0.8 (16 bits) of the time that the bytes take on H100. A vector that begins elsewhere takes
// one call more:
//
//   numbers   | 4g   4g+1   4g+2   4g+3 | 4g+4   4g+5   4g+6   4g+7 |
//   vector           v0     v1     v2     v3                             past = 1
//
// Macros:
//   DTYPE    f16, bf16 or f32
//   ACCESS   elements per access: a vector of 16 bytes, or 1 for unaligned arrays
//
// blockDim = (threads per row, rows per block), grid = (chunks of a row, groups of rows), as gemm/swiglu.cu draws it:
// a chunk is kVecs vectors of each thread; the elements that fill no vector come last, one by one.
#include "philox.cuh"
#include "scalar.cuh"
#include "vec.cuh"

typedef DTYPE scalar;

constexpr int kVec = 16 / sizeof(scalar), kVecs = 2;
constexpr int kThreads = 128, kMinBlocks = 8;  // at most 64 registers: 32 warps on an SM, 32 bytes in flight per thread

// Bit e: whether element number n + e is kept, for the first kCount elements.
template <int kCount> __device__ __forceinline__ unsigned kept_from(unsigned long long n, Seed seed, unsigned dropped) {
    constexpr int kMost = (kCount + 6) / 4;  // calls
    const int past = n % 4;
    unsigned kept = 0;
    #pragma unroll
    for (int call = 0; call < kMost; ++call) {
        if (4 * call >= past + kCount) continue;
        const unsigned long long group = n / 4 + call;
        unsigned word[4] = {static_cast<unsigned>(group), static_cast<unsigned>(group >> 32), 0, 0xffffffffu};
        philox4x32(word, seed);
        #pragma unroll
        for (int e = 0; e < 4; ++e) kept |= word[e] >= dropped ? 1u << (4 * call + e) : 0;
    }
    return kept >> past;
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
dropout(const scalar* x, scalar* y, const Seed* seed, Seed number, unsigned long long offset, unsigned dropped,
        float factor, long long rows, long long cols, long long x_stride, long long y_stride) {
    typedef Vec<scalar, kVec> vec;
    // y and z of the grid form one axis, because y is limited to 65535
    const long long row = ((long long)blockIdx.z * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const Seed key = seed_of(seed, number);
    const int step = blockDim.x * kVec;
    const long long column = (long long)blockIdx.x * kVecs * step + threadIdx.x * kVec;
    const int end = int(min(cols - column, (long long)kVecs * step));  // only whole vectors before it exist
    x += row * x_stride + column, y += row * y_stride + column, offset += row * cols + column;
    vec in[kVecs];
    #pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        if (i * step + kVec <= end) in[i] = load<vec, ACCESS, Cache::kOnce>(x + i * step);
    }
    #pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        if (i * step + kVec > end) continue;
        const unsigned kept = kept_from<kVec>(offset + i * step, key, dropped);
        float value[kVec];
        #pragma unroll
        for (int e = 0; e < kVec; ++e) value[e] = element(in[i], e) * (kept >> e & 1 ? factor : 0.0f);
        store<ACCESS>(y + i * step, packed<scalar, kVec>(value));
    }
    const int rest = cols % kVec;
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < rest) {
        const int last = end - rest + int(threadIdx.x);
        const unsigned kept = kept_from<1>(offset + last, key, dropped);
        y[last] = narrowed<scalar>(widened(x[last]) * (kept & 1 ? factor : 0.0f));
    }
}
