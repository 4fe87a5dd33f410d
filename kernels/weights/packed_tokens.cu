// Tokens for products with packed weights: in int8, or with their columns in the order of the weights.
//
// packed_quantize    grid: a warp per block, kWarps per block of threads
//
//   q = rint(x * 127 / absmax)       of each block of BLOCK elements; zeros where absmax < 2^-100
//   scale = absmax / 127             NaN where a value is not finite
//   sums                             of q over SUMMED elements
//   q (tokens, k), scales (tokens, k / BLOCK), sums (tokens, k / SUMMED), contiguous; tokens from m on repeat token m - 1
//
// packed_reorder     out[t, k] = x[t, columns[k]]         grid (m, groups of 32 kWarps columns)
//
// Macros: DTYPE (f16, bf16, f32); of packed_quantize BLOCK: 32 to 256; SUMMED: 16 or 32; REORDERED: element k is column
// columns[k] of x
#include "scalar.cuh"

typedef DTYPE scalar;

constexpr int kWarps = 4;

#ifdef BLOCK

constexpr int kEach = BLOCK / 32;  // elements of a lane: 32 i + lane

extern "C" __global__ void __launch_bounds__(32 * kWarps)
packed_quantize(const scalar* x, const int* columns, signed char* q, float* scales, int* sums, long long stride_x,
                int m, int k, long long blocks) {
    const long long block = (long long)blockIdx.x * kWarps + threadIdx.x / 32;
    if (block >= blocks) return;
    const int lane = threadIdx.x % 32, per_token = k / BLOCK, first = block % per_token * BLOCK + lane;
    const scalar* token = x + min(block / per_token, m - 1LL) * stride_x;
    float value[kEach], absmax = 0.0f;
    bool finite = true;
    #pragma unroll
    for (int i = 0; i < kEach; ++i) {
        value[i] = widened(token[REORDERED ? columns[first + 32 * i] : first + 32 * i]);
        finite = finite && fabsf(value[i]) < infinity();
        absmax = fmaxf(absmax, fabsf(value[i]));
    }
    finite = __all_sync(0xffffffffu, finite);
    for (int offset = 16; offset > 0; offset /= 2) absmax = fmaxf(absmax, __shfl_xor_sync(0xffffffffu, absmax, offset));
    const bool usable = finite && absmax >= 0x1p-100f;
    const float factor = usable ? __fdiv_rn(127.0f, absmax) : 0.0f;
    if (lane == 0) scales[block] = !finite ? __int_as_float(0x7fffffff) : usable ? __fdiv_rn(absmax, 127.0f) : 0.0f;
    #pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int code = usable ? __float2int_rn(__fmul_rn(value[i], factor)) : 0;
        q[block * BLOCK + 32 * i + lane] = static_cast<signed char>(code);
        int sum = code;
        for (int offset = SUMMED / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (lane % SUMMED == 0) sums[(block * BLOCK + 32 * i + lane) / SUMMED] = sum;
    }
}

#else

extern "C" __global__ void __launch_bounds__(32 * kWarps)
packed_reorder(const scalar* x, const int* columns, scalar* out, long long stride_x, int k) {
    const int column = blockIdx.y * 32 * kWarps + threadIdx.x;
    if (column < k) out[(long long)blockIdx.x * k + column] = x[blockIdx.x * stride_x + columns[column]];
}

#endif
