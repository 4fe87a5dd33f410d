// Statistics of every row of q for attention backward, computed before backward_sm80.cu:
//
//   lse      in units of log2
//   delta    sum over head_dim_v of dout * out, if not given. A dout in float is rounded first: delta is that of the
//            dout that dP is computed from
//
// Where lse is too coarse (backward_shape.cuh), the block goes through the keys of such rows again for the largest
// score and the sum of the weights relative to it. These scores must have the bits of the other kernels' scores, since
// next to a bias of 1e9 one rounding is a factor of 2^128. So products come from the same tensor-core steps in the same
// order. (Where keys are rows, float32 adds two small terms of a step in another order.)
//
// Macros: DTYPE, MASK, SOFTCAP, ALIBI, BLOCK_MASK, BIAS, VARLEN, WIDE_LSE as in backward_sm80.cu
//   OUT        out's type, DTYPE or f32; DELTA 0 or 1: delta is given; DROPOUT 0 or 1
//   WIDE_DOUT  0 or 1, with 16-bit DTYPE: dout is given as wide_dout in float, and written
//   grid   (ceil(seqlen_q / 64), nheads, batch)     block 256
//   what a variant does not use may be null; sinks: if there are none
#include "backward_scores.cuh"
#include "math.cuh"
#include "mma.cuh"
#include "reduce.cuh"

typedef ChooseType<WIDE_LSE, double, float>::type lse_scalar;

constexpr int kThreads = 256, kWarps = kThreads / 32, kChunk = 16 / sizeof(scalar);
constexpr bool kReads = !DELTA || WIDE_DOUT;  // out and dout

template <typename T> __device__ __forceinline__ void load_chunk(const T* from, float (&value)[kChunk]) {
    constexpr int kEach = 16 / sizeof(T), kPerWord = Packed<T>::kPerWord;
    #pragma unroll
    for (int i = 0; i < kChunk; i += kEach) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + i);
        const unsigned words[4] = {x.x, x.y, x.z, x.w};
        #pragma unroll
        for (int w = 0; w < 4; ++w) Packed<T>::widen(words[w], value + i + w * kPerWord);
    }
}

