// The next token of each row of logits, drawn without a sort. reference/sampling/sample.py defines weights, order and number.
//
//   logits (rows, cols) DTYPE      bias float, counts int (rows, cols) or null, row stride 0: one row for all
//   tokens (rows,) int             logprob (rows,) float or null        options: an array (rows,), or null and a number
//
// A block has a row, and reads it from L2 after the first time: once for its maximum, three times for each of top_k and
// top_p, up to twice to draw, once for the log-probability. Weights are integers, so that sums have no order.
//
// top_k and top_p keep the first tokens by descending logit. The cutoff is found digit by digit of the logits'
// order-preserving bits, from the highest: bins hold the number of tokens, or weight, of each digit. The bin in which
// the sum from above reaches its goal is the cutoff's, and the next digit is read only where earlier digits are the
// cutoff's. Digits of 11 bits spread logits over a few bins per factor of two: with fewer bits all would meet in one.
//
//   bins of a digit     2047 | 2046 | ... | d | ...        sum over bins above d < goal <= sum with d
//
// Macros:
//   DTYPE    f16, bf16 or f32
//   ACCESS   elements per access: a vector of 16 bytes, or 1 where not all rows are aligned to vectors
//   PLAIN    1: without bias and counts
#include "columns.cuh"
#include "philox.cuh"

typedef DTYPE scalar;
typedef unsigned long long Weight;

constexpr bool kPlain = PLAIN;
constexpr int kVec = 16 / sizeof(scalar), kThreads = 512, kWarps = kThreads / 32;
constexpr int kDigit = 11, kBins = 1 << kDigit, kKeyBits = 32;
constexpr int kStep = 32 * kVec;            // columns that a warp takes at once
constexpr unsigned kDomain = 0xfffffffeu;   // the last word of counters: it differs between ops
typedef float Values[kVec];
typedef Weight Weights[kVec];

struct Shared {
    unsigned low[kBins], high[kBins];  // halves of the bins' sums
    Weight warp_sum[kWarps];
    Weight before, weight;             // of a search's result: the sum before it, and its own weight
    long long found;
    unsigned top;
};

// Integers in the order of the numbers, NaN above infinity.
__device__ __forceinline__ unsigned key_of(float z) {
    const unsigned bits = __float_as_uint(z);
    return isnan(z) ? 0xffffffffu : bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float of_key(unsigned key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ Weight warp_total(Weight value) {
    #pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
    return value;
}

__device__ __forceinline__ Weight sum_up_to_lane(Weight value) {
    #pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const Weight other = __shfl_up_sync(kFullWarp, value, offset);
        value += threadIdx.x % 32 >= offset ? other : 0;
    }
    return value;
}

// The first of n columns up to which weights reach a sum. Each warp has a run of them, whole steps.
//
// weigh(column, count, weights) gives kVec weights, those from `count` on 0.
struct Search {
    Shared& shared;
    const long long n;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    __device__ __forceinline__ long long start() const {
        return min(warp * ((n + kWarps * kStep - 1) / (kWarps * kStep) * kStep), n);
    }

    __device__ __forceinline__ long long end() const {
        return min((warp + 1) * ((n + kWarps * kStep - 1) / (kWarps * kStep) * kStep), n);
    }

    // The sum of all weights, for all threads; find needs the sums that it stores.
    template <typename F> __device__ __forceinline__ Weight total(F weigh) const {
        Weight sum = 0;
        const long long last = end();
        for (long long column = start() + lane * kVec; column < last; column += kStep) {
            Weights w;
            weigh(column, int(min(last - column, (long long)kVec)), w);
            #pragma unroll
            for (int e = 0; e < kVec; ++e) sum += w[e];
        }
        sum = warp_total(sum);
        __syncthreads();  // all have read the sums of the search before
        if (lane == 0) shared.warp_sum[warp] = sum;
        __syncthreads();
        sum = 0;
        for (int w = 0; w < kWarps; ++w) sum += shared.warp_sum[w];
        return sum;
    }

    // The first column up to which the sum exceeds `target`, less than the total.
    template <typename F> __device__ __forceinline__ long long find(Weight target, F weigh) const {
        Weight before = 0;
        for (int w = 0; w < warp; ++w) before += shared.warp_sum[w];
        if (before <= target && target < before + shared.warp_sum[warp]) {
            const long long last = end();
            for (long long column = start() + lane * kVec;; column += kStep) {
                Weights w = {};
                if (column < last) weigh(column, int(min(last - column, (long long)kVec)), w);
                Weight mine = 0;
                #pragma unroll
                for (int e = 0; e < kVec; ++e) mine += w[e];
                const Weight up_to = before + sum_up_to_lane(mine);
                const unsigned reached = __ballot_sync(kFullWarp, up_to > target);
                if (reached) {
                    if (lane == __ffs(reached) - 1) put(column, up_to - mine, target, w);
                    break;
                }
                before = __shfl_sync(kFullWarp, up_to, 31);
            }
        }
        __syncthreads();
        return shared.found;
    }

private:
    __device__ __forceinline__ void put(long long column, Weight before, Weight target, const Weights& w) const {
        bool passed = false;
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            if (!passed && before + w[e] > target) {
                passed = true;
                shared.found = column + e, shared.before = before, shared.weight = w[e];
            }
            before += w[e];
        }
    }
};

