// Unpacks packed weights: blocks of small codes and their scales to a dense matrix, or to some of its rows.
//
//   panels   as in weights/packed_panels.py, for 32 rows: a row is a lane of the warp
//   w        (rows, K) DTYPE, contiguous; x (tokens, K) with rows x_stride elements apart
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
// Macros: those of packed.cuh; DTYPE (f16, bf16, f32); REORDERED: packed_unpack takes columns
#include "packed.cuh"

typedef DTYPE scalar;

constexpr int kWarps = 4;
typedef Codes<kUnit> Unit;  // of one row

extern "C" __global__ void __launch_bounds__(32 * kWarps)
packed_unpack(const unsigned char* panels, const float* values, const int* columns, scalar* w, long long rows,
              long long cols) {
    __shared__ float table[kTableSize], tile[kWarps][kUnit][kRows + 1];
    copy_table(table, values);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long unit = (long long)blockIdx.y * kWarps + warp, panel = blockIdx.x;
    if (unit >= cols / kUnit) return;
    const unsigned char* block = panels + (panel * (cols / BLOCK) + unit * kUnit / BLOCK) * kBlockBytes;
    float weight[kUnit];
    Unit codes;
    codes.read(block, unit % kUnits * kUnit, 0, lane);
    codes.decode(table, weight);
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
    __shared__ float table[kTableSize];
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
    Unit codes;
    codes.read(block, unit % kUnits * kUnit, 0, row % kRows);
    codes.decode(table, weight);
    for (int k = 0; k < kUnit; ++k) to[k] = narrowed<scalar>(__fmul_rn(weight[k], factor));
}
