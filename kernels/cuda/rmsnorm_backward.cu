// RMSNorm, backward: the gradient of x in one pass, and of the weight in a fixed order.
//
//   dy, x, dresidual, dx  (rows, cols) DTYPE, last axis contiguous, row strides in elements
//   weight                (cols,)      DTYPE
//   rstd                  (rows,)      float, of the forward
//   partial               (gridDim.x, cols) float, scratch
//   dweight               (cols,)      float
//
//   n = x * rstd      m = dy * (weight_offset + weight)
//   dx = rstd * (m - n * mean(m * n)) + dresidual      dweight = sum over rows of dy * n
//
// llama != 0 rounds weight_offset + weight, m, and the n in dweight to DTYPE, as the forward did.
//
// Moves 3 rows cols elements (4 with dresidual), about 12 flops each; memory is the limit. Where x and dy lie between
// the sum over a row and dx is up to KEEP:
//
//   KEEP         x and dy in                   dweight's partial sum in          reaches
//   kRegisters   VECS vectors each per thread  dynamic shared memory, float      VECS * threads vectors
//   kGlobal      global memory, read again     partial[], read back from L2      any number of columns
//
// A thread owns the same columns in every row, so it adds to dweight with no atomics: first down its rows, then over
// the row groups of its block, last over blocks, in rmsnorm_dweight. No float sees more than about 60 of these
// additions, which bounds the error by 60 * 2^-24 of sum |dy n|; the number of blocks is chosen for that.
//
// Macros, without RESIDUAL, and ownership are those of rmsnorm.cu. Slots of the sums, each 4 floats (VEC of them if
// fewer), with T threads per row, B per block, and W slots, 8 or 32, in 128 bytes:
//
//   slot (i, q), thread t of row group g  at  q * plane + ((i * stride + g * T + t) ^ 4q)      stride = B + T % W
//
// holds floats 4q .. 4q+3 of vector v = i * T + t of the row. plane is the least multiple of 8 that will do. A warp's
// accesses are to different banks, both when its lanes go by v and, in the last step, by v and q, q fastest.
#include "dtype.cuh"
#include "reduce.cuh"
#include "vec.cuh"

enum class Keep { kRegisters, kGlobal };

typedef DTYPE scalar;
typedef Vec<scalar, VEC> vec;

constexpr Keep kKeep = Keep::KEEP;
constexpr int kVecs = VECS;

// More than half of an SM's 64 or 48 warps, in blocks of any size: 48 registers per thread are 40 warps, 56 are 36.
constexpr bool kOneRow = kVecs != 2;  // long rows, one per block
constexpr int kMaxRegisters = kVecs == 4 ? 56 : 48;

// Eight numbers that arrive one by one leave no registers to keep a row in: it is read again, from L1 or L2.
constexpr bool kHold = kKeep == Keep::kRegisters && !(VEC == 8 && ACCESS == 1);

constexpr int kQuad = VEC < 4 ? VEC : 4, kQuads = VEC / kQuad;
typedef Vec<f32, kQuad> quad;

constexpr int kPerWord = VEC < vec::kPerWord ? VEC : vec::kPerWord;  // a lone 16-bit number fills half of its word
constexpr int kQuadWords = kQuad / kPerWord;
constexpr int kHeld = kHold ? kVecs : 1;
constexpr int kUnroll = kKeep == Keep::kRegisters ? kVecs : 2;

extern __shared__ uint4 dynamic_shared[];

// What the two numbers of a word, or the one, contribute.
struct Gradients {
    float m[vec::kPerWord], n[vec::kPerWord];  // dx
    float dy[vec::kPerWord], n_seen[vec::kPerWord];  // dweight: n as the weight was multiplied with it
};

__device__ __forceinline__ Gradients gradients(unsigned dy, unsigned x, unsigned weight, float rstd,
                                               float weight_offset, int llama) {
    Gradients g;
    float gain[vec::kPerWord];
    Packed<scalar>::widen(dy, g.dy);
    Packed<scalar>::widen(x, g.n);
    Packed<scalar>::widen(weight, gain);
    #pragma unroll
    for (int e = 0; e < vec::kPerWord; ++e) {
        g.n[e] *= rstd;
        g.n_seen[e] = g.n[e];
        gain[e] += weight_offset;
    }
    if (llama) {
        Packed<scalar>::round(g.n_seen);
        Packed<scalar>::round(gain);
    }
    #pragma unroll
    for (int e = 0; e < vec::kPerWord; ++e) g.m[e] = g.dy[e] * gain[e];
    if (llama) Packed<scalar>::round(g.m);
    return g;
}

