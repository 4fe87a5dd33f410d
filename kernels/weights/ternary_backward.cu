// dx = dy W, the gradient of x in a product with ternary weights, on tensor cores (mma.sync, sm_80 and later).
//
//   dy      (tokens, n)       DTYPE, row stride in elements
//   codes   (n, row_bytes)    w2: ternary.cuh; W (n, k) = scale * trits
//   scale   (1 or n, groups)  float; scale_stride is 0 or groups; a group is `group_units` units of 64 weights
//   dx      (tokens, k)       OUT
//
//   SCALED 0   dx = (sum over n of dy trit) * scale[0]                                     accumulates in float
//   SCALED 1   dx = (sum over n of dy (trit * scale / unit)) * unit, with a scale per row or group
//
// 16 bits: trit * scale / unit is rounded to DTYPE; the power of two `unit` keeps it in float16's range. float: dy *
// scale is split in two TF32 parts, trits are exact. 2 tokens n k operations, twice that for float.
//
// W stays packed until it is in registers. It is the right operand (n, k), whose registers hold pairs along n in one
// column of k, while a word holds 16 neighbours along k in one row of n. The order of columns is free, so lane
// 4 g + t takes half a word (two bytes, eight codes) of each of its rows, for eight tiles of 8 columns:
//
//     words     w of row n, w' of row n + 1, both word g / 2 of a unit of 64 columns
//     halves    v = half g % 2 of w (low), half g % 2 of w' (high)  one byte permutation
//     tile j    bits 2 j, 2 j + 1 of both halves of v               column 16 (g / 2) + 4 (j % 4) + 2 (g % 2) + j / 4
//
// 11 instructions extract 16 codes from two words and 8 more convert them, for all tokens of the warp. In each row of
// tokens a lane ends up with the 16 columns from 16 t on, so it stores vectors.
//
// A block computes BLOCK_M tokens by 64 WARPS_K columns, one unit of 64 per warp, and walks over n in tiles of BLOCK_N,
// pipelined STAGES deep. A stage:
//
//     dy        BLOCK_M x BLOCK_N, a Tile
//     weights   [unit][row] 16 bytes + gap      the gap keeps units in different banks when they are written
//     gains     [unit][row] float + gap         scale, if SCALED
//
// Macros: DTYPE f16, bf16 or f32; OUT the same, or f32; SCALED; ALIGNED: rows of dy are whole, aligned vectors of 16
// bytes; BLOCK_M, BLOCK_N, WARPS_M, WARPS_K, STAGES: kernels/weights/ternary_config.py
//   grid (tiles of dx, splits). Each split sums part of n, and dx is then (splits, tokens, k) float.
#include "gemm_operand.cuh"
#include "scalar.cuh"
#include "ternary_mma.cuh"
#include "tile_order.cuh"
#include "vec.cuh"

typedef DTYPE scalar;
typedef OUT out_scalar;

constexpr int kThreads = 32 * WARPS_M * WARPS_K, kUnits = WARPS_K, kBlockK = kUnits * kUnit;
constexpr int kSlabs = BLOCK_M / WARPS_M / 16, kTiles = kUnit / 8;  // per warp: slabs of 16 tokens, tiles of 8 columns
constexpr int kStep = 32 / sizeof(scalar);                          // rows of W per mma
constexpr bool kScaled = SCALED;

typedef Tile<scalar, BLOCK_M, BLOCK_N> TileDy;
typedef Loader<TileDy, true, BLOCK_N, kThreads, ALIGNED> LoaderDy;

constexpr int kWeightUnit = BLOCK_N * 16 + 128 / kUnits, kGainsAt = TileDy::kBytes + kUnits * kWeightUnit;
constexpr int kGainUnit = BLOCK_N * 4 + (128 + 128 / kUnits - BLOCK_N * 4 % 128) % 128;
constexpr int kStageBytes = kGainsAt + kUnits * kGainUnit;
static_assert(kUnits * BLOCK_N <= kThreads, "a thread copies a vector of weights");
static_assert(kStageBytes % 128 == 0, "tiles begin in the first bank");

