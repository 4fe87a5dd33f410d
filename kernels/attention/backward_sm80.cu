// Attention backward on tensor cores, with mma.sync (sm_80 and later).
//
//   q, dq    (batch, seqlen_q, nheads, head_dim)      DTYPE     k, dk    (batch, seqlen_k, nheads_kv, head_dim)
//   dout     (batch, seqlen_q, nheads, head_dim_v)    DTYPE     v, dv    (batch, seqlen_k, nheads_kv, head_dim_v)
//   statistics  lse and delta of every row of q, and rests, of rows with a coarse lse: backward_statistics.cu
//
//   S = q k^T     P = 2^(score(S) - lse)     dP = dout v^T     dS = P (dP - delta) dscore/dS     masked pairs are 0
//   dv = P^T dout                  dk = scale dS^T q                  dq = scale dS k
//
// A block owns rows, which stay in shared memory, and the other operands pass by in tiles:
//
//   ROWS      the block's rows   pass by                       products per tile
//   kKeys     k, v               q, dout of a group of heads   S^T, dP^T, dv += P^T dout, dk += dS^T q, dq_sum += dS k
//   kQueries  q, dout            k, v                          S,   dP,                                 dq     += dS k
//
// kKeys with ADD_DQ is all of the backward pass: 10 seqlen_q seqlen_k head_dim flops per head, k, v, dk and dv go
// over the bus once. It adds dS k to dq_sum (float) with atomics, in no fixed order. kQueries forms dq in a fixed
// order instead, for two products more.
//
// Both products of scores have the block's rows as rows: P and dS in accumulators are at once the A operands of the
// products that sum over columns. Only dq_sum needs them the other way round, and reads dS^T through shared memory,
// transposed. A head_dim for which a warp cannot hold whole rows of dk and dv is divided among WARPS_D warps, which
// share P and dS there.
//
//   shared memory   | x rows | y rows | x columns | y columns | statistics | dS | P (if shared) |   x: q, k  y: v, dout
//                   | dk, dq | dv     |     STAGES of these three                                   after the last tile
//
// With two stages the next tile loads while one is computed; with one while dq_sum is, or another block computes.
//
// Macros, all required:
//   DTYPE       f16, bf16, or f32 (3 x TF32)
//   HEAD_DIM    shape.head_dim rounded up to a multiple of 32; the extra columns are zero-filled. HEAD_DIM_V the same
//   ROWS        kKeys or kQueries                ADD_DQ   0 or 1, with kKeys
//   BLOCK_M     queries, BLOCK_N keys of a block or tile. The one that passes divides 64
//   WARPS_R     rows of the block are divided among, 16 or 32 for each        WARPS_D
//   STRIP       columns of a tile that a warp computes at a time: a multiple of 16, or 8 with WARPS_D > 1
//   STAGES      1 or 2
//   WIDE_LSE   0 or 1: lse was given in double
//   GRADS       kPlain, kFloat, kAdded: dq, dk, dv are of DTYPE, of float, or of float and added to
//   PARTS       0 or 1, with kKeys: shape.parts blocks share the heads of a group. dk, dv are then dk_sum, dv_sum
//   MASK        kNone, kCausal (uses shape.window_right), kLocal (window_left as well)
//   SOFTCAP ALIBI BLOCK_MASK DROPOUT      0 or 1
//   BIAS        kNone, kSame (DTYPE), kFloat
//   VARLEN      0 or 1: sequences are packed end to end from cu_seqlens_q, cu_seqlens_k (batch + 1) on
//
//   grid   (ceil(rows / block), nheads_kv parts or nheads, batch); blocks past the end of their sequence return
//   block  32 WARPS_R WARPS_D
//   shared kernels/attention/backward_config.py: shared_bytes()
//   all addresses and strides: multiples of 16 bytes
//   what a variant does not use may be null
#include "backward_warp.cuh"

constexpr Grads kGrads = Grads::GRADS;
typedef ChooseType<kGrads == Grads::kPlain, scalar, float>::type grad;

