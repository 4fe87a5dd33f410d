// y = x W^T with ternary weights and many tokens, on tensor cores (mma.sync, sm_80 and later).
//
//   x        (tokens, units 64)  ACT: q8 from ternary_quantize_tokens, else the activations; row stride in elements
//   codes    (n, row_bytes)      w2
//   scale    (1 or n, groups)    float; scale_stride is 0 or groups; a group is `group_units` units of 64 weights
//   sums     (tokens) or, GROUPED, (tokens, units) int, and inverse (tokens) double: q8 only
//   y        (tokens, n)         OUT
//
//   q8      y = (sum over k of code q - sum of q) * scale * inverse     exact integers, then double
//   others  y = (sum over k of trit x) * scale                          float
//
// Weights stay packed until they are in registers (ternary_mma.cuh), so activations take most of the shared memory.
// 2 tokens n k operations, plus padding at the edges.
//
// A block computes BLOCK_N rows of weights by BLOCK_M tokens. It walks over K by UNITS units of 64, pipelined STAGES
// deep. WARPS_K warps share a tile of the result and alternate among the units. A stage (u: unit):
//
//     weights       [u][row] 16 bytes + gap       lane 4 g + t reads word t of row g: 8 rows cover all banks
//     activations   [u][token] 64 numbers + gap   lane 4 g + t reads vectors of token g, permuted by `swizzled`
//
// The gaps shift a row's units to different banks, because adjacent threads write them.
//
// DIVIDED: for fewer tiles than SMs, blockIdx.y splits K. ternary_gemm then writes its raw sums to `parts` (splits,
// tokens, n): int for q8 without groups, else float. ternary_gemm_sum adds them in order and computes y.
//
// Macros: ACT q8, f16, bf16 or f32; OUT; GROUPED: groups > 1, flushed to float at the end of each; DIVIDED; BLOCK_N,
// BLOCK_M, UNITS, WARPS_N, WARPS_M, WARPS_K, STAGES: kernels/weights/ternary_config.py
#include "scalar.cuh"
#include "ternary_mma.cuh"
#include "vec.cuh"

typedef ACT act;
typedef OUT out_scalar;
typedef Ternary<act> Math;
typedef Math::Number number;

template <bool, typename X, typename> struct Pick { typedef X type; };
template <typename X, typename Y> struct Pick<false, X, Y> { typedef Y type; };

constexpr bool kQuantized = sizeof(act) == 1, kGrouped = GROUPED, kDivided = DIVIDED;
constexpr int kUnits = UNITS, kStages = STAGES;
constexpr int kThreads = 32 * WARPS_N * WARPS_M * WARPS_K;
constexpr int kSlabs = BLOCK_N / WARPS_N / 16, kTiles = BLOCK_M / WARPS_M / 8;  // 16-row slabs, 8-token tiles
constexpr int kRowChunks = 4 * sizeof(act);                                     // 16-byte chunks per token and unit
constexpr int kWeightUnit = BLOCK_N * 16 + 128 / kUnits, kActUnit = BLOCK_M * kRowChunks * 16 + 64;
constexpr int kWeightBytes = kUnits * kWeightUnit, kStageBytes = kWeightBytes + kUnits * kActUnit;
constexpr int kTileStride = BLOCK_N + 4;  // elements, for the result in shared memory

static_assert(BLOCK_N % (16 * WARPS_N) == 0 && BLOCK_M % (8 * WARPS_M) == 0, "whole products");
static_assert(kUnits <= 8 && kWeightBytes % 64 == 0, "gaps are whole vectors");

constexpr bool kFloatSums = kGrouped || !kQuantized;
typedef Pick<kFloatSums, float, int>::type total;

struct TernaryShape {
    long long x_stride, row_bytes, scale_stride, y_stride;
    int tokens, n, units, group_units, aligned;  // aligned: rows of y are whole, aligned vectors of four
    int splits;
};

extern __shared__ __align__(128) unsigned char dynamic_shared[];

__device__ __forceinline__ int swizzled(int token, int chunk) {
    if constexpr (sizeof(act) == 4) return chunk ^ (chunk >> 3 | (token & 1) << 1);
    else if constexpr (sizeof(act) == 2) return chunk ^ (token & 1);
    else return chunk;
}

// A thread's share of copying: one unit and one vector of it, from every kRowStep-th row and kTokenStep-th token.
class Loader {
    static constexpr int kAcross = kUnits * kRowChunks;
    static constexpr int kRowStep = kThreads / kUnits, kTokenStep = kThreads / kAcross;
    static_assert(kThreads % kAcross == 0 && kTokenStep % 2 == 0, "a thread's tokens are permuted alike");

