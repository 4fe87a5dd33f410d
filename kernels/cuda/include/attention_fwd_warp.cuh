// A warp's part of attention_fwd_sm80.cu: its accumulators, and one step per tile of keys.
#pragma once
#include "attention_fwd_config.cuh"

// softcap's tanh. The approximation is off by half a unit of float16, which is too much for float.
__device__ __forceinline__ float soft_sign(float x) {
    if constexpr (sizeof(scalar) == 2) return ptx::tanh(x);
    else return 1.0f - 2.0f * ptx::reciprocal(1.0f + ptx::exp2(2.0f * kLog2e * x));
}

// What a warp holds of its 16 or 32 rows, lane = 4 g + t; c: an accumulator's numbers, r = 2 slab + h: rows g
// + 8 h
//
//   q[step][slab]      A operand, 32 bytes of head_dim     a0 (g), a1 (g + 8), a2, a3: 16 bytes further
//   s[slab][tile][c]   scores, then weights                c = 2 h + e: row 16 slab + 8 h + g, key 8 tile + 2t + e
//   acc_o[slab][tile]  sums of weighted values             the same, columns of v
struct Forward {
    const AttentionShape& shape;
    Work work;
    const bool careful;            // V has numbers that are not finite: they are left out, and added later
    const int lane, warp_m, warp_n;
    const unsigned shared;
    KeyRows<TileK, kThreads, PAGED> k;
    KeyRows<TileV, kThreads, PAGED> v;
    const unsigned char* bias;     // of the sequence
    BlockMask block_mask;
    unsigned k_now, k_next;
    int query[PACK_GQA ? kRows : 1];
    float slope[PACK_GQA && ALIBI ? kRows : 1];
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
    // 8 keys of float make a step. There A wants keys t and t + 4 where the accumulator has 2t and 2t + 1:
    // the rows of V are taken in that order.
    __device__ __forceinline__ void add_values(const float (&p)[kSlabs][kTilesS][4]) {
        constexpr bool kHalf = sizeof(scalar) == 2;
        constexpr int kKeys = kHalf ? 16 : 8;
        const int row0 = warp_n * kWarpN + (kHalf ? lane % 16 : lane % 4 * 2);
        const unsigned tile_v = shared + kOffsetV + (kHalf ? 0 : lane / 4 % 4 * 4);
        const LaneAddress<TileV> even(tile_v, row0, lane / 16), odd(tile_v, row0 + 1, lane / 16);
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

    // Tile n. Its K is on the way; tile `next` comes after it, unless that is negative. partly: the block
    // mask hides some of it.
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
                    const bool look = partly && row(r) < work.rows;
                    if (look) mask_blocks(row_s, r % 2, block_mask, query_of(r), first, end - first);
                }
            }
        }
        softmax.weigh(s, acc_o, kPlainScores ? shape.scale_log2 : 1.0f);

        ptx::cp_async_wait<1>();
        if (kMasked && kHides && careful) {
            Copy<TileV, kThreads>::each_word(dynamic_shared + kOffsetV, only_finite<scalar>);
        }
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
                const int key_end = min((n + 1) * BLOCK_N, work.seqlen_k);
                const auto part = block_mask.seen(work.row0, row_end, n * BLOCK_N, key_end);
                partly = part == BlockMask::kPart;
                if (part != BlockMask::kNothing) return n;
            }
        }
        return n >= begin ? n : -1;
    }

    // Waits for Q, not for the first K, which was asked for later.
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

    // Tile n, and which comes next.
    template <bool kMasked> __device__ __forceinline__ void advance(int& n, int begin, bool& partly) {
        bool next_partly = false;
        const int next = find(n - 1, begin, next_partly);
        step<kMasked>(n, next, partly);
        n = next, partly = next_partly;
    }

    // All tiles, from the right to the left; Q is on the way.
    __device__ __forceinline__ void run(const Tiles& tiles) {
        bool partly = false;
        int n = find(tiles.end - 1, tiles.begin, partly);
        if (n >= 0) k.template load<false>(k_now, n, work.seqlen_k, shape.head_dim);
        ptx::cp_async_commit();
        receive_q();
        const auto masked = [&] {
            if (kMask == Mask::kLocal && n < tiles.all_begin) return true;
            return kBias != Bias::kNone || partly || n >= tiles.all_end;
        };
        // Tiles that are seen whole, most of them, compare nothing. Masked ones come first; with a window,
        // and wherever a block mask says so, they come again.
        if constexpr (kMask == Mask::kLocal || BLOCK_MASK) {
            while (n >= 0) {
                if (masked()) advance<true>(n, tiles.begin, partly);
                else advance<false>(n, tiles.begin, partly);
            }
        } else {
            while (n >= 0 && masked()) advance<true>(n, tiles.begin, partly);
            if constexpr (kBias == Bias::kNone) {
                while (n >= 0) advance<false>(n, tiles.begin, partly);
            }
        }
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

    // Adds to O, staged in shared memory, the numbers of V that are not finite, where they are seen: 0 * inf
    // is NaN, so the product would bring them to every row. A column of a thread; slow, and rare.
    __device__ __forceinline__ void add_special(unsigned char* tile) const {
        const Tiles tiles = work.tiles(shape);
        const int last_key = min(tiles.end * BLOCK_N, work.seqlen_k);
        #pragma unroll 1
        for (int column = threadIdx.x; column < work.columns; column += kThreads) {
            #pragma unroll 1
            for (int key = tiles.begin * BLOCK_N; key < last_key; ++key) {
                const float x = widened(v.at(key, column));
                if (fabsf(x) < infinity()) continue;
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
