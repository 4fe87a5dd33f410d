// RMSNorm and LayerNorm backward: dx in one pass, dweight and dbias in a fixed order of additions.
//
//   dy, x, dresidual, dx  (rows, cols) DTYPE, last axis contiguous, row strides in elements
//   weight                (cols,)      DTYPE
//   mean, rstd            (rows,)      float, from the forward pass; mean in LayerNorm only
//   partial               (parts, cols) float, scratch; twice in LayerNorm, for dweight and for dbias
//   exchange              scratch for teams, zeroed: team.cuh
//
//   n = (x - mean) * rstd      m = dy * (weight_offset + weight)
//   dx = rstd * (m - n * mean(m * n) [- mean(m)]) + dresidual
//   dweight = sum over rows of dy * n      dbias = sum over rows of dy
//
// llama != 0 rounds weight_offset + weight, m, and the n in dweight to DTYPE, as RMSNorm's forward pass does.
//
// Moves 3 rows cols elements (4 with dresidual), about 12 flops each. Memory-bound. Between the sums over a row and dx,
// x and dy stay in registers, VECS vectors of each per thread.
//
// A thread owns the same columns in every row, so dweight needs no atomics: it is summed down the thread's rows, then
// over the row groups of the block, and last over parts of the rows, in norm_dweight. The number of parts is chosen so
// that no float takes more than about 60 additions, which bounds the error by 60 * 2^-24 * sum |dy n|. A part is a
// block's rows; with TEAM, a team goes through several parts.
//
//   TEAM   VECS     rows
//   0      1 to 4   short enough for two blocks per SM
//   1      3, 8     longer: a team of blocks shares a row; each block holds some of its columns on the chip
//   1      0        longer than all SMs can hold: x and dy are read again (from L2 if a row fits there), and dweight
//                   accumulates in `partial`
//
//   row    | team's block 0   | block 1          | ...         first: a block's first column, own: their number
//   SM       0                  1                  ...         other blocks on the SM serve other teams
//
// Macros: those of norm.cuh, TEAM, and VECS. Threads own vectors of the block's columns as in norm.cu. The sums are in
// dynamic shared memory, with one aligned vector per thread only when the row groups are added, in slots of 4 floats
// (VEC if fewer). A 128-byte line has W = 8 or 32 slots. With T threads per row, B per block,
// n = i * stride + g * T + t and stride = B + T % W, floats 4q .. 4q+3 of vector i of thread t in row group g are at
//
//   slot (n % W) ^ 4q of line (n / W, dweight or dbias, q)
//
// A warp's accesses hit different banks, both when lanes run over t and, in the last step, over t and q, q fastest.
#include "norm.cuh"
#include "team.cuh"

constexpr int kVecs = VECS;
constexpr bool kTeam = TEAM, kAnyLength = kVecs == 0;
constexpr int kUnroll = kAnyLength ? 1 : kVecs;

constexpr bool kOneRow = kTeam || kVecs > 2;  // long rows, one per block

// Eight values loaded one by one leave no registers to keep a row in: it is read again, from L1 or L2.
constexpr bool kHold = !(VEC == 8 && ACCESS == 1) && !kAnyLength;
constexpr int kHeld = kHold ? kVecs : 1;

// With one vector per thread its sums of dweight and dbias stay in registers, and so do the weights. In shared memory
// four elements' sums take a load, a store and their addresses.
constexpr bool kKeepSums = !kTeam && kVecs == 1 && ACCESS == VEC;

// Whether rows' addresses are advanced, not computed anew: the other kernels have no registers for them.
constexpr bool kAdvance = !kTeam && ACCESS == VEC && kVecs <= (kLayer ? 3 : 2);

// Over half of an SM's 64 or 48 warps, for any block size: 56 registers per thread allow 36.
constexpr int kMaxRegisters = 56;

constexpr int kSums = kLayer ? 2 : 1;  // over a row: m n and m; down the rows: dweight and dbias

extern __shared__ uint4 dynamic_shared[];

// A row's first element: its address as it was advanced from row to row, or computed.
template <typename T> __device__ __forceinline__ T* row_of(T* array, long long r, long long stride, T* advanced) {
    return kAdvance ? advanced : array + r * stride;
}