// Number of parts into which warps divide the columns of a tile of dq_sum; others divide its queries. The choice that
// reads least; 0 if there is none.
__device__ constexpr int dq_across() {
    int best = 0, least = 0;
    for (int n = 1; n <= kWarps; n *= 2) {
        if (HEAD_DIM / kUnit % n != 0 || kColumns / 16 % (kWarps / n) != 0) continue;
        const int reads = kColumns * n / kWarps + HEAD_DIM / n;
        if (best == 0 || reads < least) best = n, least = reads;
    }
    return best;
}

struct TileDq {
    static constexpr int kAcross = ADD_DQ ? dq_across() : 1, kDown = kWarps / kAcross;
    static constexpr int kMine = ADD_DQ ? kColumns / 16 / kDown : 1;          // slabs of 16 queries per warp
    static constexpr int kTiles = HEAD_DIM / kUnit / kAcross * kUnitTiles;
};

struct Backward {
    const BackwardShape& shape;
    Work work;
    float acc_x[kSlabs][kUnitsX * kUnitTiles][4];                        // dk or dq, without the scale
    float acc_y[kSlabs][kUnitsY * kUnitTiles][4];                        // dv
    RowStatistics statistics[kOwnsKeys ? 1 : kLaneRows];                 // of this lane's queries
    int stage;                                                           // offset of that in use

    // Adds a tile to the gradients of the block's rows, and leaves dS in shared memory if dq_sum needs it.
    __device__ __forceinline__ void step(int head, int tile, bool masked, bool partly, bool slowly) {
        const unsigned shared = ptx::shared_address(dynamic_shared);
        const int unit = Place::mine().warp_d;
        #pragma unroll 1
        for (int strip = 0; strip < kStrips; ++strip) {
            const int column = (kSharesS ? unit : strip) * STRIP;
            float s[kSlabs][kTilesS][4] = {}, d[kSlabs][kTilesS][4] = {};
            differentiate_strip<true>(shape, work, head, tile, stage, column, masked, partly, statistics, s, d);
            if constexpr (kSharesS) {
                if constexpr (kOwnsKeys) put(shared + kOffsetP, column, s);
                put(shared + kOffsetS, column, d);
            } else if (kHides && slowly) {
                if constexpr (kOwnsKeys) {
                    put(shared + kOffsetS, column, s);
                    __syncwarp();
                    add_slowly<ColumnsY>(acc_y, kOffsetS, kOffsetColumnsY + stage, head, tile, column, STRIP);
                    __syncwarp();
                }
                put(shared + kOffsetS, column, d);
                __syncwarp();
                add_slowly<ColumnsX>(acc_x, kOffsetS, kOffsetColumnsX + stage, head, tile, column, STRIP);
            } else {
                if constexpr (kOwnsKeys) {
                    add_product<ColumnsY, STRIP, WARPS_D>(acc_y, shared + kOffsetColumnsY + stage, column, unit,
                        [&](int i, unsigned (&a)[kSlabs][4]) { from_accumulators(s, i, a); });
                }
                if constexpr (ADD_DQ) put(shared + kOffsetS, column, d);
                add_product<ColumnsX, STRIP, WARPS_D>(acc_x, shared + kOffsetColumnsX + stage, column, unit,
                    [&](int i, unsigned (&a)[kSlabs][4]) { from_accumulators(d, i, a); });
            }
        }
        if constexpr (kSharesS) {
            __syncthreads();
            if (kHides && slowly) {
                if constexpr (kOwnsKeys) {
                    add_slowly<ColumnsY>(acc_y, kOffsetP, kOffsetColumnsY + stage, head, tile, 0, kColumns);
                }
                add_slowly<ColumnsX>(acc_x, kOffsetS, kOffsetColumnsX + stage, head, tile, 0, kColumns);
            } else {
                if constexpr (kOwnsKeys) {
                    add_product<ColumnsY, kColumns, WARPS_D>(acc_y, shared + kOffsetColumnsY + stage, 0, unit,
                        [&](int i, unsigned (&a)[kSlabs][4]) { from_tile(shared + kOffsetP, i, a); });
                }
                add_product<ColumnsX, kColumns, WARPS_D>(acc_x, shared + kOffsetColumnsX + stage, 0, unit,
                    [&](int i, unsigned (&a)[kSlabs][4]) { from_tile(shared + kOffsetS, i, a); });
            }
        }
    }

