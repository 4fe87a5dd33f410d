// Attention, forward, on tensor cores by mma.sync (sm_80 and later).
//
//   q    (batch, seqlen_q, nheads,    head_dim)    DTYPE     k, v  (batch, seqlen_k, nheads_kv, head_dim or head_dim_v)
//   out  (batch, seqlen_q, nheads,    head_dim_v)  DTYPE     lse   (batch, nheads, seqlen_q) float, natural log
//
//   s = softcap(softmax_scale q k^T) - slope |i + seqlen_k - seqlen_q - j| + bias     masked: -inf
//   out = softmax(s) v        lse = ln sum exp(s)        a row that sees nothing: 0 and -inf
//
// Reads q once and k, v once per block of rows; 4 seqlen_q seqlen_k head_dim flops per head, all but the softmax on
// tensor cores. A block holds BLOCK_M rows of one head and goes through the keys BLOCK_N at a time, from the right
// (the masked end) to the left. A warp has 16 or 32 rows and BLOCK_N / WARPS_N of the keys of each tile.
//
//   tile     S = Q K^T                           O += P V
//   A        Q: registers, or shared memory      P: the registers of S, as they lie
//   B        K: ldmatrix                         V: ldmatrix.trans
//
// K has two buffers and V one: while S and the softmax of tile n are computed, V of n and K of n - 1 arrive; O += P V
// covers what is left of K. A second V would only cover what S and the softmax cover already, for shared memory that
// a second block per SM needs more.
//
//   shared memory   | K, even tiles | V | K, odd tiles |   Q   |      Q in registers: its place is that of odd K
//                   | out (or its partial sums in float), when all tiles are done
//
// Macros, all of them needed:
//   DTYPE       f16, bf16, or f32 (3 x TF32)
//   HEAD_DIM    a multiple of 32 that holds shape.head_dim; the rest is filled with zeros
//   HEAD_DIM_V  the same for the values; with VALUE_PARTS > 1 part of them: each block makes HEAD_DIM_V of out's columns
//   VALUE_PARTS ceil(shape.head_dim_v / HEAD_DIM_V)
//   BLOCK_M     WARPS_M times 16 or 32           WARPS_M
//   BLOCK_N     WARPS_N times a multiple of 16   WARPS_N    warps that share rows and divide the keys of a tile
//   MASK        kNone, kCausal (shape.window_right), kLocal (and shape.window_left)
//   SOFTCAP ALIBI SINKS      0 or 1
//   BIAS        kNone, kSame (DTYPE), kFloat
//   BLOCK_MASK  0 or 1, without PACK_GQA
//   VARLEN      0 or 1: cu_seqlens_q, cu_seqlens_k (batch + 1) int; q, k, v, out have one batch entry, lse_batch is 0
//   SEQUSED_K   0 or 1: seqused_k (batch) int, instead of shape.seqlen_k
//   PAGED       0 or 1: key j of a sequence is row j % page_size of page block_table[j / page_size]
//   PACK_GQA    0 or 1: rows are (query, head of the group), heads side by side: k is read once per group
//   SPLIT       0 or 1: the keys of a row are divided among shape.num_splits blocks. out and lse are float
//               [num_splits][...] and joined by attention_combine; where lse is -inf, out is not written
//
//   attention_forward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, sinks, alibi_slopes,
//                     bias, block_mask, shape); what the variant does not use may be null, lse too. With SPLIT sinks
//                     belong to attention_combine.
//   grid   (ceil(rows / BLOCK_M) * (SPLIT ? num_splits : 1), heads * VALUE_PARTS, batch)
//          rows: seqlen_q, with PACK_GQA seqlen_q * group; heads: nheads, with PACK_GQA nheads_kv. No seqlen_q of
//          VARLEN is longer than shape.seqlen_q; blocks past the end of theirs return.
//   block  32 WARPS_M WARPS_N
//   shared kernels/attention_shape.py: shared_bytes()
//   q, k, v, out and all strides: multiples of 16 bytes
#include "attention_shape.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "online_softmax.cuh"
#include "tile.cuh"

