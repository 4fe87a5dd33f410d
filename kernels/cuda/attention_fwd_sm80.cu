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
//   VARLEN      0 or 1: cu_seqlens_q, cu_seqlens_k (batch + 1) int; batch strides are 0, lse (nheads, total_q)
//   SEQUSED_K   0 or 1: seqused_k (batch) int, instead of shape.seqlen_k
//   PAGED       0 or 1: key j of a sequence is row j % page_size of page block_table[j / page_size]
//   PACK_GQA    0 or 1: rows are (query, head of the group), heads side by side: k is read once per group
//   SPLIT       0 or 1: the tiles of a row are divided among shape.num_splits blocks. out and lse are float, one per
//               split (out_split, lse_split), and joined by attention_combine.cu; where lse is -inf, out is not written
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
#include "key_rows.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "online_softmax.cuh"
#include "tile.cuh"

enum class Bias { kNone, kSame, kFloat };
template <bool kFirst, typename A, typename B> struct ChooseType { typedef A type; };
template <typename A, typename B> struct ChooseType<false, A, B> { typedef B type; };

typedef DTYPE scalar;

constexpr Mask kMask = Mask::MASK;
constexpr Bias kBias = Bias::BIAS;
constexpr int kThreads = 32 * WARPS_M * WARPS_N;
constexpr int kSlabs = BLOCK_M / WARPS_M / 16, kRows = 2 * kSlabs;  // of 16 rows, per warp; rows per lane
constexpr int kWarpN = BLOCK_N / WARPS_N;                           // keys of a tile, per warp
constexpr int kTilesS = kWarpN / 8, kTilesO = HEAD_DIM_V / 8;       // accumulators of 16 x 8
constexpr int kSteps = HEAD_DIM * sizeof(scalar) / 32;              // of Q K^T

// 160 of 255 registers for matrices leave enough for addresses, rows and what is in flight.
constexpr bool kQInRegisters = 4 * kSlabs * (kTilesS + kTilesO + kSteps) <= 160;

// Scores to which nothing is added are scaled by the multiply-add of the exponent.
constexpr bool kPlainScores = !SOFTCAP && !ALIBI && kBias == Bias::kNone;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Rows of one tile may see different keys.
constexpr bool kHides = kMask != Mask::kNone || kBias != Bias::kNone || BLOCK_MASK;

typedef Tile<scalar, BLOCK_M, HEAD_DIM> TileQ;
typedef Tile<scalar, BLOCK_N, HEAD_DIM> TileK;
typedef Tile<scalar, BLOCK_N, HEAD_DIM_V> TileV;

// O leaves through shared memory: as it is stored, or where several warps have parts of it, in float.
typedef typename ChooseType<SPLIT, float, scalar>::type out_scalar;
typedef typename ChooseType<(WARPS_N > 1), float, out_scalar>::type staged;
typedef Tile<staged, BLOCK_M * WARPS_N, HEAD_DIM_V, sizeof(staged) == 4> TileO;
struct Part { float row_max, weight; };  // of a row and a warp: behind the tile

constexpr int kOffsetV = TileK::kBytes, kOffsetOddK = kOffsetV + TileV::kBytes;
constexpr int kOffsetQ = kQInRegisters ? kOffsetOddK : kOffsetOddK + TileK::kBytes;

static_assert(kSlabs == 1 || kSlabs == 2, "a warp has 16 or 32 rows");
static_assert(kWarpN % 16 == 0, "ldmatrix.x4 reads 16 keys");
static_assert(!BLOCK_MASK || !PACK_GQA, "the heads of a group may have different block masks");

extern __shared__ __align__(128) unsigned char dynamic_shared[];

// softcap's tanh. The approximation is off by half a unit of float16, which is too much for float.
__device__ __forceinline__ float soft_sign(float x) {
    if constexpr (sizeof(scalar) == 2) return ptx::tanh(x);
    else return 1.0f - 2.0f * ptx::reciprocal(1.0f + ptx::exp2(2.0f * kLog2e * x));
}

__device__ __forceinline__ float widened(float x) { return x; }

template <typename T> __device__ __forceinline__ float widened(T x) {
    float value[2];
    Packed<T>::widen(x.bits, value);
    return value[0];
}