struct BackwardShape {
    long long dy_stride, row_bytes, scale_stride, dx_stride, split_dx;
    int tokens, n, k, group_units, aligned;  // aligned: rows of dx are whole, aligned vectors of 16 bytes
    float unit;
};

extern __shared__ __align__(128) unsigned char dynamic_shared[];

namespace ptx {

// Copies 4 bytes from global to shared memory, or zeros if they do not exist.
__device__ __forceinline__ void cp_async4(unsigned to, const void* from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(exists ? 4 : 0) : "memory");
}

__device__ __forceinline__ float2 load_shared_pair(unsigned address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}

// One lop3, with a constant in a register. From C++, ptxas makes two instructions.
__device__ __forceinline__ unsigned and_or(unsigned x, unsigned mask, unsigned bits) {
    unsigned y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
    return y;
}

template <typename T> __device__ __forceinline__ unsigned fma_pair(unsigned x, unsigned y, unsigned z) {
    if constexpr (Packed<T>::kWideRange) {
        return fma_bf16x2(x, y, z);
    } else {
        asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(z));
        return x;
    }
}

}  // namespace ptx

// Bits above a code c turn it into 2^23 + 4^i c in float, 1024 + 4^i c in f16 and 128 + 4^i c in bf16, and an FMA
// then gives c - 1. In f16 and bf16 a shift keeps i at 2 or less.
//
// Codes in bits 2 j, 2 j + 1 of both halves, as a pair of trits.
template <typename T> __device__ __forceinline__ unsigned trits_of_tile(unsigned halves, int j) {
    const unsigned i = j % 3, codes = halves >> j / 3 * 6, mask = 0x00030003u << 2 * i;
    if constexpr (Packed<T>::kWideRange) {
        const unsigned offset[3] = {0xc301c301u, 0xc204c204u, 0xc110c110u};  // -129, -33, -9
        return ptx::fma_pair<T>(ptx::and_or(codes, mask, 0x43004300u), 0x3f803f80u - 0x01000100u * i, offset[i]);
    } else {
        const unsigned offset[3] = {0xe401e401u, 0xdc04dc04u, 0xd410d410u};  // -1025, -257, -65
        return ptx::fma_pair<T>(ptx::and_or(codes, mask, 0x64006400u), 0x3c003c00u - 0x08000800u * i, offset[i]);
    }
}

// The same for one half, in float.
__device__ __forceinline__ unsigned trit_of_tile(unsigned half, int j) {
    const float x = __uint_as_float(ptx::and_or(half, 3u << 2 * j, 0x4b000000u)), scale = 1.0f / (1 << 2 * j);
    return __float_as_uint(fmaf(x, scale, -(8388608.0f * scale + 1.0f)));
}

// A thread's share in copying weights and their scales.
class Weights {
    const unsigned char* codes_;
    const float* scale_;
    int rows_;  // left, from this thread's row of the next stage on
    bool mine_, exists_;

public:
    __device__ __forceinline__ Weights(const unsigned char* codes, const float* scale, int n0, int n_end, int unit0,
                                       const BackwardShape& shape) {
        const int row = n0 + threadIdx.x / kUnits, unit = unit0 + threadIdx.x % kUnits;
        mine_ = threadIdx.x < kUnits * BLOCK_N, exists_ = unit < shape.row_bytes / 16;
        codes_ = codes + row * shape.row_bytes + unit * 16;
        scale_ = scale + row * shape.scale_stride + unit / shape.group_units;
        rows_ = n_end - row;
    }

