// Unpacks packed weights: blocks of small codes and their scales to a dense matrix, or to some of its rows.
//
//   panels   as in weights/packed_panels.py, for 32 rows: a row is a lane of the warp
//   w        (rows, K) DTYPE, contiguous; x (tokens, K) with rows x_stride elements apart
//
//   weight = (scale * run_scale) * value[code] - (minimum * run_minimum), each operation rounded to float;
//   with RUN_MINIMUMS and no MINIMUM these are zero points: weight = scale * (code - run_minimum)
//
//   packed_unpack      w = the matrix                   reads its codes once, writes rows K elements
//                      REORDERED: stored column k is column columns[k] of w
//   packed_embedding   x[t] = factor * row ids[t]       NaN where an id is outside the table
//
// packed_unpack: a warp takes a unit, 32 weights of the 32 rows of a panel. Lanes read neighbouring words, and the
// tile is transposed in shared memory, so that a row's 32 weights are written together.
//
// blockDim = 32 kWarps, grid = (panels, groups of kWarps units); packed_embedding: blockDim = 32 kWarps,
// grid = (tokens, groups of 32 kWarps units), a thread per unit.
//
// Macros: DTYPE (f16, bf16, f32); BLOCK, RUN weights; BITS of a code; SCALE_BYTES (1: 2^(byte - 128), 2: half,
// 4: float); RUN_SCALES, MINIMUM, RUN_MINIMUMS: whether blocks have them; TABLE: whether codes are
// indices of `values` (2^BITS), else integers, from which OFFSET is subtracted; REORDERED: packed_unpack takes columns
#include "scalar.cuh"

typedef DTYPE scalar;

constexpr int kRows = 32, kUnit = 32, kWarps = 4, kCodes = TABLE ? 1 << BITS : 1;
constexpr int kRuns = BLOCK / RUN, kUnits = BLOCK / kUnit;
constexpr int kLow = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2, kHigh = BITS - kLow;  // bits of the two planes
constexpr int kRowBytes = SCALE_BYTES + 2 * MINIMUM + kRuns * (RUN_SCALES + RUN_MINIMUMS) + BLOCK * BITS / 8;
constexpr int kBlockBytes = kRowBytes * kRows;

__device__ __forceinline__ float value_of(const float* table, unsigned code) {
    return TABLE ? table[code] : static_cast<float>(static_cast<int>(code) - OFFSET);
}

__device__ __forceinline__ float half_of(const unsigned char* at) {
    return widened(f16{*reinterpret_cast<const unsigned short*>(at)});
}

__device__ __forceinline__ float scale_of(const unsigned char* block, int row) {
    if (SCALE_BYTES == 4) return reinterpret_cast<const float*>(block)[row];
    if (SCALE_BYTES == 2) return half_of(block + 2 * row);
    const unsigned e = block[row];  // e 0 and 1 are denormal
    return __uint_as_float(e < 2 ? 0x00200000u << e : e - 1 << 23);
}

