// Row-by-row steps of attention backward, after backward_sm80.cu. One entry each:
//
//   attention_backward_rows         dq, dk or dv from accumulators of mma.sync (d._sum), summed over parts
//   attention_backward_sinks        dsinks_h = - sum over rows of 2^(sink_h log2 e - lse) delta
//
// Macros: DTYPE; VARLEN 0 or 1; WIDE_LSE 0 or 1: lse is of doubles
//   rows         ROWS kQ, kK or kV; COLUMNS their HEAD_DIM and GRADS as in backward_sm80.cu
//   grid   rows: (ceil(seqlen / 64), heads, batch) of q or of k   sinks: (nheads)   block 256
// All sums are in a fixed order.
#include "backward_shape.cuh"
#include "math.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

typedef DTYPE scalar;
typedef Statistics<WIDE_LSE> RowStatistics;

constexpr int kThreads = 256;

// A thread writes eight columns of a row. Lanes take two rows of an accumulator and 16 adjacent ones: whole
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
attention_backward_sinks(const RowStatistics* statistics, const float* rests, const float* sinks,
                         const int* cu_seqlens_q, const int* cu_seqlens_k, float* dsinks,
                         const __grid_constant__ BackwardShape shape) {
    __shared__ float sums[kThreads / 32];
    const int head = blockIdx.x;
    const float sink = sinks[head] * kLog2e;
    float sum = 0.0f;
    for (int b = 0; b < shape.batch; ++b) {
        const Sequence sequence = Sequence::of<VARLEN>(shape, b, cu_seqlens_q, cu_seqlens_k);
        const int64 first = sequence.padded<VARLEN>(shape, head);
        const RowStatistics* rows = statistics + first;
        for (int row = threadIdx.x; row < sequence.seqlen_q; row += kThreads) {
            float exponent = sink - rows[row].lse;
            if constexpr (WIDE_LSE) exponent -= rows[row].rest();
            else if (is_coarse<WIDE_LSE>(rows[row].lse)) exponent -= rests[first + row];
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