// Tokens that top_k and top_p keep: those whose key is above, or equal in columns up to `last`.
struct Cut {
    unsigned key;
    long long last;

    __device__ __forceinline__ bool keeps(unsigned k, long long column) const {
        return k > key || (k == key && column <= last);
    }
};

struct Row {
    const scalar* logits;
    const float* bias;
    const int* counts;
    long long cols;
    float repetition, frequency, presence;

    // kVec logits with penalties and bias, each operation rounded; -inf from `count` on.
    __device__ __forceinline__ void get(long long column, int count, Values& z) const {
        fetch<ACCESS, Cache::kDefault>(logits + column, count, z);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            if (!kPlain && e < count) {
                const int seen = counts == nullptr ? 0 : counts[column + e];
                if (seen != 0) {
                    z[e] = z[e] < 0.0f ? __fmul_rn(z[e], repetition) : __fdiv_rn(z[e], repetition);
                    if (seen > 0)  // otherwise only in the prompt
                        z[e] = __fsub_rn(__fsub_rn(z[e], __fmul_rn(frequency, __int2float_rn(seen))), presence);
                }
                if (bias != nullptr) z[e] = __fadd_rn(z[e], bias[column + e]);
            }
            z[e] = e < count ? __fadd_rn(z[e], 0.0f) : -infinity();  // -0 becomes 0
        }
    }

    // f(column, count, z) for all vectors of the row.
    template <typename F> __device__ __forceinline__ void each(F f) const {
        for (long long column = threadIdx.x * kVec; column < cols; column += kThreads * kVec) {
            const int count = int(min(cols - column, (long long)kVec));
            Values z;
            get(column, count, z);
            f(column, count, z);
        }
    }

    // The greatest key, for all threads.
    __device__ __forceinline__ unsigned top(Shared& shared) const {
        unsigned key = 0;
        each([&](long long, int, const Values& z) {
            #pragma unroll
            for (int e = 0; e < kVec; ++e) key = max(key, key_of(z[e]));
        });
        for (int offset = 16; offset > 0; offset /= 2) key = max(key, __shfl_xor_sync(kFullWarp, key, offset));
        if (threadIdx.x == 0) shared.top = 0;
        __syncthreads();
        if (threadIdx.x % 32 == 0) atomicMax(&shared.top, key);
        __syncthreads();
        return shared.top;
    }

    // The column of the token with this key that follows `before` other tokens with it.
    __device__ __forceinline__ long long tied(Shared& shared, unsigned key, Weight before) const {
        const auto is_tied = [&](long long column, int count, Weights& w) {
            Values z;
            get(column, count, z);
            #pragma unroll
            for (int e = 0; e < kVec; ++e) w[e] = e < count && key_of(z[e]) == key;
        };
        const Search search{shared, cols};
        search.total(is_tied);
        return search.find(before, is_tied);
    }
};

// The integer weight of a logit: 2^bits at the maximum.
struct Scale {
    float top, factor;
    int bits;

