// y = x W^T with ternary weights and few tokens, in one launch: every block quantises the tokens itself.
//
//   x       (tokens, k)       DTYPE, row stride in elements; tokens <= TOKENS
//   x_scale (tokens or 1)     float: 1 / s, read where DTYPE is q8; the step from one to the next is 1 or 0
//   codes   (n, row_bytes)    w2: ternary.cuh; n >= ROWS
//   scale   (1 or n, groups)  float; scale_stride is 0 or groups; a group is `group_units` units of 64 weights
//   y       (tokens, n)       OUT
//
//   y[t][n] = (sum over k of trit q[t]) * scale[n] / s[t]        exact integers, then double, then OUT
//
// Reads n k / 4 bytes once, 16 at a time, bypassing L1. At half an integer instruction per weight (ternary.cuh), an SM
// with 64 lanes keeps up with its share of memory bandwidth.
//
// A warp works on ROWS rows at a time; a lane takes every 32nd vector of each. The ROWS rows share the activations,
// which come from shared memory. AHEAD * ROWS vectors are in flight while as many are multiplied; the first of them
// load during the quantisation:
//
//     vector of a row  | 0  1 .. 31 | 32 .. 63 | ...        16 bytes, 64 codes
//     lane               0  1 .. 31   0 ..  31
//     step               0            1                     2048 codes
//
// DIVIDED: for small n, `shares` warps of a block (2, 4 or 8) alternate along the steps of one row and add their sums
// through shared memory. More than one block per row would not pay, because each block quantises all of x.
//
// Shared memory: TOKENS rows of q, whole steps, zero beyond k. A lane reads 4 consecutive chunks of 16 bytes, and 8
// lanes read one chunk each at a time. So chunk c is at c ^ (c / 8 % 4), which spreads them over the banks.
//
// Macros: DTYPE f16, bf16, f32 or q8, and GIVEN: whether it is q8; OUT; TOKENS; ROWS; DIVIDED; GROUPED: groups > 1, flushed to float after each vector.
#include "ptx.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "ternary.cuh"
#include "ternary_tokens.cuh"

typedef DTYPE scalar;
typedef OUT out_scalar;
typedef Activations<scalar> Chunk;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTokens = TOKENS, kRows = ROWS;
constexpr bool kDivided = DIVIDED;
constexpr int kFlight = kDivided ? 1 : TOKENS < 4 ? 4 : 2;  // limited by the registers that sums take
constexpr int kAhead = ROWS < kFlight ? kFlight / ROWS : 1;
static_assert(!kDivided || ROWS == 1, "there are few rows");
constexpr int kStepUnits = 32, kStepCodes = kStepUnits * kUnit;
constexpr bool kGrouped = GROUPED;

extern __shared__ uint4 dynamic_shared[];  // q, then, with groups, the sum of each unit

struct Shared {
    unsigned largest[kWarps][kTokens];
    int sums[kWarps][kTokens], sum[kTokens];
    int parts[kDivided ? kWarps : 1][kTokens];  // floats with groups
    TokenScale scale[kTokens];
};

__device__ __forceinline__ int swizzled(int chunk) { return chunk ^ (chunk >> 3 & 3); }

__device__ __forceinline__ int* unit_sums(int token, int steps) {
    return reinterpret_cast<int*>(dynamic_shared + kTokens * steps * (kStepCodes / 16)) + token * steps * kStepUnits;
}

#if !GIVEN
// The scales of all tokens, computed by the block.
__device__ __forceinline__ void find_scales(Shared& shared, const scalar* x, long long x_stride, int tokens, int k,
                                            bool whole) {
    #pragma unroll
    for (int t = 0; t < kTokens; ++t) {
        unsigned largest = 0;
        for (int at = threadIdx.x * Chunk::kSize; t < tokens && at < k; at += kThreads * Chunk::kSize) {
            largest = Chunk::largest(Chunk::get(x + t * x_stride, at, k, whole), largest);
        }
        largest = __reduce_max_sync(kFullWarp, largest);
        if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32][t] = largest;
    }
    __syncthreads();
    if (threadIdx.x < kTokens) {  // in double, which is slow: once per token
        unsigned largest = 0;
        for (int w = 0; w < kWarps; ++w) largest = max(largest, shared.largest[w][threadIdx.x]);
        shared.scale[threadIdx.x] = TokenScale(largest);
    }
}
#endif