template <typename T> __device__ __forceinline__ T narrowed(float x) {
    if constexpr (sizeof(T) == 4) {
        return x;
    } else {
        const float pair[2] = {x, 0.0f};
        return {static_cast<unsigned short>(Packed<T>::narrow(pair))};
    }
}

// A word without the numbers that are not finite.
__device__ __forceinline__ unsigned only_finite(unsigned word) {
    float value[2];
    Packed<scalar>::widen(word, value);
    #pragma unroll
    for (int i = 0; i < Packed<scalar>::kPerWord; ++i) value[i] = fabsf(value[i]) < -minus_infinity() ? value[i] : 0.0f;
    return Packed<scalar>::narrow(value);
}

template <typename T> __device__ __forceinline__ void store_pair(unsigned char* to, const float (&pair)[2]) {
    if constexpr (sizeof(T) == 4) *reinterpret_cast<float2*>(to) = make_float2(pair[0], pair[1]);
    else *reinterpret_cast<unsigned*>(to) = Packed<T>::narrow(pair);
}

// What a block works on.
struct Work {
    int batch, head, kv_head;      // with PACK_GQA head is the first of the group
    int q_begin, seqlen_q, seqlen_k;
    int row0, rows;                // of rows, the block's first
    int column0, columns;          // of out, the block's
    int group;

    __device__ __forceinline__ int query(int row) const { return PACK_GQA ? row / group : row; }
    __device__ __forceinline__ int head_of(int row) const { return PACK_GQA ? head + row % group : head; }
    __device__ __forceinline__ int shift() const { return seqlen_k - seqlen_q; }
};

// A warp's part of it: accumulators, and one step per tile of keys.
struct Forward {
    const AttentionShape& shape;
    const Work& work;
    const int lane, warp_m, warp_n;
    const unsigned shared;
    KeyRows<TileK, kThreads, PAGED> k;
    KeyRows<TileV, kThreads, PAGED> v;
    const unsigned char* bias;     // of the sequence
    BlockMask block_mask;
    unsigned k_now, k_next;
    int query[PACK_GQA ? kRows : 1];
    float slope[PACK_GQA && ALIBI ? kRows : 1];
    bool careful = false;          // V has numbers that are not finite: they are left out, and added later
    unsigned q[kQInRegisters ? kSteps : 1][kSlabs][4];
    float acc_o[kSlabs][kTilesO][4];
    OnlineSoftmax<kSlabs> softmax;

    // Row r of this lane in the matrix of rows; its query; the key that query sits on.
    __device__ __forceinline__ int row(int r) const { return work.row0 + warp_m * kSlabs * 16 + lane / 4 + 8 * r; }
    __device__ __forceinline__ int query_of(int r) const { return PACK_GQA ? query[PACK_GQA ? r : 0] : row(r); }
    __device__ __forceinline__ int diagonal(int r) const { return query_of(r) + work.shift(); }

