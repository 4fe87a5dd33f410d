// The per-warp half of backward_sm80.cu: products of tiles, and P and dS from them.
#pragma once
#include "backward_config.cuh"

// A thread's position in the block. Recomputed where it is needed again, which is cheaper than a register.
struct Place {
    unsigned lane, warp, warp_r, warp_d;

    static __device__ __forceinline__ Place mine() {
        const unsigned thread = ptx::opaque(threadIdx.x), warp = thread / 32;
        return {thread % 32, warp, warp % WARPS_R, WARPS_D > 1 ? warp / WARPS_R : 0};
    }

    __device__ __forceinline__ int first_row() const { return warp_r * kSlabs * 16; }  // of the warp, in the block
    __device__ __forceinline__ int row(int r) const { return first_row() + static_cast<int>(lane / 4) + 8 * r; }
};

// A block's share of the problem: its rows, and the columns that they may see. Recomputed from the grid position
// where it is needed again, to save registers.
struct Work : ScoredSequence {
    int kv_head;
    int part;           // of the heads of the group
    int head, heads;    // the first query head and how many
    int row0;
    Seed seed;                        // of dropout
    const float* rests;               // of all rows

    // Causal: the longest rows first, so that short ones fill the tail.
    static __device__ __forceinline__ Work of(const BackwardShape& shape, const int* cu_seqlens_q,
                                              const int* cu_seqlens_k) {
        const int x = ptx::opaque(blockIdx.x), y = ptx::opaque(blockIdx.y);
        Work work;
        work.batch = ptx::opaque(blockIdx.z);
        work.sequence = Sequence::of<VARLEN>(shape, work.batch, cu_seqlens_q, cu_seqlens_k);
        const int parts = kOwnsKeys && PARTS ? shape.parts : 1;
        work.part = PARTS ? y % parts : 0;
        work.kv_head = kOwnsKeys ? y / parts : y / shape.group;
        work.heads = kOwnsKeys ? PARTS ? shape.part_heads : shape.group : 1;
        work.head = y * work.heads;
        work.row0 = (kOwnsKeys || kMask != Mask::kCausal ? x : ptx::opaque(gridDim.x) - 1 - x) * kRows;
        return work;
    }

    __device__ __forceinline__ int rows() const { return kOwnsKeys ? sequence.seqlen_k : sequence.seqlen_q; }
    __device__ __forceinline__ int columns() const { return kOwnsKeys ? sequence.seqlen_q : sequence.seqlen_k; }
    __device__ __forceinline__ int diagonal(int row) const {  // the column that sits on it
        return kOwnsKeys ? row - sequence.shift() : row + sequence.shift();
    }
};

// Columns before and after the diagonal that a row sees.
__device__ __forceinline__ int seen_before(const BackwardShape& shape) {
    return kOwnsKeys ? shape.window_right : shape.window_left;
}
__device__ __forceinline__ int seen_after(const BackwardShape& shape) {
    return kOwnsKeys ? shape.window_left : shape.window_right;
}

// s += A B^T: A the warp's own rows, B kTilesS x 8 columns. a and b: this lane's addresses of the first 32 bytes.
// The float32 loop stays rolled: each step is three products plus the TF32 split.
template <typename TileA, typename TileB>
__device__ __forceinline__ void multiply_rows(float (&s)[kSlabs][kTilesS][4], unsigned a, unsigned b) {
    constexpr int kSpan = LaneAddress<TileA>::kSpan, kSpans = TileA::kRowBytes / kSpan, kTwists = kSpan / 32;
    constexpr int kUnrolled = kHalf ? kSpans : 1;
    const LaneAddress<TileA> rows(a);
    const LaneAddress<TileB> columns(b);
    #pragma unroll
    for (int twist = 0; twist < kTwists; ++twist) {
        #pragma unroll kUnrolled
        for (int span = 0; span < kSpans; ++span) {
            unsigned x[kSlabs][4];
            #pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                ptx::ldmatrix4(x[slab], rows.at(twist, 16 * slab) + span * kSpan);
            }
            #pragma unroll
            for (int j = 0; j < kTilesS; j += 2) {
                unsigned y[4];
                if constexpr (kTilesS > 1) {
                    ptx::ldmatrix4(y, columns.at(twist, 8 * j) + span * kSpan);
                } else {  // 8 columns: a word for each lane, and the one 16 bytes to its right
                    const unsigned word = columns.at(twist, 0) + span * kSpan;
                    y[0] = ptx::load_shared(word), y[1] = ptx::load_shared(word ^ 16);
                }
                #pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) {
                    multiply<scalar>(s[slab][j], x[slab], y[0], y[1]);
                    if constexpr (kTilesS > 1) multiply<scalar>(s[slab][j + 1], x[slab], y[2], y[3]);
                }
            }
        }
    }
}