    __device__ __forceinline__ Weight operator()(float z) const {
        constexpr float kPower[] = {0.00015461444698564868f, 0.001340042817761575f, 0.009618056678524655f,
                                    0.05550327226670302f, 0.24022650922288757f, 0.6931472067028326f, 1.0f};
        const float x = fmaxf(__fmul_rn(__fsub_rn(z, top), factor), -64.0f), whole = rintf(x);
        const float part = __fsub_rn(x, whole);
        float p = kPower[0];
        #pragma unroll
        for (int i = 1; i < 7; ++i) p = __fadd_rn(__fmul_rn(p, part), kPower[i]);
        return Weight(__fmul_rn(p, __int_as_float((int(whole) + bits + 127) << 23)));
    }
};

// A bin's sum in two halves: shared memory adds 32 bits at once, and 64 only in a loop.
__device__ __forceinline__ void add(Shared& shared, int bin, Weight w) {
    const unsigned low = unsigned(w), sum = atomicAdd(&shared.low[bin], low) + low;
    const unsigned high = unsigned(w >> 32) + (sum < low);
    if (high) atomicAdd(&shared.high[bin], high);
}

// The cut that keeps the first tokens of what `cut` keeps, as many as reach need(their total weight).
template <typename Weigh, typename Need>
__device__ __forceinline__ Cut narrowed(Shared& shared, const Row& row, const Cut& cut, Weigh weigh, Need need_of) {
    const auto from_above = [&](long long column, int count, Weights& w) {
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            const int bin = kBins - 1 - int(column) - e;
            w[e] = e < count ? Weight(shared.high[bin]) << 32 | shared.low[bin] : 0;
        }
    };
    const Search search{shared, kBins};
    Weight need = 0, before = 0;
    unsigned prefix = 0;
    #pragma unroll 1
    for (int shift = kKeyBits - kDigit, above = kKeyBits;;) {
        __syncthreads();  // all have read the bins of the digit before
        for (int bin = threadIdx.x; bin < kBins; bin += kThreads) shared.low[bin] = shared.high[bin] = 0;
        __syncthreads();
        row.each([&](long long column, int count, const Values& z) {
            #pragma unroll
            for (int e = 0; e < kVec; ++e) {
                const unsigned key = key_of(z[e]);
                const bool is_near = above == kKeyBits || key >> above == prefix;
                if (e < count && is_near && cut.keeps(key, column + e)) {
                    add(shared, key >> shift & (1u << (above - shift)) - 1, weigh(z[e]));
                }
            }
        });
        __syncthreads();
        const Weight total = search.total(from_above);
        if (above == kKeyBits) need = need_of(total);
        const int bin = kBins - 1 - int(search.find(need - 1 - before, from_above));
        before += shared.before;
        prefix = prefix << (above - shift) | bin;
        if (shift == 0) break;
        above = shift, shift = max(shift - kDigit, 0);
    }
    const Weight each = weigh(of_key(prefix)), all = shared.weight;
    const Weight ties = (need - before + each - 1) / each;
    if (ties * each < all) return {prefix, row.tied(shared, prefix, ties - 1)};
    return {prefix, prefix == cut.key ? cut.last : row.cols};
}

// The part of `total` that 64 random bits point to.
__device__ __forceinline__ Weight drawn(Weight total, Seed seed, Seed step, unsigned row) {
    unsigned word[4] = {unsigned(step), unsigned(step >> 32), row, kDomain};
    philox4x32(word, seed);
    return __umul64hi(Weight(word[1]) << 32 | word[0], total);
}

// Of softmax(logits), for thread 0.
__device__ __forceinline__ float logprob_of(const scalar* logits, long long cols, long long token) {
    __shared__ RowSums<1>::Scratch scratch;
    float row_max = kNothing, sum = 0.0f;
    Columns<kVec, 4, false>{0, cols}.each([&](int, long long column, int count) {
        Values x;
        fetch<ACCESS, Cache::kDefault>(logits + column, count, x);
        float grown = row_max;
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            x[e] = e < count ? x[e] : -infinity();
            grown = fmaxf(grown, x[e]);
        }
        sum *= exponential(row_max - grown), row_max = grown;
        #pragma unroll
        for (int e = 0; e < kVec; ++e) sum += exponential(x[e] - row_max);
    });
    const float thread_max = row_max;
    row_max = over_row<true, kThreads>(thread_max);
    sum = RowSums<1>{scratch}(sum * exponential(thread_max - row_max));
    return token < 0 ? __int_as_float(0x7fffffff) : (widened(logits[token]) - row_max) - logf(sum);
}

