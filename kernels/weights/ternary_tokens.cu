// Prepares many tokens for a ternary product: int8 activations, or rows that can be copied in whole vectors.
//
//   ternary_quantize_tokens   x (tokens, k) DTYPE to q int8, inverse = 1 / s double (ternary_tokens.cuh), and int sums
//                             of q: one per token, or, with GROUPED, one per unit of 64. DTYPE q8: x is copied, and
//                             inverse is x_scale[token * x_scale_step]
//   ternary_pad_tokens        x to a padded copy
//   ternary_round_tokens      x to q / s in DTYPE: the effective operand of an int8 product, for its gradients
//
// The first two write rows of whole units, zero beyond k. One block per token. x is read twice, the second time from L1
// or L2.
#include "reduce.cuh"
#include "scalar.cuh"
#include "ternary.cuh"
#include "ternary_tokens.cuh"

typedef DTYPE scalar;
typedef Activations<scalar> Chunk;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr bool kGrouped = GROUPED;

#if !GIVEN
// The scale of a row of x, computed by its block.
__device__ __forceinline__ TokenScale scale_of(const scalar* row, int k, bool whole) {
    __shared__ unsigned largest_of[kWarps];
    __shared__ TokenScale shared_scale;
    unsigned largest = 0;
    for (int at = threadIdx.x * Chunk::kSize; at < k; at += kThreads * Chunk::kSize) {
        largest = Chunk::largest(Chunk::get(row, at, k, whole), largest);
    }
    largest = __reduce_max_sync(kFullWarp, largest);
    if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x == 0) {  // in double, which is slow: once per block
        for (int w = 1; w < kWarps; ++w) largest = max(largest, largest_of[w]);
        shared_scale = TokenScale(largest);
    }
    __syncthreads();
    return shared_scale;
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads)
ternary_quantize_tokens(const scalar* x, const float* x_scale, signed char* q, double* inverse, int* sums,
                        long long x_stride, int x_scale_step, int k, int padded, int whole) {
    __shared__ int sum_of[kWarps];
    const long long token = blockIdx.x;
    const scalar* row = x + token * x_stride;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if GIVEN
    const TokenScale scale(__ldg(x_scale + token * x_scale_step));
#else
    const TokenScale scale = scale_of(row, k, whole);
#endif
    if (threadIdx.x == 0) inverse[token] = scale.inverse;

    int sum = 0;
    for (int first = 0; first < padded; first += kThreads * Chunk::kSize) {  // all lanes stay for the shuffles
        const int at = first + threadIdx.x * Chunk::kSize;
        int four = 0;
        if (at < padded) {
            unsigned word[Chunk::kSize / 4];
            Chunk::quantize(Chunk::get(row, at, k, whole), scale, word);
            detail::write_words<Chunk::kSize>(q + token * padded + at, word);
            #pragma unroll
            for (int i = 0; i < Chunk::kSize / 4; ++i) four = byte_sum(word[i], four);
        }
        if constexpr (kGrouped) {  // the threads of a unit are adjacent
            #pragma unroll
            for (int offset = kUnit / Chunk::kSize / 2; offset > 0; offset /= 2) {
                four += __shfl_xor_sync(kFullWarp, four, offset);
            }
            if (at < padded && at % kUnit == 0) sums[token * (padded / kUnit) + at / kUnit] = four;
        } else {
            sum += four;
        }
    }
    if constexpr (!kGrouped) {
        sum = __reduce_add_sync(kFullWarp, sum);
        if (lane == 0) sum_of[warp] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < kWarps; ++w) sum += sum_of[w];
            sums[token] = sum;
        }
    }
}

#if !GIVEN
extern "C" __global__ void __launch_bounds__(kThreads)
ternary_pad_tokens(const scalar* x, scalar* copy, long long x_stride, int k, int padded) {
    const long long token = blockIdx.x;
    for (int at = threadIdx.x * Chunk::kSize; at < padded; at += kThreads * Chunk::kSize) {
        store<Chunk::kSize>(copy + token * padded + at, Chunk::get(x + token * x_stride, at, k, false));
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
ternary_round_tokens(const scalar* x, scalar* rounded, long long x_stride, int k, int whole) {
    const long long token = blockIdx.x;
    const scalar* row = x + token * x_stride;
    scalar* to = rounded + token * k;
    const TokenScale scale = scale_of(row, k, whole);
    const float step = static_cast<float>(scale.inverse), rest = static_cast<float>(scale.inverse - step);
    for (int at = threadIdx.x * Chunk::kSize; at < k; at += kThreads * Chunk::kSize) {
        unsigned word[Chunk::kSize / 4];
        Chunk::quantize(Chunk::get(row, at, k, whole), scale, word);
        float value[Chunk::kSize];
        #pragma unroll
        for (int e = 0; e < Chunk::kSize; ++e) {
            const float q = static_cast<signed char>(word[e / 4] >> e % 4 * 8);
            value[e] = fmaf(q, step, q * rest);  // as if 1 / s were exact
        }
        if (whole) {
            store<Chunk::kSize>(to + at, packed<scalar, Chunk::kSize>(value));
        } else {
            #pragma unroll
            for (int e = 0; e < Chunk::kSize; ++e) {
                if (at + e < k) to[at + e] = narrowed<scalar>(value[e]);
            }
        }
    }
}
#endif
