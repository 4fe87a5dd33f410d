// Ternary quantisation: weights to 2-bit codes (format w2) and float scales.
//
//   w        (N, K) DTYPE, last axis contiguous, row stride `stride` in elements
//   words    (N, K padded to 64, / 16): code e of a word in byte e % 4 at bits 2 (e / 4), as in ternary.cuh
//
// A run is a contiguous piece of a row with one scale: a group along K (a multiple of 64 weights) or a whole row.
//
//   ternary_quantize_runs      a scale per run: the same threads do statistics, limit, codes and scale; the second
//                              pass finds the run in L1 or L2
//   one scale for the tensor:
//   ternary_quantize_sums      partial[0][run] = sum |w|,              partial[1][run] = max |w|
//   ternary_quantize_limit     the tensor's limit from these: one block
//   ternary_quantize_squares   partial[0][run] = sum (|w| - mean)^2;   for mean + std, followed by the limit again
//   ternary_quantize_encode    the codes;  partial[0][run] = sum |w| and partial[1][run] = count of |w| > limit
//   ternary_quantize_scale     their quotient: one block
//   a percentile as the limit, interpolated between the weights of two adjacent ranks:
//   ternary_quantize_ranks     a scale per run: the same threads find the two weights, codes and scale
//   ternary_quantize_count     one scale: histogram of the next bits of those |w| that begin with the known bits
//   ternary_quantize_pick      the bin that holds the rank: one block. The first call clears, the last sets the limit
//
// A rank is found by radix selection on the bits of |w|, in the order of the numbers: 11 bits at a time, fewer if a
// block has several runs. A float32 tensor is read three times for it, a 16-bit one twice, and once more to encode.
//
// Sums are in double and their order depends only on the shape. The float scale equals the reference's except where
// the last bits of the sum decide its rounding. Codes follow from that scale by exact comparisons.
//
// blockDim = (threads per run: part of a warp or 128, runs per block). A thread owns vectors of 16 bytes; kLanes
// adjacent ones form a word:
//
//   weight      | 0 .. 7 | 8 .. 15 | 16 .. 23 | 24 .. 31 |      float16, bfloat16; float32 has 4 threads per word
//   thread          0         1          2          3
//   word              0  (thread 0)         1  (thread 2)
//
// Macros: DTYPE, one of f16, bf16 and f32.
#include "math.cuh"
#include "reduce.cuh"
#include "vec.cuh"

typedef DTYPE scalar;

constexpr int kVec = 16 / sizeof(scalar), kLanes = 16 / kVec;
typedef Vec<scalar, kVec> vec;

constexpr int kThreads = 128;          // of the kernels that read weights
constexpr int kCombineThreads = 1024;  // of the one-block kernels
constexpr int kVecs = 4;               // loads per thread in flight

enum Method { kAbsmean, kAbsmax, kTwn, kManual, kMeanStd };

struct Plus {
    static __device__ __forceinline__ double of(double a, double b) { return a + b; }
};
struct Larger {
    static __device__ __forceinline__ double of(double a, double b) { return fmax(a, b); }
};
struct Smaller {
    static __device__ __forceinline__ double of(double a, double b) { return fmin(a, b); }
};

// Reduces over the threads of a run; all get the same bits.
template <typename Op> __device__ __forceinline__ double reduced(double value) {
    __shared__ double of_warp[32];
    const int width = blockDim.x;
    for (int offset = min(width, 32) / 2; offset > 0; offset /= 2) {
        value = Op::of(value, __shfl_xor_sync(kFullWarp, value, offset));
    }
    if (width <= 32) return value;
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warp[0];
    for (int w = 1; w < width / 32; ++w) value = Op::of(value, of_warp[w]);
    __syncthreads();  // before the next sum overwrites it
    return value;
}

struct Run {
    const scalar* first;
    unsigned* words;
    unsigned index;
    int length, padded;  // padded: to the end of its last word
    bool active, whole;  // whole: its vectors are aligned

    __device__ __forceinline__ Run(const scalar* w, unsigned* all_words, long long stride, int k, int run_length,
                                   unsigned runs, int aligned, unsigned block = blockIdx.x)
        : index(block * blockDim.y + threadIdx.y), whole(aligned) {
        active = index < runs;
        const unsigned per_row = k / run_length;
        const long long row = index / per_row;
        const long long column = (long long)(index % per_row) * run_length;
        first = w + row * stride + column;
        words = all_words + row * (((long long)k + 63) / 64 * 4) + column / 16;
        length = active ? run_length : 0;  // threads past the last run only take part in shuffles
        padded = (run_length + 63) / 64 * 64;
    }