// acc += A B: kDepth rows of B from row0 on, and of its columns every kStride-th unit from `unit` on. source(i, a)
// gives the A operand of step i.
//
// float32 takes 8 rows per step. A operands come from accumulators, which hold columns 2t and 2t + 1 where A requires t
// and t + 4: the rows of B are read in that order.
template <typename TileB, int kDepth, int kStride, int kA, int kTiles, typename Source>
__device__ __forceinline__ void add_product(float (&acc)[kA][kTiles][4], unsigned tile, int row0, int unit,
                                            Source source) {
    constexpr int kStep = kHalf ? 16 : 8;
    const unsigned lane = Place::mine().lane;
    const int row = row0 + (kHalf ? lane % 16 : lane % 4 * 2), word = kHalf ? 0 : lane / 4 % 4 * 4;
    const LaneAddress<TileB> even(TileB::at(tile + word, row, 2 * unit + lane / 16));
    const LaneAddress<TileB> odd((even.first ^ TileB::key(1) << 4) + TileB::kRowBytes);
    #pragma unroll kHalf ? kDepth / kStep : 1
    for (int i = 0; i < kDepth / kStep; ++i) {
        unsigned a[kA][4];
        source(i, a);
        #pragma unroll
        for (int j = 0; j < kTiles / kUnitTiles; ++j) {
            unsigned b[4];
            if constexpr (kHalf) {
                ptx::ldmatrix4_transposed(b, even.at(kStride * j, kStep * i));
            } else {
                b[0] = ptx::load_shared(even.at(kStride * j, kStep * i));
                b[1] = ptx::load_shared(odd.at(kStride * j, kStep * i));
            }
            #pragma unroll
            for (int slab = 0; slab < kA; ++slab) {
                #pragma unroll
                for (int k = 0; k < kUnitTiles; ++k) {
                    multiply<scalar>(acc[slab][kUnitTiles * j + k], a[slab], b[2 * k], b[2 * k + 1]);
                }
            }
        }
    }
}

// Two adjacent floats per lane of eight rows would meet in the banks of other rows' pairs. Odd rows take them in the
// other order, one word at a time.
__device__ __forceinline__ unsigned other_first() { return Place::mine().lane / 4 % 2; }

// The A operand of step i from accumulators: those of two adjacent tiles for 16-bit types, one for float.
template <int kTiles>
__device__ __forceinline__ void from_accumulators(const float (&s)[kSlabs][kTiles][4], int i,
                                                  unsigned (&a)[kSlabs][4]) {
    #pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
        #pragma unroll
        for (int r = 0; r < 4; ++r) {
            if constexpr (kHalf) a[slab][r] = Packed<scalar>::narrow(&s[slab][2 * i + r / 2][r % 2 * 2]);
            else a[slab][r] = __float_as_uint(s[slab][i][r % 2 * 2 + r / 2]);
        }
    }
}