// Rounds 16 bytes of scalars, and writes them.
__device__ __forceinline__ void round_chunk(float (&value)[kChunk], scalar* to) {
    constexpr int kPerWord = Packed<scalar>::kPerWord;
    unsigned words[4];
    #pragma unroll
    for (int w = 0; w < 4; ++w) {
        words[w] = Packed<scalar>::narrow(value + w * kPerWord);
        Packed<scalar>::widen(words[w], value + w * kPerWord);
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// The largest score of a row, in units of log2, and the sum of all weights relative to it.
struct Weights {
    float top, total;

    __device__ __forceinline__ void add(float x, const AttentionScores& scores) {
        const float score = kPlainScores ? x * scores.scale_log2 : x;
        if (score == -infinity()) return;
        if (score > top) total *= ptx::exp2(top - score), top = score;
        total += ptx::exp2(exponent_of(x, scores, top));
    }
    __device__ __forceinline__ void merge(const Weights& other) {
        if (other.top == -infinity()) return;
        if (other.top > top) total *= ptx::exp2(top - other.top), top = other.top;
        total = fmaf(other.total, ptx::exp2(other.top - top), total);
    }
};

// s = the products of 16 queries, of which this lane reads two, and 8 keys, of which it reads one. The order of steps
// is that of multiply_rows in backward_warp.cuh.
__device__ __forceinline__ void multiply_slab(const scalar* const (&q)[2], const scalar* k, int head_dim,
                                              Accumulator& s) {
    constexpr int kPerWord = Packed<scalar>::kPerWord, kStep = 8 * kPerWord;  // columns in 4 and in 32 bytes
    const int steps = (head_dim + 31) / 32 * 32 / kStep, twists = steps % 4 == 0 ? 4 : 2;
    #pragma unroll 1
    for (int i = 0; i < steps; ++i) {
        const int spans = steps / twists, step = i % spans * twists + i / spans;
        const int column = step * kStep + threadIdx.x % 4 * kPerWord;
        const auto word = [&](const scalar* row, int right) {
            const int at = column + right * (4 * kPerWord);
            return at < head_dim ? *reinterpret_cast<const unsigned*>(row + at) : 0u;
        };
        const unsigned a[4] = {word(q[0], 0), word(q[1], 0), word(q[0], 1), word(q[1], 1)};
        multiply<scalar>(s, a, word(k, 0), word(k, 1));
    }
}

// Weights of the 16 rows from `row0` on: every eighth tile of keys is a warp's, and `parts` has each warp's sums. q and
// k: of the head.
__device__ __forceinline__ void weigh_slab(const BackwardShape& shape, const ScoredSequence& scored, int head, int row0,
                                           const scalar* q, const scalar* k, Weights (&parts)[kWarps][16]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    const int last = scored.sequence.seqlen_q - 1, seqlen_k = scored.sequence.seqlen_k;
    const int shift = scored.sequence.shift();
    const KeyRange seen = KeyRange::of<kMask>(row0 + shift, min(row0 + 15, last) + shift, seqlen_k, shape.window_left,
                                              shape.window_right);
    const scalar* const rows[2] = {q + min(row0 + g, last) * shape.q.row, q + min(row0 + g + 8, last) * shape.q.row};
    Weights mine[2] = {{-infinity(), 0.0f}, {-infinity(), 0.0f}};
    #pragma unroll 1
    for (int first = (seen.begin / 8 + warp) * 8; first < seen.end; first += 8 * kWarps) {
        Accumulator s = {};
        multiply_slab(rows, k + min(first + g, seqlen_k - 1) * shape.k.row, shape.head_dim, s);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int query = row0 + g + i / 2 * 8, key = first + lane % 4 * 2 + i % 2;
            if (!scored.sees(shape, head, query, key)) continue;
            const float distance = fabsf(static_cast<float>(query + shift + shape.scores.ahead - key));
            const float bias = scored.bias_at(shape, head, query, key);
            make_gradient_score(s[i], shape.scores, scored.slope(head), distance, bias);
            mine[i / 2].add(s[i], shape.scores);
        }
    }
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
        #pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            const float top = __shfl_xor_sync(0xffffffffu, mine[h].top, lanes);
            mine[h].merge({top, __shfl_xor_sync(0xffffffffu, mine[h].total, lanes)});
        }
        if (lane % 4 == 0) parts[warp][g + 8 * h] = mine[h];
    }
}

// Whether the lse passed for a row is that of these weights, since k may be a part of the keys. Unknown from 2^40 on.
__device__ __forceinline__ bool is_lse_of(const Weights& weights, float lse) {
    if (!(fabsf(weights.top) >= kCoarse<WIDE_LSE> && weights.total > 0.0f && weights.total < infinity())) return false;
    const float error = fabsf(weights.top + log2f(weights.total) - lse);
    return error <= 0x1p-19f * fabsf(lse) || fabsf(lse) >= 0x1p40f;  // 16 roundings
}