    template <typename TileB, int kTiles>
    __device__ __forceinline__ void add_slowly(float (&acc)[kSlabs][kTiles][4], int weights, int values, int head,
                                               int tile, int first, int depth) const {
        const Place me = Place::mine();
        add_product_slowly<WARPS_D>(
            acc, depth, me.warp_d, [&](int r, int k) { return element<TileS>(weights, me.row(r), first + k); },
            [&](int k, int column) { return element<TileB>(values, first + k, column); },
            [&](int r, int k) {
                const int own = work.row0 + me.row(r), other = tile * kColumns + first + k;
                return work.sees(shape, head, kOwnsKeys ? other : own, kOwnsKeys ? own : other);
            });
    }

    // dq_sum += dS k for the queries of a tile.
    __device__ __forceinline__ void add_dq(int head, int tile, bool slowly, float* dq_sum) const {
        constexpr int kStride = TileDq::kAcross;
        const unsigned shared = ptx::shared_address(dynamic_shared);
        const Place me = Place::mine();
        const unsigned across = me.warp % kStride, down = me.warp / kStride;
        float acc[TileDq::kMine][TileDq::kTiles][4] = {};
        if (kHides && slowly) {
            const auto query = [&](int r) -> int {
                return (r / 2 * TileDq::kDown + down) * 16 + r % 2 * 8 + me.lane / 4;
            };
            add_product_slowly<kStride>(
                acc, kRows, across, [&](int r, int k) { return element<TileS>(kOffsetS, k, query(r)); },
                [&](int k, int column) { return element<RowsX>(0, k, column); },
                [&](int r, int k) { return work.sees(shape, head, tile * kColumns + query(r), work.row0 + k); });
        } else {
            add_product<RowsX, kRows, kStride>(acc, shared, 0, across, [&](int i, unsigned (&a)[TileDq::kMine][4]) {
                #pragma unroll
                for (int m = 0; m < TileDq::kMine; ++m) {
                    const int slab = m * TileDq::kDown + down;
                    if constexpr (kHalf) {
                        const int key = 16 * i + me.lane / 16 * 8 + me.lane % 8, chunk = 2 * slab + me.lane / 8 % 2;
                        ptx::ldmatrix4_transposed(a[m], TileS::at(shared + kOffsetS, key, chunk));
                    } else {
                        #pragma unroll
                        for (int r = 0; r < 4; ++r) {
                            const int key = 8 * i + me.lane % 4 * 2 + r / 2;
                            const int column = 16 * slab + me.lane / 4 + r % 2 * 8;
                            const unsigned at = TileS::at(shared + kOffsetS, key, column / 4) + column % 4 * 4;
                            a[m][r] = ptx::load_shared(at);
                        }
                    }
                }
            });
        }
        const int64 row = work.sequence.padded<VARLEN>(shape, head) + tile * kColumns;
        float* to = dq_sum + row * HEAD_DIM + ((down * (HEAD_DIM / 8) + across * kUnitTiles) * 128 + me.lane);
        #pragma unroll
        for (int m = 0; m < TileDq::kMine; ++m) {
            #pragma unroll
            for (int j = 0; j < TileDq::kTiles; ++j) {
                const int column_tile = kStride * (j / kUnitTiles) * kUnitTiles + j % kUnitTiles;
                #pragma unroll
                for (int r = 0; r < 4; ++r) {
                    atomicAdd(to + (m * TileDq::kDown * (HEAD_DIM / 8) + column_tile) * 128 + 32 * r, acc[m][j][r]);
                }
            }
        }
    }

