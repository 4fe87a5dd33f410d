// The last step of RMSNorm's backward: dweight from the partial sums of the blocks, in a fixed order.
//
//   partial  (parts, cols) float      dweight  (cols,) float
//
// Reads 4 parts cols bytes once. blockDim = (32, 32): 32 columns, side by side in a warp's access, and 32 threads per
// column, of which thread k adds up parts k, k + 32, ... with compensation (Kahan), so that the number of parts does
// not show in the error. The 32 sums of a column then lie in a column of shared memory, and one warp adds them:
//
//            column 0   1  ...  31   pad
//   thread 0        o   o  ...   o    .      written by rows, read by columns: the pad turns
//          1        o   o  ...   o    .      both into 32 different banks
//         ...
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(1024)
rmsnorm_dweight(const float* partial, float* dweight, int parts, int cols) {
    __shared__ float sums[32][33];
    const int lane = threadIdx.x, k = threadIdx.y;
    const int c = blockIdx.x * 32 + lane;

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
    if (lane == 0 && mine < cols) dweight[mine] = total;
}