// The 32 weights of a row in a unit of a block.
__device__ __forceinline__ void
decode(const unsigned char* block, int unit, int row, const float* table, float (&weight)[kUnit]) {
    const unsigned char* minimums = block + SCALE_BYTES * kRows;
    const unsigned char* run_scales = minimums + 2 * MINIMUM * kRows;
    const unsigned char* run_minimums = run_scales + kRuns * RUN_SCALES * kRows;
    const unsigned* low = reinterpret_cast<const unsigned*>(run_minimums + kRuns * RUN_MINIMUMS * kRows);
    const unsigned* high = low + BLOCK * kLow / 32 * kRows;
    const float block_scale = scale_of(block, row);
    const float block_minimum = MINIMUM ? half_of(minimums + 2 * row) : 0.0f;
    float scale = block_scale, minimum = block_minimum, zero = 0.0f;
    #pragma unroll
    for (int step = 0; step < kUnit / 4; ++step) {  // a byte per weight
        unsigned codes = low[(unit * kLow + step * kLow / 8) * kRows + row] >> kLow * (step % (8 / kLow));
        if (kLow < 8) codes &= 0x01010101u * ((1 << kLow) - 1);
        if (kHigh > 0) {
            const unsigned bits = high[(unit * kHigh + step * kHigh / 8) * kRows + row] >> kHigh * (step % (8 / kHigh));
            codes |= (bits & 0x01010101u * ((1 << kHigh) - 1)) << kLow;
        }
        if (step * 4 % RUN == 0) {
            const int run = (unit * kUnit + step * 4) / RUN;
            if (RUN_SCALES) {
                scale = __fmul_rn(block_scale, static_cast<signed char>(run_scales[run * kRows + row]));
            }
            if (RUN_MINIMUMS && MINIMUM) minimum = __fmul_rn(block_minimum, run_minimums[run * kRows + row]);
            if (RUN_MINIMUMS && !MINIMUM) zero = run_minimums[run * kRows + row];
        }
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float product = __fmul_rn(scale, value_of(table, codes >> 8 * i & 255) - zero);
            weight[4 * step + i] = MINIMUM ? __fsub_rn(product, minimum) : product;
        }
    }
}

// The values of codes, in shared memory: lanes read different ones.
__device__ __forceinline__ void copy_table(float (&table)[kCodes], const float* values) {
    if (!TABLE) return;
    for (int i = threadIdx.x; i < kCodes; i += blockDim.x) table[i] = values[i];
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(32 * kWarps)
packed_unpack(const unsigned char* panels, const float* values, const int* columns, scalar* w, long long rows,
              long long cols) {
    __shared__ float table[kCodes], tile[kWarps][kUnit][kRows + 1];
    copy_table(table, values);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long unit = (long long)blockIdx.y * kWarps + warp, panel = blockIdx.x;
    if (unit >= cols / kUnit) return;
    const unsigned char* block = panels + (panel * (cols / BLOCK) + unit * kUnit / BLOCK) * kBlockBytes;
    float weight[kUnit];
    decode(block, unit % kUnits, lane, table, weight);
    #pragma unroll
    for (int k = 0; k < kUnit; ++k) tile[warp][k][lane] = weight[k];
    __syncwarp();
    const int count = static_cast<int>(min(rows - panel * kRows, (long long)kRows));
    const long long column = REORDERED ? columns[unit * kUnit + lane] : unit * kUnit + lane;
    scalar* to = w + panel * kRows * cols + column;
    for (int r = 0; r < count; ++r) to[r * cols] = narrowed<scalar>(tile[warp][lane][r]);
}

extern "C" __global__ void __launch_bounds__(32 * kWarps)
packed_embedding(const unsigned char* panels, const float* values, const void* ids, scalar* x, int wide, float factor, long long first,
                 long long rows, long long total, long long cols, long long x_stride) {
    __shared__ float table[kCodes];
    copy_table(table, values);
    const long long token = blockIdx.x, unit = (long long)blockIdx.y * blockDim.x + threadIdx.x;
    if (unit >= cols / kUnit) return;
    const long long id = wide ? static_cast<const long long*>(ids)[token] : static_cast<const int*>(ids)[token];
    scalar* to = x + token * x_stride + unit * kUnit;
    if (id < 0 || id >= total) {
        for (int k = 0; k < kUnit; ++k) to[k] = narrowed<scalar>(__int_as_float(0x7fffffff));
        return;
    }
    if (id < first || id >= first + rows) return;  // of another run of rows
    const long long row = id - first;
    const unsigned char* block =
        panels + (row / kRows * (cols / BLOCK) + unit * kUnit / BLOCK) * kBlockBytes;
    float weight[kUnit];
    decode(block, unit % kUnits, row % kRows, table, weight);
    for (int k = 0; k < kUnit; ++k) to[k] = narrowed<scalar>(__fmul_rn(weight[k], factor));
}