    const unsigned char* codes_;
    const act* x_;
    int rows_, tokens_;    // left from this thread's first one on
    int units_, x_units_;  // the same, of the next stage

public:
    // Covers units [unit0, end).
    __device__ __forceinline__ Loader(const act* x, const unsigned char* codes, int row0, int token0, int unit0,
                                      int end, const TernaryShape& shape) {
        const int row = row0 + threadIdx.x / kUnits, unit = unit0 + threadIdx.x % kUnits;
        codes_ = codes + row * shape.row_bytes + unit * 16;
        rows_ = shape.n - row, units_ = end - unit;
        const int token = token0 + threadIdx.x / kAcross, at = threadIdx.x % kAcross;
        x_ = x + token * shape.x_stride + unit0 * kUnit + at * (16 / static_cast<int>(sizeof(act)));
        tokens_ = shape.tokens - token, x_units_ = end - unit0 - at / kRowChunks;
    }

    // Starts copying a stage (zeros past the edges) and moves on to the next.
    __device__ __forceinline__ void load(unsigned stage, const TernaryShape& shape) {
        const int row = threadIdx.x / kUnits, token = threadIdx.x / kAcross, at = threadIdx.x % kAcross;
        unsigned to = ptx::opaque(stage + threadIdx.x % kUnits * kWeightUnit + row * 16);
        const unsigned char* codes = codes_;
        #pragma unroll
        for (int i = 0; i < BLOCK_N; i += kRowStep) {
            if (kRowStep > BLOCK_N && row >= BLOCK_N) break;
            ptx::cp_async16(to + i * 16, codes, i < rows_ && units_ > 0 ? 16 : 0);
            codes = ptx::opaque(codes + kRowStep * shape.row_bytes);
        }
        to = ptx::opaque(stage + kWeightBytes + at / kRowChunks * kActUnit +
                         (token * kRowChunks + swizzled(token, at % kRowChunks)) * 16);
        const act* x = x_;
        #pragma unroll
        for (int i = 0; i < BLOCK_M; i += kTokenStep) {
            if (kTokenStep > BLOCK_M && token >= BLOCK_M) break;
            ptx::cp_async16(to + i * kRowChunks * 16, x, i < tokens_ && x_units_ > 0 ? 16 : 0);
            x = ptx::opaque(x + kTokenStep * shape.x_stride);
        }
        codes_ += kUnits * 16, units_ -= kUnits;
        x_ += kUnits * kUnit, x_units_ -= kUnits;
    }
};

// A warp's accumulators.
struct Sums {
    Math::Sum now[kSlabs][kTiles] = {};
    Accumulator flushed[kGrouped ? kSlabs : 1][kGrouped ? kTiles : 1] = {};
    int correction[kGrouped ? kTiles : 1][2] = {};

    __device__ __forceinline__ void multiply(unsigned weights, unsigned acts, int row, int token) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        unsigned low[kSlabs], high[kSlabs];
        #pragma unroll
        for (int i = 0; i < kSlabs; ++i) {
            low[i] = ptx::load_shared(weights + (row + 16 * i + g) * 16 + 4 * t);
            high[i] = ptx::load_shared(weights + (row + 16 * i + g + 8) * 16 + 4 * t);
        }
        #pragma unroll 1  // registers for one vector of each token
        for (int h = 0; h < Math::kChunks; ++h) {
            uint4 b[kTiles];
            #pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                const int chunk = (token + 8 * j + g) * kRowChunks + swizzled(g, t * Math::kChunks + h);
                b[j] = ptx::load_shared4(acts + chunk * 16);
            }
            #pragma unroll
            for (int s = 0; s < 2; ++s) {
                #pragma unroll
                for (int i = 0; i < kSlabs; ++i) {
                    Operand a;
                    Math::unpack(a, low[i], high[i], h, s);
                    #pragma unroll
                    for (int j = 0; j < kTiles; ++j) {
                        Math::multiply(now[i][j], a, s ? b[j].z : b[j].x, s ? b[j].w : b[j].y);
                    }
                }
            }
        }
    }

    // Adds a unit's correction (sum of q) for the two tokens a lane has in each tile.
    __device__ __forceinline__ void correct(const int* sums, int token, int tokens, int units) {
        #pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int mine = token + 8 * j + threadIdx.x % 4 * 2 + e;
                if (mine < tokens) correction[j][e] += __ldg(sums + static_cast<long long>(mine) * units);
            }
        }
    }

    // Ends a group. scale points to the group in the matrix's first row.
    __device__ __forceinline__ void flush(const float* scale, int row, int n, long long stride) {
        #pragma unroll
        for (int i = 0; i < kSlabs; ++i) {
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int mine = row + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                const float gain = mine < n ? __ldg(scale + mine * stride) : 0.0f;
                #pragma unroll
                for (int j = 0; j < kTiles; ++j) {
                    #pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        number& sum = now[i][j][2 * half + e];
                        if constexpr (kQuantized) sum -= correction[j][e];
                        float& total = flushed[i][j][2 * half + e];
                        total = fmaf(static_cast<float>(sum), gain, total);
                        sum = 0;
                    }
                }
            }
        }
        #pragma unroll
        for (int j = 0; j < kTiles; ++j) correction[j][0] = correction[j][1] = 0;
    }
};