    // The vector at column `at`. Elements past the run have every bit set to `beyond`.
    template <Cache kCache> __device__ __forceinline__ vec get(int at, unsigned beyond) const {
        if (whole && at + kVec <= length) return load<vec, kVec, kCache>(first + at);
        vec v;
        #pragma unroll
        for (int w = 0; w < vec::kWords; ++w) {
            v.word[w] = beyond;
            #pragma unroll
            for (int e = 0; e < vec::kPerWord; ++e) {
                const int i = at + w * vec::kPerWord + e;
                if (i >= length) continue;
                unsigned bits;
                detail::read_words<kCache, sizeof(scalar)>(first + i, &bits);
                v.word[w] = e == 0 && vec::kPerWord == 2 ? (v.word[w] & 0xffff0000u) | bits
                            : e == 0                     ? bits
                                                         : (v.word[w] & 0xffffu) | bits << 16;
            }
        }
        return v;
    }

    // Calls visit(column, kVec floats) for this thread's vectors, including padding.
    template <Cache kCache, typename Visit> __device__ __forceinline__ void each(unsigned beyond, Visit visit) const {
        const int step = blockDim.x * kVec;
        for (int sweep = 0; sweep < padded; sweep += kVecs * step) {
            vec in[kVecs];
            #pragma unroll
            for (int i = 0; i < kVecs; ++i) {
                in[i] = get<kCache>(sweep + i * step + static_cast<int>(threadIdx.x) * kVec, beyond);
            }
            #pragma unroll
            for (int i = 0; i < kVecs; ++i) {
                if (sweep + i * step >= padded) break;
                float value[kVec];
                #pragma unroll
                for (int w = 0; w < vec::kWords; ++w) Packed<scalar>::widen(in[i].word[w], value + w * vec::kPerWord);
                visit(sweep + i * step + static_cast<int>(threadIdx.x) * kVec, value);
            }
        }
    }

    __device__ __forceinline__ bool leads() const { return active && threadIdx.x == 0; }
};

struct Sums { double total, largest; };

__device__ __forceinline__ Sums sums_of(const Run& run) {
    double total = 0.0;
    float largest = 0.0f;
    run.each<Cache::kDefault>(0u, [&](int, const float (&value)[kVec]) {
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            total += static_cast<double>(fabsf(value[e]));  // the sum keeps NaN, max drops it
            largest = fmaxf(largest, fabsf(value[e]));
        }
    });
    return {reduced<Plus>(total), reduced<Larger>(largest)};
}

__device__ __forceinline__ double squares_of(const Run& run, double mean) {
    double total = 0.0;
    run.each<Cache::kDefault>(0u, [&](int at, const float (&value)[kVec]) {
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            const double d = static_cast<double>(fabsf(value[e])) - mean;
            if (at + e < run.length) total += d * d;
        }
    });
    return reduced<Plus>(total);
}

// The limit up to which |w| counts as 0, and, for absmean, the scale. NaN if a weight is NaN or infinite. Like the
// reference, without fused multiply-add.
__device__ __forceinline__ double limit_of(int method, double threshold, Sums sums, double size, float& scale) {
    if (!(sums.total < infinity())) {
        scale = __int_as_float(0x7fffffff);
        return scale;
    }
    const double mean = sums.total / size;
    if (method == kAbsmean) {
        scale = static_cast<float>(fmax(mean, 1e-5));
        return 0.5 * static_cast<double>(scale);  // up to here |w / scale| rounds to 0, half to even
    }
    if (method == kAbsmax) return __dmul_rn(threshold, sums.largest);
    if (method == kTwn) return __dmul_rn(threshold, mean);
    return method == kManual ? threshold : mean;  // mean + std continues with the squares
}

__device__ __forceinline__ double with_std(double mean, double threshold, double squares, double size) {
    return __dadd_rn(mean, __dmul_rn(threshold, sqrt(squares / size)));
}

__device__ __forceinline__ float scale_of(Sums kept, double limit) {  // largest: the count
    if (limit != limit) return limit;
    return kept.largest > 0.0 ? kept.total / kept.largest : 1.0;
}

