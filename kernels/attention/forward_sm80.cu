// Attention forward on tensor cores, with mma.sync (sm_80 and later).
//
//   q    (batch, seqlen_q, nheads,    head_dim)    DTYPE     k    (batch, seqlen_k, nheads_kv, head_dim)
//   out  (batch, seqlen_q, nheads,    head_dim_v)  OUT       v    (batch, seqlen_k, nheads_kv, head_dim_v)
//   lse  (batch, nheads, seqlen_q) float, or double with WIDE_LSE, natural log
//
//   s = softmax_scale q k^T and the options of scores.cuh     masked scores are -inf
//   out = softmax(s) v        lse = ln sum exp(s)        a row that sees no key: out 0, lse -inf
//
// Reads q once, and k and v once per block of rows. 4 seqlen_q seqlen_k head_dim flops per head, all on tensor
// cores except the softmax. A block owns BLOCK_M rows of one head and walks over the keys in tiles of BLOCK_N,
// from right to left (the masked end comes first). A warp owns 16 or 32 rows and BLOCK_N / WARPS_N keys of each tile.
//
//   operand  S = Q K^T                           O += P V
//   A        Q: registers or shared memory       P: the accumulators of S, used in place
//   B        K: ldmatrix                         V: ldmatrix.trans
//
// K is double-buffered, V is not. V of tile n and K of tile n - 1 load while S and the softmax of tile n are
// computed, and O += P V hides the rest of K. A second V buffer would hide little more, and it would cost shared
// memory that a second block per SM uses better. With ONE_K neither is: K of tile n - 1 loads from S on, under the
// softmax and O += P V, for a barrier more.
//
// Quantized pages: the numbers of a tile are in shared memory as DTYPE, and after them the codes of the next tile
// arrive. Each thread turns the codes that it has copied into numbers, so that a tile takes two barriers here as well.
// Codes of K are exact; the scale of a key multiplies its scores. Values are rounded to DTYPE, beyond whose range they
// are infinite. With their scales in P instead, small weights would underflow in float16, and a row that sees one key
// would not return its value.
//
//   shared memory   | K, even tiles | V | K, odd tiles |   Q   |      with Q in registers, Q shares the place of odd K
//                   | K             | V |   Q   |                     with ONE_K
//                   | K | V | codes of K | codes of V | scales of K | Q |       quantized; Q in registers shares K and V
//                   | out, or float partial sums of O          |      after the last tile
//
// Macros, all required:
//   DTYPE       f16, bf16, or f32 (3 x TF32)
//   PAGE_DTYPE  of k and v: DTYPE; with PAGED also s8 or e4m3 (common/cuda/codes.cuh), with scales k_scale and
//               v_scale (num_pages, page_size, nheads_kv) float
//   OUT         DTYPE or f32                     WIDE_LSE   0 or 1
//   HEAD_DIM    shape.head_dim rounded up to a multiple of 32; the extra columns are zero-filled
//   HEAD_DIM_V  the same for V, or a part of it: a block computes HEAD_DIM_V columns of out
//   VALUE_PARTS ceil(shape.head_dim_v / HEAD_DIM_V)
//   BLOCK_M     WARPS_M times 16 or 32           WARPS_M
//   BLOCK_N     WARPS_N times a multiple of 16   WARPS_N    warps that share rows and divide the keys of a tile
//   ONE_K       0 or 1, not with Q in registers: one buffer for K
//   MASK        kNone, kCausal (uses shape.window_right), kLocal (window_left as well)
//   those of scores.cuh, DROPOUT not with PACK_GQA
//   BLOCK_MASK  0 or 1, not with PACK_GQA
//   VARLEN      0 or 1: cu_seqlens_q, cu_seqlens_k (batch + 1) int; batch strides are 0; lse is (nheads, total_q)
//   SEQUSED_K   0 or 1: seqused_k (batch) int are the lengths of the keys
//   PAGED       0; 1: key j of a sequence is row j % page_size of page block_table[j / page_size], and cu_seqlens_k is
//               not used; 2: the same where page_size is a multiple of BLOCK_N, so that a tile is in one page
//   PACK_GQA    0 or 1: a row is a (query, head of the group) pair, heads adjacent; K is read once per group
//   SPLIT       0 or 1: shape.num_splits blocks share the tiles of a row. out is float, one per split (out_split);
//               lse holds row_max (in units of log2), then row_sum (2, lse_split). combine.cu merges them.
//
//   attention_forward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, k_scale, v_scale, sinks,
//                     alibi_slopes, bias, block_mask, seed, shape); lse, and arrays that the variant does not use, may be null. With
//                     SPLIT, attention_combine applies the sinks.
//   grid   (ceil(rows / BLOCK_M) * (SPLIT ? num_splits : 1), heads * VALUE_PARTS, batch)
//          rows = seqlen_q, heads = nheads; with PACK_GQA rows = seqlen_q * group, heads = nheads_kv. With VARLEN,
//          shape.seqlen_q bounds every sequence, and blocks past the end of theirs return.
//   block  32 WARPS_M WARPS_N
//   shared problem.py: shared_bytes()
//   q, k, v, out and all their strides: multiples of 16 bytes; those of codes: of 16 / sizeof(DTYPE) bytes
#include "forward_warp.cuh"

