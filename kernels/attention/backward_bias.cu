// Gradient of attention's bias: dbias = dS, summed over the axes along which bias is broadcast.
//
//   S = q k^T     P = 2^(score(S) - lse)     dP = dout v^T     dS = P (dP - delta), 0 where hidden
//
// A block owns BLOCK_M x BLOCK_N elements of dbias (one in place of BLOCK_M or BLOCK_N along an axis of length 1) and
// goes through everything that they are added to: batches, heads, tiles of queries, tiles of keys, in this order. So
// sums have a fixed order, and no memory in addition to dbias is needed. 4 seqlen_q seqlen_k head_dim flops per head.
//
//   shared memory   | q | dout | k | v |        after the last tile: dS in float, summed along axes of length 1
//
// Macros as in backward_sm80.cu: ROWS is kQueries, BIAS not kNone, WARPS_D and STAGES 1, ADD_DQ, PARTS, VARLEN 0.
//   grid   (tiles of dbias, its heads, its batches)     block 32 WARPS_R
#include "backward_warp.cuh"

static_assert(!kOwnsKeys && WARPS_D == 1 && kBias != Bias::kNone && !VARLEN, "see above");

constexpr int kSumStride = kColumns + 1;  // of the float tile: a column's rows are in different banks

__device__ __forceinline__ int tiles_along(int length, int tile) { return (length + tile - 1) / tile; }