// An option of this block's row.
template <typename T> __device__ __forceinline__ T of_row(const T* each, T all) {
    return each == nullptr ? all : each[blockIdx.x];
}

struct Options {
    float temperature, top_p, min_p;
    int top_k;

    __device__ __forceinline__ bool are_allowed(const Row& row) const {
        return temperature >= 0.0f && temperature < infinity() && top_k >= 0 && top_p >= 0.0f && top_p <= 1.0f &&
               min_p >= 0.0f && min_p <= 1.0f && row.repetition > 0.0f && row.repetition < infinity() &&
               fabsf(row.frequency) < infinity() && fabsf(row.presence) < infinity();
    }
};

__device__ __forceinline__ long long token_of(Shared& shared, const Row& row, const Options& o, int bits, Seed seed,
                                              Seed step, unsigned number) {
    const unsigned lowest = key_of(-infinity()), top = row.top(shared);
    if (!o.are_allowed(row) || top <= lowest || top >= key_of(infinity())) return -1;
    if (o.temperature == 0.0f) return row.tied(shared, top, 0);
    const Scale weight_of{of_key(top), fminf(__fdiv_rn(1.4426950408889634f, o.temperature), 3.4028235e38f), bits};
    Cut cut{lowest, row.cols};
    if (o.top_k > 0 && o.top_k < row.cols) {
        cut = narrowed(shared, row, cut, [](float) -> Weight { return 1; }, [&](Weight) -> Weight { return o.top_k; });
    }
    if (o.top_p < 1.0f) {
        cut = narrowed(shared, row, cut, weight_of, [&](Weight total) {
            return max(Weight(ceil(__dmul_rn(double(o.top_p), __ull2double_rn(total)))), Weight(1));
        });
    }
    const Weight least = Weight(ceil(__dmul_rn(double(o.min_p), __ull2double_rn(Weight(1) << bits))));
    const auto kept = [&](long long column, int count, Weights& w) {
        Values z;
        row.get(column, count, z);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            w[e] = weight_of(z[e]);
            if (w[e] < least || !cut.keeps(key_of(z[e]), column + e)) w[e] = 0;
        }
    };
    const Search search{shared, row.cols};
    const Weight total = search.total(kept);
    return search.find(drawn(total, seed, step, number), kept);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sample(const scalar* logits, const float* bias, const int* counts, int* tokens, float* logprob,
       const float* temperature, float temperature_value, const int* top_k, int top_k_value,
       const float* top_p, float top_p_value, const float* min_p, float min_p_value,
       const float* repetition, float repetition_value, const float* frequency, float frequency_value,
       const float* presence, float presence_value, const Seed* seed, Seed seed_value, const Seed* step, Seed step_value,
       int bits, long long cols, long long logits_stride, long long bias_stride, long long counts_stride) {
    __shared__ Shared shared;
    const long long r = blockIdx.x;
    const Row row{logits + r * logits_stride,
                  bias == nullptr ? bias : bias + r * bias_stride,
                  counts == nullptr ? counts : counts + r * counts_stride,
                  cols,
                  of_row(repetition, repetition_value),
                  of_row(frequency, frequency_value),
                  of_row(presence, presence_value)};
    const Options o{of_row(temperature, temperature_value), of_row(top_p, top_p_value), of_row(min_p, min_p_value),
                    of_row(top_k, top_k_value)};
    // rows with separate seeds draw the same numbers wherever they are
    const unsigned number = seed == nullptr ? blockIdx.x : 0;
    const long long token =
        token_of(shared, row, o, bits, of_row(seed, seed_value), of_row(step, step_value), number);
    if (threadIdx.x == 0) tokens[r] = int(token);
    if (logprob == nullptr) return;
    const float found = logprob_of(row.logits, cols, token);
    if (threadIdx.x == 0) logprob[r] = found;
}
