// Merges the partial results of split-KV attention (forward_sm80.cu with SPLIT).
//
//   partial   (num_splits, batch, nheads, seqlen_q, head_dim_v)  float, contiguous within a split; shape.out_split
//   row_max   (num_splits, batch, nheads, seqlen_q)  float, in units of log2; shape.lse_split
//   row_sum   likewise, right after row_max: the sum of 2^(score - row_max)
//   out       (batch, seqlen_q, nheads, head_dim_v)  DTYPE, strides in shape.out
//   lse       (batch, nheads, seqlen_q)  float, or double with WIDE_LSE
//
//   m = max_s row_max_s        l = sum_s 2^(row_max_s - m) row_sum_s + 2^(sink log2 e - m)
//   lse = m ln 2 + ln l        out = sum_s 2^(row_max_s - m) row_sum_s / l partial_s
//
// Why two statistics and not one lse per split: next to a bias of -1e9, float32 loses ln(row_sum), and all splits
// would weigh the same however many keys they hold.
//
// One warp per row. It reads num_splits * head_dim_v floats, mostly from L2, and writes head_dim_v numbers.
//
//   phase 1   lane = split      | 0 .. 31 | 32 .. 63 | ...                    maximum, sum, then one weight per lane
//   phase 2   lane = 4 columns  | 4 lane .. 4 lane + 3 | + 128 | ...          loops over splits; weights by shuffle
//
// Macros: DTYPE, of out; SINKS and WIDE_LSE, 0 or 1.
//   grid   (ceil(batch * nheads * seqlen_q / 4))     block 128
#include "shape.cuh"
#include "math.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

typedef DTYPE scalar;
#if WIDE_LSE
typedef double lse_scalar;
#else
typedef float lse_scalar;
#endif

__device__ __forceinline__ float warp_max(float x) {
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, offset));
    return x;
}

extern "C" __global__ void __launch_bounds__(128)
attention_combine(const float* partial, const float* row_max, const float* sinks, scalar* out, lse_scalar* lse, int64 rows,
                  const __grid_constant__ AttentionShape shape) {
    const int lane = threadIdx.x % 32;
    const int64 row = blockIdx.x * 4ll + threadIdx.x / 32;
    if (row >= rows) return;
    const int query = row % shape.seqlen_q;
    const int head = row / shape.seqlen_q % shape.nheads;
    const int64 batch = row / shape.seqlen_q / shape.nheads;

    row_max += row;
    const float* const row_sum = row_max + shape.num_splits * shape.lse_split;
    const float sink = SINKS ? sinks[head] * kLog2e : -infinity();
    float highest = sink;
    for (int s = lane; s < shape.num_splits; s += 32) {
        if (row_sum[s * shape.lse_split] != 0.0f) highest = fmaxf(highest, row_max[s * shape.lse_split]);
    }
    highest = warp_max(highest);
    const float shift = highest == -infinity() ? 0.0f : highest;  // the row sees no key: avoid -inf - -inf
    const auto share = [&](int s) {  // a split without visible keys may hold any row_max: avoid 0 * inf
        const float part_sum = row_sum[s * shape.lse_split];
        return part_sum == 0.0f ? 0.0f : exp2f(row_max[s * shape.lse_split] - shift) * part_sum;
    };
    float sum = 0.0f;
    for (int s = lane; s < shape.num_splits; s += 32) sum += share(s);
    sum = warp_sum(sum, 32) + (SINKS ? exp2f(sink - shift) : 0.0f);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (lse != nullptr && lane == 0) {
        lse += batch * shape.lse_batch + head * shape.lse_head + query;
        *lse = sum == 0.0f ? -infinity() : lse_of<lse_scalar>(shift, sum);
    }

    partial += row * shape.head_dim_v;
    out += batch * shape.out.batch + query * shape.out.row + head * shape.out.head;
    for (int column0 = 0; column0 < shape.head_dim_v; column0 += 128) {
        const int column = column0 + 4 * lane;
        const bool mine = column < shape.head_dim_v;
        float acc[4] = {};
        for (int first = 0; first < shape.num_splits; first += 32) {
            const int count = min(32, shape.num_splits - first);
            const bool none = lane >= count || row_sum[(first + lane) * shape.lse_split] == 0.0f;
            const float my_weight = none ? -1.0f : share(first + lane) * inverse;
            for (int s = 0; s < count; ++s) {
                const float weight = __shfl_sync(kFullWarp, my_weight, s);
                if (weight < 0.0f || !mine) continue;  // without visible keys
                const float4 x = *reinterpret_cast<const float4*>(partial + (first + s) * shape.out_split + column);
                add_weighted(acc, x, weight);
            }
        }
        if (!mine) continue;
        store_four(out + column, acc);
    }
}