// Adds the sums of the warps that share a tile, in shared memory as [token][row].
template <typename T>
__device__ __forceinline__ void gather(T* tile, const Sums& sums, int row, int token, int turn) {
    #pragma unroll 1
    for (int k = 0; k < WARPS_K; ++k) {
        if (turn == k) {
            #pragma unroll
            for (int i = 0; i < kSlabs; ++i) {
                #pragma unroll
                for (int j = 0; j < kTiles; ++j) {
                    #pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        T sum;
                        if constexpr (kGrouped) sum = sums.flushed[i][j][r];
                        else sum = sums.now[i][j][r];
                        const int to = token + 8 * j + threadIdx.x % 4 * 2 + r % 2;
                        T& at = tile[to * kTileStride + row + 16 * i + threadIdx.x % 32 / 4 + r / 2 * 8];
                        at = k == 0 ? sum : at + sum;
                    }
                }
            }
        }
        __syncthreads();
    }
}

// Loads four adjacent sums, of which `here` exist. whole: they are one vector.
__device__ __forceinline__ void get_sums(const total* at, int here, bool whole, total (&sum)[4]) {
    uint4 bits = {};
    if (whole) bits = *reinterpret_cast<const uint4*>(at);
    const unsigned word[4] = {bits.x, bits.y, bits.z, bits.w};
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
        if (!whole) sum[e] = e < here ? at[e] : 0;
        else if constexpr (kFloatSums) sum[e] = __uint_as_float(word[e]);
        else sum[e] = static_cast<int>(word[e]);
    }
}

__device__ __forceinline__ void put_sums(total* at, int here, bool whole, const total (&sum)[4]) {
    if (whole) {
        detail::write_words<16>(at, reinterpret_cast<const unsigned*>(sum));
    } else {
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (e < here) at[e] = sum[e];
        }
    }
}

// Turns sums into y for four rows of weights, of which `here` exist, and any token.
struct Finish {
    float gain[4];
    int here;

    __device__ __forceinline__ Finish(const float* scale, int row, const TernaryShape& shape) : here(shape.n - row) {
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            gain[e] = kGrouped ? 1.0f : __ldg(scale + (row + min(e, here - 1)) * shape.scale_stride);
        }
    }

    __device__ __forceinline__ void store(out_scalar* at, const total (&sum)[4], const int* sums,
                                          const double* inverse, int token, bool aligned) const {
        float value[4];
        if constexpr (kQuantized) {
            const double by = __ldg(inverse + token);
            const int correction = kGrouped ? 0 : __ldg(sums + token);
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const double exact = kGrouped ? sum[e] : (sum[e] - correction) * static_cast<double>(gain[e]);
                value[e] = before_narrowing<out_scalar>(exact * by);
            }
        } else {
            #pragma unroll
            for (int e = 0; e < 4; ++e) value[e] = sum[e] * gain[e];
        }
        if (aligned) {
            store_four(at, value);
        } else {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (e < here) at[e] = narrowed<out_scalar>(value[e]);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kThreads == 256 ? 2 : 1)
