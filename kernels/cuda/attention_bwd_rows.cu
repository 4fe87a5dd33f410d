// What attention backward computes row by row, around attention_bwd_sm80.cu. One entry each:
//
//   attention_backward_statistics   lse (units of log2) and delta = sum over head_dim_v of dout * out, if not given;
//                                   a dout in float is rounded first: delta is that of the dout that dP is computed of
//   attention_backward_rows         dq, dk or dv from accumulators of mma.sync (d._sum), summed over parts
//   attention_backward_sinks        dsinks_h = - sum over rows of 2^(sink_h log2 e - lse) delta
//
// Macros: DTYPE; VARLEN 0 or 1; WIDE_LSE 0 or 1: lse is of doubles
//   statistics   OUT: out's type, DTYPE or f32; DELTA 0 or 1: delta is given; DROPOUT 0 or 1
//                WIDE_DOUT 0 or 1, with 16-bit DTYPE: dout is given as wide_dout in float, and written
//   rows         ROWS kQ, kK or kV; COLUMNS their HEAD_DIM and GRADS as in attention_bwd_sm80.cu
//   grid   statistics: (ceil(seqlen_q / 64), nheads, batch)   rows: the same, of q or of k   sinks: (nheads)   block 256
// All sums are in a fixed order.
#include "attention_bwd_shape.cuh"
#include "math.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

typedef DTYPE scalar;
typedef Statistics<WIDE_LSE> RowStatistics;
typedef ChooseType<WIDE_LSE, double, float>::type lse_scalar;

constexpr int kThreads = 256, kChunk = 16 / sizeof(scalar);
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

// Eight lanes per row, 16 bytes per lane and step: 128 bytes of a row at a time. Padding gets lse = +inf.
extern "C" __global__ void __launch_bounds__(kThreads)
attention_backward_statistics(const OUT* out, scalar* dout, const lse_scalar* lse, const float* delta,
                              const float* wide_dout, const int* cu_seqlens_q, const int* cu_seqlens_k,
                              RowStatistics* statistics, const __grid_constant__ BackwardShape shape) {
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
        statistics[row] = RowStatistics::of(empty ? infinity() : base2, empty ? 0.0f : sum, rest);
    }
}

// A thread writes eight columns of a row. Lanes take two rows of an accumulator and 16 of them side by side: whole
// sectors are read and whole lines written.
enum class Of { kQ, kK, kV };
constexpr Of kOf = Of::ROWS;
constexpr Grads kGrads = Grads::GRADS;
typedef ChooseType<kGrads == Grads::kPlain, scalar, float>::type grad;

extern "C" __global__ void __launch_bounds__(kThreads)
attention_backward_rows(const float* sums, const int* cu_seqlens_q, const int* cu_seqlens_k, grad* to,
                        const __grid_constant__ BackwardShape shape) {
    constexpr int kTiles = COLUMNS / 8;
    constexpr bool kQueries = kOf == Of::kQ;
    const int batch = blockIdx.z, head = blockIdx.y;
    const Sequence sequence = Sequence::of<VARLEN>(shape, batch, cu_seqlens_q, cu_seqlens_k);
    const RowStrides& stride = kQueries ? shape.dq : kOf == Of::kK ? shape.dk : shape.dv;
    const int length = kQueries ? sequence.seqlen_q : sequence.seqlen_k;
    const int columns = kOf == Of::kV ? shape.head_dim_v : shape.head_dim, parts = kQueries ? 1 : shape.parts;
    const float scale = kOf == Of::kV ? 1.0f : shape.scale;
    const int64 part = shape.padded_part * COLUMNS;
    sums += (kQueries ? sequence.padded<VARLEN>(shape, head) : sequence.padded_k<VARLEN>(shape, head)) * COLUMNS;
    to += batch * stride.batch + (kQueries ? sequence.q_begin : sequence.k_begin) * stride.row + head * stride.head;
    for (int i = threadIdx.x; i < kPad * kTiles; i += kThreads) {
        const int tile = i / 2 % kTiles, of_pad = i / (2 * kTiles) * 2 + i % 2;  // 0 .. 63
        const int row = blockIdx.x * kPad + of_pad, g = of_pad % 8, h = of_pad / 8 % 2;
        if (row >= length || tile * 8 >= columns) continue;
        const float* from = sums + (static_cast<int64>(row / 16) * kTiles + tile) * 128 + h * 64 + g * 4;
        float low[4] = {}, high[4] = {};
        for (int p = 0; p < parts; ++p, from += part) {
            const float4 even = *reinterpret_cast<const float4*>(from);
            const float4 odd = *reinterpret_cast<const float4*>(from + 32);
            low[0] += even.x, low[1] += odd.x, low[2] += even.y, low[3] += odd.y;
            high[0] += even.z, high[1] += odd.z, high[2] += even.w, high[3] += odd.w;
        }
        #pragma unroll
        for (int c = 0; c < 4; ++c) low[c] *= scale, high[c] *= scale;
        grad* const at = to + row * stride.row + tile * 8;
        if constexpr (kGrads == Grads::kAdded) {
            float before[2][4];
            load_four(at, before[0]), load_four(at + 4, before[1]);
            #pragma unroll
            for (int c = 0; c < 4; ++c) low[c] += before[0][c], high[c] += before[1][c];
        }
        store_four(at, low);
        store_four(at + 4, high);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
attention_backward_sinks(const RowStatistics* statistics, const float* sinks, const int* cu_seqlens_q,
                         const int* cu_seqlens_k, float* dsinks, const __grid_constant__ BackwardShape shape) {
    __shared__ float sums[kThreads / 32];
    const int head = blockIdx.x;
    const float sink = sinks[head] * kLog2e;
    float sum = 0.0f;
    for (int b = 0; b < shape.batch; ++b) {
        const Sequence sequence = Sequence::of<VARLEN>(shape, b, cu_seqlens_q, cu_seqlens_k);
        const RowStatistics* rows = statistics + sequence.padded<VARLEN>(shape, head);
        for (int row = threadIdx.x; row < sequence.seqlen_q; row += kThreads) {
            float exponent = sink - rows[row].lse;
            if constexpr (WIDE_LSE) exponent -= rows[row].rest();
            sum = fmaf(exp2f(exponent), rows[row].delta, sum);
        }
    }
    sum = warp_sum(sum, 32);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < kThreads / 32; ++i) sum += sums[i];
    dsinks[head] = -sum;
}
