// out = softmax(q k^T * scale) v for one head per block row: a small flash-attention forward on tensor cores, to run
// what real attention kernels run: cp.async, ldmatrix, mma.sync, warp shuffles, ex2, an XOR-swizzled tile.
//
// q, k, v, out: (seqlen, 64) bfloat16, seqlen a multiple of 64. Grid (seqlen / 64), block 128: warp w owns query rows
// 16 w .. 16 w + 15 of the tile. A lane holds, of each 16 x 8 accumulator, rows g and g + 8, columns 2 t and 2 t + 1
// (g = lane / 4, t = lane % 4).
#include <cuda_bf16.h>

using uint32_t = unsigned int;

constexpr int D = 64, TILE = 64;
#define MINUS_INFINITY __int_as_float(0xff800000)

struct Shared {
    __nv_bfloat16 q[TILE * D], k[TILE * D], v[TILE * D];
};

// 16-byte chunks of a row are permuted by the row, so that the 8 rows of an ldmatrix hit 8 different bank groups.
__device__ uint32_t at(const __nv_bfloat16* tile, int row, int chunk) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(tile + row * D + ((chunk ^ (row & 7)) << 3)));
}

__device__ void copy_tile(const __nv_bfloat16* tile, const __nv_bfloat16* source) {
    for (int i = threadIdx.x; i < TILE * D / 8; i += blockDim.x) {
        int row = i / 8, chunk = i % 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(tile, row, chunk)),
                     "l"(source + row * D + chunk * 8));
    }
    asm volatile("cp.async.commit_group;");
}

__device__ void load4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ void load4_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ uint32_t pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

extern "C" __global__ void flash(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v,
                                 __nv_bfloat16* out, int seqlen, float scale_log2) {
    __shared__ __align__(128) Shared s;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row0 = blockIdx.x * TILE;

    copy_tile(s.q, q + row0 * D);
    asm volatile("cp.async.wait_group 0;");
    __syncthreads();
    uint32_t qf[D / 16][4];
    for (int i = 0; i < D / 16; i++) load4(qf[i], at(s.q, 16 * warp + lane % 16, 2 * i + lane / 16));

    float acc[D / 8][4] = {}, row_max[2] = {MINUS_INFINITY, MINUS_INFINITY}, row_sum[2] = {0, 0};
    for (int start = 0; start < seqlen; start += TILE) {
        __syncthreads();  // everybody is done with the last tiles
        copy_tile(s.k, k + start * D);
        copy_tile(s.v, v + start * D);
        asm volatile("cp.async.wait_group 0;");
        __syncthreads();

        float sc[TILE / 8][4] = {};
        for (int i = 0; i < D / 16; i++) {
            for (int j = 0; j < TILE / 16; j++) {  // 16 keys: two B fragments
                uint32_t b[4];
                load4(b, at(s.k, 16 * j + lane % 8 + 8 * (lane / 16), 2 * i + (lane / 8) % 2));
                mma(sc[2 * j], qf[i], b[0], b[1]);
                mma(sc[2 * j + 1], qf[i], b[2], b[3]);
            }
        }
        for (int h = 0; h < 2; h++) {  // rows g and g + 8
            float m = row_max[h];
            for (int j = 0; j < TILE / 8; j++) m = fmaxf(m, fmaxf(sc[j][2 * h], sc[j][2 * h + 1]));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
            float rescale = exp2f((row_max[h] - m) * scale_log2);
            row_max[h] = m;
            row_sum[h] *= rescale;
            for (int j = 0; j < D / 8; j++) acc[j][2 * h] *= rescale, acc[j][2 * h + 1] *= rescale;
            for (int j = 0; j < TILE / 8; j++)
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    sc[j][e] = exp2f((sc[j][e] - m) * scale_log2);
                    row_sum[h] += sc[j][e];
                }
        }
        for (int i = 0; i < TILE / 16; i++) {  // the accumulator layout of S is the A layout of P
            uint32_t p[4] = {pack(sc[2 * i][0], sc[2 * i][1]), pack(sc[2 * i][2], sc[2 * i][3]),
                             pack(sc[2 * i + 1][0], sc[2 * i + 1][1]), pack(sc[2 * i + 1][2], sc[2 * i + 1][3])};
            for (int j = 0; j < D / 16; j++) {
                uint32_t b[4];
                load4_transposed(b, at(s.v, 16 * i + lane % 16, 2 * j + lane / 16));
                mma(acc[2 * j], p, b[0], b[1]);
                mma(acc[2 * j + 1], p, b[2], b[3]);
            }
        }
    }
    for (int h = 0; h < 2; h++) {
        row_sum[h] += __shfl_xor_sync(~0u, row_sum[h], 1);
        row_sum[h] += __shfl_xor_sync(~0u, row_sum[h], 2);
        for (int j = 0; j < D / 8; j++) {
            uint32_t pair = pack(acc[j][2 * h] / row_sum[h], acc[j][2 * h + 1] / row_sum[h]);
            int row = row0 + 16 * warp + g + 8 * h;
            *reinterpret_cast<uint32_t*>(out + row * D + 8 * j + 2 * t) = pair;
        }
    }
}