// Writes the words of a run. With kCount, returns the sum and count of |w| > limit.
template <bool kCount> __device__ __forceinline__ Sums encode(const Run& run, double limit) {
    const float zero_to = __double2float_rd(limit);  // same comparisons: no float is between the two
    double total = 0.0;
    int count = 0;
    run.each<Cache::kOnce>(0xffffffffu, [&](int at, const float (&value)[kVec]) {  // padding is NaN: never kept
        unsigned word = 0;
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            const bool keep = fabsf(value[e]) > zero_to;
            const unsigned code = 1 + (keep && value[e] > 0.0f) - (keep && value[e] < 0.0f);
            word |= code << (8 * (e % 4) + 2 * (e / 4));
            if (kCount && keep) total += static_cast<double>(fabsf(value[e])), ++count;
        }
        word <<= at % 16 / 2;
        #pragma unroll
        for (int offset = 1; offset < kLanes; offset *= 2) word |= __shfl_xor_sync(kFullWarp, word, offset);
        if (run.active && at < run.padded && at % 16 == 0) run.words[at / 16] = word;
    });
    if constexpr (!kCount) return {0.0, 0.0};
    return {reduced<Plus>(total), reduced<Plus>(count)};
}

extern "C" __global__ void __launch_bounds__(kThreads)
ternary_quantize_runs(const scalar* w, unsigned* words, float* scale, long long stride, int k, int length,
                      unsigned runs, int whole, int method, double threshold) {
    const Run run(w, words, stride, k, length, runs, whole);
    float my_scale;
    double limit = limit_of(method, threshold, sums_of(run), length, my_scale);
    if (method == kMeanStd) limit = with_std(limit, threshold, squares_of(run, limit), length);
    if (method == kAbsmean) encode<false>(run, limit);
    else my_scale = scale_of(encode<true>(run, limit), limit);
    if (run.leads()) scale[run.index] = my_scale;
}

extern "C" __global__ void __launch_bounds__(kThreads)
ternary_quantize_sums(const scalar* w, double* partial, long long stride, int k, unsigned runs, int whole) {
    const Run run(w, nullptr, stride, k, k, runs, whole);
    const Sums sums = sums_of(run);
    if (run.leads()) partial[run.index] = sums.total, partial[runs + run.index] = sums.largest;
}

extern "C" __global__ void __launch_bounds__(kThreads)
ternary_quantize_squares(const scalar* w, const double* mean, double* partial, long long stride, int k,
                         unsigned runs, int whole) {
    const Run run(w, nullptr, stride, k, k, runs, whole);
    const double squares = squares_of(run, *mean);
    if (run.leads()) partial[run.index] = squares;
}

extern "C" __global__ void __launch_bounds__(kThreads)
ternary_quantize_encode(const scalar* w, const double* limit, unsigned* words, double* partial, long long stride,
                        int k, unsigned runs, int whole, int counts) {
    const Run run(w, words, stride, k, k, runs, whole);
    if (!counts) {
        encode<false>(run, *limit);
        return;
    }
    const Sums kept = encode<true>(run, *limit);
    if (run.leads()) partial[run.index] = kept.total, partial[runs + run.index] = kept.largest;
}

template <typename Op> __device__ __forceinline__ double over(const double* partial, unsigned runs) {
    double value = 0.0;
    for (unsigned r = threadIdx.x; r < runs; r += kCombineThreads) value = Op::of(value, partial[r]);
    return reduced<Op>(value);
}

// With `again`, *limit holds the mean and `partial` the squares.
extern "C" __global__ void __launch_bounds__(kCombineThreads)
ternary_quantize_limit(const double* partial, double* limit, float* scale, unsigned runs, double size, int method,
                       double threshold, int again) {
    const double total = over<Plus>(partial, runs);
    if (again) {
        if (threadIdx.x == 0) *limit = with_std(*limit, threshold, total, size);
        return;
    }
    const Sums sums = {total, over<Larger>(partial + runs, runs)};
    if (threadIdx.x == 0) *limit = limit_of(method, threshold, sums, size, *scale);
}

extern "C" __global__ void __launch_bounds__(kCombineThreads)
ternary_quantize_scale(const double* partial, const double* limit, float* scale, unsigned runs) {
    const Sums kept = {over<Plus>(partial, runs), over<Plus>(partial + runs, runs)};
    if (threadIdx.x == 0) *scale = scale_of(kept, *limit);
}

