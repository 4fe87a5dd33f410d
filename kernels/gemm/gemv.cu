// Products of a few rows with a matrix, for the gated MLP in decoding.
//
//   c = x w0^T   or   act(x w0^T) (x w1^T)     x (m, k), w (n, k), c (m, n), m <= TOKENS; accumulates in float
//
// Memory-bound: one thread reads each weight once, 16 bytes at a time, and uses it from registers. 2 m n k flops (4
// gated) for n k weights (2 n k gated). A warp works on groups of 8 rows; groups of gate and up alternate:
//
//     lane 4 g + t      row g of each group, bytes 16 t .. of a 64-byte chunk
//
// 16 bits    Weights are the A operand of mma.sync (16 rows by 32 bytes of k), tokens are B. Columns of k may be
//            permuted as long as A and B agree: of a lane's 16 bytes, words 0 and 1 form the first step, 2 and 3 the
//            second. Rows 0 .. 7 of A are group 2 i, rows 8 .. 15 are group 2 i + 1, or zero without such a group.
// float32    FMA: exact products, at most 16 per weight, which stay hidden behind the loads.
//
// The WARPS warps of a block share its rows and alternate along k, UNROLL chunks each. Their sums are added in shared
// memory in a fixed order: the same bits every time.
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
#include "activation.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "vec.cuh"

typedef long long int64;
typedef DTYPE scalar;
typedef OUT out_scalar;

constexpr int kVec = 16 / sizeof(scalar), kChunk = 4 * kVec;  // elements per lane; elements of a row per warp
constexpr int kMatrices = GATED ? 2 : 1;
constexpr int kGroups = ROWS / 8 * kMatrices, kSlabs = (kGroups + 1) / 2;  // groups of 8 rows; slabs of 16
constexpr int kTokenTiles = TOKENS / 8;
typedef Vec<scalar, kVec> vec;

struct GemvShape {
    int64 stride_x, stride_w[2], stride_c, split_c;  // in elements
    int m, n, k, unused;
};

// 16 bytes of a row from column k on; zeros from `end` on.
template <Cache kCache> __device__ __forceinline__ vec fetch(const scalar* row, int k, int end) {
    vec v = {};
    if constexpr (ALIGNED) {
        if (k < end) v = load<vec, kVec, kCache>(row + k);
    } else {
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            if (k + e >= end) continue;
            const Vec<scalar, 1> one = load<Vec<scalar, 1>, 1, kCache>(row + k + e);
            v.word[e / vec::kPerWord] |= one.word[0] << (16 * (e % vec::kPerWord));
        }
    }
    return v;
}

// The sums of a block's warps, to be added: [warp][group][token][row of the group].
struct Parts {
    float sum[WARPS][kGroups][TOKENS][8];

    __device__ __forceinline__ float total(int group, int token, int row) const {
        float x = 0.0f;
        #pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) x += sum[warp][group][token][row];
        return x;
    }
};

// A warp's sums. add(w, row_of) adds one chunk of k: w holds weights by group, row_of(token) returns a token's bytes.
template <bool kHalf = sizeof(scalar) == 2> struct Sums {
    Accumulator sum[kSlabs][kTokenTiles] = {};

    template <typename RowOf> __device__ __forceinline__ void add(const vec (&w)[kGroups], RowOf row_of) {
        #pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
            const vec b = row_of(8 * tile + threadIdx.x % 32 / 4);
            #pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                const vec upper = w[2 * slab], lower = 2 * slab + 1 < kGroups ? w[2 * slab + 1] : vec{};
                #pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const Operand a = {upper.word[i], lower.word[i], upper.word[i + 1], lower.word[i + 1]};
                    ptx::mma<scalar>(sum[slab][tile], a, b.word[i], b.word[i + 1]);
                }
            }
        }
    }

    // Lanes t = 2, 3 store their second token first, so that a warp's stores have no bank conflicts.
    __device__ __forceinline__ void store(Parts& parts) const {
        const int lane = threadIdx.x % 32, odd = lane / 2 % 2;
        #pragma unroll
        for (int i = 0; i < kGroups * kTokenTiles; ++i) {
            const int group = i / kTokenTiles, tile = i % kTokenTiles, h = group % 2 * 2;
            const Accumulator& c = sum[group / 2][tile];
            float(&to)[TOKENS][8] = parts.sum[threadIdx.x / 32][group];
            const int token = 8 * tile + lane % 4 * 2;
            to[token + odd][lane / 4] = odd ? c[h + 1] : c[h];
            to[token + 1 - odd][lane / 4] = odd ? c[h] : c[h + 1];
        }
    }
};

template <> struct Sums<false> {
    float sum[kGroups][TOKENS] = {};

    template <typename RowOf> __device__ __forceinline__ void add(const vec (&w)[kGroups], RowOf row_of) {
        #pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            const vec x = row_of(token);
            #pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                #pragma unroll
                for (int e = 0; e < kVec; ++e) {
                    sum[group][token] = fmaf(element(w[group], e), element(x, e), sum[group][token]);
                }
            }
        }
    }

    __device__ __forceinline__ void store(Parts& parts) const {
        #pragma unroll
        for (int i = 0; i < kGroups * TOKENS; ++i) {
            const float total = warp_sum(sum[i / TOKENS][i % TOKENS], 4);
            float& to = parts.sum[threadIdx.x / 32][i / TOKENS][i % TOKENS][threadIdx.x % 32 / 4];
            if (threadIdx.x % 4 == 0) to = total;
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
gemv(const scalar* x, const scalar* w0, const scalar* w1, out_scalar* c, const __grid_constant__ GemvShape shape) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    const int row0 = blockIdx.x * ROWS;

    // This split's part of k, in whole turns of the block.
    constexpr int kTurn = WARPS * UNROLL * kChunk;
    const int turns = (shape.k + kTurn - 1) / kTurn, share = (turns + gridDim.y - 1) / gridDim.y;
    const int first = blockIdx.y * share, end_turn = min(first + share, turns);

    // Row g of a group, in gate or up by turns. Rows past the end have no columns.
    const auto row_of = [&](int group) { return row0 + (GATED ? group / 2 : group) * 8 + g; };
    const auto weights = [&](int group) {
        const bool second = GATED && group % 2;
        return (second ? w1 : w0) + row_of(group) * shape.stride_w[second];
    };

    Sums<> sums;
    for (int turn = first; turn < end_turn; ++turn) {
        const int k0 = turn * kTurn + warp * UNROLL * kChunk + lane % 4 * kVec;
        vec w[UNROLL][kGroups];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            #pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                w[u][i] = fetch<Cache::kOnce>(weights(i), k0 + u * kChunk, row_of(i) < shape.n ? shape.k : 0);
            }
        }
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            sums.add(w[u], [&](int token) {
                const int end = token < shape.m ? shape.k : 0;
                return fetch<Cache::kConstant>(x + token * shape.stride_x, k0 + u * kChunk, end);
            });
        }
    }

    __shared__ Parts parts;
    sums.store(parts);
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * TOKENS; i += 32 * WARPS) {
        const int group = i / (8 * TOKENS), token = i / 8 % TOKENS, row = 8 * group + i % 8;
        if (token >= shape.m || row0 + row >= shape.n) continue;
        float sum = parts.total(group * kMatrices, token, i % 8);
        if constexpr (GATED) {
            sum = activated<Activation::ACTIVATION, out_scalar>(sum).value * parts.total(2 * group + 1, token, i % 8);
        }
        c[blockIdx.y * shape.split_c + token * shape.stride_c + row0 + row] = narrowed<out_scalar>(sum);
    }
}
