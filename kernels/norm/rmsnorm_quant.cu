// RMSNorm with per-row int8 quantisation and an optional residual add in front.
//
//   x, residual, s   (rows, cols) DTYPE      q  (rows, cols) int8      last axis contiguous, row strides in elements
//   weight           (cols,)      DTYPE      scale, rowsum  (rows,)  float, int
//
//   s = round(x + residual)      y = s * rstd * (weight_offset + weight)      rstd = 1 / sqrt(mean(s^2) + eps)
//   absmax = max(max|y|, 1e-5)   q = round half to even (y * 127 / absmax)    scale = absmax / 127
//   rowsum = sum of q
//
// llama != 0 rounds s * rstd, weight_offset + weight and y to DTYPE.
//
// Moves each element once: 3 bytes for 16-bit elements, 7 with a residual. A thread keeps its part of a row in
// registers as floats, so the last pass costs one FMA and part of a store per element:
//
//   t = s * gain, summing squares and taking max|t|:            one barrier
//   q = round(t * factor),  factor = rstd * 127 / absmax,  absmax = max|t| * rstd
//
// If t or the squares leave float's range, and for llama, which rounds s * rstd, y is formed first ("staged"):
//
//   s, squares; barrier; y, max|y|; barrier; q = round(y * factor),  factor = 127 / absmax
//
// Macros:
//   DTYPE    f16, bf16 or f32
//   VEC      elements per vector; divides cols
//   ACCESS   elements per memory access: VEC, or 1 for arrays that are not aligned to a vector
//   VECS     vectors per thread in registers: 2; or 0: every pass reads the row again, from L2
//
// blockDim = (threads per row, rows per block): one warp per row, or one row of several warps. Thread t owns vectors t,
// t + blockDim.x, ... of its row.
#include "math.cuh"
#include "reduce.cuh"
#include "vec.cuh"

typedef DTYPE scalar;
typedef Vec<scalar, VEC> vec;

constexpr int kBatch = VECS ? VECS : VEC == 1 ? 4 : 2;  // vector loads in flight
constexpr Cache kFirstRead = VECS ? Cache::kOnce : Cache::kDefault;
constexpr float kRoundingBias = 12582912.0f;  // 1.5 * 2^23: floats of this size are integers

struct Plus {
    template <typename T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};
struct Larger {  // propagates NaN
    __device__ __forceinline__ float operator()(float a, float b) const {
        float larger;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
        return larger;
    }
};

// Reduces the values of a row's threads with op; all of them get the result. `none` is the neutral element.
template <typename T, typename Op>
__device__ __forceinline__ T over_row(T value, T none, void* scratch, Op op) {
    const auto butterfly = [&] {
        #pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(kFullWarp, value, offset));
    };
    butterfly();
    if (blockDim.x == 32) return value;
    T* const warps = static_cast<T*>(scratch);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : none;
    butterfly();
    return value;
}

struct Row {
    const scalar *x, *residual, *weight;
    scalar* s;
    signed char* q;
    int cols, llama;
    bool has_residual, staged;  // staged: y, not t
    float weight_offset, rstd;
    float held[VECS ? VECS : 1][VEC];

    __device__ __forceinline__ int column(int i) const { return (i * blockDim.x + threadIdx.x) * VEC; }
    __device__ __forceinline__ int end() const { return VECS ? VECS : (cols / VEC + blockDim.x - 1) / blockDim.x; }

    __device__ __forceinline__ float gain(const vec& w, int e) const {
        const float sum = weight_offset + element(w, e);
        return llama ? rounded(sum) : sum;
    }

    static __device__ __forceinline__ float rounded(float x) {
        float pair[vec::kPerWord] = {x};
        Packed<scalar>::round(pair);
        return pair[0];
    }

    // t or y from s.
    __device__ __forceinline__ float value(float s, const vec& w, int e) const {
        if (!staged) return s * gain(w, e);
        if (!llama) return s * rstd * gain(w, e);
        return rounded(rounded(s * rstd) * gain(w, e));
    }