    __device__ __forceinline__ void load(unsigned stage, const BackwardShape& shape) {
        if (mine_) {
            const int row = threadIdx.x / kUnits, unit = threadIdx.x % kUnits;
            const bool exists = exists_ && rows_ > 0;
            ptx::cp_async16(stage + TileDy::kBytes + unit * kWeightUnit + row * 16, codes_, exists ? 16 : 0);
            if constexpr (kScaled) ptx::cp_async4(stage + kGainsAt + unit * kGainUnit + row * 4, scale_, exists);
        }
        codes_ += BLOCK_N * shape.row_bytes, scale_ += BLOCK_N * shape.scale_stride, rows_ -= BLOCK_N;
    }
};

struct Sums {
    Accumulator of[kSlabs][kTiles] = {};

    // weights, gains: those of the warp's unit
    __device__ __forceinline__ void multiply(unsigned stage, unsigned weights, unsigned gains, int token,
                                             float per_unit) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const Fragments<TileDy, true, true> rows(stage, token);
        #pragma unroll
        for (int step = 0; step < BLOCK_N / kStep; ++step) {
            Operand a[kSlabs];
            #pragma unroll
            for (int i = 0; i < kSlabs; ++i) rows.read(a[i], i, step);
            const unsigned words = weights + step * kStep * 16 + g / 2 * 4;
            const auto word = [&](int row) { return ptx::load_shared(words + row * 16); };
            if constexpr (sizeof(scalar) == 2) {
                const unsigned select = g % 2 ? 0x7632 : 0x5410;
                const unsigned low = __byte_perm(word(2 * t), word(2 * t + 1), select);
                const unsigned high = __byte_perm(word(2 * t + 8), word(2 * t + 9), select);
                unsigned gain[2];
                #pragma unroll
                for (int h = 0; h < 2 && kScaled; ++h) {
                    const float2 x = ptx::load_shared_pair(gains + (step * kStep + 2 * t + 8 * h) * 4);
                    const float pair[2] = {x.x * per_unit, x.y * per_unit};
                    gain[h] = Packed<scalar>::narrow(pair);
                }
                #pragma unroll
                for (int j = 0; j < kTiles; ++j) {
                    unsigned b0 = trits_of_tile<scalar>(low, j), b1 = trits_of_tile<scalar>(high, j);
                    if constexpr (kScaled) {
                        b0 = ptx::fma_pair<scalar>(b0, gain[0], 0x80008000u);  // - 0
                        b1 = ptx::fma_pair<scalar>(b1, gain[1], 0x80008000u);
                    }
                    #pragma unroll
                    for (int i = 0; i < kSlabs; ++i) ptx::mma<scalar>(of[i][j], a[i], b0, b1);
                }
            } else {
                const unsigned low = word(t) >> g % 2 * 16, high = word(t + 4) >> g % 2 * 16;
                Operand rest[kSlabs];
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float gain = 1.0f;
                    if constexpr (kScaled) {
                        gain = __uint_as_float(ptx::load_shared(gains + (step * kStep + t + e / 2 * 4) * 4)) * per_unit;
                    }
                    #pragma unroll
                    for (int i = 0; i < kSlabs; ++i) {
                        const unsigned x = kScaled ? __float_as_uint(__uint_as_float(a[i][e]) * gain) : a[i][e];
                        rest[i][e] = tf32_rest(x), a[i][e] = tf32_part(x);
                    }
                }
                #pragma unroll
                for (int j = 0; j < kTiles; ++j) {
                    const unsigned b0 = trit_of_tile(low, j), b1 = trit_of_tile(high, j);
                    #pragma unroll
                    for (int i = 0; i < kSlabs; ++i) add_products(of[i][j], rest[i], b0, b1, a[i], b0, b1);
                }
            }
        }
    }
};