// Fills q and its sums.
__device__ __forceinline__ void quantize(Shared& shared, const scalar* x, const float* x_scale, int x_scale_step,
                                         long long x_stride, int tokens, int k, int steps, bool whole) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if GIVEN
    if (threadIdx.x < tokens) shared.scale[threadIdx.x] = TokenScale(__ldg(x_scale + threadIdx.x * x_scale_step));
#else
    find_scales(shared, x, x_stride, tokens, k, whole);
#endif
    __syncthreads();
    #pragma unroll
    for (int t = 0; t < kTokens; ++t) {
        const TokenScale scale = shared.scale[t];
        int mine = 0;
        unsigned char* row = reinterpret_cast<unsigned char*>(dynamic_shared) + t * steps * kStepCodes;
        for (int at = threadIdx.x * Chunk::kSize; at < steps * kStepCodes; at += kThreads * Chunk::kSize) {
            unsigned q[Chunk::kSize / 4];
            Chunk::quantize(Chunk::get(x + t * x_stride, at, t < tokens ? k : 0, whole), scale, q);
            unsigned char* to = row + swizzled(at / 16) * 16 + at % 16;
            if constexpr (Chunk::kSize == 16) *reinterpret_cast<uint4*>(to) = make_uint4(q[0], q[1], q[2], q[3]);
            else if constexpr (Chunk::kSize == 8) *reinterpret_cast<uint2*>(to) = make_uint2(q[0], q[1]);
            else *reinterpret_cast<unsigned*>(to) = q[0];
            int four = 0;
            #pragma unroll
            for (int i = 0; i < Chunk::kSize / 4; ++i) four = byte_sum(q[i], four);
            mine += four;
            if constexpr (kGrouped) {  // the threads of a unit are adjacent
                #pragma unroll
                for (int offset = kUnit / Chunk::kSize / 2; offset > 0; offset /= 2) {
                    four += __shfl_xor_sync(kFullWarp, four, offset);
                }
                if (at % kUnit == 0) unit_sums(t, steps)[at / kUnit] = four;
            }
        }
        mine = __reduce_add_sync(kFullWarp, mine);
        if (lane == 0) shared.sums[warp][t] = mine;
    }
    __syncthreads();
    if (threadIdx.x < kTokens) {
        int sum = 0;
        for (int w = 0; w < kWarps; ++w) sum += shared.sums[w][threadIdx.x];
        shared.sum[threadIdx.x] = sum;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads, kGrouped && kTokens == 4 ? 1 : 2)
