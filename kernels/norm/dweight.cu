// The last step of the RMSNorm and LayerNorm backward: adds partial dweight and dbias in a fixed order.
//
//   partial  (gridDim.y, parts, cols) float      dweight, dbias  (cols,) float; dbias if gridDim.y is 2
//   add_dweight, add_dbias: 1 if it is added to the existing values
//
// Reads partial once. blockDim = (32, 32): 32 adjacent columns per warp access, 32 threads per column. Thread k of a
// column adds parts k, k + 32, ... with Kahan compensation, so that the number of parts does not affect the error. One
// warp then adds the 32 sums of a column, which are in a column of shared memory:
//
//            column 0   1  ...  31   pad
//   thread 0        o   o  ...   o    .      written by rows, read by columns: the pad makes
//          1        o   o  ...   o    .      both hit 32 different banks
//         ...
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(1024)
norm_dweight(const float* partial, float* dweight, float* dbias, int parts, int cols,
             int add_dweight, int add_dbias) {
    __shared__ float sums[32][33];
    const int lane = threadIdx.x, k = threadIdx.y;
    const int c = blockIdx.x * 32 + lane;
    partial += (long long)blockIdx.y * parts * cols;

    float sum = 0.0f, lost = 0.0f;
    if (c < cols) {
        for (int part = k; part < parts; part += 32) {
            const float value = __fsub_rn(__ldcs(partial + (long long)part * cols + c), lost);
            const float next = __fadd_rn(sum, value);
            lost = __fsub_rn(__fsub_rn(next, sum), value);
            sum = next;
        }
    }
    sums[k][lane] = sum;
    __syncthreads();

    const float total = warp_sum(sums[lane][k], 32);
    const int mine = blockIdx.x * 32 + k;
    if (lane == 0 && mine < cols) {
        float* const to = (blockIdx.y == 0 ? dweight : dbias) + mine;
        *to = (blockIdx.y == 0 ? add_dweight : add_dbias) ? *to + total : total;
    }
}
