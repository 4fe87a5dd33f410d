// Products of up to TOKENS rows of x with ROWS rows of each weight, shared by the kernels of plain and packed weights.
//
// Memory-bound: one thread reads each weight once and uses it from registers. A warp works on groups of 8 rows; groups
// of two weights alternate:
//
//     lane 4 g + t      row g of each group, kVec elements from kVec t on of a chunk of kChunk: 64 bytes of DTYPE
//
// 16 bits    Weights are the A operand of mma.sync (16 rows by 32 bytes of k), tokens are B. Columns of k may be
//            permuted as long as A and B agree: of a lane's 16 bytes, words 0 and 1 form the first step, 2 and 3 the
//            second. Rows 0 .. 7 of A are group 2 i, rows 8 .. 15 are group 2 i + 1, or zero without such a group.
// float32    FMA: exact products, at most 16 per weight, which stay hidden behind the loads.
//
// The WARPS warps of a block share its rows and alternate along k, UNROLL chunks each. Their sums are added in shared
// memory in a fixed order: the same bits every time.
//
// Macros: DTYPE ROWS TOKENS WARPS UNROLL, as in gemm/gemv.cu; ALIGNED for x; kMatrices, the number of weights.
#pragma once
#include "ptx.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "vec.cuh"

typedef long long int64;
typedef DTYPE scalar;

constexpr int kVec = 16 / sizeof(scalar), kChunk = 4 * kVec;  // elements per lane; elements of a row per warp
constexpr int kGroups = ROWS / 8 * kMatrices, kSlabs = (kGroups + 1) / 2;  // groups of 8 rows; slabs of 16
constexpr int kTokenTiles = (TOKENS + 7) / 8;  // of mma; float32 takes any number of tokens
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

// A warp's sums. add(w, x_of) adds one chunk of k: w holds weights by group; x_of(i) returns a lane's part of row i of
// the kRows rows of x that it reads, which is token(i). Tokens past the last repeat it; their sums are not stored.
template <bool kHalf = sizeof(scalar) == 2> struct Sums {
    static constexpr int kRows = kTokenTiles;
    Accumulator sum[kSlabs][kTokenTiles] = {};

    static __device__ __forceinline__ int token(int row) { return 8 * row + threadIdx.x % 32 / 4; }

    template <typename XOf> __device__ __forceinline__ void add(const vec (&w)[kGroups], XOf x_of) {
        #pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
            const vec b = x_of(tile);
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
    static constexpr int kRows = TOKENS;
    float sum[kGroups][TOKENS] = {};

    static __device__ __forceinline__ int token(int row) { return row; }

    template <typename XOf> __device__ __forceinline__ void add(const vec (&w)[kGroups], XOf x_of) {
        #pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            const vec x = x_of(token);
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

// A warp's part of a turn, from column k0 on. kWhole: it does not pass the end of k.
template <bool kWhole, typename Weights>
__device__ __forceinline__ void
add_chunks(Sums<>& sums, const Weights& weights, const scalar* const (&x)[Sums<>::kRows], int k0, int k) {
    typename Weights::Loaded loaded[UNROLL][kGroups];
    weights.template load<kWhole>(loaded, k0);
    #pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        vec w[kGroups];
        #pragma unroll
        for (int i = 0; i < kGroups; ++i) w[i] = weights.values(loaded[u][i]);
        sums.add(w, [&](int row) {
            const int column = k0 + u * kChunk;
            if constexpr (kWhole && ALIGNED) return load<vec, kVec, Cache::kConstant>(x[row] + column);
            else return fetch<Cache::kConstant>(x[row], column, k);
        });
    }
}

// The sums of a split's part of k, in whole turns of the block. weights.load starts to read a lane's weights of all
// chunks of a turn; weights.values returns those of a chunk and group.
template <typename Weights>
__device__ __forceinline__ Sums<> products(const Weights& weights, const scalar* x, int64 stride_x, int m, int k) {
    constexpr int kSpan = UNROLL * kChunk, kTurn = WARPS * kSpan;
    const int turns = (k + kTurn - 1) / kTurn, share = (turns + gridDim.y - 1) / gridDim.y;
    const int first = blockIdx.y * share, end_turn = min(first + share, turns);
    const int lane_k = threadIdx.x / 32 * kSpan + threadIdx.x % 4 * kVec;
    const scalar* rows[Sums<>::kRows];
    #pragma unroll
    for (int i = 0; i < Sums<>::kRows; ++i) rows[i] = x + min(Sums<>::token(i), m - 1) * stride_x;
    Sums<> sums;
    for (int turn = first; turn < end_turn; ++turn) {
        const int k0 = turn * kTurn + lane_k;
        if (Weights::kSplitsTurns && k0 + kSpan - kChunk < k) add_chunks<true>(sums, weights, rows, k0, k);
        else add_chunks<false>(sums, weights, rows, k0, k);
    }
    return sums;
}

// Adds up the sums of the block's warps and stores result(parts, group, token, row of the group) of each row and token.
template <typename T, typename Result>
__device__ __forceinline__ void write(const Sums<>& sums, T* c, const GemvShape& shape, Result result) {
    __shared__ Parts parts;
    sums.store(parts);
    __syncthreads();
    const int row0 = blockIdx.x * ROWS;
    for (int i = threadIdx.x; i < ROWS * TOKENS; i += 32 * WARPS) {
        const int group = i / (8 * TOKENS), token = i / 8 % TOKENS, row = 8 * group + i % 8;
        if (token >= shape.m || row0 + row >= shape.n) continue;
        const float sum = result(parts, group, token, i % 8);
        c[blockIdx.y * shape.split_c + token * shape.stride_c + row0 + row] = narrowed<T>(sum);
    }
}
