// Products of a few tokens with packed weights, for decoding: gemv.cuh, whose lanes read codes and decode them.
//
//   c = x w^T      x (m, k), w (n, k) in panels, c (m, n), m <= TOKENS
//
// A weight is decoded to float, rounded to DTYPE and multiplied as gemm/gemv.cu multiplies an unpacked one, with the
// same bits. The codes of kVec weights of a row are one word of 4-bit codes in 16 bits: lanes of 8 neighbouring rows
// read 32 bytes together.
//
// Macros: those of packed.cuh; DTYPE OUT ROWS TOKENS ALIGNED WARPS UNROLL as in gemm/gemv.cu
//
//   packed_gemv(x, panels, values, c, shape)    grid (ceil(n / ROWS), splits), block 32 WARPS
constexpr int kMatrices = 1;
#include "gemv.cuh"
#include "packed.cuh"

typedef OUT out_scalar;

struct Weights {
    typedef Codes<kVec> Loaded;
    static constexpr bool kSplitsTurns = true;
    const unsigned char* panel;
    const float* table;
    int k_end;

    // Rows past the end are zeros of the panel; chunks past the end of k are zeros too.
    template <bool kWhole>
    __device__ __forceinline__ void load(Loaded (&loaded)[UNROLL][kGroups], int k0) const {
        constexpr int kSpan = UNROLL * kChunk;  // within a block, or whole blocks
        const unsigned row = blockIdx.x * ROWS % kRows + threadIdx.x % 32 / 4, first = k0 % BLOCK;
        const unsigned char* block = panel + k0 / BLOCK * static_cast<int64>(kBlockBytes);
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const unsigned char* chunk = block + (kSpan > BLOCK ? u * kChunk / BLOCK * kBlockBytes : 0);
            #pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                if (!kWhole) loaded[u][i] = {};
                if (kWhole || k0 + u * kChunk < k_end) loaded[u][i].read(chunk, first, u * kChunk % BLOCK, row + 8 * i);
            }
        }
    }

    __device__ __forceinline__ vec values(const Loaded& loaded) const {
        float weight[kVec];
        loaded.decode(table, weight);
        return packed<scalar, kVec>(weight);
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, sizeof(scalar) == 4)
packed_gemv(const scalar* x, const unsigned char* panels, const float* values, out_scalar* c,
            const __grid_constant__ GemvShape shape) {
    __shared__ float table[kTableSize];
    copy_table(table, values);
    const int64 panel = blockIdx.x * ROWS / kRows;
    const Weights weights{panels + panel * (shape.k / BLOCK) * kBlockBytes, table, shape.k};
    write(products(weights, x, shape.stride_x, shape.m, shape.k), c, shape,
          [](const Parts& parts, int group, int token, int row) { return parts.total(group, token, row); });
}
