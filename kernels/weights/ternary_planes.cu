// y = a w^T with both operands ternary, by bit planes and popcounts.
//
//   a       (m, row_bytes)    w2: ternary.cuh; a_scale (1 or m), a_step 0 or 1
//   w       (n, row_bytes)    w2; w_scale (1 or n), w_step 0 or 1
//   starts  (n + 1), chunks   with SKIP: row r of w has nonzeros only in chunks[starts[r]] .. chunks[starts[r + 1] - 1]
//   y       (m, n)            float, row stride in elements
//
//   y[i][j] = (sum over k of a w) * (a_scale[i] * w_scale[j])          exact integer, then double, then float
//
// The codes of +1, 0, -1 are 10, 01, 00. Two words of 16 codes give one word of each plane. The order of bits does not
// matter as long as a and w share it:
//
//     x0                 h0 l0 h1 l1 ..      nonzero  = not  l of x0, l of x1, ..
//     x1                 h0 l0 h1 l1 ..      plus     =      h of x0, h of x1, ..
//
// dot = popc(both) - 2 popc(both & (plus_a ^ plus_w)), both = nonzero_a & nonzero_w: two popcounts per 32 weights.
// An SM does 16 popcounts per clock, which is the limit once four rows of a share the planes of w.
//
// A warp has one row of w and ROWS of a; a lane takes every 32nd vector of each (16 bytes, 64 codes). With SKIP, two
// lanes take a chunk of 128 codes, which is a 32-byte sector: skipped chunks are not read.
//
// Macros: ROWS; SKIP.
#include "reduce.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32, kRows = ROWS;
constexpr bool kSkip = SKIP;

struct Planes {
    unsigned nonzero[2], plus[2];

    explicit __device__ __forceinline__ Planes(const uint4& v) {
        split(v.x, v.y, nonzero[0], plus[0]);
        split(v.z, v.w, nonzero[1], plus[1]);
    }

    static __device__ __forceinline__ void split(unsigned x0, unsigned x1, unsigned& nonzero, unsigned& plus) {
        constexpr unsigned kHigh = 0xaaaaaaaau;
        nonzero = ~((x0 << 1 & kHigh) | (x1 & ~kHigh));
        plus = (x0 & kHigh) | (x1 >> 1 & ~kHigh);
    }
};

__device__ __forceinline__ int dot(const Planes& a, const Planes& w) {
    int like = 0, unlike = 0;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned both = a.nonzero[i] & w.nonzero[i];
        like += __popc(both);
        unlike += __popc(both & (a.plus[i] ^ w.plus[i]));
    }
    return like - 2 * unlike;
}

extern "C" __global__ void __launch_bounds__(kThreads)
ternary_planes(const unsigned char* a, const float* a_scale, const unsigned char* w, const float* w_scale,
               const long long* starts, const int* chunks, float* y, long long y_stride, int row_bytes, int m, int n,
               int a_step, int w_step) {
    const int lane = threadIdx.x % 32, units = row_bytes / 16;
    const int blocks = (n + kWarps - 1) / kWarps;  // blocks that share rows of a
    const int column = blockIdx.x % blocks * kWarps + threadIdx.x / 32, row0 = blockIdx.x / blocks * kRows;
    if (column >= n) return;
    const unsigned char* w_row = w + static_cast<long long>(column) * row_bytes;
    const unsigned char* a_row[kRows];
    #pragma unroll
    for (int r = 0; r < kRows; ++r) {  // past the end, repeat the last row and drop its result
        a_row[r] = a + static_cast<long long>(min(row0 + r, m - 1)) * row_bytes;
    }
    int sum[kRows] = {};
    const auto add = [&](int unit) {
        const Planes there(__ldg(reinterpret_cast<const uint4*>(w_row) + unit));
        #pragma unroll
        for (int r = 0; r < kRows; ++r) {
            sum[r] += dot(Planes(__ldg(reinterpret_cast<const uint4*>(a_row[r]) + unit)), there);
        }
    };
    if constexpr (kSkip) {
        const long long end = __ldg(starts + column + 1);
        for (long long at = __ldg(starts + column) + lane / 2; at < end; at += 16) {
            const int unit = 2 * __ldg(chunks + at) + lane % 2;
            if (unit < units) add(unit);
        }
    } else {
        #pragma unroll 2  // with 4, sm_90 would spill
        for (int unit = lane; unit < units; unit += 32) add(unit);
    }
    int mine = 0;
    #pragma unroll
    for (int r = 0; r < kRows; ++r) {  // one lane per result
        const int total = __reduce_add_sync(kFullWarp, sum[r]);
        mine = lane == r ? total : mine;
    }
    const int row = row0 + lane;
    if (lane < kRows && row < m) {
        const double gain = static_cast<double>(__ldg(a_scale + static_cast<long long>(row) * a_step)) *
                            __ldg(w_scale + static_cast<long long>(column) * w_step);
        y[row * y_stride + column] = static_cast<float>(mine * gain);
    }
}