// Finishes a row whose weights are relative to row_max and sum to row_sum: adds the sink, writes lse, and returns the
// share of its keys: 1 without a sink, 0 if it sees no key.
__device__ __forceinline__ float finish_row(const AttentionShape& shape, const Work& work, int row, float row_max,
                                            float row_sum, const float* sinks, lse_scalar* lse) {
    float share = row_sum;
    if (SINKS && !SPLIT && row < work.rows) {
        const float sink = sinks[work.head_of(row)] * kLog2e, m = fmaxf(row_max, sink);
        share = row_sum * ptx::exp2(row_max - m);
        row_sum = share + ptx::exp2(sink - m);
        row_max = m;
    }
    if (lse != nullptr && row < work.rows && work.column0 == 0) {
        lse += work.head_of(row) * shape.lse_head + work.query(row);
        if constexpr (SPLIT) {
            lse[0] = row_max, lse[shape.num_splits * shape.lse_split] = row_sum;
        } else {
            *lse = row_sum == 0.0f ? minus_infinity() : lse_of<lse_scalar>(row_max, row_sum);
        }
    }
    return row_sum == 0.0f ? 0.0f : share / row_sum;
}

// Writes O to global memory through shared memory.
__device__ __forceinline__ void store(Forward& f, const scalar* q, const float* sinks, out_scalar* out,
                                      lse_scalar* lse) {
    const AttentionShape& shape = f.shape;
    const Work& work = f.work;
    const Place me = Place::mine();
    out += work.batch * shape.out.batch + work.q_begin * shape.out.row + work.split * shape.out_split + work.column0;
    if (lse != nullptr) lse += work.batch * shape.lse_batch + work.q_begin + work.split * shape.lse_split;

    ptx::cp_async_wait<0>();  // Q, if the block mask hides every key
    __syncthreads();  // no warp reads the tiles any more
    unsigned char* const tile = dynamic_shared;
    Part* const parts = reinterpret_cast<Part*>(tile + TileO::kBytes);  // [WARPS_N][BLOCK_M]
    #pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int tile_row = me.warp_n * BLOCK_M + me.row(r);
        const float sum = f.softmax.total(r);
        const float taken = f.taken(r, sum);
        float scale = taken == 0.0f ? 0.0f : (DROPOUT ? shape.scores.keep_scale : 1.0f) / taken;
        if constexpr (WARPS_N > 1) {
            if (me.lane % 4 == 0) parts[tile_row] = {-f.softmax.minus_max[r], sum};
        } else {
            lse_scalar* const to = me.lane % 4 ? nullptr : lse;
            scale *= finish_row(shape, work, f.row(me, r), -f.softmax.minus_max[r], sum, sinks, to);
        }
        #pragma unroll
        for (int j = 0; j < kTilesO; ++j) {
            const float pair[2] = {f.acc_o[r / 2][j][r % 2 * 2] * scale, f.acc_o[r / 2][j][r % 2 * 2 + 1] * scale};
            const int byte = (8 * j + me.lane % 4 * 2) * sizeof(staged);
            store_pair<staged>(tile + TileO::at(0, tile_row, byte / 16) + byte % 16, pair);
        }
    }
    if constexpr (WARPS_N > 1) {
        // Each warp's O is a mean over its keys, and its sum of weights relative to its own maximum: find the common one.
        __syncthreads();
        for (int i = threadIdx.x; i < BLOCK_M; i += kThreads) {
            float row_max = kNothing, row_sum = 0.0f;
            for (int w = 0; w < WARPS_N; ++w) row_max = fmaxf(row_max, parts[w * BLOCK_M + i].row_max);
            for (int w = 0; w < WARPS_N; ++w) {
                Part& part = parts[w * BLOCK_M + i];
                part.weight *= ptx::exp2(part.row_max - row_max);
                row_sum += part.weight;
            }
            const float share = finish_row(shape, work, work.row0 + i, row_max, row_sum, sinks, lse);
            const float scale = row_sum == 0.0f ? 0.0f : share / row_sum;
            for (int w = 0; w < WARPS_N; ++w) parts[w * BLOCK_M + i].weight *= scale;
        }
        __syncthreads();
    } else {
        __syncwarp();  // a warp stores only its own rows
    }
    if (f.careful) {
        __syncthreads();
        q += work.batch * shape.q.batch + work.q_begin * shape.q.row;
        f.add_special(tile, [&](int row) {
            return q + work.query(row) * shape.q.row + work.head_of(row) * shape.q.head;
        });
        __syncthreads();
    }

    // Rows are stored in chunks of 16 bytes, or of 4 partial sums.
    constexpr int kChunk = WARPS_N > 1 ? 4 : 16 / sizeof(out_scalar), kChunks = HEAD_DIM_V / kChunk;
    constexpr int kSharedRows = WARPS_N > 1 ? BLOCK_M : 16 * kSlabs, kSharing = WARPS_N > 1 ? kThreads : 32;
    const int first = WARPS_N > 1 ? 0 : me.warp_m * kSharedRows;
    for (int i = threadIdx.x % kSharing; i < kSharedRows * kChunks; i += kSharing) {
        const int tile_row = first + i / kChunks, chunk = i % kChunks, row = work.row0 + tile_row;
        if (row >= work.rows || chunk * kChunk >= work.columns) continue;
        out_scalar* to = out + work.query(row) * shape.out.row + work.head_of(row) * shape.out.head + chunk * kChunk;
        if constexpr (WARPS_N > 1) {
            float sum[4] = {};
            #pragma unroll
            for (int w = 0; w < WARPS_N; ++w) {
                const float weight = parts[w * BLOCK_M + tile_row].weight;
                const float4 x = *reinterpret_cast<const float4*>(tile + TileO::at(0, w * BLOCK_M + tile_row, chunk));
                add_weighted(sum, x, weight);
            }
            store_four(to, sum);
        } else {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(tile + TileO::at(0, tile_row, chunk));
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
attention_forward(const scalar* q, const page_scalar* k, const page_scalar* v, out_scalar* out, lse_scalar* lse,
                  const int* cu_seqlens_q, const int* cu_seqlens_k, const int* seqused_k, const int* block_table,
                  const float* k_scale, const float* v_scale, const float* sinks, const float* alibi_slopes,
                  const unsigned char* bias, const unsigned char* block_mask, const Seed* seed,
                  const __grid_constant__ AttentionShape shape) {
    // O is not finite: an input is not, or scores are huge. Run again, skip non-finite values of V in P V (added at
    // the end), and round scores before the maximum is subtracted.
    for (bool careful = false;; careful = true) {
        const Work work = Work::of(shape, cu_seqlens_q, cu_seqlens_k, seqused_k);
        if (VARLEN && work.row0 >= work.rows) return;
        const int64 batch = work.batch;
        const int* pages = PAGED ? block_table + batch * shape.block_table_batch : nullptr;
        const unsigned shared = ptx::shared_address(dynamic_shared);
        const auto first_row = [&](const Work& work, const page_scalar* x, const RowStrides& stride) {
            return x + (PAGED ? 0 : work.batch * stride.batch) + work.k_begin * stride.row + work.kv_head * stride.head;
        };
        const auto rows_k = [&](const Work& work) {
            const RowScales scales{k_scale + work.kv_head * shape.k_scale.head, shape.k_scale};
            return RowsK(first_row(work, k, shape.k), shape.k, pages, shape.page_size, scales);
        };
        const auto rows_v = [&](const Work& work) {
            const RowScales scales{v_scale + work.kv_head * shape.v_scale.head, shape.v_scale};
            return RowsV(first_row(work, v + work.column0, shape.v), shape.v, pages, shape.page_size, scales);
        };
        const Place me = Place::mine();
        Forward f{shape, work, careful, rows_k(work), rows_v(work)};
        if constexpr (kKeepsQuery) {
            #pragma unroll
            for (int r = 0; r < kRows; ++r) f.query[r] = work.query(f.row(me, r));
        }
        if constexpr (ALIBI) {
            #pragma unroll
            for (int r = 0; r < (PACK_GQA ? kRows : 1); ++r) {
                f.slope[r] = alibi_slopes[batch * shape.alibi_batch + work.head_of(f.row(me, r))] * kLog2e;
            }
        }
        if constexpr (kBias != Bias::kNone) {
            f.bias = bias + batch * shape.bias[0] * (kBias == Bias::kFloat ? sizeof(float) : sizeof(scalar));
        }
        if constexpr (BLOCK_MASK) {
            f.block_mask = {block_mask + batch * shape.block_mask[0] + work.head * shape.block_mask[1],
                            shape.block_mask[2], shape.block_mask[3], shape.block_q, shape.block_k};
        }

        if constexpr (DROPOUT) f.seed = seed_of(seed, shape.seed);

        f.start(shared);
        const Tiles tiles = work.tiles(shape);
        if (tiles.begin < tiles.end) {
            typedef Copy<TileQ, kThreads> LoadQ;
            const scalar* q_rows = q + batch * shape.q.batch + work.q_begin * shape.q.row + LoadQ::column();
            const auto row_at = [&](int row) {
                row += work.row0;
                return q_rows + work.query(row) * shape.q.row + work.head_of(row) * shape.q.head;
            };
            LoadQ::template start<kSpare>(LoadQ::at(shared + kOffsetQ), false, work.rows - work.row0, shape.head_dim,
                                          row_at);
            ptx::cp_async_commit();
            f.run(tiles);
            if (!careful && __any_sync(0xffffffffu, __syncthreads_or(!f.is_regular()))) continue;
        }
        f.work = Work::of(shape, cu_seqlens_q, cu_seqlens_k, seqused_k);
        f.k = rows_k(f.work);
        f.v = rows_v(f.work);
        store(f, q, sinks, out, lse);
        return;
    }
}