// --- ranks ----------------------------------------------------------------------------------------

// |w| as 31 bits. The lowest kLow of them are 0 if w had 16 bits.
constexpr int kLow = sizeof(scalar) == 4 ? 0 : Packed<scalar>::kWideRange ? 16 : 13;
constexpr int kDigit = 11, kBins = 1 << kDigit;
constexpr int kMine = kBins / kThreads;  // bins per thread; stored with a one-word gap per thread
constexpr unsigned kNone = 0xffffffffu, kInfinite = 0x7f800000u;
__device__ __forceinline__ int bin_at(int bin) { return bin + bin / kMine; }

// The sum over a run's threads before this one.
template <typename T> __device__ __forceinline__ T sum_before(T mine) {
    __shared__ T of_warp[32];
    const int width = min(blockDim.x, 32), lane = threadIdx.x % 32;
    T sum = mine;
    for (int offset = 1; offset < width; offset *= 2) {
        const T other = __shfl_up_sync(kFullWarp, sum, offset, width);
        sum += lane >= offset ? other : 0;
    }
    if (blockDim.x > 32) {
        if (lane == 31) of_warp[threadIdx.x / 32] = sum;
        __syncthreads();
        for (int w = 0; w < threadIdx.x / 32; ++w) sum += of_warp[w];
        __syncthreads();  // free for the next sum
    }
    return sum - mine;
}

// Among the bins of a run's threads (kCount adjacent ones each): the bin that holds a rank, the number below it, and
// the bin of the next rank, or kNone.
struct Chosen { unsigned bin, next; unsigned long long below; };

template <int kCount, typename T>
__device__ __forceinline__ void choose(const T (&count)[kCount], T rank, Chosen& chosen) {
    if (threadIdx.x == 0) chosen = {0, kNone, 0};
    T mine = 0;
    #pragma unroll
    for (int j = 0; j < kCount; ++j) mine += count[j];
    T below = sum_before(mine);
    __syncthreads();
    #pragma unroll
    for (int j = 0; j < kCount; ++j) {
        if (rank >= below && rank - below < count[j]) chosen.bin = kCount * threadIdx.x + j, chosen.below = below;
        if (rank + 1 >= below && rank + 1 - below < count[j]) chosen.next = kCount * threadIdx.x + j;
        below += count[j];
    }
    __syncthreads();
}

struct Bounds { unsigned above, largest; };  // above: the smallest key beyond the prefix; largest: of all
// Counts a run's weights that begin with `prefix` (above bit `top`) by their bits from `shift` to `top`.
__device__ __forceinline__ void count_run(const Run& run, unsigned prefix, int top, int shift, unsigned* bins,
                                          int first_bin, Bounds& bounds) {
    const unsigned mask = (1u << (top - shift)) - 1;
    run.each<Cache::kDefault>(0u, [&](int at, const float (&value)[kVec]) {
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            if (at + e >= run.length) continue;
            const unsigned key = __float_as_uint(fabsf(value[e]));
            bounds.largest = max(bounds.largest, key);
            if (key >> top == prefix) atomicAdd(bins + bin_at(first_bin + (key >> shift & mask)), 1u);
            else if (key >> top > prefix) bounds.above = min(bounds.above, key);
        }
    });
}

// Interpolates between two neighbours as NumPy's percentile does, without fused multiply-add.
__device__ __forceinline__ double between(unsigned low, unsigned high, double share) {
    const double a = __uint_as_float(low), b = __uint_as_float(high), apart = __dsub_rn(b, a);
    return share < 0.5 ? __dadd_rn(a, __dmul_rn(apart, share)) : __dsub_rn(b, __dmul_rn(apart, __dsub_rn(1.0, share)));
}

// The weight whose rank follows that of `key`; `key` itself if it is the last.
__device__ __forceinline__ unsigned next_key(unsigned prefix, int bits, const Chosen& in, unsigned above,
                                             unsigned key) {
    return in.next != kNone ? (prefix << bits | in.next) << kLow : above == kNone ? key : above;
}