// Eight lanes per row, 16 bytes per lane and step: 128 bytes of a row at a time. Padding gets lse = +inf.
extern "C" __global__ void __launch_bounds__(kThreads, 4)  // 64 registers: enough for the rare case
attention_backward_statistics(const OUT* out, scalar* dout, const lse_scalar* lse, const float* delta,
                              const float* wide_dout, const scalar* q, const scalar* k, const float* sinks,
                              const int* cu_seqlens_q, const int* cu_seqlens_k, const float* alibi_slopes,
                              const unsigned char* bias, const unsigned char* block_mask, RowStatistics* statistics,
                              float* rests, const __grid_constant__ BackwardShape shape) {
    __shared__ float given[kPad];  // lse in units of log2, as statistics have it
    __shared__ Weights parts[kWarps][16];
    const int batch = blockIdx.z, head = blockIdx.y, lane = threadIdx.x % 8;
    const Sequence sequence = Sequence::of<VARLEN>(shape, batch, cu_seqlens_q, cu_seqlens_k);
    const int first = blockIdx.x * kPad;
    if (first >= sequence.seqlen_q) return;
    lse += batch * shape.lse[0] + head * shape.lse[1] + sequence.q_begin * shape.lse[2];
    if constexpr (DELTA) delta += batch * shape.delta[0] + head * shape.delta[1] + sequence.q_begin * shape.delta[2];
    out += batch * shape.out.batch + sequence.q_begin * shape.out.row + head * shape.out.head;
    dout += batch * shape.dout.batch + sequence.q_begin * shape.dout.row + head * shape.dout.head;
    if constexpr (WIDE_DOUT) {
        const RowStrides& stride = shape.wide_dout;
        wide_dout += batch * stride.batch + sequence.q_begin * stride.row + head * stride.head;
    }
    statistics += sequence.padded<VARLEN>(shape, head);
    bool coarse = false;
    for (int row = first + threadIdx.x / 8; row < first + kPad; row += kThreads / 8) {
        float sum = 0.0f;
        const bool exists = row < sequence.seqlen_q;
        for (int column = lane * kChunk; kReads && exists && column < shape.head_dim_v; column += 8 * kChunk) {
            float a[kChunk], b[kChunk];
            scalar* const own = dout + row * shape.dout.row + column;
            if constexpr (WIDE_DOUT) {
                load_chunk(wide_dout + row * shape.wide_dout.row + column, b);
                round_chunk(b, own);
            } else {
                load_chunk(own, b);
            }
            if constexpr (!DELTA) {
                load_chunk(out + row * shape.out.row + column, a);
                #pragma unroll
                for (int i = 0; i < kChunk; ++i) sum = fmaf(a[i], b[i], sum);
            }
        }
        sum = warp_sum(sum, 8);
        if (lane != 0) continue;
        if (DELTA && exists) sum = delta[row * shape.delta[2]];
        const lse_scalar natural = exists ? lse[row * shape.lse[2]] : -infinity();
        const bool empty = natural == -infinity();  // a row that sees no key: P = 0, and no gradient whatever dout is
        float base2 = static_cast<float>(natural * kLog2e), rest = 0.0f;
        if constexpr (WIDE_LSE) {
            const double exact = natural * 1.4426950408889634;
            base2 = static_cast<float>(exact);
            rest = fabsf(base2) < infinity() ? static_cast<float>(exact - base2) : 0.0f;
        }
        if constexpr (DROPOUT) {
            (WIDE_LSE ? rest : base2) -= shape.scores.keep_scale_log2;
            sum /= shape.scores.keep_scale;
        }
        base2 = empty ? infinity() : base2;
        statistics[row] = RowStatistics::of(base2, empty ? 0.0f : sum, rest);
        given[row - first] = base2;
        coarse |= is_coarse<WIDE_LSE>(base2);
    }
    if (!__syncthreads_or(coarse)) return;

    ScoredSequence scored;
    scored.sequence = sequence, scored.batch = batch;
    scored.set_arrays(shape, alibi_slopes, bias, block_mask);
    q += batch * shape.q.batch + sequence.q_begin * shape.q.row + head * shape.q.head;
    k += batch * shape.k.batch + sequence.k_begin * shape.k.row + head / shape.group * shape.k.head;
    rests += sequence.padded<VARLEN>(shape, head);
    #pragma unroll 1
    for (int slab = 0; slab < kPad; slab += 16) {
        if (!__syncthreads_or(is_coarse<WIDE_LSE>(given[slab + threadIdx.x % 16]))) continue;
        weigh_slab(shape, scored, head, first + slab, q, k, parts);
        __syncthreads();
        const float base2 = given[slab + threadIdx.x % 16], kept = DROPOUT ? shape.scores.keep_scale_log2 : 0.0f;
        if (threadIdx.x >= 16 || !is_coarse<WIDE_LSE>(base2)) continue;
        Weights all = {sinks == nullptr ? -infinity() : sinks[head] * kLog2e, 1.0f};
        for (int warp = 0; warp < kWarps; ++warp) all.merge(parts[warp][threadIdx.x]);
        const bool split = is_lse_of(all, WIDE_LSE ? base2 : base2 + kept);
        const float rest = split ? log2f(all.total) - kept : 0.0f;
        const int row = first + slab + threadIdx.x;
        if (split) statistics[row] = RowStatistics::of(all.top, statistics[row].delta, rest);
        if constexpr (!WIDE_LSE) rests[row] = rest;
    }
}