// The same from the warp's rows of a tile in shared memory.
__device__ __forceinline__ void from_tile(unsigned tile, int i, unsigned (&a)[kSlabs][4]) {
    const Place me = Place::mine();
    #pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
        if constexpr (kHalf) {
            ptx::ldmatrix4(a[slab], TileS::at(tile, me.first_row() + 16 * slab + me.lane % 16, 2 * i + me.lane / 16));
        } else {
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const unsigned column = 8 * i + me.lane % 4 * 2, word = column % 4 + other_first();
                const unsigned first = TileS::at(tile, me.row(2 * slab + h), column / 4) + word * 4;
                const unsigned x = ptx::load_shared(first), y = ptx::load_shared(first ^ 4);
                a[slab][h] = other_first() ? y : x, a[slab][h + 2] = other_first() ? x : y;
            }
        }
    }
}

// Stores P or dS: this warp's rows, kTilesS x 8 columns from `column` on. A tile's rows are one permuted group of
// chunks.
__device__ __forceinline__ void put(unsigned tile, int column, const float (&s)[kSlabs][kTilesS][4]) {
    constexpr int kTileBytes = 8 * sizeof(scalar);
    static_assert(TileS::kRowBytes <= TileS::kGroup * 16, "the chunks of a row differ by an XOR");
    const Place me = Place::mine();
    const unsigned byte = (column + me.lane % 4 * 2) * sizeof(scalar), other = kHalf ? 0 : other_first();
    const unsigned first = ptx::opaque(TileS::at(tile, me.row(0), byte / 16) + byte % 16 + other * 4);
    #pragma unroll
    for (int j = 0; j < kTilesS; ++j) {
        #pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            const unsigned to = (first ^ j * kTileBytes) + 8 * r * TileS::kRowBytes;
            const float* const pair = &s[r / 2][j][r % 2 * 2];
            if constexpr (kHalf) {
                ptx::store_shared(to, Packed<scalar>::narrow(pair));
            } else {
                ptx::store_shared(to, __float_as_uint(other ? pair[1] : pair[0]));
                ptx::store_shared(to ^ 4, __float_as_uint(other ? pair[0] : pair[1]));
            }
        }
    }
}

// acc += A B without tensor cores, for masked tiles that hold inf or NaN: hidden pairs are left out, since 0 * inf is
// NaN. a(r, k) and b(k, column) are elements; visible(r, k): row r sees k.
template <int kStride, int kA, int kTiles, typename A, typename B, typename Visible>
__device__ __forceinline__ void add_product_slowly(float (&acc)[kA][kTiles][4], int depth, int unit, A a, B b,
                                                   Visible visible) {
    const unsigned lane = Place::mine().lane;
    #pragma unroll 1
    for (int k = 0; k < depth; ++k) {
        float x[2 * kA];
        bool seen[2 * kA];
        #pragma unroll
        for (int r = 0; r < 2 * kA; ++r) x[r] = a(r, k), seen[r] = visible(r, k);
        #pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int first = (kStride * (j / kUnitTiles) + unit) * kUnit + j % kUnitTiles * 8;
                const int column = first + lane % 4 * 2 + e;
                const float y = b(k, column);
                #pragma unroll
                for (int r = 0; r < 2 * kA; ++r) {
                    if (seen[r]) acc[r / 2][j][r % 2 * 2 + e] = fmaf(x[r], y, acc[r / 2][j][r % 2 * 2 + e]);
                }
            }
        }
    }
}

template <typename TileT> __device__ __forceinline__ float element(int offset, int row, int column) {
    const unsigned byte = column * sizeof(scalar);
    const unsigned at = TileT::at(offset, row, byte / 16) + byte % 16;
    return widened(*reinterpret_cast<const scalar*>(dynamic_shared + at));
}

// Whether limits depend on the row: columns left of the diagonal are queries if the rows are keys.
constexpr bool kBegins = kMask == Mask::kLocal || (kMask == Mask::kCausal && kOwnsKeys);
constexpr bool kEnds = kMask == Mask::kLocal || (kMask == Mask::kCausal && !kOwnsKeys);

