// RMSNorm and LayerNorm forward, with an optional residual add in front.
//
//   x, residual, y, s  (rows, cols) DTYPE, last axis contiguous, row strides in elements
//   weight, bias       (cols,)      DTYPE; bias in LayerNorm only, optional
//   mean, rstd         (rows,)      float; mean in LayerNorm only
//   exchange           scratch for teams, zeroed: team.cuh
//   has_sum == 0: s is not an output. s then aliases y, which holds what does not fit on the chip until y is written.
//
//   s = round(x + residual)
//   RMSNorm     rstd = 1 / sqrt(mean(s^2) + eps)             y = (s * rstd) * (weight_offset + weight)
//   LayerNorm   rstd = 1 / sqrt(mean((s - mean)^2) + eps)    y = ((s - mean) * rstd) * weight + bias
//
// llama != 0 also rounds s * rstd and weight_offset + weight to DTYPE before multiplying them.
//
// Moves each element once: 2 rows cols elements, 4 with a residual, or 3 if s is not an output. About 4 flops each, 7
// in LayerNorm. Memory-bound, so a row is read once and stays on the chip between its sums and its output.
//
//   VECS   TEAM   rows                                              blocks
//   2, 4   0      fit in registers                                  small and many
//   0      0      fit in shared memory                              two or three per SM
//   0      1      longer: a team of blocks shares a row, and each   three per SM, from three teams, which hide each
//                 block has some of its columns                     other's waits
//
//   row    | team's block 0                               | block 1                        | ...
//          | shared memory: shared_vecs per thread | rest |
//
// If a row is longer than all SMs can hold, each block reads the rest of its columns again.
//
// Macros: those of norm.cuh; VECS: vectors per thread in registers, or 0 to keep them in shared memory; TEAM.
//
// blockDim = (threads per row, rows per block). Thread t of a row, or of a team's block, owns vectors t,
// t + blockDim.x, ...:
//
//   row       | v0 | v1 | ... | v(T-1) | v(T) | v(T+1) | ...        T = blockDim.x
//   thread      0    1    ...   T-1      0      1                   a warp reads 32 adjacent vectors
//   i           0    0    ...   0        1      1                   held[i], or slot i * T + t
#include "norm.cuh"
#include "team.cuh"

constexpr int kVecs = VECS;
constexpr bool kShared = kVecs == 0, kTeam = TEAM;

// Over half of an SM's 64 or 48 warps, for any block size: 48 registers per thread allow 40 warps, 56 allow 36.
constexpr int kMaxRegisters = kShared || (kLayer && kVecs == 2) ? 56 : 48;

// A block with several rows per step takes many steps and keeps weights and biases in registers. A block with one row
// loads them from L1 or L2 when needed, while other blocks wait for memory.
constexpr bool kKeepWeights = kVecs == 2 && ACCESS == VEC;

constexpr int kBatch = VEC == 8 && ACCESS == 1 ? 1 : 2;  // vector loads in flight per thread

extern __shared__ uint4 dynamic_shared[];

// Several short chains of additions: faster than one long chain, and more accurate.
struct Chains {
    static constexpr int kMany = VEC < 4 ? 1 : kVecs == 4 ? 2 : 4;
    float sum[kMany] = {};