typedef DTYPE scalar;

constexpr Mask kMask = Mask::MASK;
constexpr int kThreads = 32 * WARPS_M * WARPS_N;
constexpr int kSlabs = BLOCK_M / WARPS_M / 16;       // of 16 rows, per warp
constexpr int kWarpN = BLOCK_N / WARPS_N;
constexpr int kTilesS = kWarpN / 8, kTilesO = HEAD_DIM_V / 8;
constexpr int kSteps = HEAD_DIM * sizeof(scalar) / 32;  // of 32 bytes, in Q K^T
constexpr int kStepKeys = 32 / sizeof(scalar);          // keys per step of P V

// 160 of 255 registers for matrices leave enough for addresses, rows and what is in flight.
constexpr bool kQInRegisters = 4 * kSlabs * (kTilesS + kTilesO + kSteps) <= 160;

typedef Tile<scalar, BLOCK_M, HEAD_DIM> TileQ;
typedef Tile<scalar, BLOCK_N, HEAD_DIM> TileK;
typedef Tile<scalar, BLOCK_N, HEAD_DIM_V> TileV;
typedef Tile<scalar, BLOCK_M, HEAD_DIM_V> TileOut;

constexpr int kOffsetV = TileK::kBytes, kOffsetOddK = kOffsetV + TileV::kBytes;
constexpr int kOffsetQ = kQInRegisters ? kOffsetOddK : kOffsetOddK + TileK::kBytes;

static_assert(kSlabs == 1 || kSlabs == 2, "a warp has 16 or 32 rows");
static_assert(kWarpN % 16 == 0, "ldmatrix.x4 reads 16 keys");

extern __shared__ __align__(128) unsigned char dynamic_shared[];

// The rows of a matrix of keys.
struct KeyRows {
    const scalar* first;
    int64 stride;

    __device__ __forceinline__ const scalar* operator()(int row) const { return first + row * stride; }
};

struct Forward {
    const AttentionShape& shape;
    const int lane, warp_m, warp_n;
    const unsigned shared;
    KeyRows k, v;
    int seqlen_k, head_dim_v;
    KeyRange keys;
    int tile_end;                  // tiles [.., tile_end) are looked at
    int tile_begin;
    int position;                  // of this lane's row 0, as a key: on the diagonal
    unsigned k_now, k_next;
    unsigned q[kQInRegisters ? kSteps : 1][kSlabs][4];
    float acc_o[kSlabs][kTilesO][4] = {};
    OnlineSoftmax<kSlabs> softmax;

    __device__ __forceinline__ Forward(const AttentionShape& shape)
        : shape(shape), lane(threadIdx.x % 32), warp_m(threadIdx.x / 32 % WARPS_M), warp_n(threadIdx.x / 32 / WARPS_M),
          shared(ptx::shared_address(dynamic_shared)), k_now(shared), k_next(shared + kOffsetOddK) {}

    template <typename TileT>
    __device__ __forceinline__ void load_keys(unsigned tile, const KeyRows& rows, int n, int cols) {
        const int first = n * BLOCK_N;
        copy_tile_async<TileT, kThreads>(tile, seqlen_k - first, cols, [&](int row, bool) { return rows(first + row); });
        ptx::cp_async_commit();
    }