// Stores the lane's 16 columns of a row, from `column` on. Adjacent lanes exchange vectors, so that both write the same
// sector at a time:
//
//     vectors of lanes 2 u, 2 u + 1    a0 a1 (a2 a3)   b0 b1 (b2 b3)
//     stores                           a0 a1,  b0 b1,  (a2 a3,  b2 b3)
__device__ __forceinline__ void store_row(out_scalar* row, int column, int k, bool exists, bool aligned,
                                          const float (&x)[16]) {
    if (aligned) {
        constexpr int kSize = 16 / sizeof(out_scalar);
        const int odd = threadIdx.x % 2;
        #pragma unroll
        for (int i = 0; i < 16 / kSize; i += 2) {
            Vec<out_scalar, kSize> vector[2] = {packed<out_scalar, kSize>(x + i * kSize),
                                                packed<out_scalar, kSize>(x + (i + 1) * kSize)};
            #pragma unroll
            for (int w = 0; w < 4; ++w) {
                unsigned& first = vector[0].word[w];
                unsigned& second = vector[1].word[w];
                const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
                (odd ? first : second) = other;
            }
            #pragma unroll
            for (int lane = 0; lane < 2; ++lane) {
                const int at = column + (lane - odd) * 16 + (i + odd) * kSize;
                if (exists && at < k) store<kSize>(row + at, vector[lane]);
            }
        }
    } else if (exists) {
        #pragma unroll
        for (int e = 0; e < 16; ++e) {
            if (column + e < k) row[column + e] = narrowed<out_scalar>(x[e]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kSlabs == 4 || sizeof(scalar) == 4 ? 2 : 4)
ternary_backward(const scalar* dy, const unsigned char* codes, const float* scale, out_scalar* dx,
                 const __grid_constant__ BackwardShape shape) {
    int token0, column0;
    block_tile<BLOCK_M, kBlockK>(shape.tokens, shape.k, token0, column0);
    const int unit0 = column0 / kUnit;
    const int all = (shape.n + BLOCK_N - 1) / BLOCK_N, share = (all + gridDim.y - 1) / gridDim.y;
    const int begin = min(static_cast<int>(blockIdx.y) * share, all), steps = min(share, all - begin);
    const int n0 = begin * BLOCK_N, n_end = min(n0 + steps * BLOCK_N, shape.n);

    LoaderDy from_dy({dy, shape.dy_stride}, {}, token0, shape.tokens, n0, n_end);
    Weights from_w(codes, scale, n0, n_end, unit0, shape);
    const auto load = [&](unsigned stage) {
        from_dy.load(stage);
        from_w.load(stage, shape);
    };
    const unsigned shared = ptx::shared_address(dynamic_shared);
    const int warp = threadIdx.x / 32, unit = warp % WARPS_K, token = warp / WARPS_K * kSlabs * 16;
    const float per_unit = 1.0f / shape.unit;  // exact
    #pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < steps) load(shared + s * kStageBytes);
        ptx::cp_async_commit();
    }
    Sums sums;
    int now = 0, later = STAGES - 1;
    #pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        ptx::cp_async_wait<STAGES - 2>();
        __syncthreads();  // this stage has arrived; no warp reads the previous one, which is refilled next
        if (step + STAGES - 1 < steps) load(shared + later * kStageBytes);
        ptx::cp_async_commit();
        const unsigned stage = shared + now * kStageBytes;
        sums.multiply(stage, stage + TileDy::kBytes + unit * kWeightUnit, stage + kGainsAt + unit * kGainUnit, token,
                      per_unit);
        now = now + 1 == STAGES ? 0 : now + 1;
        later = later + 1 == STAGES ? 0 : later + 1;
    }

    const float factor = kScaled ? shape.unit : __ldg(scale);
    const int column = (unit0 + unit) * kUnit + threadIdx.x % 4 * 16;
    #pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x[16];
            #pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                #pragma unroll
                for (int e = 0; e < 2; ++e) x[4 * (j % 4) + 2 * e + j / 4] = sums.of[i][j][2 * half + e] * factor;
            }
            const int to = token0 + token + 16 * i + 8 * half + threadIdx.x % 32 / 4;
            store_row(dx + blockIdx.y * shape.split_dx + to * shape.dx_stride, column, shape.k, to < shape.tokens,
                      shape.aligned, x);
        }
    }
}