extern "C" __global__ void __launch_bounds__(kThreads)
ternary_quantize_ranks(const scalar* w, unsigned* words, float* scale, long long stride, int k, int length,
                       unsigned runs, int whole, unsigned rank, double share) {
    __shared__ unsigned bins[kBins + kThreads];
    __shared__ Chosen of_run[kThreads];
    const Run run(w, words, stride, k, length, runs, whole);
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, digit = kDigit + 1 - (32 - __clz(blockDim.y));
    Chosen& chosen = of_run[threadIdx.y];
    unsigned prefix = 0, key = 0, next = 0;
    Bounds bounds = {kNone, 0};
    for (int top = 31, shift; top > kLow; top = shift) {
        shift = max(top - digit, kLow);
        for (int j = 0; j < kMine; ++j) bins[bin_at(kMine * thread) + j] = 0;
        bounds.above = kNone;
        __syncthreads();
        count_run(run, prefix, top, shift, bins, threadIdx.y << digit, bounds);
        __syncthreads();
        unsigned count[kMine];
        #pragma unroll
        for (int j = 0; j < kMine; ++j) count[j] = bins[bin_at(kMine * thread) + j];
        choose(count, rank, chosen);
        if (shift == kLow) {
            key = (prefix << (top - shift) | chosen.bin) << kLow;
            next = next_key(prefix, top - shift, chosen, static_cast<unsigned>(reduced<Smaller>(bounds.above)), key);
        }
        prefix = prefix << (top - shift) | chosen.bin;
        rank -= chosen.below;
    }
    const bool finite = reduced<Larger>(bounds.largest) < kInfinite;
    const double limit = finite ? between(key, next, share) : __int_as_float(0x7fffffff);
    const float my_scale = scale_of(encode<true>(run, limit), limit);
    if (run.leads()) scale[run.index] = my_scale;
}

struct Selection {
    unsigned long long rank;  // among the weights that begin with the prefix
    unsigned prefix;
    Bounds bounds;
};

extern "C" __global__ void __launch_bounds__(kThreads)
ternary_quantize_count(const scalar* w, Selection* selection, unsigned long long* counts, long long stride, int k,
                       unsigned runs, int whole, int top, int shift) {
    __shared__ unsigned bins[kBins + kThreads];
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    for (int i = thread; i < kBins + kThreads; i += kThreads) bins[i] = 0;
    const unsigned prefix = selection->prefix;
    Bounds bounds = {kNone, 0};
    __syncthreads();
    for (unsigned block = blockIdx.x; block * blockDim.y < runs; block += gridDim.x) {
        const Run run(w, nullptr, stride, k, k, runs, whole, block);
        count_run(run, prefix, top, shift, bins, 0, bounds);
    }
    const unsigned above = static_cast<unsigned>(reduced<Smaller>(bounds.above));
    const unsigned largest = static_cast<unsigned>(reduced<Larger>(bounds.largest));
    if (threadIdx.x == 0) {
        atomicMin(&selection->bounds.above, above);
        atomicMax(&selection->bounds.largest, largest);
    }
    __syncthreads();
    for (int bin = thread; bin < kBins; bin += kThreads) {
        const unsigned count = bins[bin_at(bin)];
        if (count > 0) atomicAdd(counts + bin, static_cast<unsigned long long>(count));
    }
}

// With shift == top nothing has been counted yet.
extern "C" __global__ void __launch_bounds__(kCombineThreads)
ternary_quantize_pick(Selection* selection, unsigned long long* counts, double* limit, int top, int shift,
                      unsigned long long rank, double share) {
    constexpr int kEach = kBins / kCombineThreads;
    __shared__ Chosen chosen;
    const int first = kEach * static_cast<int>(threadIdx.x);
    if (top > shift) {
        const Selection now = *selection;
        unsigned long long count[kEach];
        #pragma unroll
        for (int j = 0; j < kEach; ++j) count[j] = counts[first + j];
        choose(count, now.rank, chosen);
        const unsigned prefix = now.prefix << (top - shift) | chosen.bin;
        if (threadIdx.x == 0) {
            *selection = {now.rank - chosen.below, prefix, {kNone, now.bounds.largest}};
            if (shift == kLow) {
                const unsigned key = prefix << kLow;
                const unsigned next = next_key(now.prefix, top - shift, chosen, now.bounds.above, key);
                *limit = now.bounds.largest < kInfinite ? between(key, next, share) : __int_as_float(0x7fffffff);
            }
        }
    } else if (threadIdx.x == 0) {
        *selection = {rank, 0, {kNone, 0}};
    }
    #pragma unroll
    for (int j = 0; j < kEach; ++j) counts[first + j] = 0;
}