    __device__ __forceinline__ vec weights(int i) const {
        return load<vec, ACCESS, Cache::kConstant>(weight + column(i));
    }
    // Calls f(i, vector of s) for each vector, from memory. The first time it adds the residual.
    template <bool kFirst, typename F> __device__ __forceinline__ void each_stored(F f) {
        for (int i0 = 0; i0 < end(); i0 += kBatch) {
            vec v[kBatch];
            #pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                if (column(i0 + j) >= cols) continue;
                if constexpr (kFirst) v[j] = load<vec, ACCESS, kFirstRead>(x + column(i0 + j));
                else v[j] = load<vec, ACCESS, Cache::kDefault>((has_residual ? s : x) + column(i0 + j));
            }
            if (kFirst && has_residual) {
                #pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    if (column(i0 + j) >= cols) continue;
                    v[j] = v[j] + load<vec, ACCESS, Cache::kOnce>(residual + column(i0 + j));
                }
                #pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    if (column(i0 + j) < cols) store<ACCESS>(s + column(i0 + j), v[j]);
                }
            }
            #pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                if (column(i0 + j) < cols) f(i0 + j, v[j]);
            }
        }
    }

    // Calls f(i, floats) for each vector: from registers, or s from memory.
    template <typename F> __device__ __forceinline__ void each_s(F f) {
        if constexpr (VECS > 0) {
            #pragma unroll
            for (int i = 0; i < VECS; ++i) {
                if (column(i) < cols) f(i, held[i]);
            }
        } else {
            each_stored<false>([&](int i, const vec& v) {
                float wide[VEC];
                #pragma unroll
                for (int e = 0; e < VEC; ++e) wide[e] = element(v, e);
                f(i, wide);
            });
        }
    }
};

// Packs the low bytes of adjacent codes, the first into the low byte of the first word.
template <int kSize> struct Codes {
    unsigned word[(kSize + 3) / 4];

    explicit __device__ __forceinline__ Codes(const unsigned (&code)[kSize]) {
        if constexpr (kSize == 1) word[0] = code[0] & 0xff;
        #pragma unroll
        for (int k = 0; k < kSize / 4; ++k) {
            const unsigned low = __byte_perm(code[4 * k], code[4 * k + 1], 0x0040);
            word[k] = __byte_perm(low, __byte_perm(code[4 * k + 2], code[4 * k + 3], 0x0040), 0x5410);
        }
    }

    template <int kAccess> __device__ __forceinline__ void store(signed char* to) const {
        if constexpr (kAccess > 1) {
            detail::write_words<kSize>(to, word);
        } else {
            #pragma unroll
            for (int e = 0; e < kSize; ++e) to[e] = static_cast<signed char>(word[e / 4] >> (e % 4 * 8));
        }
    }
};

// 48 registers allow 40 of an SM's warps, in blocks of up to 256 threads. With 48, sm_120 spills (its SMs have room for
// 48 warps), and so does sm_100 with single-element access; 56 registers allow 32 or 36 warps.
constexpr int kMaxRegisters = __CUDA_ARCH__ >= 1200 || (__CUDA_ARCH__ >= 1000 && ACCESS < VEC) ? 56 : 48;