    __device__ __forceinline__ void load_q_fragment(unsigned (&a)[kSlabs][4], int i) const {
        const LaneAddress<TileQ> rows(lane % 16, lane / 16);
        #pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            ptx::ldmatrix4(a[slab], rows.at(shared + kOffsetQ + warp_m * kSlabs * 16 * TileQ::kRowBytes, i, 16 * slab));
        }
    }

    // S = Q K^T: 16 keys and 32 bytes of head_dim per ldmatrix.
    __device__ __forceinline__ void scores(float (&s)[kSlabs][kTilesS][4]) {
        const LaneAddress<TileK> rows(warp_n * kWarpN + lane % 8 + lane / 16 * 8, lane / 8 % 2);
        #pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            unsigned a[kSlabs][4];
            if constexpr (!kQInRegisters) load_q_fragment(a, i);
            #pragma unroll
            for (int j = 0; j < kTilesS; j += 2) {
                unsigned b[4];
                ptx::ldmatrix4(b, rows.at(k_now, i, 8 * j));
                #pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) {
                    const unsigned(&q_i)[4] = kQInRegisters ? q[kQInRegisters ? i : 0][slab] : a[slab];
                    multiply<scalar>(s[slab][j], q_i, b[0], b[1]);
                    multiply<scalar>(s[slab][j + 1], q_i, b[2], b[3]);
                }
            }
        }
    }

    // O += P V. The accumulators of two tiles of S are the A operand of 16 keys:
    //   a0, a1 = (c0 c1), (c2 c3) of the first      a2, a3 = of the second
    __device__ __forceinline__ void add_values(const float (&p)[kSlabs][kTilesS][4]) {
        const LaneAddress<TileV> rows(warp_n * kWarpN + lane % 16, lane / 16);
        #pragma unroll
        for (int i = 0; i < kTilesS / 2; ++i) {
            unsigned a[kSlabs][4];
            #pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                #pragma unroll
                for (int r = 0; r < 4; ++r) a[slab][r] = Packed<scalar>::narrow(&p[slab][2 * i + r / 2][r % 2 * 2]);
            }
            #pragma unroll
            for (int j = 0; j < kTilesO; j += 2) {
                unsigned b[4];
                ptx::ldmatrix4_transposed(b, rows.at(shared + kOffsetV, j / 2, 16 * i));
                #pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) {
                    multiply<scalar>(acc_o[slab][j], a[slab], b[0], b[1]);
                    multiply<scalar>(acc_o[slab][j + 1], a[slab], b[2], b[3]);
                }
            }
        }
    }

    // One tile of keys. Its K is on the way.
    template <bool kMasked> __device__ __forceinline__ void step(int n) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // K is here; everybody is done with V and the other K
        load_keys<TileV>(shared + kOffsetV, v, n, head_dim_v);
        if (n > tile_begin) load_keys<TileK>(k_next, k, n - 1, shape.head_dim);
        else ptx::cp_async_commit();

        float s[kSlabs][kTilesS][4] = {};
        scores(s);
        if constexpr (kMasked) {
            const int first = n * BLOCK_N + warp_n * kWarpN + lane % 4 * 2;
            #pragma unroll
            for (int r = 0; r < 2 * kSlabs; ++r) {
                const int diagonal = position + 8 * r;
                int end = seqlen_k;
                if constexpr (kMask != Mask::kNone) end = min(end, diagonal + shape.window_right + 1);
                mask_row<kMask>(s[r / 2], r % 2, diagonal - shape.window_left - first, end - first);
            }
        }
        softmax.weigh(s, acc_o, shape.scale_log2);

        ptx::cp_async_wait<1>();
        __syncthreads();  // V is here
        add_values(s);
        const unsigned swap = k_now;
        k_now = k_next, k_next = swap;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
