// RMSNorm, forward, with an optional residual add in front.
//
//   x, residual, y, s  (rows, cols) DTYPE, last axis contiguous, row strides in elements
//   weight             (cols,)      DTYPE
//   rstd               (rows,)      float
//
//   s = round(x + residual)      rstd = 1 / sqrt(mean(s^2) + eps)      y = (s * rstd) * (weight_offset + weight)
//
// llama != 0 also rounds s * rstd and weight_offset + weight to DTYPE before they are multiplied.
//
// Moves each element once: 2 rows cols elements, 4 with a residual; about 4 flops each. Memory is the limit, so a
// row is read once and kept on the chip between its sum and its output:
//
//   KEEP         the row lies in                          reaches
//   kRegisters   VECS vectors per thread, unrolled        VECS * threads vectors
//   kShared      dynamic shared memory, own slots only    what a block can opt in to
//   kGlobal      global memory: read again, L2 has it     any number of columns
//
// A cluster of blocks with a part of the row each (sm_90) would be one more way to keep it.
//
// Configured by macros:
//   DTYPE   f16, bf16 or f32
//   VEC     elements per vector; cols is a multiple
//   ACCESS  elements per memory access: VEC, or 1 for arrays that are not aligned to a vector
//   KEEP    as above
//   VECS    vectors per thread in registers; 0 unless KEEP is kRegisters
//
// blockDim = (threads per row, rows per block). Thread t of a row owns its vectors t, t + blockDim.x, ... :
//
//   row       | v0 | v1 | ... | v(T-1) | v(T) | v(T+1) | ...        T = blockDim.x
//   thread      0    1    ...   T-1      0      1                   a warp reads 32 vectors side by side
//   i           0    0    ...   0        1      1                   held[i], or slot i * T + t
#include "dtype.cuh"
#include "math.cuh"
#include "reduce.cuh"
#include "vec.cuh"

enum class Keep { kRegisters, kShared, kGlobal };

typedef DTYPE scalar;
typedef Vec<scalar, VEC> vec;

constexpr Keep kKeep = Keep::KEEP;
constexpr int kVecs = VECS;
constexpr bool kResidual = RESIDUAL;

// At most 48 registers per thread in blocks of 128 or 256 are 40 warps on an SM, of 64 or 48; at most 40 in blocks of
// 512 are 48, with a residual 32 at up to 64. A row in shared memory may be so long that one block of 1024 threads is
// all that fits.
constexpr int kMaxThreads = kKeep == Keep::kShared ? 1024 : kKeep == Keep::kGlobal ? 512 : kVecs > 2 ? 256 : 128;
constexpr int kMinBlocks =
    kKeep == Keep::kShared ? 1 : kKeep == Keep::kGlobal ? (kResidual ? 2 : 3) : kVecs > 2 ? 5 : 10;

// Where a block has several rows it goes through many: the weights stay in registers. A block with one row reads
// them from L1 or L2 when it needs them, while others wait for memory.
constexpr bool kKeepWeights = kKeep == Keep::kRegisters && kVecs <= 2;

// Full unrolling puts held[] in registers. Elsewhere four loads in flight per thread are enough.
constexpr int kUnroll = kKeep == Keep::kRegisters ? kVecs : 2;
constexpr int kBatch = kResidual ? 2 : kKeep == Keep::kRegisters ? kVecs : 4;
constexpr int kUnrolledBatches = kKeep == Keep::kRegisters ? kVecs / kBatch : 1;
constexpr Cache kFirstRead = kKeep == Keep::kGlobal ? Cache::kDefault : Cache::kOnce;

extern __shared__ uint4 dynamic_shared[];

// What a thread keeps of its row.
struct Row {
    vec held[kKeep == Keep::kRegisters ? kVecs : 1];
    const scalar* memory;  // where s lies in global memory

    __device__ __forceinline__ vec& slot(int i) {  // read by the thread that wrote it: no barrier, no bank conflict
        return reinterpret_cast<vec*>(dynamic_shared)[i * blockDim.x + threadIdx.x];
    }
    __device__ __forceinline__ void put(int i, const vec& v) {
        if constexpr (kKeep == Keep::kRegisters) held[i] = v;
        else if constexpr (kKeep == Keep::kShared) slot(i) = v;
    }
    __device__ __forceinline__ vec get(int i) {
        if constexpr (kKeep == Keep::kRegisters) return fresh(held[i]);
        else if constexpr (kKeep == Keep::kShared) return slot(i);
        else return load<vec, ACCESS, Cache::kDefault>(memory + (i * blockDim.x + threadIdx.x) * VEC);
    }
};

// Squares of floats can leave float's range where the numbers do not: such a row is summed once more, scaled by a
// power of two. Squares of float16 cannot.
//
//   sum is infinite (or NaN)   scale 2^-80   |x| < 2^128 becomes < 2^48, squares < 2^96
//   sum < 2^-80                scale 2^64    |x| < 2^-40 becomes < 2^24; skipped where eps hides what was lost
__device__ __forceinline__ float range_scale(float sum, float eps) {
    if constexpr (!Packed<scalar>::kWideRange) return 1.0f;
    if (!(sum < infinity())) return 0x1p-80f;
    return sum < 0x1p-80f && eps < 0x1p-80f ? 0x1p64f : 1.0f;
}

// Several short chains of additions: faster than one long one, and more accurate.
constexpr int kSums = VEC < 4 ? VEC : 4;