// Address of the statistics of a column of a tile, where columns are queries. stage: offset of the tile's stage.
__device__ __forceinline__ unsigned passing_at(int stage, int column) {
    const unsigned first = ptx::shared_address(dynamic_shared) + kOffsetStatistics + stage;
    return ptx::opaque(first + column * sizeof(RowStatistics));
}

// Those of two neighbouring columns, from shared memory.
__device__ __forceinline__ void load_two(unsigned at, RowStatistics (&two)[2]) {
    constexpr int kWords = sizeof(RowStatistics) / 4;
    unsigned words[2][4];
    ptx::load_shared(at, words[0]);
    if constexpr (kWords == 4) ptx::load_shared(at + 16, words[1]);
    #pragma unroll
    for (int e = 0; e < 2; ++e) {
        const unsigned(&own)[4] = words[kWords == 4 ? e : 0];
        const int first = kWords == 4 ? 0 : 2 * e;
        two[e] = RowStatistics::of(__uint_as_float(own[first]), __uint_as_float(own[first + 1]),
                                   __uint_as_float(own[2]));
    }
}

// Turns S into P and dP into dS, in place: P = 2^(score - lse), dS = P (dP - delta), 0 where hidden. With kSlope dS
// is the gradient of softmax_scale q k^T, without that of the score. `first`: this lane's first column.
// statistics: of this lane's rows, where rows are queries; else those of its columns are in shared memory at `passing`.
template <bool kMasked, bool kSlope>
__device__ __forceinline__ void differentiate(const BackwardShape& shape, const Work& work, int head, bool partly,
                                              int first, float (&s)[kSlabs][kTilesS][4],
                                              float (&d)[kSlabs][kTilesS][4], unsigned passing,
                                              const RowStatistics (&statistics)[kOwnsKeys ? 1 : kLaneRows]) {
    const Place me = Place::mine();
    // A lane's rows are 8 apart, so that one register and constants give the limits of all.
    const int row0 = work.row0 + me.row(0), diagonal = work.diagonal(row0) - first;
    const int begin = diagonal - seen_before(shape), end = diagonal + seen_after(shape) + 1;
    const int rows_left = work.rows() - row0, columns_left = work.columns() - first;
    const int ahead = ALIBI ? shape.scores.ahead : 0;
    [[maybe_unused]] const float along = static_cast<float>(diagonal + (kOwnsKeys ? -ahead : ahead));
    [[maybe_unused]] const float slope = work.slope(head);
    #pragma unroll
    for (int j = 0; j < kTilesS; ++j) {
        RowStatistics two[2];
        if constexpr (kOwnsKeys) load_two(passing + 8 * j * sizeof(RowStatistics), two);
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int column = 8 * j + e;
            #pragma unroll
            for (int r = 0; r < kLaneRows; ++r) {
                const RowStatistics query = kOwnsKeys ? two[e] : statistics[kOwnsKeys ? 0 : r];
                float& x = s[r / 2][j][r % 2 * 2 + e];
                float& dx = d[r / 2][j][r % 2 * 2 + e];
                bool visible = column < columns_left && 8 * r < rows_left;
                if (kBegins) visible = visible && column - 8 * r >= begin;
                if (kEnds) visible = visible && column - 8 * r < end;
                const int own = row0 + 8 * r, other = first + column;
                const int i = kOwnsKeys ? other : own, key = kOwnsKeys ? own : other;
                if (kMasked && BLOCK_MASK && partly && visible) visible = work.blocks(shape, head).sees(i, key);
                float bias = 0.0f;
                if constexpr (kBias != Bias::kNone) {
                    bias = visible ? work.bias_at(shape, head, i, key) : minus_infinity();
                    visible = visible && bias != minus_infinity();
                }
                const float distance = fabsf(along + (8 * r - column));
                const float slope_of_cap = make_gradient_score(x, shape.scores, slope, distance, bias);
                float exponent = exponent_of(x, shape.scores, query.lse);
                if constexpr (WIDE_LSE) exponent -= query.rest();
                const float p = ptx::exp2(exponent);
                float ds = p * (dx - query.delta);
                if constexpr (SOFTCAP && kSlope) ds *= slope_of_cap;
                x = !kMasked || visible ? p : 0.0f;
                dx = !kMasked || visible ? ds : 0.0f;
            }
        }
    }
}

