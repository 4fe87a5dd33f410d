// Products of a few rows with a matrix, for decoding: gemv.cuh with weights as they are in memory.
//
//   c = x w0^T   or   act(x w0^T) (x w1^T)     x (m, k), w (n, k), c (m, n), m <= TOKENS; accumulates in float
//
// 2 m n k flops (4 gated) for n k weights (2 n k gated). Groups of gate and up alternate.
//
// Macros, all required:
//   DTYPE   f16, bf16, f32                        OUT      the same, or f32
//   GATED   0 or 1                                ACTIVATION  kSilu, kGelu, kGeluTanh
//   ROWS    of each matrix per block: 8, 16 or 32
//   TOKENS  8 or 16                               ALIGNED  1: as in gemm_sm80.cu, for x and w
//   WARPS   UNROLL
//
//   gemv(x, w0, w1, c, shape)
//   grid   (ceil(n / ROWS), splits). Each split sums part of k, and c is then (splits, m, n) float.
//   block  32 WARPS
constexpr int kMatrices = GATED ? 2 : 1;
#include "activation.cuh"
#include "gemv.cuh"

typedef OUT out_scalar;

// Row g of a group, in gate or up by turns. Rows past the end have no columns.
struct Weights {
    typedef vec Loaded;
    static constexpr bool kSplitsTurns = false;  // checks of k stay hidden behind the loads
    const scalar* matrix[2];
    const GemvShape& shape;

    template <bool kWhole> __device__ __forceinline__ void load(vec (&loaded)[UNROLL][kGroups], int k0) const {
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            #pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                const bool second = GATED && i % 2;
                const int row = blockIdx.x * ROWS + (GATED ? i / 2 : i) * 8 + threadIdx.x % 32 / 4;
                const scalar* weights = matrix[second] + row * shape.stride_w[second];
                loaded[u][i] = fetch<Cache::kOnce>(weights, k0 + u * kChunk, row < shape.n ? shape.k : 0);
            }
        }
    }

    static __device__ __forceinline__ vec values(const vec& loaded) { return loaded; }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
gemv(const scalar* x, const scalar* w0, const scalar* w1, out_scalar* c, const __grid_constant__ GemvShape shape) {
    const Sums<> sums = products(Weights{{w0, w1}, shape}, x, shape.stride_x, shape.m, shape.k);
    write(sums, c, shape, [](const Parts& parts, int group, int token, int row) {
        const float sum = parts.total(group * kMatrices, token, row);
        if constexpr (!GATED) return sum;
        return activated<Activation::ACTIVATION, out_scalar>(sum).value * parts.total(2 * group + 1, token, row);
    });
}