__device__ __forceinline__ void add_squares(float (&squares)[kSums], const vec& v, float scale) {
    #pragma unroll
    for (int e = 0; e < VEC; ++e) {
        const float scaled = element(v, e) * scale;
        squares[e % kSums] = fmaf(scaled, scaled, squares[e % kSums]);
    }
}

__device__ __forceinline__ float total(const float (&squares)[kSums]) {
    if constexpr (kSums == 1) return squares[0];
    else if constexpr (kSums == 2) return squares[0] + squares[1];
    else return (squares[0] + squares[1]) + (squares[2] + squares[3]);
}

// (s * rstd) * (weight_offset + weight) of the two numbers, or the one, in a word.
__device__ __forceinline__ unsigned normalised(unsigned s, unsigned weight, float rstd, float weight_offset,
                                               int llama) {
    float n[vec::kPerWord], gain[vec::kPerWord];
    Packed<scalar>::widen(s, n);
    Packed<scalar>::widen(weight, gain);
    #pragma unroll
    for (int e = 0; e < vec::kPerWord; ++e) {
        n[e] *= rstd;
        gain[e] += weight_offset;
    }
    if (llama) {
        Packed<scalar>::round(n);
        Packed<scalar>::round(gain);
    }
    #pragma unroll
    for (int e = 0; e < vec::kPerWord; ++e) n[e] *= gain[e];
    return Packed<scalar>::narrow(n);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, kMinBlocks)
rmsnorm_forward(const scalar* x, const scalar* weight, const scalar* residual, scalar* y, scalar* s, float* rstd,
                long long rows, int cols, long long x_stride, long long residual_stride, long long y_stride,
                long long s_stride, float eps, float inverse_cols, float weight_offset, int llama) {
    __shared__ RowSum::Scratch scratch;
    RowSum row_sum(scratch);
    int thread = threadIdx.x;
    const int threads = blockDim.x;
    const int n_vecs = cols / VEC;
    const int n_mine = kKeep == Keep::kRegisters ? kVecs : (n_vecs + threads - 1) / threads;
    const auto column = [&](int i) { return (i * threads + thread) * VEC; };

    vec weights[kKeepWeights ? kVecs : 1];
    if constexpr (kKeepWeights) {
        #pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            if (column(i) < cols) weights[i] = load<vec, ACCESS, Cache::kConstant>(weight + column(i));
        }
    }

    for (long long first = (long long)blockIdx.x * blockDim.y; first < rows;
         first += (long long)gridDim.x * blockDim.y) {
        // Threads whose row is past the end own nothing, but stay for the shuffles of their warp.
        const long long r = first + threadIdx.y;
        const int end = r < rows ? cols : 0;
        Row row;
        row.memory = kResidual ? s + r * s_stride : x + r * x_stride;

        // 1. Read the row, add the residual, sum the squares. y may be x: a thread reads what it will write, and
        // nobody else does. Stores of s keep the compiler from moving later loads up, hence loads in batches.
        float squares[kSums] = {};
        #pragma unroll kUnrolledBatches
        for (int i0 = 0; i0 < n_mine; i0 += kBatch) {
            vec v[kBatch];
            #pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                v[j] = {};
                if (column(i0 + j) < end) v[j] = load<vec, ACCESS, kFirstRead>(x + r * x_stride + column(i0 + j));
            }
            if constexpr (kResidual) {
                vec other[kBatch];
                #pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    other[j] = {};
                    if (column(i0 + j) < end) {
                        other[j] = load<vec, ACCESS, kFirstRead>(residual + r * residual_stride + column(i0 + j));
                    }
                }
                #pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    v[j] = v[j] + other[j];
                    if (column(i0 + j) < end) store<ACCESS>(s + r * s_stride + column(i0 + j), v[j]);
                }
            }
            #pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                if (kKeep == Keep::kRegisters || column(i0 + j) < end) row.put(i0 + j, v[j]);
                add_squares(squares, v[j], 1.0f);
            }
        }
        float sum = row_sum(total(squares));
        forget(thread);  // columns are computed again: kept, they would take a register per vector

        // 2. The statistics, in range.
        float scale = range_scale(sum, eps);
        if (__any_sync(kFullWarp, scale != 1.0f)) {
            for (int k = 0; k < kSums; ++k) squares[k] = 0.0f;
            #pragma unroll kUnroll
            for (int i = 0; i < n_mine; ++i) {
                if (kKeep == Keep::kRegisters || column(i) < end) add_squares(squares, row.get(i), scale);
            }
            sum = row_sum(total(squares));
        }
        const float row_rstd = scale * rsqrt_accurate(fmaf(sum, inverse_cols, eps * scale * scale));
        if (thread == 0 && end > 0) rstd[r] = row_rstd;
        forget(thread);

        // 3. The output.
        #pragma unroll kUnroll
        for (int i = 0; i < n_mine; ++i) {
            if (column(i) >= end) continue;
            const vec w = kKeepWeights ? fresh(weights[i]) : load<vec, ACCESS, Cache::kConstant>(weight + column(i));
            vec v = row.get(i);
            #pragma unroll
            for (int k = 0; k < vec::kWords; ++k) {
                v.word[k] = normalised(v.word[k], w.word[k], row_rstd, weight_offset, llama);
            }
            store<ACCESS>(y + r * y_stride + column(i), v);
        }
    }
}
