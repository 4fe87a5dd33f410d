// Kernels whose counts are known beforehand: tests/emulator/test_profile.py.
#include <cuda_fp16.h>
typedef unsigned int u32;
__device__ u32 smem(const void* p) { return (u32)__cvta_generic_to_shared(p); }
extern __shared__ __align__(16) unsigned char dynamic[];
__constant__ float table[4] = {1.f, 2.f, 3.f, 4.f};
__device__ float calls[32];

extern "C" __global__ void strided(const float* x, float* y, int stride) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    y[t] = x[t * stride];  // strided load
}
template <typename T> __device__ void gather(const T* x, T* y, const int* index) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (index[t] >= 0) y[t] = x[index[t]];  // gather
}
extern "C" __global__ void gather2(const short* x, short* y, const int* i) { gather(x, y, i); }
extern "C" __global__ void gather4(const float* x, float* y, const int* i) { gather(x, y, i); }
extern "C" __global__ void gather8(const float2* x, float2* y, const int* i) { gather(x, y, i); }
extern "C" __global__ void gather16(const float4* x, float4* y, const int* i) { gather(x, y, i); }

template <typename T> __device__ void shared_gather(const T* x, T* y, const int* index, int count) {
    T* s = reinterpret_cast<T*>(dynamic);
    for (int i = threadIdx.x; i < count; i += blockDim.x) s[i] = x[i];
    __syncthreads();
    if (index[threadIdx.x] >= 0) y[threadIdx.x] = s[index[threadIdx.x]];
}
extern "C" __global__ void shared1(const char* x, char* y, const int* i, int n) { shared_gather(x, y, i, n); }
extern "C" __global__ void shared4(const float* x, float* y, const int* i, int n) { shared_gather(x, y, i, n); }
extern "C" __global__ void shared8(const float2* x, float2* y, const int* i, int n) { shared_gather(x, y, i, n); }
extern "C" __global__ void shared16(const float4* x, float4* y, const int* i, int n) { shared_gather(x, y, i, n); }

extern "C" __global__ void matrix_rows(u32* y, int pitch, int swizzled) {
    for (int i = threadIdx.x; i < 32 * pitch / 4; i += 32) reinterpret_cast<u32*>(dynamic)[i] = i;
    __syncwarp();
    u32 r[4], chunk = swizzled ? (threadIdx.x & 7) * 16 : 0, at = smem(dynamic) + threadIdx.x * pitch + chunk;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
    y[threadIdx.x] = r[0] + r[1] + r[2] + r[3];
}
extern "C" __global__ void two_passes(const float* x, const float* w, float* y, int columns) {
    __shared__ float total;
    x += (size_t)blockIdx.x * columns, y += (size_t)blockIdx.x * columns;
    float sum = 0.f;
    if (threadIdx.x == 0) total = 0.f;
    __syncthreads();
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += x[i];  // first pass
    atomicAdd(&total, sum);
    __syncthreads();
    for (int i = threadIdx.x; i < columns; i += blockDim.x) y[i] = __ldcv(x + i) * w[i] / total;  // second
}
extern "C" __global__ void in_place(float* x) { x[blockIdx.x * blockDim.x + threadIdx.x] *= 2.f; }
extern "C" __global__ void histogram(const int* x, int* counts) {
    atomicAdd(counts + x[blockIdx.x * blockDim.x + threadIdx.x], 1);
}
extern "C" __global__ void product(const u32* a, const u32* b, float* c, int steps) {
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    for (int k = 0; k < steps; k++) {
        u32 ra[4], rb[2];
        for (int i = 0; i < 4; i++) ra[i] = a[(k * 4 + i) * 32 + threadIdx.x];
        for (int i = 0; i < 2; i++) rb[i] = b[(k * 2 + i) * 32 + threadIdx.x];
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                     "{%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    }
    for (int i = 0; i < 4; i++) c[(blockIdx.x * 4 + i) * 32 + threadIdx.x] = d[i];
}
extern "C" __global__ void branches(float* x, int period) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t % period == 0)  // the branch
        for (int i = 0; i < 3; i++) atomicAdd(x + t, 1.f);
}
extern "C" __global__ void operations(const float* x, const double* d, const __half2* h, float* y, int n) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    float a = __fadd_rn(__fmul_rn(__fmaf_rn(x[t], x[t], 1.f), 3.f), 5.f);  // 2 + 1 + 1
    double b = __fma_rn(d[t], d[t], d[t]);                                  // 2
    __half2 c = __hfma2(h[t], h[t], h[t]);                                  // 4
    y[t] = fmaxf(a, (float)b) > __low2float(c) ? rsqrtf(a) : a;             // 1
}
extern "C" __global__ void copies(const float* x, float* y, int n) {
    int bytes = max(0, min(16, 4 * (n - 4 * (int)threadIdx.x)));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem(dynamic) + threadIdx.x * 16),
                 "l"(x + 4 * threadIdx.x), "r"(bytes));
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    for (int i = threadIdx.x; i < 4 * blockDim.x; i += blockDim.x) y[i] = reinterpret_cast<float*>(dynamic)[i];
}
extern "C" __global__ void indexed(const int* x, int* y) {
    int a[8];
    for (int i = 0; i < 8; i++) a[i] = x[i];
    y[threadIdx.x] = a[x[threadIdx.x & 7] & 7];
}
extern "C" __global__ void variables(float* y) {
    calls[threadIdx.x] += 1.f;
    y[threadIdx.x] = table[threadIdx.x & 3];
}