extern "C" __global__ void __maxnreg__(kMaxRegisters)
ENTRY(backward)(const scalar* dy, const scalar* x, const scalar* weight, const float* mean, const float* rstd,
                const scalar* dresidual, scalar* dx, float* partial, unsigned long long* exchange, long long rows,
                int cols, int parts, int team, int block_cols, long long dy_stride, long long x_stride,
                long long dresidual_stride, long long dx_stride, float inverse_cols, float weight_offset, int llama,
                int has_dresidual) {
    constexpr bool kSpares = kAdvance || (kTeam && VEC > 1 && !(kLayer && ACCESS < VEC));  // registers for it
    constexpr int kLeast = kSpares ? kOneRow ? 32 : 4 : 0;
    __shared__ typename RowSums<kSums, kLeast>::Scratch scratch;
    RowSums<kSums, kLeast> block_sum(scratch);
    TeamSums<kSums, kLeast> team_sum(block_sum, exchange, team);

    int thread = threadIdx.x;
    const int threads = blockDim.x;
    const int groups = kOneRow ? 1 : blockDim.y, group = kOneRow ? 0 : threadIdx.y;
    const auto column = [&](int i) { return (i * threads + thread) * VEC; };  // among the block's own
    int own = cols;
    if constexpr (kTeam) {
        const int first = blockIdx.x % team * block_cols;
        own = min(block_cols, cols - first);
        dy += first, x += first, weight += first, dresidual += first, dx += first, partial += first;
    }
    const int vecs = kAnyLength ? (own + threads * VEC - 1) / (threads * VEC) : kVecs;

    int part = kTeam ? blockIdx.x / team : blockIdx.x;
    do {
        const auto block_partial = [&](int of) { return partial + ((long long)of * parts + part) * cols; };

        // The sums of this thread's columns. of: 0 for dweight, 1 for dbias.
        constexpr int kLine = 128 / sizeof(quad);
        const int stride = groups * threads + threads % kLine;
        const auto slot = [&](int of, int i, int q, int g, int t) -> quad& {
            const int n = i * stride + g * threads + t;
            return reinterpret_cast<quad*>(dynamic_shared)[(n / kLine * kSums * kQuads + of * kQuads + q) * kLine
                                                           + (n % kLine ^ 4 * q)];
        };
        quad kept[kSums * kQuads][kKeepSums ? kVecs : 1] = {};
        const auto get_sum = [&](int of, int i, int q) -> quad {
            if constexpr (kKeepSums) {
                return kept[of * kQuads + q][i];
            } else if constexpr (kAnyLength) {
                return load<quad, kQuad, Cache::kDefault>(block_partial(of) + column(i) + q * kQuad);
            } else return slot(of, i, q, group, thread);
        };
        const auto put_sum = [&](int of, int i, int q, const quad& sum) {
            if constexpr (kKeepSums) kept[of * kQuads + q][i] = sum;
            else if constexpr (kAnyLength) store<kQuad>(block_partial(of) + column(i) + q * kQuad, sum);
            else slot(of, i, q, group, thread) = sum;
        };
        #pragma unroll kUnroll
        for (int i = 0; i < vecs; ++i) {
            for (int q = 0; !kKeepSums && q < kSums * kQuads && column(i) < own; ++q) {
                put_sum(q / kQuads, i, q % kQuads, {});
            }
        }
        vec weights[kKeepSums ? kVecs : 1];
        #pragma unroll kUnroll
        for (int i = 0; kKeepSums && i < vecs; ++i) {
            if (column(i) < own) weights[i] = load<vec, ACCESS, Cache::kConstant>(weight + column(i));
        }
        const auto get_weight = [&](int i) {
            if constexpr (kKeepSums) return fresh(weights[i]);
            else return load<vec, ACCESS, Cache::kConstant>(weight + column(i));
        };

        // Threads whose row is past the end own nothing but take part in their warp's shuffles.
        const long long step = (long long)parts * groups;
        const long long mine = (long long)part * groups + group;
        const scalar *next_x = x + mine * x_stride, *next_dy = dy + mine * dy_stride;
        scalar* next_dx = dx + mine * dx_stride;
        for (long long first = (long long)part * groups; first < rows; first += step) {
            const long long r = first + group;
            const int end = r < rows ? own : 0;
            const float row_rstd = end > 0 ? rstd[r] : 0.0f;
            const float row_mean = kLayer && end > 0 ? mean[r] : 0.0f;

            // 1. Read the row, sum over it, and add to dweight and dbias. dx may alias dy: each element is read and
            // written by the same thread.
            vec held_x[kHeld], held_dy[kHeld];
            if constexpr (kHold) {
                #pragma unroll
                for (int i = 0; i < kVecs; ++i) {
                    if (column(i) < end) {
                        held_x[i] = load<vec, ACCESS, Cache::kOnce>(row_of(x, r, x_stride, next_x) + column(i));
                        held_dy[i] = load<vec, ACCESS, Cache::kOnce>(row_of(dy, r, dy_stride, next_dy) + column(i));
                    }
                }
            }
            const auto get_x = [&](int i) {
                if constexpr (kHold) return fresh(held_x[i]);
                else return load<vec, ACCESS, Cache::kDefault>(row_of(x, r, x_stride, next_x) + column(i));
            };
            const auto get_dy = [&](int i) {
                if constexpr (kHold) return fresh(held_dy[i]);
                else return load<vec, ACCESS, Cache::kDefault>(row_of(dy, r, dy_stride, next_dy) + column(i));
            };

            forget(thread);  // recompute columns: kept ones would take a register per vector

            float sums[kSums] = {};
            #pragma unroll kUnroll
            for (int i = 0; i < vecs; ++i) {
                if (column(i) >= end) continue;
                const vec w = get_weight(i);
                const vec row_x = get_x(i), row_dy = get_dy(i);
                #pragma unroll
                for (int q = 0; q < kQuads; ++q) {
                    if constexpr (!kKeepSums) forget(thread);  // else it loads ahead and runs out of registers
                    quad dw = get_sum(0, i, q), db = {};
                    if constexpr (kLayer) db = get_sum(1, i, q);
                    #pragma unroll
                    for (int k = 0; k < kQuadWords; ++k) {
                        const int word = q * kQuadWords + k;
                        const Gradients g = gradients(row_dy.word[word], row_x.word[word], w.word[word], row_mean,
                                                      row_rstd, weight_offset, llama);
                        #pragma unroll
                        for (int e = 0; e < kPerWord; ++e) {
                            sums[0] = fmaf(g.m[e], g.n[e], sums[0]);
                            if constexpr (kLayer) sums[1] += g.m[e];
                            add(dw, k * kPerWord + e, g.dy[e], g.n_seen[e]);
                            if constexpr (kLayer) add(db, k * kPerWord + e, g.dy[e], 1.0f);
                        }
                    }
                    put_sum(0, i, q, dw);
                    if constexpr (kLayer) put_sum(1, i, q, db);
                }
            }
            if constexpr (kTeam) team_sum(sums, thread);
            else block_sum(sums, thread);
            forget(thread);

            // 2. The output.
            #pragma unroll kUnroll
            for (int i = 0; i < vecs; ++i) {
                if (column(i) >= end) continue;
                vec extra = {};
                if (has_dresidual) {
                    extra = load<vec, ACCESS, Cache::kOnce>(dresidual + r * dresidual_stride + column(i));
                }
                const vec w = get_weight(i);
                vec row_x = get_x(i);
                const vec row_dy = get_dy(i);
                #pragma unroll
                for (int k = 0; k < vec::kWords; ++k) {
                    const Gradients g = gradients(row_dy.word[k], row_x.word[k], w.word[k], row_mean, row_rstd,
                                                  weight_offset, llama);
                    row_x.word[k] = input_gradient(g, row_rstd, row_rstd * (sums[0] * inverse_cols),
                                                   sums[kSums - 1] * inverse_cols, extra.word[k]);
                }
                store<ACCESS>(row_of(dx, r, dx_stride, next_dx) + column(i), row_x);
            }
            next_x += step * x_stride, next_dy += step * dy_stride, next_dx += step * dx_stride;
        }
        if constexpr (kAnyLength) continue;  // the sums are already in `partial`

        // 3. The part's dweight and dbias: add the row groups, first to last. Threads run over columns, so that stores
        // are whole sectors.
        if constexpr (kKeepSums) {
            #pragma unroll
            for (int i = 0; i < kVecs; ++i) {
                #pragma unroll
                for (int q = 0; q < kSums * kQuads; ++q) {
                    if (column(i) < own) slot(q / kQuads, i, q % kQuads, group, thread) = kept[q][i];
                }
            }
        }
        __syncthreads();
        #pragma unroll
        for (int of = 0; of < kSums; ++of) {
            for (int k = group * threads + thread; k * kQuad < own; k += groups * threads) {
                const int v = k / kQuads, q = k % kQuads;
                quad sum = {};
                for (int g = 0; g < groups; ++g) sum = sum + slot(of, v / threads, q, g, v % threads);
                store<kQuad>(block_partial(of) + k * kQuad, sum);
            }
        }
        if constexpr (kTeam) __syncthreads();  // before the next part's sums
    } while (kTeam && (part += gridDim.x / team) < parts);
}