    // Writes the rows of a gradient in the layout of the accumulators.
    template <int kTiles, int kCols>
    __device__ __forceinline__ void store_part(const float (&acc)[kSlabs][kTiles][4], float* to) const {
        const Place me = Place::mine();
        const int64 first = work.sequence.padded_k<VARLEN>(shape, work.kv_head) + work.part * shape.padded_part;
        to += (first + work.row0 + me.first_row()) * kCols + me.warp_d * (kUnitTiles * 128) + me.lane;
        #pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            if (work.row0 + me.first_row() + 16 * slab >= work.rows()) break;
            #pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                const int column_tile = WARPS_D * (j / kUnitTiles) * kUnitTiles + j % kUnitTiles;
                #pragma unroll
                for (int r = 0; r < 4; ++r) to[(slab * (kCols / 8) + column_tile) * 128 + 32 * r] = acc[slab][j][r];
            }
        }
    }

    // Writes the rows of a gradient, times scale: through shared memory, from `offset` on, or floats from registers,
    // of which four lanes have 32 bytes of a row.
    template <int kTiles, int kCols>
    __device__ __forceinline__ void store(const float (&acc)[kSlabs][kTiles][4], int offset, float scale, int columns,
                                          grad* to, const RowStrides& stride) const {
        typedef Tile<scalar, kRows, kCols, !kHalf> Staged;
        constexpr int kChunk = Staged::kChunk;
        const Place me = Place::mine();
        const int begin = kOwnsKeys ? work.sequence.k_begin : work.sequence.q_begin;
        to += work.batch * stride.batch + begin * stride.row + (kOwnsKeys ? work.kv_head : work.head) * stride.head;
        #pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            #pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                const int unit = WARPS_D * (j / kUnitTiles) + me.warp_d;
                const int column = unit * kUnit + j % kUnitTiles * 8 + me.lane % 4 * 2;
                const float pair[2] = {acc[r / 2][j][r % 2 * 2] * scale, acc[r / 2][j][r % 2 * 2 + 1] * scale};
                if constexpr (kGrads == Grads::kPlain) {
                    const unsigned byte = column * sizeof(scalar);
                    store_pair<scalar>(dynamic_shared + offset + Staged::at(0, me.row(r), byte / 16) + byte % 16, pair);
                } else {
                    const int row = work.row0 + me.row(r);
                    if (row >= work.rows() || column >= columns) continue;
                    float2* const at = reinterpret_cast<float2*>(to + row * stride.row + column);
                    const float2 before = kGrads == Grads::kAdded ? *at : make_float2(0.0f, 0.0f);
                    *at = make_float2(before.x + pair[0], before.y + pair[1]);
                }
            }
        }
        if constexpr (kGrads != Grads::kPlain) return;
        __syncthreads();
        for (int i = threadIdx.x; i < kRows * Staged::kChunks; i += kThreads) {
            const int row = i / Staged::kChunks, chunk = i % Staged::kChunks;
            if (work.row0 + row >= work.rows() || chunk * kChunk >= columns) continue;
            *reinterpret_cast<uint4*>(to + (work.row0 + row) * stride.row + chunk * kChunk) =
                *reinterpret_cast<const uint4*>(dynamic_shared + offset + Staged::at(0, row, chunk));
        }
    }
};

// Tiles that some row sees, [begin, end), and that all rows see, [all_begin, all_end).
struct Tiles {
    int begin, end, all_begin, all_end;

    static __device__ __forceinline__ Tiles of(const BackwardShape& shape, const Work& work) {
        const int row_end = min(work.row0 + kRows, work.rows());
        const int first = work.diagonal(work.row0), last = work.diagonal(row_end - 1);
        const KeyRange seen = KeyRange::of<kMask == Mask::kNone ? Mask::kNone : Mask::kLocal>(
            first, last, work.columns(), seen_before(shape), seen_after(shape));
        const bool whole = work.row0 + kRows <= work.rows();
        const int all_begin = (seen.all_begin + kColumns - 1) / kColumns;
        return {seen.begin / kColumns, (seen.end + kColumns - 1) / kColumns, all_begin,
                whole ? seen.all_end / kColumns : 0};
    }
};

// Goes through the tiles that some row sees, head after head.
struct Walk {
    int head, tile;
    bool partly;  // the block mask hides a part of the tile