// Sums a float tile in shared memory along the axes of length 1, into their first row or column, in a fixed order.
__device__ __forceinline__ void sum_tile(float* tile, bool rows, bool columns) {
    if (columns) {
        for (int row = threadIdx.x; row < kRows; row += kThreads) {
            for (int i = 1; i < kColumns; ++i) tile[row * kSumStride] += tile[row * kSumStride + i];
        }
        __syncthreads();
    }
    if (rows) {
        for (int column = threadIdx.x; column < (columns ? 1 : kColumns); column += kThreads) {
            for (int i = 1; i < kRows; ++i) tile[column] += tile[i * kSumStride + column];
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
attention_backward_bias(const scalar* q, const scalar* k, const scalar* v, const scalar* dout,
                        const RowStatistics* statistics, const float* rests, const float* alibi_slopes,
                        const unsigned char* bias, const unsigned char* block_mask, const Seed* seed, void* dbias,
                        const __grid_constant__ BackwardShape shape) {
    const Place me = Place::mine();
    const int(&size)[4] = shape.bias_shape;
    const int across = tiles_along(size[3], kColumns);
    const int own_m = blockIdx.x / across, own_n = blockIdx.x % across;
    // Along an axis of length 1 a block goes through all tiles, along others it has its own.
    const int first_m = size[2] == 1 ? 0 : own_m, first_n = size[3] == 1 ? 0 : own_n;
    const int last_m = size[2] == 1 ? tiles_along(shape.seqlen_q, kRows) : own_m + 1;
    const int last_n = size[3] == 1 ? tiles_along(shape.seqlen_k, kColumns) : own_n + 1;
    const int first_head = size[1] == 1 ? 0 : blockIdx.y, last_head = size[1] == 1 ? shape.nheads : first_head + 1;
    const int first_batch = size[0] == 1 ? 0 : blockIdx.z, last_batch = size[0] == 1 ? shape.batch : first_batch + 1;

    float acc[kStrips][kSlabs][kTilesS][4] = {};
    #pragma unroll 1
    for (int batch = first_batch; batch < last_batch; ++batch) {
        Work work;
        work.sequence = Sequence::of<false>(shape, batch, nullptr, nullptr);
        work.batch = batch;
        if constexpr (DROPOUT) work.seed = seed_of(seed, shape.seed);
        work.rests = rests;
        work.set_arrays(shape, alibi_slopes, bias, block_mask);
        #pragma unroll 1
        for (int head = first_head; head < last_head; ++head) {
            const int kv_head = head / shape.group;
            const RowStatistics* rows = statistics + work.sequence.padded<false>(shape, head);
            #pragma unroll 1
            for (int m = first_m; m < last_m; ++m) {
                work.row0 = m * kRows;
                const int last_row = min(work.row0 + kRows, shape.seqlen_q) - 1;
                const int first = work.diagonal(work.row0), last = work.diagonal(last_row);
                const KeyRange seen =
                    KeyRange::of<kMask>(first, last, shape.seqlen_k, shape.window_left, shape.window_right);
                #pragma unroll 1
                for (int n = first_n; n < last_n; ++n) {
                    const int column0 = n * kColumns;
                    if (column0 >= seen.end || column0 + kColumns <= seen.begin) continue;
                    bool partly = false;
                    if constexpr (BLOCK_MASK) {
                        const auto part = work.blocks(shape, head).seen(work.row0, last_row + 1, column0,
                                                                        min(column0 + kColumns, shape.seqlen_k));
                        if (part == BlockMask::kNothing) continue;
                        partly = part == BlockMask::kPart;
                    }
                    __syncthreads();  // no warp reads the last tiles any more
                    const auto of = [&](const scalar* x, const RowStrides& stride, int which) {
                        return x + batch * stride.batch + which * stride.head;
                    };
                    const int queries = shape.seqlen_q, keys = shape.seqlen_k;
                    load<RowsX>(0, of(q, shape.q, head), shape.q, work.row0, queries, shape.head_dim);
                    load<RowsY>(kOffsetRowsY, of(dout, shape.dout, head), shape.dout, work.row0, queries,
                                shape.head_dim_v);
                    load<ColumnsX>(kOffsetColumnsX, of(k, shape.k, kv_head), shape.k, column0, keys, shape.head_dim);
                    load<ColumnsY>(kOffsetColumnsY, of(v, shape.v, kv_head), shape.v, column0, keys,
                                   shape.head_dim_v);
                    ptx::cp_async_commit();
                    RowStatistics mine[kLaneRows];
                    #pragma unroll
                    for (int r = 0; r < kLaneRows; ++r) mine[r] = rows[min(work.row0 + me.row(r), last_row)];
                    ptx::cp_async_wait<0>();
                    __syncthreads();
                    #pragma unroll
                    for (int strip = 0; strip < kStrips; ++strip) {
                        float s[kSlabs][kTilesS][4] = {}, d[kSlabs][kTilesS][4] = {};
                        differentiate_strip<false>(shape, work, head, n, 0, strip * STRIP, true, partly, mine, s, d);
                        #pragma unroll
                        for (int slab = 0; slab < kSlabs; ++slab) {
                            #pragma unroll
                            for (int j = 0; j < kTilesS; ++j) {
                                #pragma unroll
                                for (int r = 0; r < 4; ++r) acc[strip][slab][j][r] += d[slab][j][r];
                            }
                        }
                    }
                }
            }
        }
    }

    __syncthreads();
    float* const tile = reinterpret_cast<float*>(dynamic_shared);
    #pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
        #pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float x = acc[j / kTilesS][r / 2][j % kTilesS][r % 2 * 2 + e];
                tile[me.row(r) * kSumStride + 8 * j + me.lane % 4 * 2 + e] = x;
            }
        }
    }
    __syncthreads();
    sum_tile(tile, size[2] == 1, size[3] == 1);
    const int row_end = min(size[2] - own_m * kRows, kRows), column_end = min(size[3] - own_n * kColumns, kColumns);
    for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
        const int row = i / kColumns, column = i % kColumns;
        if (row >= row_end || column >= column_end) continue;
        const int64 at = blockIdx.z * shape.dbias[0] + blockIdx.y * shape.dbias[1] +
                         (own_m * kRows + row) * shape.dbias[2] + (own_n * kColumns + column) * shape.dbias[3];
        const float x = tile[row * kSumStride + column];
        if constexpr (kBias == Bias::kFloat) static_cast<float*>(dbias)[at] = x;
        else static_cast<scalar*>(dbias)[at] = narrowed<scalar>(x);
    }
}