ternary_gemv(const scalar* x, const float* x_scale, const unsigned char* codes, const float* scale, out_scalar* y,
             long long x_stride, long long scale_stride, long long y_stride, int x_scale_step, int row_bytes,
             int tokens, int n, int k, int group_units, int whole, int shares) {
    __shared__ Shared shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = kDivided ? warp % shares : 0, turns = kDivided ? shares : 1;
    const int units = row_bytes / 16, steps = (units + kStepUnits - 1) / kStepUnits;
    const int stride = gridDim.x * kWarps * kRows;

    // The last rows also go kRows at a time: some are repeated, and their results dropped.
    int row = (blockIdx.x * kWarps + warp) / turns * kRows;
    const auto first_unit = [&](int row) {
        return codes + static_cast<long long>(min(row, n - kRows)) * row_bytes + (part * kStepUnits + lane) * 16;
    };
    const unsigned char* from = first_unit(row);
    uint4 next[kAhead][kRows], now[kAhead][kRows];
    const auto fetch = [&](int step) {
        #pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const bool exists = (step + a) * kStepUnits + lane < units && (!kDivided || row < n);
            #pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const unsigned char* at = from + r * row_bytes + a * kStepUnits * 16;
                next[a][r] = exists ? __ldcs(reinterpret_cast<const uint4*>(at)) : make_uint4(0, 0, 0, 0);
            }
        }
        from += turns * kAhead * kStepUnits * 16;
    };
    if (kDivided || row < n) fetch(part);
    quantize(shared, x, x_scale, x_scale_step, x_stride, tokens, k, steps, whole);
    unsigned acts[4];  // addresses of the lane's four chunks in the first step
    #pragma unroll
    for (int w = 0; w < 4; ++w) acts[w] = ptx::shared_address(dynamic_shared) + swizzled(lane * 4 + w) * 16;

    for (; kDivided || row < n; row += stride) {
        const int base = min(row, n - kRows);
        PlaneSums sums[kRows][kTokens] = {};
        float grouped[kGrouped ? kRows : 1][kTokens] = {};
        for (int step = part; step < steps; step += turns * kAhead) {
            #pragma unroll
            for (int a = 0; a < kAhead; ++a) {
                #pragma unroll
                for (int r = 0; r < kRows; ++r) now[a][r] = next[a][r];
            }
            if (step + turns * kAhead < steps) {
                fetch(step + turns * kAhead);
            } else if (!kDivided && row + stride < n) {
                from = first_unit(row + stride);
                fetch(0);
            }
            #pragma unroll
            for (int a = 0; a < kAhead; ++a) {
                if (kAhead > 1 && step + a >= steps) break;
                #pragma unroll
                for (int t = 0; t < kTokens; ++t) {
                    const int offset = (t * steps + step + a) * kStepCodes;
                    #pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        const uint4 q = ptx::load_shared4(acts[w] + offset);
                        #pragma unroll
                        for (int r = 0; r < kRows; ++r) {
                            const uint4& v = now[a][r];
                            sums[r][t].add(w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w, q);
                        }
                    }
                }
                if constexpr (kGrouped) {
                    const int unit = (step + a) * kStepUnits + lane;
                    #pragma unroll
                    for (int r = 0; r < kRows; ++r) {
                        const float gain =
                            unit < units ? __ldg(scale + (base + r) * scale_stride + unit / group_units) : 0.0f;
                        #pragma unroll
                        for (int t = 0; t < kTokens; ++t) {
                            const int sum = sums[r][t].total() - unit_sums(t, steps)[unit];
                            grouped[r][t] = fmaf(static_cast<float>(sum), gain, grouped[r][t]);
                            sums[r][t] = {};
                        }
                    }
                }
            }
        }
        // Each result of the warp is finished by a separate lane.
        int whole_sum = 0;
        float grouped_sum = 0.0f;
        #pragma unroll
        for (int r = 0; r < kRows; ++r) {
            #pragma unroll
            for (int t = 0; t < kTokens; ++t) {
                const bool mine = lane == r * kTokens + t;
                if constexpr (kGrouped) {
                    const float total = warp_sum(grouped[r][t], 32);
                    grouped_sum = mine ? total : grouped_sum;
                } else {
                    const int total = __reduce_add_sync(kFullWarp, sums[r][t].total());
                    whole_sum = mine ? total : whole_sum;
                }
            }
        }
        if constexpr (kDivided) {
            if (lane < kTokens) shared.parts[warp][lane] = kGrouped ? __float_as_int(grouped_sum) : whole_sum;
            __syncthreads();
            if (part > 0) return;
            for (int other = 1; other < shares && lane < kTokens; ++other) {
                const int more = shared.parts[warp + other][lane];
                if constexpr (kGrouped) grouped_sum += __int_as_float(more);
                else whole_sum += more;
            }
        }
        const int t = lane % kTokens, to = base + lane / kTokens;
        if (lane < kRows * kTokens && t < tokens && to >= row) {
            double value;
            if constexpr (kGrouped) value = grouped_sum;
            else value = (whole_sum - shared.sum[t]) * static_cast<double>(__ldg(scale + to * scale_stride));
            y[t * y_stride + to] = narrowed<out_scalar>(before_narrowing<out_scalar>(value * shared.scale[t].inverse));
        }
        if constexpr (kDivided) return;
    }
}
