// The per-warp half of forward_sm80.cu: accumulators, and one step per tile of keys.
#pragma once
#include "forward_config.cuh"

// A thread's position in the block. Recomputed where it is needed again, like Work.
struct Place {
    int lane, warp_m, warp_n;

    static __device__ __forceinline__ Place mine() {
        const unsigned thread = ptx::opaque(threadIdx.x), warp = thread / 32;
        return {int(thread % 32), int(warp % WARPS_M), WARPS_N > 1 ? int(warp / WARPS_M) : 0};
    }

    __device__ __forceinline__ int first_row() const { return warp_m * kSlabs * 16; }   // of the warp, in the block
    __device__ __forceinline__ int row(int r) const { return first_row() + lane / 4 + 8 * r; }
    __device__ __forceinline__ int first_key() const { return warp_n * kWarpN; }        // of the warp, in the tile
};

// State of a warp for its 16 or 32 rows. lane = 4 g + t; a lane's row r = 2 slab + h is row 16 slab + 8 h + g.
//
//   q[step][slab]      A operand, 32 bytes of head_dim     a0 (row g), a1 (row g + 8); a2, a3: 16 bytes to the right
//   s[slab][tile][c]   scores, then weights                c = 2 h + e: row 16 slab + 8 h + g, key 8 tile + 2t + e
//   acc_o[slab][tile]  sums of weighted values             the same, with columns of V for keys
//        [kTilesO]     sums of weights, each rounded to DTYPE as P V takes it: equal values come out as they are
//
// s and acc_o take up to 192 of 255 registers, so little else may live across a tile: two source addresses and a
// destination for copies, three addresses for fragments, the tile index and the limits of masked tiles. Everything
// else comes from constant memory or is recomputed.
struct Forward {
    const AttentionShape& shape;
    Work work;
    const bool careful;               // some input is not finite: what V has of that is added at the end; or scores
                                      // are huge: they are rounded before the maximum is subtracted
    RowsK k;
    RowsV v;
    const unsigned char* bias;        // of the sequence
    BlockMask block_mask;
    Seed seed;                        // of dropout
    unsigned q_from, k_from, v_from;  // this lane's ldmatrix addresses: Q, even K, V
    unsigned k_to, v_to;              // this thread's copy destinations: odd K, V; their codes
    int k_odd;                        // offset of the K buffer in use: 0 or kOffsetOddK
    int query[kKeepsQuery ? kRows : 1];
    float slope[PACK_GQA && ALIBI ? kRows : 1];
    unsigned q[kQInRegisters ? kSteps : 1][kSlabs][4];
    float acc_o[kSlabs][kTilesAcc][4];
    OnlineSoftmax<kSlabs> softmax;

    // Row r of this lane among all rows; its query; the key on that query's diagonal.
    __device__ __forceinline__ int row(const Place& me, int r) const { return work.row0 + me.row(r); }
    __device__ __forceinline__ int query_of(const Place& me, int r) const {
        return kKeepsQuery ? query[kKeepsQuery ? r : 0] : work.query(row(me, r));
    }
    __device__ __forceinline__ int diagonal(const Place& me, int r) const { return query_of(me, r) + work.shift(); }