    __device__ __forceinline__ void start() {
        k_now = shared, k_next = shared + kOffsetOddK;
        softmax = {};
        #pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            #pragma unroll
            for (int j = 0; j < kTilesO; ++j) {
                #pragma unroll
                for (int r = 0; r < 4; ++r) acc_o[slab][j][r] = 0.0f;
            }
        }
    }

    __device__ __forceinline__ LaneAddress<TileQ> q_address() const {
        return {shared + kOffsetQ, warp_m * kSlabs * 16 + lane % 16, lane / 16};
    }

    // S = Q K^T: 16 keys and 32 bytes of head_dim per ldmatrix.
    __device__ __forceinline__ void scores(float (&s)[kSlabs][kTilesS][4]) {
        const LaneAddress<TileK> rows_k(k_now, warp_n * kWarpN + lane % 8 + lane / 16 * 8, lane / 8 % 2);
        const LaneAddress<TileQ> rows_q = q_address();
        #pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            #pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                if constexpr (!kQInRegisters) ptx::ldmatrix4(q[0][slab], rows_q.at(i, 16 * slab));
            }
            #pragma unroll
            for (int j = 0; j < kTilesS; j += 2) {
                unsigned b[4];
                ptx::ldmatrix4(b, rows_k.at(i, 8 * j));
                #pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) {
                    const unsigned(&a)[4] = q[kQInRegisters ? i : 0][slab];
                    multiply<scalar>(s[slab][j], a, b[0], b[1]);
                    multiply<scalar>(s[slab][j + 1], a, b[2], b[3]);
                }
            }
        }
    }

    __device__ __forceinline__ float bias_at(int row, int query, int key) const {
        if constexpr (kBias == Bias::kNone) return 0.0f;
        const int64 at = work.head_of(row) * shape.bias[1] + query * shape.bias[2] + key * shape.bias[3];
        if constexpr (kBias == Bias::kFloat) return reinterpret_cast<const float*>(bias)[at];
        else return widened(reinterpret_cast<const scalar*>(bias)[at]);
    }

    // Softcap, ALiBi and bias: scores in units of log2. `first` is the key of this lane's first column.
    __device__ __forceinline__ void shape_row(float (&s)[kTilesS][4], int r, int first, int end) {
        const int h = r % 2;
        const float along = static_cast<float>(diagonal(r) - first);
        #pragma unroll
        for (int j = 0; j < kTilesS; ++j) {
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = s[j][2 * h + e];
                const int column = 8 * j + e;
                if constexpr (SOFTCAP) x = shape.softcap_log2 * soft_sign(x * shape.softcap_in);
                else x *= shape.scale_log2;
                if constexpr (ALIBI) x = fmaf(-slope[PACK_GQA ? r : 0], fabsf(along - column), x);
                if constexpr (kBias != Bias::kNone) {
                    // What nobody sees is not read.
                    const float b = column < end && row(r) < work.rows ? bias_at(row(r), query_of(r), first + column)
                                                                       : minus_infinity();
                    x = b == minus_infinity() ? b : fmaf(b, kLog2e, x);
                }
            }
        }
    }

    // O += P V. The accumulators of two tiles of S are the A operand of 16 keys:
    //
    //   a0, a1 = (c0 c1), (c2 c3) of the first      a2, a3 = of the second
    //
    // 8 keys of float make a step. There A wants keys t and t + 4 where the accumulator has 2t and 2t + 1: the rows of V
    // are taken in that order.
    __device__ __forceinline__ void add_values(const float (&p)[kSlabs][kTilesS][4]) {
        constexpr bool kHalf = sizeof(scalar) == 2;
        constexpr int kKeys = kHalf ? 16 : 8;
        const int row0 = warp_n * kWarpN + (kHalf ? lane % 16 : lane % 4 * 2);
        const LaneAddress<TileV> even(shared + kOffsetV + (kHalf ? 0 : lane / 4 % 4 * 4), row0, kHalf ? lane / 16 : lane / 16);
        const LaneAddress<TileV> odd(shared + kOffsetV + lane / 4 % 4 * 4, row0 + 1, lane / 16);
        #pragma unroll
        for (int i = 0; i < kWarpN / kKeys; ++i) {
            unsigned a[kSlabs][4];
            #pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                #pragma unroll
                for (int r = 0; r < 4; ++r) {
                    if constexpr (kHalf) a[slab][r] = Packed<scalar>::narrow(&p[slab][2 * i + r / 2][r % 2 * 2]);
                    else a[slab][r] = __float_as_uint(p[slab][i][r % 2 * 2 + r / 2]);
                }
            }
            #pragma unroll
            for (int j = 0; j < kTilesO; j += kHalf ? 2 : 1) {
                unsigned b[4];
                if constexpr (kHalf) {
                    ptx::ldmatrix4_transposed(b, even.at(j / 2, 16 * i));
                } else {
                    b[0] = ptx::load_shared(even.at(j, 8 * i));
                    b[1] = ptx::load_shared(odd.at(j, 8 * i));
                }
                #pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) {
                    #pragma unroll
                    for (int tile = 0; tile < (kHalf ? 2 : 1); ++tile) {
                        multiply<scalar>(acc_o[slab][j + tile], a[slab], b[2 * tile], b[2 * tile + 1]);
                    }
                }
            }
        }
    }

    // Tile n. Its K is on the way; tile `next` comes after it, unless that is negative. partly: the block mask hides some
    // of it.
    template <bool kMasked> __device__ __forceinline__ void step(int n, int next, bool partly) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // K is here; everybody is done with V and the other K
        v.template load<!kMasked>(shared + kOffsetV, n, work.seqlen_k, work.columns);
        ptx::cp_async_commit();
        if (next >= 0) k.template load<true>(k_next, next, work.seqlen_k, shape.head_dim);
        ptx::cp_async_commit();

        float s[kSlabs][kTilesS][4] = {};
        scores(s);
        const int first = n * BLOCK_N + warp_n * kWarpN + lane % 4 * 2;
        #pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float(&row_s)[kTilesS][4] = s[r / 2];
            int end = work.seqlen_k;
            if constexpr (kMask != Mask::kNone) end = min(end, diagonal(r) + shape.window_right + 1);
            if constexpr (!kPlainScores) shape_row(row_s, r, first, end - first);
            if constexpr (kMasked) {
                mask_row<kMask>(row_s, r % 2, diagonal(r) - shape.window_left - first, end - first);
                if constexpr (BLOCK_MASK) {
                    if (partly && row(r) < work.rows) mask_blocks(row_s, r % 2, block_mask, query_of(r), first, end - first);
                }
            }
        }
        softmax.weigh(s, acc_o, kPlainScores ? shape.scale_log2 : 1.0f);

        ptx::cp_async_wait<1>();
        if (kHides && careful) Copy<TileV, kThreads>::each_word(dynamic_shared + kOffsetV, only_finite);
        __syncthreads();  // V is here
        add_values(s);
        const unsigned swap = k_now;
        k_now = k_next, k_next = swap;
    }

    // The next tile to the left, from n on, that the block mask does not hide; -1 when there is none.
    __device__ __forceinline__ int find(int n, int begin, bool& partly) const {
        if constexpr (BLOCK_MASK) {
            const int row_end = min(work.row0 + BLOCK_M, work.rows);
            for (; n >= begin; --n) {
                const auto part = block_mask.seen(work.row0, row_end, n * BLOCK_N, min((n + 1) * BLOCK_N, work.seqlen_k));
                partly = part == BlockMask::kPart;
                if (part != BlockMask::kNothing) return n;
            }
        }
        return n >= begin ? n : -1;
    }

    // Q, which is on the way, when all that has come since, the first K, may still be.
    __device__ __forceinline__ void receive_q() {
        if (kQInRegisters || shape.negate) ptx::cp_async_wait<1>();
        if (shape.negate) {
            const unsigned signs = sizeof(scalar) == 2 ? 0x80008000u : 0x80000000u;
            Copy<TileQ, kThreads>::each_word(dynamic_shared + kOffsetQ, [=](unsigned word) { return word ^ signs; });
        }
        if constexpr (kQInRegisters) {
            __syncthreads();
            const LaneAddress<TileQ> rows = q_address();
            #pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                #pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) ptx::ldmatrix4(q[i][slab], rows.at(i, 16 * slab));
            }
        }
    }

    // All tiles [begin, end), of which [all_begin, all_end) need no mask.
    __device__ __forceinline__ void run(int begin, int end, int all_begin, int all_end) {
        bool partly = false, next_partly = false;
        int n = find(end - 1, begin, partly);
        if (n >= 0) k.template load<false>(k_now, n, work.seqlen_k, shape.head_dim);
        ptx::cp_async_commit();
        if (!careful) receive_q();
        // Two loops, so that tiles that are seen whole, most of them, compare nothing. Masked ones come first, and with a
        // window last; with a block mask the two take turns.
        const auto masked = [&] {
            return kBias != Bias::kNone || partly || n >= all_end || (kMask == Mask::kLocal && n < all_begin);
        };
        do {
            for (int next; n >= 0 && masked(); n = next, partly = next_partly) {
                next = find(n - 1, begin, next_partly);
                step<true>(n, next, partly);
            }
            if constexpr (kBias != Bias::kNone) break;
            for (int next; n >= 0 && !masked(); n = next, partly = next_partly) {
                next = find(n - 1, begin, next_partly);
                step<false>(n, next, false);
            }
        } while ((kMask == Mask::kLocal || BLOCK_MASK) && n >= 0);
    }

    // Whether a row sees a key: what the masks do tile by tile, for one pair.
    __device__ __forceinline__ bool sees(int row, int key) const {
        const int query = work.query(row), diagonal = query + work.shift();
        bool visible = true;
        if (kMask != Mask::kNone) visible = key <= diagonal + shape.window_right;
        if (kMask == Mask::kLocal) visible = visible && key >= diagonal - shape.window_left;
        if (BLOCK_MASK) visible = visible && block_mask.sees(query, key);
        return visible && bias_at(row, query, key) != minus_infinity();
    }

    // Adds to O, staged in shared memory, the numbers of V that are not finite, where they are seen: 0 * inf is NaN, so
    // the product would bring them to every row. A column of a thread; slow, and rare.
    __device__ __forceinline__ void add_special(unsigned char* tile, int first_key, int last_key) const {
        #pragma unroll 1
        for (int column = threadIdx.x; column < work.columns; column += kThreads) {
            #pragma unroll 1
            for (int key = first_key; key < last_key; ++key) {
                const float x = widened(v.at(key, column));
                if (fabsf(x) < -minus_infinity()) continue;
                #pragma unroll 1
                for (int row = 0; row < BLOCK_M && work.row0 + row < work.rows; ++row) {
                    if (!sees(work.row0 + row, key)) continue;
                    const int byte = column * sizeof(staged);
                    staged& o = *reinterpret_cast<staged*>(tile + TileO::at(0, row, byte / 16) + byte % 16);
                    o = narrowed<staged>(widened(o) + x);
                }
            }
        }
    }

    __device__ __forceinline__ bool all_finite() const {
        float zero = 0.0f;
        #pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            #pragma unroll
            for (int j = 0; j < kTilesO; ++j) {
                #pragma unroll
                for (int r = 0; r < 4; ++r) zero = fmaf(acc_o[slab][j][r], 0.0f, zero);
            }
        }
        return zero == 0.0f;
    }
};