// Whether the warp has a query whose lse is too coarse: among its rows, or the columns of the strip from `column` on.
// stage: offset of the tile's stage.
__device__ __forceinline__ bool any_coarse(int stage, int column,
                                           const RowStatistics (&statistics)[kOwnsKeys ? 1 : kLaneRows]) {
    bool coarse = false;
    if constexpr (kOwnsKeys) {
        #pragma unroll
        for (int half = 0; half < (STRIP + 15) / 16; ++half) {
            const int at = column + 16 * half + Place::mine().lane % (STRIP < 16 ? STRIP : 16);
            coarse |= is_coarse<WIDE_LSE>(__uint_as_float(ptx::load_shared(passing_at(stage, at))));
        }
    } else {
        #pragma unroll
        for (int r = 0; r < kLaneRows; ++r) coarse |= is_coarse<WIDE_LSE>(statistics[kOwnsKeys ? 0 : r].lse);
    }
    return __any_sync(0xffffffffu, coarse);
}

// Multiplies P and dS of such queries by 2^-rest. Arguments as of differentiate_strip. Positions are computed again, to
// save registers.
__device__ __forceinline__ void weigh_coarse(const BackwardShape& shape, const Work& work, int head, int tile,
                                             int stage, int column,
                                             const RowStatistics (&statistics)[kOwnsKeys ? 1 : kLaneRows],
                                             float (&s)[kSlabs][kTilesS][4], float (&d)[kSlabs][kTilesS][4]) {
    const Place me = Place::mine();
    const float* const rests = work.rests + work.sequence.padded<VARLEN>(shape, head);
    #pragma unroll
    for (int n = 0; n < (kOwnsKeys ? 2 * kTilesS : kLaneRows); ++n) {  // queries
        const int at = column + n / 2 * 8 + me.lane % 4 * 2 + n % 2;
        float lse = statistics[kOwnsKeys ? 0 : n].lse;
        if constexpr (kOwnsKeys) lse = __uint_as_float(ptx::load_shared(passing_at(stage, at)));
        // Rows past the end have the last one's statistics, and their own rest is not written.
        const int query = kOwnsKeys ? tile * kColumns + at : min(work.row0 + me.row(n), work.rows() - 1);
        const float weight = is_coarse<WIDE_LSE>(lse) ? ptx::exp2(-rests[query]) : 1.0f;
        #pragma unroll
        for (int m = 0; m < (kOwnsKeys ? kLaneRows : 2 * kTilesS); ++m) {  // keys
            const int r = kOwnsKeys ? m : n, j = (kOwnsKeys ? n : m) / 2, e = (kOwnsKeys ? n : m) % 2;
            s[r / 2][j][r % 2 * 2 + e] *= weight;
            d[r / 2][j][r % 2 * 2 + e] *= weight;
        }
    }
}

// Sets dP of the weights that dropout drops to 0; returns a bit for each of this lane's elements that is dropped.
// `first`: this lane's first column.
__device__ __forceinline__ unsigned drop_gradients(const BackwardShape& shape, const Work& work, int head, int first,
                                                   float (&d)[kSlabs][kTilesS][4]) {
    static_assert(!DROPOUT || kSlabs * kTilesS * 4 <= 32, "a bit for each element");
    const int row = work.row0 + Place::mine().row(0);
    unsigned dropped = 0;
    const auto drop = [&](int a, int c, int e, bool kept) {
        const int r = kOwnsKeys ? c : a, j = kOwnsKeys ? a : c;
        float& dx = d[r / 2][j][r % 2 * 2 + e];
        dx = kept ? dx : 0.0f;
        dropped |= kept ? 0 : 1u << ((r / 2 * kTilesS + j) * 4 + r % 2 * 2 + e);
    };
    draw<kOwnsKeys ? kTilesS : kLaneRows, kOwnsKeys ? kLaneRows : kTilesS, kOwnsKeys>(
        work.seed, shape.scores, work.sequence.number, head, kOwnsKeys ? first : row, kOwnsKeys ? row : first,
        drop);
    return ptx::opaque(dropped);  // otherwise each bit becomes a predicate, and there are too few
}