    __device__ __forceinline__ bool more(const Work& work) const { return head < work.head + work.heads; }

    __device__ __forceinline__ void next(const BackwardShape& shape, const Work& work) {
        const Tiles tiles = Tiles::of(shape, work);
        while (more(work)) {
            if (++tile >= tiles.end) {
                tile = tiles.begin, ++head;
                if (tiles.begin >= tiles.end) head = work.head + work.heads;
                if (!more(work)) return;
            }
            if constexpr (!BLOCK_MASK) return;
            const int column = tile * kColumns, column_end = min(column + kColumns, work.columns());
            const int row_end = min(work.row0 + kRows, work.rows());
            const auto part = kOwnsKeys ? work.blocks(shape, head).seen(column, column_end, work.row0, row_end)
                                        : work.blocks(shape, head).seen(work.row0, row_end, column, column_end);
            partly = part == BlockMask::kPart;
            if (part != BlockMask::kNothing) return;
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
attention_backward(const scalar* q, const scalar* k, const scalar* v, const scalar* dout,
                   const RowStatistics* statistics, const float* rests, const int* cu_seqlens_q,
                   const int* cu_seqlens_k, const float* alibi_slopes, const unsigned char* bias,
                   const unsigned char* block_mask, const Seed* seed, float* dq_sum, grad* dq, grad* dk, grad* dv,
                   const __grid_constant__ BackwardShape shape) {
    const Seed seed_now = DROPOUT ? seed_of(seed, shape.seed) : 0;
    const auto find_work = [&] {
        Work work = Work::of(shape, cu_seqlens_q, cu_seqlens_k);
        work.seed = seed_now;
        work.rests = rests;
        work.set_arrays(shape, alibi_slopes, bias, block_mask);
        return work;
    };
    const Work work = find_work();
    if (work.row0 >= work.rows()) return;
    Walk walk{work.head, Tiles::of(shape, work).begin - 1, false};

    const auto of_keys = [&](const Work& work, const scalar* x, const RowStrides& stride) {
        return x + work.batch * stride.batch + work.sequence.k_begin * stride.row + work.kv_head * stride.head;
    };
    const auto of_queries = [&](const Work& work, const scalar* x, const RowStrides& stride, int head) {
        return x + work.batch * stride.batch + work.sequence.q_begin * stride.row + head * stride.head;
    };
    const auto load_columns = [&](const Walk& walk, int stage) {
        const Work work = find_work();
        const int row0 = walk.tile * kColumns, length = work.columns();
        const scalar* const x = kOwnsKeys ? of_queries(work, q, shape.q, walk.head) : of_keys(work, k, shape.k);
        const scalar* const y = kOwnsKeys ? of_queries(work, dout, shape.dout, walk.head) : of_keys(work, v, shape.v);
        load<ColumnsX>(kOffsetColumnsX + stage, x, kOwnsKeys ? shape.q : shape.k, row0, length, shape.head_dim);
        load<ColumnsY>(kOffsetColumnsY + stage, y, kOwnsKeys ? shape.dout : shape.v, row0, length, shape.head_dim_v);
        constexpr int kChunks = kColumns * sizeof(RowStatistics) / 16;
        static_assert(kChunks <= kThreads, "a thread copies 16 bytes of statistics");
        if (kOwnsKeys && threadIdx.x < kChunks) {
            const unsigned to = ptx::shared_address(dynamic_shared) + kOffsetStatistics + stage + threadIdx.x * 16;
            const int64 row = work.sequence.padded<VARLEN>(shape, walk.head) + row0;
            ptx::cp_async16(to, statistics + row + threadIdx.x * (16 / sizeof(RowStatistics)), 16);
        }
        ptx::cp_async_commit();
    };

    Backward backward{shape, work};
    backward.stage = 0;
    #pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
        #pragma unroll
        for (int r = 0; r < 4; ++r) {
            #pragma unroll
            for (int j = 0; j < kUnitsX * kUnitTiles; ++j) backward.acc_x[slab][j][r] = 0.0f;
            #pragma unroll
            for (int j = 0; j < kUnitsY * kUnitTiles; ++j) backward.acc_y[slab][j][r] = 0.0f;
        }
    }
    walk.next(shape, work);
    if (walk.more(work)) {
        const scalar* const x = kOwnsKeys ? of_keys(work, k, shape.k) : of_queries(work, q, shape.q, work.head);
        const scalar* const y = kOwnsKeys ? of_keys(work, v, shape.v) : of_queries(work, dout, shape.dout, work.head);
        load<RowsX>(0, x, kOwnsKeys ? shape.k : shape.q, work.row0, work.rows(), shape.head_dim);
        load<RowsY>(kOffsetRowsY, y, kOwnsKeys ? shape.v : shape.dout, work.row0, work.rows(), shape.head_dim_v);
        #pragma unroll
        for (int r = 0; !kOwnsKeys && r < kLaneRows; ++r) {
            const int row = min(work.row0 + Place::mine().row(r), work.rows() - 1);
            const int64 at = work.sequence.padded<VARLEN>(shape, work.head) + row;
            backward.statistics[kOwnsKeys ? 0 : r] = statistics[at];
        }
        load_columns(walk, 0);
    }
    bool special = false;  // k of the block's rows holds a value that is not finite
    if (kHides && ADD_DQ && walk.more(work)) {
        ptx::cp_async_wait<0>();
        special = __syncthreads_or(holds_special<RowsX>(0));
    }
    while (walk.more(find_work())) {
        backward.work = find_work();
        const Tiles tiles = Tiles::of(shape, backward.work);
        const bool partly = BLOCK_MASK && walk.partly;
        const bool all = walk.tile >= tiles.all_begin && walk.tile < tiles.all_end;
        const bool masked = kBias != Bias::kNone || partly || !all;
        ptx::cp_async_wait<0>();
        bool slowly = false;
        if (kHides && masked) {
            slowly = __syncthreads_or(holds_special<ColumnsX>(kOffsetColumnsX + backward.stage) |
                                      (kOwnsKeys ? holds_special<ColumnsY>(kOffsetColumnsY + backward.stage) : 0));
        } else {
            __syncthreads();
        }
        Walk ahead = walk;
        const auto load_next = [&](int stage) {
            const Work work = find_work();
            ahead.next(shape, work);
            if (ahead.more(work)) load_columns(ahead, stage);
        };
        if (STAGES == 2) load_next(kStageBytes - backward.stage);
        backward.step(walk.head, walk.tile, masked, partly, slowly);
        // dS is complete, and no warp reads the tile any more. With two stages and a shared dS other barriers say so.
        if (STAGES == 1 || (ADD_DQ && !kSharesS)) __syncthreads();
        if (STAGES == 1) load_next(0);
        else backward.stage = kStageBytes - backward.stage;
        backward.work = find_work();
        if constexpr (ADD_DQ) backward.add_dq(walk.head, walk.tile, special, dq_sum);
        if constexpr (BLOCK_MASK) walk = ahead;
        else walk.next(shape, find_work());  // again: cheaper than registers for it
    }

    backward.work = find_work();
    __syncthreads();
    if constexpr (PARTS) {
        backward.store_part<kUnitsX * kUnitTiles, HEAD_DIM>(backward.acc_x, reinterpret_cast<float*>(dk));
        backward.store_part<kUnitsY * kUnitTiles, HEAD_DIM_V>(backward.acc_y, reinterpret_cast<float*>(dv));
    } else if constexpr (kOwnsKeys) {
        backward.store<kUnitsX * kUnitTiles, HEAD_DIM>(backward.acc_x, 0, shape.scale, shape.head_dim, dk, shape.dk);
        backward.store<kUnitsY * kUnitTiles, HEAD_DIM_V>(backward.acc_y, kOffsetRowsY, 1.0f, shape.head_dim_v, dv,
                                                         shape.dv);
    } else {
        backward.store<kUnitsX * kUnitTiles, HEAD_DIM>(backward.acc_x, 0, shape.scale, shape.head_dim, dq, shape.dq);
    }
}