attention_forward(const scalar* q, const scalar* k, const scalar* v, void* out, float* lse, const int* cu_seqlens_q,
                  const int* cu_seqlens_k, const int* seqused_k, const int* block_table, const float* sinks,
                  const float* alibi_slopes, const void* bias, const unsigned char* block_mask,
                  const __grid_constant__ AttentionShape shape) {
    Forward f(shape);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = head / shape.group;
    // The longest rows first: short ones fill the end.
    const int m = kMask == Mask::kCausal ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int row0 = m * BLOCK_M, seqlen_q = shape.seqlen_q, shift = shape.seqlen_k - seqlen_q;
    f.seqlen_k = shape.seqlen_k;
    f.head_dim_v = shape.head_dim_v;
    f.k = {k + batch * shape.k.batch + kv_head * shape.k.head, shape.k.row};
    f.v = {v + batch * shape.v.batch + kv_head * shape.v.head, shape.v.row};
    f.keys = KeyRange::of<kMask>(row0 + shift, min(row0 + BLOCK_M, seqlen_q) - 1 + shift, f.seqlen_k,
                                 shape.window_left, shape.window_right);
    f.position = row0 + f.warp_m * kSlabs * 16 + f.lane / 4 + shift;
    f.tile_begin = f.keys.begin / BLOCK_N;
    f.tile_end = (f.keys.end + BLOCK_N - 1) / BLOCK_N;

    if (f.tile_end > f.tile_begin) {
        const scalar* q_rows = q + batch * shape.q.batch + head * shape.q.head + row0 * shape.q.row;
        copy_tile_async<TileQ, kThreads>(f.shared + kOffsetQ, seqlen_q - row0, shape.head_dim,
                                         [&](int row, bool) { return q_rows + row * shape.q.row; });
        int n = f.tile_end - 1;
        f.load_keys<TileK>(f.k_now, f.k, n, shape.head_dim);
        if constexpr (kQInRegisters) {
            ptx::cp_async_wait<0>();
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < kSteps; ++i) f.load_q_fragment(f.q[i], i);
        }
        for (; n >= max(f.keys.all_end / BLOCK_N, f.tile_begin); --n) f.step<true>(n);
        for (; n >= (f.keys.all_begin + BLOCK_N - 1) / BLOCK_N; --n) f.step<false>(n);
        if constexpr (kMask == Mask::kLocal) {
            for (; n >= f.tile_begin; --n) f.step<true>(n);
        }
    }

    #pragma unroll
    for (int r = 0; r < 2 * kSlabs; ++r) {
        const float sum = f.softmax.total(r);
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        #pragma unroll
        for (int j = 0; j < kTilesO; ++j) {
            f.acc_o[r / 2][j][r % 2 * 2] *= inverse;
            f.acc_o[r / 2][j][r % 2 * 2 + 1] *= inverse;
        }
        const int row = row0 + f.warp_m * kSlabs * 16 + f.lane / 4 + 8 * r;
        if (lse != nullptr && f.lane % 4 == 0 && row < seqlen_q) {
            lse[batch * shape.lse_batch + head * shape.lse_head + row] =
                sum == 0.0f ? minus_infinity() : f.softmax.row_max[r] * 0.6931471805599453f + logf(sum);
        }
    }

    // Out through shared memory, so that whole chunks leave. A warp reads the rows it wrote.
    __syncthreads();
    const int warp_row = f.warp_m * kSlabs * 16;
    #pragma unroll
    for (int r = 0; r < 2 * kSlabs; ++r) {
        #pragma unroll
        for (int j = 0; j < kTilesO; ++j) {
            const int row = warp_row + f.lane / 4 + 8 * r;
            *reinterpret_cast<unsigned*>(dynamic_shared + TileOut::at(0, row, j) + f.lane % 4 * 4) =
                Packed<scalar>::narrow(&f.acc_o[r / 2][j][r % 2 * 2]);
        }
    }
    __syncwarp();
    scalar* out_head = static_cast<scalar*>(out) + batch * shape.out.batch + head * shape.out.head;
    for (int i = f.lane; i < kSlabs * 16 * TileOut::kChunks; i += 32) {
        const int row = warp_row + i / TileOut::kChunks, chunk = i % TileOut::kChunks;
        if (row0 + row < seqlen_q && chunk * TileOut::kChunk < f.head_dim_v) {
            *reinterpret_cast<uint4*>(out_head + (row0 + row) * shape.out.row + chunk * TileOut::kChunk) =
                *reinterpret_cast<const uint4*>(dynamic_shared + TileOut::at(0, row, chunk));
        }
    }
}