    __device__ __forceinline__ float total() const {
        if constexpr (kMany == 1) return sum[0];
        else if constexpr (kMany == 2) return sum[0] + sum[1];
        else return (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
};

__device__ __forceinline__ void add(Chains& sum, const vec& v, float scale) {
    #pragma unroll
    for (int e = 0; e < VEC; ++e) sum.sum[e % Chains::kMany] = fmaf(element(v, e), scale, sum.sum[e % Chains::kMany]);
}

// Sums of d = (v - shift) * scale and of d^2. shift is 0 in RMSNorm. In LayerNorm it is the rounded mean of what a team
// holds on the chip; the sum of d corrects it to the mean of the row, so that a constant row becomes exactly 0.
constexpr bool kShifted = kLayer;

struct Moments {
    Chains first, second;

    __device__ __forceinline__ void add(const vec& v, float shift, float scale) {
        #pragma unroll
        for (int e = 0; e < VEC; ++e) {
            const float d = kLayer ? fmaf(element(v, e), scale, -shift * scale) : element(v, e) * scale;
            if constexpr (kShifted) first.sum[e % Chains::kMany] += d;
            second.sum[e % Chains::kMany] = fmaf(d, d, second.sum[e % Chains::kMany]);
        }
    }
};

// Squares of floats can leave float's range when the values do not. Such a row is summed again, scaled by a power of
// two. Squares of float16 cannot.
//
//   sum is infinite (or NaN)   scale 2^-80   |x| < 2^128 becomes < 2^48, squares < 2^96
//   sum < 2^-80                scale 2^64    |x| < 2^-40 becomes < 2^24; not needed if eps hides the lost bits
__device__ __forceinline__ float range_scale(float sum, float eps) {
    if constexpr (!Packed<scalar>::kWideRange) return 1.0f;
    if (!(sum < infinity())) return 0x1p-80f;
    return sum < 0x1p-80f && eps < 0x1p-80f ? 0x1p64f : 1.0f;
}

// y for one word (one or two values).
__device__ __forceinline__ unsigned normalised(unsigned s, unsigned weight, unsigned bias, float mean, float rstd,
                                               float weight_offset, int llama) {
    float n[vec::kPerWord], gain[vec::kPerWord], add[vec::kPerWord];
    Packed<scalar>::widen(s, n);
    Packed<scalar>::widen(weight, gain);
    if constexpr (kLayer) Packed<scalar>::widen(bias, add);
    #pragma unroll
    for (int e = 0; e < vec::kPerWord; ++e) {
        if constexpr (kLayer) n[e] -= mean;
        n[e] *= rstd;
        if constexpr (!kLayer) gain[e] += weight_offset;
    }
    if (!kLayer && llama) {
        Packed<scalar>::round(n);
        Packed<scalar>::round(gain);
    }
    #pragma unroll
    for (int e = 0; e < vec::kPerWord; ++e) n[e] = kLayer ? fmaf(n[e], gain[e], add[e]) : n[e] * gain[e];
    return Packed<scalar>::narrow(n);
}

// One thread's view of a row, or of its block's columns of a team's row.
struct Row {
    const scalar *x, *residual;  // y may alias x: each element is read and written by the same thread
    scalar* s;
    int has_residual, has_sum;
    int thread, on_chip;  // in vectors of this thread, like every index i below
    unsigned end, chip_end;  // in columns
    vec held[kVecs ? kVecs : 1];

    __device__ __forceinline__ unsigned column(int i) const { return unsigned(i * blockDim.x + thread) * VEC; }

    __device__ __forceinline__ vec& slot(int i) {  // only its writer reads it: no barrier, no bank conflict
        return reinterpret_cast<vec*>(dynamic_shared)[i * blockDim.x + thread];
    }

    // Loads kBatch vectors of x (zeros beyond `limit`), adds the residual, passes them to f. Batched, because stores to
    // s keep the compiler from hoisting later loads. With Cache::kDefault the data are read again, so s must be stored.
    template <Cache kCache, typename F> __device__ __forceinline__ void fetch(int i0, unsigned limit, F f) {
        vec v[kBatch];
        #pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            v[j] = {};
            if (column(i0 + j) < limit) v[j] = load<vec, ACCESS, kCache>(x + column(i0 + j));
        }
        if (has_residual) {
            vec other[kBatch];
            #pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                other[j] = {};
                if (column(i0 + j) < limit) other[j] = load<vec, ACCESS, Cache::kOnce>(residual + column(i0 + j));
            }
            #pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                v[j] = v[j] + other[j];
                if (column(i0 + j) >= limit || (kCache == Cache::kOnce && !has_sum)) continue;
                store<ACCESS>(s + column(i0 + j), v[j]);
            }
        }
        #pragma unroll
        for (int j = 0; j < kBatch; ++j) f(i0 + j, v[j]);
    }

    // Load what stays on the chip, or what does not; f gets each vector.
    template <typename F> __device__ __forceinline__ void read_kept(F f) {
        #pragma unroll
        for (int i0 = 0; i0 < kVecs; i0 += kBatch) {
            fetch<Cache::kOnce>(i0, end, [&](int i, const vec& v) { held[i] = v, f(v); });
        }
        if constexpr (kShared) {
            for (int i0 = 0; column(i0) < chip_end; i0 += kBatch) {
                fetch<Cache::kOnce>(i0, chip_end, [&](int i, const vec& v) {
                    if (column(i) < chip_end) slot(i) = v, f(v);
                });
            }
        }
    }
    template <typename F> __device__ __forceinline__ void read_others(F f) {
        if constexpr (kTeam) {
            for (int i0 = on_chip; column(i0) < end; i0 += kBatch) {
                fetch<Cache::kDefault>(i0, end, [&](int i, const vec& v) {
                    if (column(i) < end) f(v);
                });
            }
        }
    }

    // Visit the same vectors again. f also gets zero vectors held in registers: branches would cost more registers.
    template <typename F> __device__ __forceinline__ void each_kept(F f) {
        #pragma unroll
        for (int i = 0; i < kVecs; ++i) f(i, fresh(held[i]), column(i) < end);
        if constexpr (kShared) {
            #pragma unroll 1
            for (int i = 0; column(i) < chip_end; ++i) f(i, slot(i), true);
        }
    }
    template <typename F> __device__ __forceinline__ void each_other(F f) {
        if constexpr (kTeam) {
            #pragma unroll 1
            for (int i = on_chip; column(i) < end; ++i) {
                f(i, load<vec, ACCESS, Cache::kDefault>((has_residual ? s : x) + column(i)), true);
            }
        }
    }
};

