// Products of a few rows with a matrix: what a gated MLP computes while decoding.
//
//   c = x w0^T   or   act(x w0^T) (x w1^T)     x (m, k), w (n, k), c (m, n), m <= TOKENS; sums are float
//
// Bound by memory: every weight is read once, by one thread, 16 bytes at a time, and goes from registers to the tensor
// cores. 2 m n k flops (4 gated) for n k weights (2 n k).
//
// The weights are the A operand of mma.sync, 16 rows by 32 bytes of k, the tokens are B. A lane may take any columns
// of k as long as A and B agree: it takes 16 bytes side by side, whose words serve two steps.
//
//     lane 4 g + t      row g of a group, bytes 16 t .. of a chunk of 64      words 0, 1: first step   2, 3: second
//     A, rows 0 .. 7    group 2 i        with gate and up: gate
//     A, rows 8 .. 15   group 2 i + 1    up, so that a lane has both sums of an element; zero where there is none
//
// The WARPS warps of a block share its rows and take turns along k, UNROLL chunks each. Their sums meet in shared
// memory and are added up in order: the same bits every time.
//
// Macros, all of them needed:
//   DTYPE   f16, bf16, f32 (3 x TF32)             OUT      the same, or f32
//   GATED   0 or 1                                ACTIVATION  kSilu, kGelu, kGeluTanh
//   ROWS    of each matrix per block: 8, 16 or 32
//   TOKENS  8 or 16                               ALIGNED  1: as in gemm_sm80.cu, for x and w
//   WARPS   UNROLL
//
//   gemv(x, w0, w1, c, shape)
//   grid   (ceil(n / ROWS), splits): each split adds up a part of k; c is then (splits, m, n) float
//   block  32 WARPS
#include "activation.cuh"
#include "mma.cuh"
#include "scalar.cuh"
#include "vec.cuh"

typedef long long int64;
typedef DTYPE scalar;
typedef OUT out_scalar;

constexpr int kVec = 16 / sizeof(scalar), kChunk = 4 * kVec;  // elements of a lane; of a row, per warp
constexpr int kMatrices = GATED ? 2 : 1;
constexpr int kGroups = ROWS / 8 * kMatrices, kSlabs = (kGroups + 1) / 2;  // of 8 rows; of 16
constexpr int kTokenTiles = TOKENS / 8;
typedef Vec<scalar, kVec> vec;

struct GemvShape {
    int64 stride_x, stride_w[2], stride_c, split_c;  // elements
    int m, n, k, unused;
};

// 16 bytes of a row from column k on; nothing from `end` on.
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

extern "C" __global__ void __launch_bounds__(32 * WARPS)
gemv(const scalar* x, const scalar* w0, const scalar* w1, out_scalar* c, const __grid_constant__ GemvShape shape) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    const int row0 = blockIdx.x * ROWS;

    // The split's part of k, in whole turns of the block.
    constexpr int kTurn = WARPS * UNROLL * kChunk;
    const int turns = (shape.k + kTurn - 1) / kTurn, share = (turns + gridDim.y - 1) / gridDim.y;
    const int first = blockIdx.y * share, end_turn = min(first + share, turns);

    // Row g of a group, of the matrix whose turn it is; rows that do not exist have no columns.
    const auto row_of = [&](int group) { return row0 + (GATED ? group / 2 : group) * 8 + g; };
    const auto weights = [&](int group) {
        const bool second = GATED && group % 2;
        return (second ? w1 : w0) + row_of(group) * shape.stride_w[second];
    };

    Accumulator sums[kSlabs][kTokenTiles] = {};
    for (int turn = first; turn < end_turn; ++turn) {
        const int k0 = turn * kTurn + warp * UNROLL * kChunk + lane % 4 * kVec;
        vec w[UNROLL][2 * kSlabs];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            #pragma unroll
            for (int i = 0; i < 2 * kSlabs; ++i) {
                w[u][i] = {};
                if (i >= kGroups) continue;
                w[u][i] = fetch<Cache::kOnce>(weights(i), k0 + u * kChunk, row_of(i) < shape.n ? shape.k : 0);
            }
        }
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            #pragma unroll
            for (int tile = 0; tile < kTokenTiles; ++tile) {
                const int token = 8 * tile + g;
                const vec b = fetch<Cache::kConstant>(x + token * shape.stride_x, k0 + u * kChunk,
                                                      token < shape.m ? shape.k : 0);
                #pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) {
                    const vec &upper = w[u][2 * slab], &lower = w[u][2 * slab + 1];
                    #pragma unroll
                    for (int step = 0; step < 2; ++step) {
                        const int i = 2 * step;
                        const Operand a = {upper.word[i], lower.word[i], upper.word[i + 1], lower.word[i + 1]};
                        multiply<scalar>(sums[slab][tile], a, b.word[i], b.word[i + 1]);
                    }
                }
            }
        }
    }

    // [warp][slab][token tile][half][token][row]. Lanes t = 2, 3 store their second token first: no two of a warp's
    // stores are then in one bank.
    constexpr int kSums = kSlabs * kTokenTiles * 2 * 64;
    __shared__ float parts[WARPS][kSums];
    #pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
        #pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Accumulator& sum = sums[slab][tile];
                float* const to = &parts[warp][((slab * kTokenTiles + tile) * 2 + h) * 64 + g];
                const int odd = lane / 2 % 2, token = lane % 4 * 2;
                to[(token + odd) * 8] = odd ? sum[2 * h + 1] : sum[2 * h];
                to[(token + 1 - odd) * 8] = odd ? sum[2 * h] : sum[2 * h + 1];
            }
        }
    }
    __syncthreads();

    const auto total = [&](int group, int token, int row) {
        float sum = 0.0f;
        #pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            sum += parts[i][((group / 2 * kTokenTiles + token / 8) * 2 + group % 2) * 64 + token % 8 * 8 + row];
        }
        return sum;
    };
    for (int i = threadIdx.x; i < ROWS * TOKENS; i += 32 * WARPS) {
        const int group = i / (8 * TOKENS), token = i / 8 % TOKENS, row = 8 * group + i % 8;
        if (token >= shape.m || row0 + row >= shape.n) continue;
        float sum = total(group * kMatrices, token, row % 8);
        if constexpr (GATED) {
            sum = activated<Activation::ACTIVATION, out_scalar>(sum).value * total(2 * group + 1, token, row % 8);
        }
        c[blockIdx.y * shape.split_c + token * shape.stride_c + row0 + row] = narrowed<out_scalar>(sum);
    }
}