// P and dS of the warp's rows and kTilesS x 8 columns of a tile, from `column` of the tile on. s and d are zero on
// entry. statistics: as above. stage: offset of the tile's stage.
template <bool kSlope>
__device__ __forceinline__ void differentiate_strip(const BackwardShape& shape, const Work& work, int head, int tile,
                                                    int stage, int column, bool masked, bool partly,
                                                    const RowStatistics (&statistics)[kOwnsKeys ? 1 : kLaneRows],
                                                    float (&s)[kSlabs][kTilesS][4], float (&d)[kSlabs][kTilesS][4]) {
    const unsigned shared = ptx::shared_address(dynamic_shared);
    const Place me = Place::mine();
    const int row = me.first_row() + me.lane % 16, chunk = me.lane / 16;
    const int at = column + (kTilesS > 1 ? me.lane % 8 + me.lane / 16 * 8 : me.lane / 4);
    const int chunk_at = kTilesS > 1 ? me.lane / 8 % 2 : 0, word = kTilesS > 1 ? 0 : me.lane % 4 * 4;
    multiply_rows<RowsX, ColumnsX>(s, RowsX::at(shared, row, chunk),
                                   ColumnsX::at(shared + kOffsetColumnsX + stage, at, chunk_at) + word);
    multiply_rows<RowsY, ColumnsY>(d, RowsY::at(shared + kOffsetRowsY, row, chunk),
                                   ColumnsY::at(shared + kOffsetColumnsY + stage, at, chunk_at) + word);
    const int mine = column + me.lane % 4 * 2;
    const unsigned passing = shared + kOffsetStatistics + stage + mine * sizeof(RowStatistics);
    const int first = tile * kColumns + mine;
    const unsigned dropped = DROPOUT ? drop_gradients(shape, work, head, first, d) : 0;
    // Where this takes fewer registers: columns are read ahead of the scores, the warp's own rows after them.
    const bool coarse = kOwnsKeys && !WIDE_LSE && any_coarse(stage, column, statistics);
    if (masked) differentiate<true, kSlope>(shape, work, head, partly, first, s, d, passing, statistics);
    else differentiate<false, kSlope>(shape, work, head, partly, first, s, d, passing, statistics);
    if (kOwnsKeys ? coarse : !WIDE_LSE && any_coarse(stage, column, statistics)) {
        weigh_coarse(shape, work, head, tile, stage, column, statistics, s, d);
    }
    if constexpr (DROPOUT) {
        #pragma unroll
        for (int i = 0; i < kSlabs * kTilesS * 4; ++i) {
            float& x = s[i / (4 * kTilesS)][i / 4 % kTilesS][i % 4];
            x = dropped >> i & 1 ? 0.0f : x;
        }
    }
}

template <typename TileT>
__device__ __forceinline__ void load(int offset, const scalar* from, const RowStrides& stride, int row0, int rows,
                                     int columns) {
    typedef Copy<TileT, kThreads> Loader;
    const unsigned to = Loader::at(ptx::shared_address(dynamic_shared) + offset);
    from += Loader::column();
    Loader::template start<kSpare>(to, false, rows - row0, columns,
                                   [&](int row) { return from + (row0 + row) * stride.row; });
}

// Whether this thread's own copies, which have arrived, hold a value that is not finite.
template <typename TileT> __device__ __forceinline__ unsigned holds_special(int offset) {
    const auto test = [](unsigned word) { return special_bits<scalar>(word); };  // a function pointer may stay a call
    return Copy<TileT, kThreads>::any_word(dynamic_shared + offset, test);
}