extern "C" __global__ void __maxnreg__(kMaxRegisters)
rmsnorm_quant_int8(const scalar* x, const scalar* weight, const scalar* residual, signed char* q, float* scale,
                   int* rowsum, scalar* s, long long rows, int cols, long long x_stride, long long residual_stride,
                   long long q_stride, long long s_stride, float eps, float inverse_cols, float weight_offset,
                   int llama, int has_residual) {
    __shared__ unsigned scratch[5][32];  // one row per sum, so that no thread overwrites what another may still read
    const Plus plus{};
    const Larger larger{};

    const long long r = ((long long)blockIdx.y * gridDim.x + blockIdx.x) * blockDim.y + threadIdx.y;
    if (r >= rows) return;  // true for all threads of the row, or for none
    Row row = {x + r * x_stride, residual + r * residual_stride, weight, s + r * s_stride, q + r * q_stride,
               cols, llama, has_residual != 0, false, weight_offset, 1.0f};

    // 1. Read the row: squares and t. llama keeps s for now.
    float squares = 0.0f;
    float largest = 0.0f;
    row.each_stored<true>([&](int i, const vec& v) {
        vec w = {};
        if (!llama) w = row.weights(i);
        #pragma unroll
        for (int e = 0; e < VEC; ++e) {
            const float a = element(v, e), t = llama ? a : row.value(a, w, e);
            squares = fmaf(a, a, squares);
            largest = larger(largest, fabsf(t));
            if constexpr (VECS > 0) row.held[i][e] = t;
        }
    });
    squares = over_row(squares, 0.0f, scratch[0], plus);
    if (!llama) largest = over_row(largest, 0.0f, scratch[1], larger);

    // 2. absmax, and the factor from t (or y) to q.
    constexpr bool kWide = Packed<scalar>::kWideRange;
    const bool small = squares < 0x1p-80f && eps < 0x1p-80f;
    const bool in_range = squares < 0x1p100f && !small;
    row.staged = llama || !in_range || !(largest < infinity());
    if (row.staged) {
        if (VECS > 0 && !llama) {  // read s again
            row.each_stored<false>([&](int i, const vec& v) {
                #pragma unroll
                for (int e = 0; e < VEC; ++e) row.held[VECS ? i : 0][e] = element(v, e);
            });
        }
        float power = 1.0f;  // a power of two that keeps squares of s in range
        if (kWide && !in_range) {
            power = small ? 0x1p64f : 0x1p-80f;
            squares = 0.0f;
            row.each_s([&](int, const float (&value)[VEC]) {
                #pragma unroll
                for (int e = 0; e < VEC; ++e) squares = fmaf(value[e] * power, value[e] * power, squares);
            });
            squares = over_row(squares, 0.0f, scratch[2], plus);
        }
        row.rstd = power * rsqrt_accurate(fmaf(squares, inverse_cols, eps * power * power));
        largest = 0.0f;
        row.each_s([&](int i, const float (&value)[VEC]) {
            const vec w = row.weights(i);
            #pragma unroll
            for (int e = 0; e < VEC; ++e) {
                const float y = row.value(value[e], w, e);
                largest = larger(largest, fabsf(y));
                if constexpr (VECS > 0) row.held[i][e] = y;
            }
        });
        largest = over_row(largest, 0.0f, scratch[3], larger);
    } else {
        row.rstd = rsqrt_accurate(fmaf(squares, inverse_cols, eps));
    }
    const bool finite = largest < infinity();  // otherwise all codes are 0
    const float most = largest * (row.staged ? 1.0f : row.rstd);
    const float absmax = most < 1e-5f ? 1e-5f : most;  // NaN passes through
    const float factor = 127.0f / absmax * (row.staged ? 1.0f : row.rstd);

    // 3. The codes. Value * factor + bias rounds once, to an integer, whose low byte is the code.
    int sum = 0;
    const auto write = [&](int i, const float (&value)[VEC]) {
        unsigned code[VEC];
        #pragma unroll
        for (int e = 0; e < VEC; ++e) code[e] = __float_as_uint(fmaf(value[e], factor, kRoundingBias));
        Codes<VEC> codes(code);
        #pragma unroll
        for (unsigned& word : codes.word) {
            word = finite ? word : 0;
            sum = __dp4a(static_cast<int>(word), 0x01010101, sum);
        }
        codes.store<ACCESS>(row.q + row.column(i));
    };
    row.each_s([&](int i, const float (&kept)[VEC]) {
        if constexpr (VECS > 0) {
            write(i, kept);
        } else {
            const vec w = row.weights(i);
            float value[VEC];
            #pragma unroll
            for (int e = 0; e < VEC; ++e) value[e] = row.value(kept[e], w, e);
            write(i, value);
        }
    });
    sum = over_row(sum, 0, scratch[4], plus);
    if (threadIdx.x == 0) {
        scale[r] = absmax / 127.0f;
        rowsum[r] = sum;
    }
}
