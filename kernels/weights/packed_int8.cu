// Products of tokens in int8 (packed_quantize.cu) with packed weights, for decoding.
//
//   c = sum over blocks of scale * x_scale * (sum of run_scale * (code - zero) * q) - minimum * x_scale * (...)
//
// The sums of a block are integers and exact; each of its two terms is rounded once. A lane is a row of a panel, so the
// four codes of a word are an operand of dp4a, and the tokens are the same for all lanes. The WARPS warps of a block
// of threads share a panel: blocks of k in turn, kAhead units of 32 weights at a time; their sums are added in shared
// memory. The order depends on k and the splits alone: the same bits in any batch.
//
// Macros: those of packed.cuh, except kE4M3 and tables with values other than int8; OUT f16, bf16, f32; TOKENS of a
// block of threads: 1, 2, 4 or 8; WARPS
//
//   packed_int8(q, scales, sums, panels, values, c, shape)    q, scales, sums of packed_quantize, for
//       whole tiles of TOKENS; c (m, n)
//   grid   (panels, splits, tiles of TOKENS). Each split sums part of k, and c is then (splits, m, n) float.
//   block  32 WARPS
#include "packed.cuh"

typedef long long int64;
typedef OUT out_scalar;

constexpr int kSummed = RUN < kUnit ? RUN : kUnit, kAhead = TOKENS < 8 ? 4 : 2;
constexpr int kSigned = BITS == 8 ? 128 : 0;  // subtracted from codes so that they are signed bytes
constexpr int kExcess = CODES == kTable ? 0 : OFFSET - kSigned;
constexpr bool kUsesSums = kExcess != 0 || RUN_MINIMUMS || MINIMUM;
typedef Codes<kUnit> Unit;

struct Int8Shape {
    int64 stride_c, split_c;
    int m, n, k, unused;
};

// A table of 16 signed bytes, in registers.
struct Table {
    unsigned word[4];

    __device__ __forceinline__ explicit Table(const float* values) {
        #pragma unroll
        for (int i = 0; i < (CODES == kTable ? 16 : 0); ++i) {
            const unsigned byte = static_cast<int>(values[i]) & 255;
            word[i / 4] = i % 4 == 0 ? byte : word[i / 4] | byte << 8 * (i % 4);
        }
    }

    // The values of a word of 4-bit codes, those of the low nibbles in `low`, a byte each. prmt selects from 8 bytes by
    // the nibbles of 16 bits; their fourth bits then select the half of the table.
    __device__ __forceinline__ void look_up(unsigned codes, unsigned& low, unsigned& high) const {
        const unsigned index = codes & 0x77777777u, half = (codes >> 1 & 0x44444444u) | 0x32103210u;
        unsigned pairs[2];  // values of a low nibble, of a high one, of a low one, of a high one
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned first = __byte_perm(word[0], word[1], index >> 16 * i);
            const unsigned second = __byte_perm(word[2], word[3], index >> 16 * i);
            pairs[i] = __byte_perm(first, second, half >> 16 * i);
        }
        low = __byte_perm(pairs[0], pairs[1], 0x6420);
        high = __byte_perm(pairs[0], pairs[1], 0x7531);
    }
};

// Integer sums of a block of weights, and float sums of the blocks.
struct Totals {
    int sum[TOKENS] = {}, low[TOKENS] = {};
    float total[TOKENS] = {};

    // q, sums: of the unit and the first token; a token has `k` elements.
    __device__ __forceinline__ void add(const Unit& unit, const Table& table, const signed char* q, const int* sums, int k) {
        unsigned codes[kUnit / 4];
        #pragma unroll
        for (int step = 0; step < kUnit / 4; ++step) {
            if constexpr (CODES == kTable) {
                if (step % 2 == 0) table.look_up(unit.word(step / 2), codes[step], codes[step + 1]);
            } else {
                codes[step] = BITS == 8 ? unit.codes(step) ^ 0x80808080u : unit.codes(step);
            }
        }
        #pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            unsigned x[kUnit / 4];
            detail::read_words<Cache::kConstant, 16>(q + t * k, x);
            detail::read_words<Cache::kConstant, 16>(q + t * k + 16, x + 4);
            #pragma unroll
            for (int run = 0; run < kUnit / kSummed; ++run) {
                const int step = run * kSummed / 4;
                int part = 0;
                #pragma unroll
                for (int i = step; i < step + kSummed / 4; ++i) {
                    part = __dp4a(static_cast<int>(codes[i]), static_cast<int>(x[i]), part);
                }
                if (kUsesSums) {
                    const int x_sum = __ldg(sums + t * (k / kSummed) + run);
                    part -= x_sum * (kExcess + (kZeros ? unit.run_minimum(step) : 0));
                    if (MINIMUM) low[t] += x_sum * unit.run_minimum(step);
                }
                sum[t] += part * unit.run_scale(step);
            }
        }
    }

    // scales: of the block and the first token; a token has `blocks`.
    __device__ __forceinline__ void end_block(const Unit& unit, const float* scales, int blocks) {
        #pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const float x_scale = __ldg(scales + t * blocks);
            total[t] = fmaf(__fmul_rn(unit.scale(), x_scale), static_cast<float>(sum[t]), total[t]);
            if (MINIMUM) total[t] = fmaf(__fmul_rn(-unit.minimum(), x_scale), static_cast<float>(low[t]), total[t]);
            sum[t] = low[t] = 0;
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, TOKENS < 8 ? 2 : 1)
packed_int8(const signed char* q, const float* scales, const int* sums, const unsigned char* panels, const float* values,
            out_scalar* c, const __grid_constant__ Int8Shape shape) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token0 = blockIdx.z * TOKENS;
    const int blocks = shape.k / BLOCK, share = (blocks + gridDim.y - 1) / gridDim.y;
    const int first = blockIdx.y * share + warp, end = min((static_cast<int>(blockIdx.y) + 1) * share, blocks);
    const unsigned char* panel = panels + static_cast<int64>(blockIdx.x) * blocks * kBlockBytes;
    const Table table(values);

    q += static_cast<int64>(token0) * shape.k;
    scales += static_cast<int64>(token0) * blocks;
    sums += static_cast<int64>(token0) * (shape.k / kSummed);

    Totals totals;
    const int units = first < end ? ((end - first - 1) / WARPS + 1) * kUnits : 0;
    for (int i = 0; i < units; i += kAhead) {
        Unit unit[kAhead];
        #pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const int block = first + (i + a) / kUnits * WARPS;
            if (i + a < units) unit[a].read(panel + static_cast<int64>(block) * kBlockBytes, (i + a) % kUnits * kUnit, 0, lane);
        }
        #pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            if (i + a >= units) break;
            const int block = first + (i + a) / kUnits * WARPS;
            const int k = block * BLOCK + (i + a) % kUnits * kUnit;
            totals.add(unit[a], table, q + k, sums + k / kSummed, shape.k);
            if ((i + a + 1) % kUnits == 0) totals.end_block(unit[a], scales + block, blocks);
        }
    }

    __shared__ float parts[WARPS][TOKENS][kRows];
    #pragma unroll
    for (int t = 0; t < TOKENS; ++t) parts[warp][t][lane] = totals.total[t];
    __syncthreads();
    const int row = blockIdx.x * kRows + lane;
    for (int t = warp; t < TOKENS && row < shape.n && token0 + t < shape.m; t += WARPS) {
        float sum = 0.0f;
        #pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += parts[i][t][lane];
        c[blockIdx.y * shape.split_c + (token0 + t) * shape.stride_c + row] = narrowed<out_scalar>(sum);
    }
}