extern "C" __global__ void __maxnreg__(kMaxRegisters)
rmsnorm_backward(const scalar* dy, const scalar* x, const scalar* weight, const float* rstd, const scalar* dresidual,
                 scalar* dx, float* partial, long long rows, int cols, long long dy_stride, long long x_stride,
                 long long dresidual_stride, long long dx_stride, float inverse_cols, float weight_offset, int llama,
                 int has_dresidual) {
    __shared__ RowSum::Scratch scratch;
    RowSum row_sum(scratch);
    int thread = threadIdx.x;
    const int threads = blockDim.x;
    const int groups = kOneRow ? 1 : blockDim.y, group = kOneRow ? 0 : threadIdx.y;
    const int n_mine = kKeep == Keep::kRegisters ? kVecs : (cols / VEC + threads - 1) / threads;
    const auto column = [&](int i) { return (i * threads + thread) * VEC; };

    const auto block_partial = [&] { return partial + (long long)blockIdx.x * cols; };

    // The sums of this thread's columns.
    const int stride = groups * threads + threads % int(128 / sizeof(quad));
    const int plane = ((groups == 1 ? cols / VEC : kVecs * stride) + 7) / 8 * 8;
    quad* const slots = reinterpret_cast<quad*>(dynamic_shared);
    const auto slot = [&](int i, int q, int g, int t) -> quad& {
        return slots[q * plane + ((i * stride + g * threads + t) ^ 4 * q)];
    };
    if constexpr (kKeep == Keep::kRegisters) {
        #pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            for (int q = 0; q < kQuads && column(i) < cols; ++q) slot(i, q, group, thread) = {};
        }
    }

    // Threads whose row is past the end own nothing, but stay for the shuffles of their warp.
    bool first_row = true;
    for (long long first = (long long)blockIdx.x * groups; first < rows;
         first += (long long)gridDim.x * groups, first_row = false) {
        const long long r = first + group;
        const int end = r < rows ? cols : 0;
        const float row_rstd = end > 0 ? rstd[r] : 0.0f;

        // 1. Read the row; sum m * n over it; add to the sums of dweight. dx may be dy: a thread reads what it will
        // write, and nobody else does.
        vec held_x[kHeld], held_dy[kHeld];
        if constexpr (kHold) {
            #pragma unroll
            for (int i = 0; i < kVecs; ++i) {
                if (column(i) < end) {
                    held_x[i] = load<vec, ACCESS, Cache::kOnce>(x + r * x_stride + column(i));
                    held_dy[i] = load<vec, ACCESS, Cache::kOnce>(dy + r * dy_stride + column(i));
                }
            }
        }
        const auto get_x = [&](int i) {
            if constexpr (kHold) return fresh(held_x[i]);
            else return load<vec, ACCESS, Cache::kDefault>(x + r * x_stride + column(i));
        };
        const auto get_dy = [&](int i) {
            if constexpr (kHold) return fresh(held_dy[i]);
            else return load<vec, ACCESS, Cache::kDefault>(dy + r * dy_stride + column(i));
        };

        forget(thread);  // columns are computed again: kept, they would take a register per vector

        float sum = 0.0f;
        #pragma unroll kUnroll
        for (int i = 0; i < n_mine; ++i) {
            if (column(i) >= end) continue;
            const vec w = load<vec, ACCESS, Cache::kConstant>(weight + column(i));
            const vec row_x = get_x(i), row_dy = get_dy(i);
            #pragma unroll
            for (int q = 0; q < kQuads; ++q) {
                forget(thread);  // else this reads ahead, and the registers do not suffice
                quad dw = {};
                if constexpr (kKeep == Keep::kRegisters) dw = slot(i, q, group, thread);
                else if (!first_row) dw = load<quad, kQuad, Cache::kDefault>(block_partial() + column(i) + q * kQuad);
                #pragma unroll
                for (int k = 0; k < kQuadWords; ++k) {
                    const int word = q * kQuadWords + k;
                    const Gradients g = gradients(row_dy.word[word], row_x.word[word], w.word[word], row_rstd,
                                                  weight_offset, llama);
                    #pragma unroll
                    for (int e = 0; e < kPerWord; ++e) {
                        sum = fmaf(g.m[e], g.n[e], sum);
                        unsigned& total = dw.word[k * kPerWord + e];
                        total = __float_as_uint(fmaf(g.dy[e], g.n_seen[e], __uint_as_float(total)));
                    }
                }
                if constexpr (kKeep == Keep::kRegisters) slot(i, q, group, thread) = dw;
                else store<kQuad>(block_partial() + column(i) + q * kQuad, dw);
            }
        }
        const float mean = row_sum(sum, thread) * inverse_cols;
        forget(thread);

        // 2. The output.
        #pragma unroll kUnroll
        for (int i = 0; i < n_mine; ++i) {
            if (column(i) >= end) continue;
            vec extra = {};
            if (has_dresidual) {
                extra = load<vec, ACCESS, Cache::kOnce>(dresidual + r * dresidual_stride + column(i));
            }
            const vec w = load<vec, ACCESS, Cache::kConstant>(weight + column(i));
            vec row_x = get_x(i);
            const vec row_dy = get_dy(i);
            #pragma unroll
            for (int k = 0; k < vec::kWords; ++k) {
                Gradients g = gradients(row_dy.word[k], row_x.word[k], w.word[k], row_rstd,
                                        weight_offset, llama);
                float more[vec::kPerWord];
                Packed<scalar>::widen(extra.word[k], more);
                #pragma unroll
                for (int e = 0; e < vec::kPerWord; ++e) {
                    g.m[e] = row_rstd * fmaf(-g.n[e], mean, g.m[e]);
                    if (has_dresidual) g.m[e] += more[e];
                }
                row_x.word[k] = Packed<scalar>::narrow(g.m);
            }
            store<ACCESS>(dx + r * dx_stride + column(i), row_x);
        }
    }

    // 3. The block's part of dweight: the sums of its row groups, first to last. Threads go by columns, so that the
    // stores are whole sectors.
    if constexpr (kKeep == Keep::kRegisters) {
        __syncthreads();
        for (int k = group * threads + thread; k * kQuad < cols; k += groups * threads) {
            const int v = k / kQuads, q = k % kQuads;
            quad dw = {};
            for (int g = 0; g < groups; ++g) dw = dw + slot(v / threads, q, g, v % threads);
            store<kQuad>(block_partial() + k * kQuad, dw);
        }
    }
}