ternary_gemm(const act* x, const unsigned char* codes, const float* scale, const int* sums, const double* inverse,
             void* y_or_parts, const __grid_constant__ TernaryShape shape) {
    const int tiles_n = (shape.n + BLOCK_N - 1) / BLOCK_N;
    const int row0 = blockIdx.x % tiles_n * BLOCK_N, token0 = blockIdx.x / tiles_n * BLOCK_M;
    const int warp = threadIdx.x / 32, warp_k = warp / (WARPS_N * WARPS_M);
    const int row = warp % WARPS_N * kSlabs * 16, token = warp / WARPS_N % WARPS_M * kTiles * 8;
    int steps = (shape.units + kUnits - 1) / kUnits, unit0 = 0, end = shape.units;
    if constexpr (kDivided) {
        const int share = (steps + shape.splits - 1) / shape.splits;
        const int begin = min(static_cast<int>(blockIdx.y) * share, steps);
        steps = min(share, steps - begin);
        unit0 = begin * kUnits, end = min(unit0 + steps * kUnits, end);
    }
    Loader from(x, codes, row0, token0, unit0, end, shape);
    const unsigned shared = ptx::shared_address(dynamic_shared);

    Sums sums_of_warp;
    #pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
        if (s < steps) from.load(shared + s * kStageBytes, shape);
        ptx::cp_async_commit();
    }
    int now = 0, later = kStages - 1;
    #pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        ptx::cp_async_wait<kStages - 2>();
        __syncthreads();  // this stage has arrived; no warp reads the previous one, which is refilled next
        if (step + kStages - 1 < steps) from.load(shared + later * kStageBytes, shape);
        ptx::cp_async_commit();
        const unsigned stage = shared + now * kStageBytes;
        #pragma unroll
        for (int k = 0; k < kUnits; k += WARPS_K) {
            const int in_stage = k + warp_k, unit = unit0 + step * kUnits + in_stage;
            if (kUnits > WARPS_K && unit >= end) break;
            const unsigned acts = stage + kWeightBytes + in_stage * kActUnit;
            sums_of_warp.multiply(stage + in_stage * kWeightUnit, acts, row, token);
            if constexpr (kGrouped) {
                if (unit >= end) break;
                if constexpr (kQuantized) {
                    sums_of_warp.correct(sums + token0 * static_cast<long long>(shape.units) + unit, token,
                                         shape.tokens - token0, shape.units);
                }
                const int group = unit / shape.group_units, next = unit + WARPS_K;
                if (next >= end || next / shape.group_units != group) {
                    sums_of_warp.flush(scale + row0 * shape.scale_stride + group, row, shape.n - row0,
                                       shape.scale_stride);
                }
            }
        }
        now = now + 1 == kStages ? 0 : now + 1;
        later = later + 1 == kStages ? 0 : later + 1;
    }
    ptx::cp_async_wait<0>();  // only empty groups remain: shared memory may be reused
    __syncthreads();

    // Store through shared memory. A thread has the same four rows for all its tokens.
    total* tile = reinterpret_cast<total*>(dynamic_shared);
    gather(tile, sums_of_warp, row, token, warp_k);
    constexpr int kAcross = BLOCK_N / 4;
    static_assert(kThreads % kAcross == 0, "a thread's rows are the same for all tokens");
    const int column = threadIdx.x % kAcross * 4;
    if (row0 + column >= shape.n) return;
    const Finish finish(scale, row0 + column, shape);
    for (int to = threadIdx.x / kAcross; to < min(BLOCK_M, shape.tokens - token0); to += kThreads / kAcross) {
        total sum[4];
        get_sums(tile + to * kTileStride + column, 4, true, sum);
        if constexpr (kDivided) {
            const long long token = static_cast<long long>(blockIdx.y) * shape.tokens + token0 + to;
            total* at = static_cast<total*>(y_or_parts) + token * shape.n + row0 + column;
            put_sums(at, finish.here, shape.n % 4 == 0, sum);
        } else {
            out_scalar* at = static_cast<out_scalar*>(y_or_parts) + (token0 + to) * shape.y_stride + row0 + column;
            finish.store(at, sum, sums, inverse, token0 + to, shape.aligned);
        }
    }
}

#if DIVIDED
// One thread per four rows of weights and token. With fewer tiles than SMs, 32 bits can count the threads.
extern "C" __global__ void __launch_bounds__(256)
ternary_gemm_sum(const total* parts, const float* scale, const int* sums, const double* inverse, out_scalar* y,
                 const __grid_constant__ TernaryShape shape) {
    const unsigned across = (shape.n + 3u) / 4, i = blockIdx.x * 256 + threadIdx.x;
    const int token = i / across, row = i % across * 4;
    if (token >= shape.tokens) return;
    const Finish finish(scale, row, shape);
    total sum[4] = {};
    for (int split = 0; split < shape.splits; ++split) {
        total part[4];
        get_sums(parts + (static_cast<long long>(split) * shape.tokens + token) * shape.n + row, finish.here,
                 shape.n % 4 == 0, part);
        #pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += part[e];
    }
    finish.store(y + token * shape.y_stride + row, sum, sums, inverse, token, shape.aligned);
}
#endif