extern "C" __global__ void __maxnreg__(kMaxRegisters)
ENTRY(forward)(const scalar* x, const scalar* weight, const scalar* bias, const scalar* residual, scalar* y, scalar* s,
               float* mean, float* rstd, unsigned long long* exchange, long long rows, int cols, int shared_vecs,
               int team, int block_cols, long long x_stride, long long residual_stride, long long y_stride,
               long long s_stride, float eps, float inverse_cols, float inverse_kept, float weight_offset, int llama,
               int has_bias, int has_residual, int has_sum) {
    constexpr int kSums = kShifted ? 2 : 1;
    __shared__ RowSums<kSums>::Scratch scratch;
    RowSums<kSums> block_sum(scratch);
    TeamSums<kSums> team_sum(block_sum, exchange, team);
    Row row;
    row.thread = threadIdx.x;
    row.on_chip = shared_vecs;
    row.has_residual = has_residual;
    row.has_sum = has_sum;

    const auto row_sum = [&](float (&sums)[kSums]) {
        if constexpr (kTeam) team_sum(sums, row.thread);
        else block_sum(sums, row.thread);
    };
    const auto row_total = [&](const Chains& chains) {
        float sum[1] = {chains.total()};
        if constexpr (kTeam) team_sum(sum, row.thread);
        else block_sum(sum, row.thread);
        return sum[0];
    };

    // The first of the block's columns, and their number.
    const int begin = kTeam ? blockIdx.x % team * block_cols : 0;
    const int own = kTeam ? min(block_cols, cols - begin) : cols;

    vec weights[kKeepWeights ? kVecs : 1], biases[kKeepWeights && kLayer ? kVecs : 1];
    const auto get_weight = [&](int i) { return load<vec, ACCESS, Cache::kConstant>(weight + begin + row.column(i)); };
    const auto get_bias = [&](int i) -> vec {
        if (!kLayer || !has_bias) return {};
        return load<vec, ACCESS, Cache::kConstant>(bias + begin + row.column(i));
    };
    if constexpr (kKeepWeights) {
        #pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            if (row.column(i) >= cols) continue;
            weights[i] = get_weight(i);
            if constexpr (kLayer) biases[i] = get_bias(i);
        }
    }

    const unsigned tile = kTeam ? blockIdx.x / team : blockIdx.x, tiles = kTeam ? gridDim.x / team : gridDim.x;
    for (long long first = (long long)tile * blockDim.y; first < rows; first += (long long)tiles * blockDim.y) {
        // Threads whose row is past the end own nothing but take part in their warp's shuffles.
        const long long r = first + threadIdx.y;
        row.end = r < rows ? own : 0;
        row.chip_end = kTeam ? min(row.end, row.on_chip * blockDim.x * VEC) : row.end;
        row.x = x + r * x_stride + begin;
        row.residual = residual + r * residual_stride + begin;
        row.s = s + r * s_stride + begin;

        // 1. Read what stays on the chip. RMSNorm sums squares. LayerNorm sums values, then squared distances from
        // their mean.
        Moments moments;
        float shift = 0.0f;
        if constexpr (kLayer) {
            Chains sum;
            row.read_kept([&](const vec& v) { add(sum, v, 1.0f); });
            shift = row_total(sum) * inverse_kept;
            forget(row.thread);
            if (Packed<scalar>::kWideRange && __any_sync(kFullWarp, !(fabsf(shift) < infinity()))) {
                sum = {};
                row.each_kept([&](int, const vec& v, bool) { add(sum, v, 0x1p-40f); });
                shift = row_total(sum) * inverse_kept * 0x1p40f;
            }
            row.each_kept([&](int, const vec& v, bool real) { moments.add(v, shift, real ? 1.0f : 0.0f); });
        } else {
            row.read_kept([&](const vec& v) { moments.add(v, 0.0f, 1.0f); });
        }

        forget(row.thread);
        // 2. Read the rest. A fixed share p of such a row is on the chip. Its mean is within sqrt(1/p - 1) standard
        // deviations of the row's mean, so sums around it cancel by a factor of at most 1/p.
        row.read_others([&](const vec& v) { moments.add(v, shift, 1.0f); });
        float sums[kSums];  // of squares; of distances from the shift
        const auto add_up = [&] {
            sums[0] = moments.second.total();
            if constexpr (kShifted) sums[kShifted] = moments.first.total();
            row_sum(sums);
        };
        add_up();
        forget(row.thread);  // recompute columns: kept ones would take a register per vector

        // 3. The statistics, kept in range.
        const float scale = range_scale(sums[0], eps);
        if (__any_sync(kFullWarp, scale != 1.0f)) {
            moments = {};
            const auto add_scaled = [&](int, const vec& v, bool real) { moments.add(v, shift, real ? scale : 0.0f); };
            row.each_kept(add_scaled);
            row.each_other(add_scaled);
            add_up();
        }
        const float offset = kShifted ? sums[kShifted] * inverse_cols : 0.0f;  // from the shift to the mean
        float variance = fmaf(-offset, offset, sums[0] * inverse_cols);
        if (kShifted && variance < 0.0f) variance = 0.0f;  // like fmaxf, but keeps NaN
        const float row_rstd = scale * rsqrt_accurate(fmaf(eps * scale, scale, variance));
        const float row_mean = kShifted ? shift + offset / scale : shift;
        if (row.thread == 0 && begin == 0 && row.end > 0) {
            rstd[r] = row_rstd;
            if constexpr (kLayer) mean[r] = row_mean;
        }
        forget(row.thread);

        // 4. The output.
        const auto write = [&](int i, vec v, bool real) {
            if (!real) return;
            if constexpr (ACCESS < VEC) forget(row.thread);  // else the compiler loads ahead and runs out of registers
            vec w, b = {};
            if constexpr (kKeepWeights) w = fresh(weights[i]);
            else w = get_weight(i);
            if constexpr (kLayer && kKeepWeights) b = fresh(biases[i]);
            else if constexpr (kLayer) b = get_bias(i);
            #pragma unroll
            for (int k = 0; k < vec::kWords; ++k) {
                v.word[k] = normalised(v.word[k], w.word[k], b.word[k], row_mean, row_rstd, weight_offset, llama);
            }
            store<ACCESS>(y + r * y_stride + begin + row.column(i), v);
        };
        row.each_kept(write);
        row.each_other(write);
    }
}