// The softmax weights of a row are relative to row_max and sum up to row_sum: adds the sink, writes lse and gives what O
// is to be multiplied with.
__device__ __forceinline__ float finish_row(const AttentionShape& shape, const Work& work, int row, float row_max,
                                            float row_sum, const float* sinks, float* lse) {
    float scale = 1.0f;
    if (SINKS && !SPLIT && row < work.rows) {
        const float sink = sinks[work.head_of(row)] * kLog2e, m = fmaxf(row_max, sink);
        scale = ptx::exp2(row_max - m);
        row_sum = fmaf(row_sum, scale, ptx::exp2(sink - m));
        row_max = m;
    }
    if (lse != nullptr && row < work.rows && work.column0 == 0) {
        lse[work.head_of(row) * shape.lse_head + work.query(row)] =
            row_sum == 0.0f ? minus_infinity() : fmaf(row_max, kLn2, logf(row_sum));
    }
    return row_sum == 0.0f ? 0.0f : scale / row_sum;
}

extern "C" __global__ void __launch_bounds__(kThreads)
attention_forward(const scalar* q, const scalar* k, const scalar* v, out_scalar* out, float* lse, const int* cu_seqlens_q,
                  const int* cu_seqlens_k, const int* seqused_k, const int* block_table, const float* sinks,
                  const float* alibi_slopes, const unsigned char* bias, const unsigned char* block_mask,
                  const __grid_constant__ AttentionShape shape) {
    // Which rows: of causal ones the longest first, so that short ones fill the end.
    const int batch = blockIdx.z;
    const int blocks_m = SPLIT ? gridDim.x / shape.num_splits : gridDim.x;
    const int split = SPLIT ? blockIdx.x / blocks_m : 0, m = SPLIT ? blockIdx.x % blocks_m : blockIdx.x;
    Work work;
    work.head = blockIdx.y / VALUE_PARTS * (PACK_GQA ? shape.group : 1);
    work.kv_head = PACK_GQA ? blockIdx.y / VALUE_PARTS : work.head / shape.group;
    work.group = shape.group;
    work.column0 = blockIdx.y % VALUE_PARTS * HEAD_DIM_V;
    work.columns = min(HEAD_DIM_V, shape.head_dim_v - work.column0);
    const int q_begin = VARLEN ? cu_seqlens_q[batch] : 0, k_begin = VARLEN ? cu_seqlens_k[batch] : 0;
    work.seqlen_q = VARLEN ? cu_seqlens_q[batch + 1] - q_begin : shape.seqlen_q;
    work.seqlen_k = SEQUSED_K ? seqused_k[batch] : VARLEN ? cu_seqlens_k[batch + 1] - k_begin : shape.seqlen_k;
    work.rows = PACK_GQA ? work.seqlen_q * shape.group : work.seqlen_q;
    work.row0 = (kMask == Mask::kCausal ? blocks_m - 1 - m : m) * BLOCK_M;
    if (VARLEN && work.row0 >= work.rows) return;

    q += batch * shape.q.batch + q_begin * shape.q.row;
    out += batch * shape.out.batch + q_begin * shape.out.row + split * shape.out_split + work.column0;
    if (lse != nullptr) lse += batch * shape.lse_batch + q_begin + split * shape.lse_split;
    k += (PAGED ? 0 : batch * shape.k.batch) + k_begin * shape.k.row + work.kv_head * shape.k.head;
    v += (PAGED ? 0 : batch * shape.v.batch) + k_begin * shape.v.row + work.kv_head * shape.v.head + work.column0;
    const int* pages = PAGED ? block_table + batch * shape.block_table_batch : nullptr;
    Forward f{shape, work, int(threadIdx.x % 32), int(threadIdx.x / 32 % WARPS_M), int(threadIdx.x / 32 / WARPS_M),
              ptx::shared_address(dynamic_shared), {k, shape.k, pages, shape.page_size}, {v, shape.v, pages, shape.page_size}};
    if constexpr (PACK_GQA) {
        #pragma unroll
        for (int r = 0; r < kRows; ++r) f.query[r] = work.query(f.row(r));
    }
    if constexpr (ALIBI) {
        #pragma unroll
        for (int r = 0; r < (PACK_GQA ? kRows : 1); ++r) {
            f.slope[r] = alibi_slopes[batch * shape.alibi_batch + work.head_of(f.row(r))] * kLog2e;
        }
    }
    if constexpr (kBias != Bias::kNone) f.bias = bias + batch * shape.bias[0] * (kBias == Bias::kFloat ? 4 : sizeof(scalar));
    if constexpr (BLOCK_MASK) {
        f.block_mask = {block_mask + batch * shape.block_mask[0] + work.head * shape.block_mask[1], shape.block_mask[2],
                        shape.block_mask[3], shape.block_q, shape.block_k};
    }

    // Which tiles.
    const KeyRange keys = KeyRange::of<kMask>(work.query(work.row0) + work.shift(),
                                              work.query(min(work.row0 + BLOCK_M, work.rows) - 1) + work.shift(),
                                              work.seqlen_k, shape.window_left, shape.window_right);
    int begin = keys.begin / BLOCK_N, end = (keys.end + BLOCK_N - 1) / BLOCK_N;
    if constexpr (SPLIT) {
        const int share = (max(end - begin, 0) + shape.num_splits - 1) / shape.num_splits;
        begin += split * share;
        end = min(end, begin + share);
    }

    // From right to left. Where something in V is not finite, once more without it: rows may not see it.
    f.start();
    if (begin < end) {
        typedef Copy<TileQ, kThreads> LoadQ;
        LoadQ::template start<false>(f.shared + kOffsetQ, work.rows - work.row0, shape.head_dim, [&](int row, int) {
            row += work.row0;
            return q + work.query(row) * shape.q.row + work.head_of(row) * shape.q.head + LoadQ::column();
        });
        ptx::cp_async_commit();
        const int all_begin = (keys.all_begin + BLOCK_N - 1) / BLOCK_N, all_end = keys.all_end / BLOCK_N;
        for (;;) {
            f.run(begin, end, all_begin, all_end);
            if (!kHides || f.careful || !__syncthreads_or(!f.all_finite())) break;
            f.careful = true;
            f.start();
        }
    }
    __syncthreads();  // everybody is done with the tiles: their place is that of O

    unsigned char* const tile = dynamic_shared;
    Part* const parts = reinterpret_cast<Part*>(tile + TileO::kBytes);  // [WARPS_N][BLOCK_M]
    #pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int tile_row = f.warp_n * BLOCK_M + f.row(r) - work.row0;
        const float sum = f.softmax.total(r);
        float scale = 1.0f;
        if constexpr (WARPS_N > 1) {
            if (f.lane % 4 == 0) parts[tile_row] = {f.softmax.row_max[r], sum};
        } else {
            scale = finish_row(shape, work, f.row(r), f.softmax.row_max[r], sum, sinks, f.lane % 4 ? nullptr : lse);
        }
        #pragma unroll
        for (int j = 0; j < kTilesO; ++j) {
            const float pair[2] = {f.acc_o[r / 2][j][r % 2 * 2] * scale, f.acc_o[r / 2][j][r % 2 * 2 + 1] * scale};
            const int byte = (8 * j + f.lane % 4 * 2) * sizeof(staged);
            store_pair<staged>(tile + TileO::at(0, tile_row, byte / 16) + byte % 16, pair);
        }
    }
    if constexpr (WARPS_N > 1) {
        // The warps' sums have maxima of their own.
        __syncthreads();
        for (int i = threadIdx.x; i < BLOCK_M; i += kThreads) {
            float row_max = kNothing, row_sum = 0.0f;
            for (int w = 0; w < WARPS_N; ++w) row_max = fmaxf(row_max, parts[w * BLOCK_M + i].row_max);
            for (int w = 0; w < WARPS_N; ++w) {
                Part& part = parts[w * BLOCK_M + i];
                const float alpha = ptx::exp2(part.row_max - row_max);
                row_sum = fmaf(part.weight, alpha, row_sum);
                part.weight = alpha;
            }
            const float scale = finish_row(shape, work, work.row0 + i, row_max, row_sum, sinks, lse);
            for (int w = 0; w < WARPS_N; ++w) parts[w * BLOCK_M + i].weight *= scale;
        }
        __syncthreads();
    } else {
        __syncwarp();  // a warp stores the rows it has
    }
    if (kHides && f.careful) {
        __syncthreads();
        f.add_special(tile, begin * BLOCK_N, min(end * BLOCK_N, work.seqlen_k));
        __syncthreads();
    }

    // Whole chunks of rows leave.
    constexpr int kChunk = 16 / sizeof(out_scalar), kChunks = HEAD_DIM_V / kChunk;
    constexpr int kSharedRows = WARPS_N > 1 ? BLOCK_M : 16 * kSlabs, kSharing = WARPS_N > 1 ? kThreads : 32;
    const int first = WARPS_N > 1 ? 0 : f.warp_m * kSharedRows;
    for (int i = threadIdx.x % kSharing; i < kSharedRows * kChunks; i += kSharing) {
        const int tile_row = first + i / kChunks, chunk = i % kChunks, row = work.row0 + tile_row;
        if (row >= work.rows || chunk * kChunk >= work.columns) continue;
        uint4 words;
        if constexpr (WARPS_N > 1) {
            float sum[kChunk] = {};
            for (int w = 0; w < WARPS_N; ++w) {
                const float weight = parts[w * BLOCK_M + tile_row].weight;
                #pragma unroll
                for (int c = 0; c < kChunk; c += 4) {
                    const float4 x = *reinterpret_cast<const float4*>(
                        tile + TileO::at(0, w * BLOCK_M + tile_row, (chunk * kChunk + c) / 4));
                    sum[c] = fmaf(x.x, weight, sum[c]), sum[c + 1] = fmaf(x.y, weight, sum[c + 1]);
                    sum[c + 2] = fmaf(x.z, weight, sum[c + 2]), sum[c + 3] = fmaf(x.w, weight, sum[c + 3]);
                }
            }
            constexpr int kPerWord = Packed<out_scalar>::kPerWord;
            words.x = Packed<out_scalar>::narrow(sum), words.y = Packed<out_scalar>::narrow(sum + kPerWord);
            words.z = Packed<out_scalar>::narrow(sum + 2 * kPerWord), words.w = Packed<out_scalar>::narrow(sum + 3 * kPerWord);
        } else {
            words = *reinterpret_cast<const uint4*>(tile + TileO::at(0, tile_row, chunk));
        }
        out_scalar* to = out + work.query(row) * shape.out.row + work.head_of(row) * shape.out.head;
        *reinterpret_cast<uint4*>(to + chunk * kChunk) = words;
    }
}