    __device__ __forceinline__ void start(unsigned shared) {
        constexpr bool kHalf = sizeof(scalar) == 2;
        const Place me = Place::mine();
        const int lane = me.lane, key = me.first_key();
        q_from = ptx::kept(TileQ::at(shared + kOffsetQ, me.first_row() + lane % 16, lane / 16));
        k_from = ptx::kept(TileK::at(shared, key + lane % 8 + lane / 16 * 8, lane / 8 % 2));
        v_from = ptx::kept(kHalf ? TileV::at(shared + kOffsetV, key + lane % 16, lane / 16)
                                 : TileV::at(shared + kOffsetV + lane / 4 % 4 * 4, key + lane % 4 * 2, lane / 16));
        k_to = RowsK::Loader::at(shared + (kCodes ? kOffsetCodesK : kOffsetOddK));
        v_to = RowsV::Loader::at(shared + (kCodes ? kOffsetCodesV : kOffsetV));
        k_odd = 0;
        softmax = {};
        #pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            #pragma unroll
            for (int j = 0; j < kTilesAcc; ++j) {
                #pragma unroll
                for (int r = 0; r < 4; ++r) acc_o[slab][j][r] = 0.0f;
            }
        }
    }

    // S = Q K^T. Each ldmatrix covers 16 keys and 32 bytes of head_dim; steps with the same swizzle XOR run back to
    // back. The float32 loop stays rolled: each step is three products plus the TF32 split, and unrolled code would
    // dominate ptxas time.
    __device__ __forceinline__ void scores(float (&s)[kSlabs][kTilesS][4]) {
        constexpr int kSpan = LaneAddress<TileK>::kSpan, kSpans = TileK::kRowBytes / kSpan, kTwists = kSpan / 32;
        constexpr int kUnrolled = sizeof(scalar) == 2 ? kSpans : 1;
        const LaneAddress<TileK> k_now(k_from + k_odd);
        const LaneAddress<TileQ> q_now(q_from);
        #pragma unroll
        for (int twist = 0; twist < kTwists; ++twist) {
            #pragma unroll kUnrolled
            for (int span = 0; span < kSpans; ++span) {
                #pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) {
                    if constexpr (!kQInRegisters) ptx::ldmatrix4(q[0][slab], q_now.at(twist, 16 * slab) + span * kSpan);
                }
                #pragma unroll
                for (int j = 0; j < kTilesS; j += 2) {
                    unsigned b[4];
                    ptx::ldmatrix4(b, k_now.at(twist, 8 * j) + span * kSpan);
                    #pragma unroll
                    for (int slab = 0; slab < kSlabs; ++slab) {
                        const unsigned(&a)[4] = q[kQInRegisters ? span * kTwists + twist : 0][slab];
                        multiply<scalar>(s[slab][j], a, b[0], b[1]);
                        multiply<scalar>(s[slab][j + 1], a, b[2], b[3]);
                    }
                }
            }
        }
    }

    // Products with the codes of keys become those with the keys.
    __device__ __forceinline__ void scale_keys(float (&s)[kSlabs][kTilesS][4]) const {
        const Place me = Place::mine();
        const float* scale_of_key = scales_of_keys() + me.first_key() + me.lane % 4 * 2;
        #pragma unroll
        for (int j = 0; j < kTilesS; ++j) {
            const float2 by = *reinterpret_cast<const float2*>(scale_of_key + 8 * j);
            #pragma unroll
            for (int r = 0; r < kRows; ++r) s[r / 2][j][r % 2 * 2] *= by.x, s[r / 2][j][r % 2 * 2 + 1] *= by.y;
        }
    }

    static __device__ __forceinline__ float* scales_of_keys() {
        return reinterpret_cast<float*>(dynamic_shared + kOffsetScales);
    }

    // 3 x TF32 makes NaN of infinities (infinity - infinity). Such scores are computed again one by one: slow, but rare.
    // Meanwhile they all are in local memory, which takes no registers from the usual path.
    __device__ __forceinline__ void mend(float (&s)[kSlabs][kTilesS][4]) const {
        const Place me = Place::mine();
        constexpr int kScores = kSlabs * kTilesS * 4;
        float local[kScores];
        #pragma unroll
        for (int i = 0; i < kScores; ++i) local[i] = s[i / 4 / kTilesS][i / 4 % kTilesS][i % 4];
        #pragma unroll 1
        for (int i = 0; i < kScores; ++i) {
            const int row = me.row(i / 4 / kTilesS * 2 + i % 4 / 2);
            const int key = me.first_key() + i / 4 % kTilesS * 8 + me.lane % 4 * 2 + i % 2;
            if (local[i] != local[i]) local[i] = product(row, key);
        }
        #pragma unroll
        for (int i = 0; i < kScores; ++i) s[i / 4 / kTilesS][i / 4 % kTilesS][i % 4] = local[i];
    }

    // q.k of a row of the block and a key of the tile, from shared memory.
    __device__ __forceinline__ float product(int row, int key) const {
        constexpr int kChunk = TileQ::kChunk;
        float sum = 0.0f;
        #pragma unroll 1
        for (int d = 0; d < HEAD_DIM; ++d) {
            const int byte = d % kChunk * sizeof(scalar);
            const auto* x = dynamic_shared + TileQ::at(kOffsetQ, row, d / kChunk) + byte;
            const auto* y = dynamic_shared + TileK::at(k_odd, key, d / kChunk) + byte;
            sum = fmaf(widened(*reinterpret_cast<const scalar*>(x)), widened(*reinterpret_cast<const scalar*>(y)), sum);
        }
        return sum;
    }

    __device__ __forceinline__ float bias_at(int row, int query, int key) const {
        if constexpr (kBias == Bias::kNone) return 0.0f;
        const int64 at = work.head_of(row) * shape.bias[1] + query * shape.bias[2] + key * shape.bias[3];
        if constexpr (kBias == Bias::kFloat) return reinterpret_cast<const float*>(bias)[at];
        else return widened(reinterpret_cast<const scalar*>(bias)[at]);
    }

    // Turns products into scores, in units of log2. `first` is the key of this lane's first column.
    __device__ __forceinline__ void shape_row(const Place& me, float (&s)[kTilesS][4], int r, int first, int end) {
        const int h = r % 2;
        const float along = static_cast<float>(diagonal(me, r) + (ALIBI ? shape.scores.ahead : 0) - first);
        #pragma unroll
        for (int j = 0; j < kTilesS; ++j) {
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = s[j][2 * h + e];
                const int column = 8 * j + e;
                make_score<scalar>(x, shape.scores);
                if constexpr (ALIBI) x = fmaf(-slope[PACK_GQA ? r : 0], fabsf(along - column), x);
                if constexpr (kBias != Bias::kNone) {
                    // Do not read the bias of invisible keys.
                    const bool seen = column < end && row(me, r) < work.rows;
                    const float b = seen ? bias_at(row(me, r), query_of(me, r), first + column) : minus_infinity();
                    x = b == minus_infinity() ? b : fmaf(b < kLowestBias ? kLowestBias : b, kLog2e, x);
                }
            }
        }
    }

    // O += P V. The accumulators of two adjacent tiles of S form the A operand for 16 keys:
    //
    //   a0, a1 = (c0 c1), (c2 c3) of the first tile      a2, a3 = those of the second
    //
    // float32 takes 8 keys per step. Its A operand takes keys t and t + 4, but the accumulator holds 2t and 2t + 1, so
    // the rows of V are read in that order.
    __device__ __forceinline__ void add_values(const float (&p)[kSlabs][kTilesS][4]) {
        constexpr bool kHalf = sizeof(scalar) == 2;
        constexpr int kKeys = kHalf ? 16 : 8;
        const LaneAddress<TileV> even(v_from);
        const LaneAddress<TileV> odd((even.first ^ TileV::key(1) << 4) + TileV::kRowBytes);
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
            if constexpr (kRounded) {
                #pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) {
                    multiply<scalar>(acc_o[slab][kTilesAcc - 1], a[slab], Packed<scalar>::kOnes, Packed<scalar>::kOnes);
                }
            }
        }
    }

    // Processes tile n, whose K is already loading. Tile `next` follows, unless it is before `begin`.
    // masked: some row does not see all of tile n; partly: because of the block mask.
    __device__ __forceinline__ void step(int n, int next, int begin, bool masked, bool partly) {
        if constexpr (kCodes) {
            ptx::cp_async_wait<1>();  // the codes of V are newer
            k.template decode<false>(dynamic_shared, dynamic_shared + kOffsetCodesK, scales_of_keys());
        } else {
            ptx::cp_async_wait<0>();
        }
        __syncthreads();  // K has arrived; no warp reads V or the other K any more
        if constexpr (!kCodes) {
            if (masked) v.load(v_to, n, false, work.seqlen_k, work.columns);
            else v.load(v_to, n, true, work.seqlen_k, work.columns);  // skips the row bounds check
            ptx::cp_async_commit();
            v.skip(n - 1 - next);
            k.skip(n - 1 - next);
        }
        const auto load_next = [&] {
            if (next >= begin) k.load(k_to - k_odd, next, true, work.seqlen_k, shape.head_dim);
            ptx::cp_async_commit();
        };
        if constexpr (!ONE_K) load_next();

        float s[kSlabs][kTilesS][4] = {};
        scores(s);
        if (sizeof(scalar) == 4 && careful) mend(s);
        if constexpr (kCodes) scale_keys(s);
        if constexpr (ONE_K) {
            __syncthreads();  // no warp reads K any more
            load_next();
        }
        if (!kPlainScores || masked) {
            const Place me = Place::mine();
            const int first = n * BLOCK_N + me.first_key() + me.lane % 4 * 2;
            // A lane's rows are 8 apart, and unpacked their diagonals. ptxas would compute the limits of all before the
            // loop, and with packed heads spill them; `kept` stays where it is.
            int first_row = PACK_GQA ? row(me, 0) : diagonal(me, 0) - first;
            if (PACK_GQA && kMask == Mask::kCausal) first_row = ptx::kept(first_row);
            #pragma unroll
            for (int r = 0; r < kRows; ++r) {
                float(&row_s)[kTilesS][4] = s[r / 2];
                int on_diagonal = first_row + 8 * r;
                if constexpr (kKeepsQuery) on_diagonal = diagonal(me, r) - first;
                else if constexpr (PACK_GQA) on_diagonal = work.query(on_diagonal) + work.shift() - first;
                int end = work.seqlen_k - first;
                if constexpr (kMask != Mask::kNone) end = min(end, on_diagonal + shape.window_right + 1);
                if constexpr (!kPlainScores) shape_row(me, row_s, r, first, end);
                if (!masked) continue;
                mask_row<kMask>(row_s, r % 2, on_diagonal - shape.window_left, end);
                if constexpr (BLOCK_MASK) {
                    const bool look = partly && row(me, r) < work.rows;
                    if (look) mask_blocks(row_s, r % 2, block_mask, query_of(me, r), first, end);
                }
            }
        }
        if (!kCodes && careful) {
            ptx::cp_async_wait<1>();  // this thread's own copies of V have arrived
            RowsV::Loader::each_word(dynamic_shared + kOffsetV, only_finite<scalar>);
        }
        float scale = kPlainScores ? shape.scores.scale_log2 : 1.0f;
        if (kPlainScores && careful) {
            #pragma unroll
            for (int i = 0; i < kSlabs * kTilesS * 4; ++i) s[i / (4 * kTilesS)][i / 4 % kTilesS][i % 4] *= scale;
            scale = 1.0f;
        }
        softmax.weigh(s, acc_o, scale);
        if constexpr (DROPOUT) {
            // The factor of the weights that stay comes with the last division.
            const Place me = Place::mine();
            const int key = n * BLOCK_N + me.first_key() + me.lane % 4 * 2;
            const auto drop = [&](int a, int c, int e, bool kept) {
                float& x = s[a / 2][c][a % 2 * 2 + e];
                x = kept ? x : 0.0f;
            };
            draw<kRows, kTilesS, false>(seed, shape.scores, work.batch, work.head, row(me, 0), key, drop);
        }

        ptx::cp_async_wait<1>();
        if constexpr (kCodes) {
            v.template decode<true>(dynamic_shared + kOffsetV, dynamic_shared + kOffsetCodesV, nullptr);
            if (careful) Copy<TileV, kThreads>::each_word(dynamic_shared + kOffsetV, only_finite<scalar>);
        }
        __syncthreads();  // V has arrived
        if constexpr (kCodes) load_codes_of_values(next, begin);
        add_values(s);
        k_odd = kOffsetOddK - k_odd;
    }

    __device__ __forceinline__ void load_codes_of_values(int n, int begin, bool whole = true) {
        if (n >= begin) v.load(v_to, n, whole, work.seqlen_k, work.columns);
        ptx::cp_async_commit();
    }

    // The next tile at or left of n that the block mask does not hide entirely; begin - 1 if there is none.
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
        return n;
    }

    // Waits for Q, but not for the first K, which was issued later, and codes of V.
    __device__ __forceinline__ void receive_q() {
        if (kQInRegisters || shape.scores.negate) ptx::cp_async_wait<kCodes ? 2 : 1>();
        if (shape.scores.negate) {
            const unsigned signs = sizeof(scalar) == 2 ? 0x80008000u : 0x80000000u;
            Copy<TileQ, kThreads>::each_word(dynamic_shared + kOffsetQ, [=](unsigned word) { return word ^ signs; });
        }
        if constexpr (kQInRegisters) {
            __syncthreads();
            const LaneAddress<TileQ> rows(q_from);
            #pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                #pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) ptx::ldmatrix4(q[i][slab], rows.at(i, 16 * slab));
            }
            if constexpr (kCodes) __syncthreads();  // K and V take the place of Q
        }
    }

    // Runs over all tiles from right to left. Q is already loading.
    __device__ __forceinline__ void run(const Tiles& tiles) {
        bool partly = false;
        int n = ptx::kept(find(tiles.end - 1, tiles.begin, partly));
        const int all_begin = ptx::kept(tiles.all_begin);
        k.seek(n);
        v.seek(n);
        if (n >= tiles.begin) k.load(k_to - kOffsetOddK, n, false, work.seqlen_k, shape.head_dim);
        ptx::cp_async_commit();
        if constexpr (kCodes) load_codes_of_values(n, tiles.begin, false);
        receive_q();
        const auto masked = [&] {
            if (kMask == Mask::kLocal && n < all_begin) return true;
            return kBias != Bias::kNone || partly || n >= tiles.all_end;
        };
        // Most tiles need no mask and branch around it. A separate loop for them would save two branches and double the
        // code, with a different register allocation in each loop.
        while (n >= tiles.begin) {
            bool next_partly = false;
            const int next = find(n - 1, tiles.begin, next_partly);
            step(n, next, tiles.begin, masked(), partly);
            n = next, partly = next_partly;
        }
    }

    // Does `row` see `key`? The same masks as for whole tiles, for one pair, and a score of -infinity hides too.
    // q_row: the row's first element.
    __device__ __forceinline__ bool sees(const scalar* q_row, int row, int key) const {
        const int query = work.query(row), diagonal = query + work.shift();
        bool visible = true;
        if (kMask != Mask::kNone) visible = key <= diagonal + shape.window_right;
        if (kMask == Mask::kLocal) visible = visible && key >= diagonal - shape.window_left;
        if (BLOCK_MASK) visible = visible && block_mask.sees(query, key);
        if (!visible || bias_at(row, query, key) == minus_infinity()) return false;
        float x = 0.0f;
        #pragma unroll 1
        for (int d = 0; d < shape.head_dim; ++d) x = fmaf(widened(q_row[d]), k.at(key, d), x);
        x = shape.scores.negate ? -x : x;
        make_score<scalar>(x, shape.scores);
        return x != minus_infinity();
    }

    // Adds the non-finite values of V to O (staged in shared memory) for the rows that see them, however small their
    // weight: in the product, 0 * inf would give NaN, and in every row. One column per thread: slow, but rare.
    template <typename RowOfQ> __device__ __forceinline__ void add_special(unsigned char* tile, RowOfQ row_of_q) const {
        const Tiles tiles = work.tiles(shape);
        const int last_key = min(tiles.end * BLOCK_N, work.seqlen_k);
        #pragma unroll 1
        for (int column = threadIdx.x; column < work.columns; column += kThreads) {
            #pragma unroll 1
            for (int key = tiles.begin * BLOCK_N; key < last_key; ++key) {
                float x = v.at(key, column);
                if constexpr (kCodes) x = widened(narrowed<scalar>(x));  // as in the product
                if (fabsf(x) < infinity()) continue;
                #pragma unroll 1
                for (int row = 0; row < BLOCK_M && work.row0 + row < work.rows; ++row) {
                    const int byte = column * sizeof(staged);
                    staged& o = *reinterpret_cast<staged*>(tile + TileO::at(0, row, byte / 16) + byte % 16);
                    const float before = widened(o), after = before + x;
                    if (before != before || before == after) continue;  // NaN already, or an infinity of the same sign
                    if (sees(row_of_q(work.row0 + row), work.row0 + row, key)) o = narrowed<staged>(after);
                }
            }
        }
    }

    // The sum of a row's weights as P V took them, in all lanes of its quad. `total` is that of the exact ones.
    __device__ __forceinline__ float taken(int r, float total) const {
        return kRounded ? acc_o[r / 2][kTilesAcc - 1][r % 2 * 2] : total;
    }

    // Whether O is finite, and no maximum so large that its product with the scale is off by more than exp2 can bear.
    __device__ __forceinline__ bool is_regular() const {
        float zero = 0.0f;
        bool regular = true;
        #pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float top = softmax.minus_max[r];
            regular = regular && (!kPlainScores || fabsf(top) < kCoarse || top == -kNothing);
        }
        #pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            #pragma unroll
            for (int j = 0; j < kTilesO; ++j) {
                #pragma unroll
                for (int r = 0; r < 4; ++r) zero = fmaf(acc_o[slab][j][r], 0.0f, zero);
            }
        }
        return regular && zero == 0.0f;
    }
};
