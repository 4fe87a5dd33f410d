// Packs trits into the tiles of bitnet.cpp's table-lookup kernels, and unpacks them.
//
//   trits    (N, K) int8, last axis contiguous          code = trit + 1
//   packed   tiles of BM rows and BK columns; a tile has steps of bm rows, and those have steps of a few columns:
//
//   tl1        byte: four weights of a row, 3 c0 + c1 in the high four bits, 3 c2 + c3 in the low four
//              [N/BM][K/BK][BM/bm][BK/by][bm/16][by/4][16 rows], by = 256 / bm
//   tl2        byte: six weights, |9 t0 + 3 t1 + t2| high and low   [N/BM][K3/BK][BM/32][BK/6][32 rows]
//              then their signs, 16 bits of rows r and r + 16       [N/BM][K3/BK][BM/32][BK/24][16]
//   tl2 pairs  the remaining K2 = K - K3 columns, as in tl1         [N/BM][K2/32][BM/32][8][32 rows]
//              the 32 rows of tl2 are in the order 0-7, 16-23, 8-15, 24-31
//
//   ternary_pack_tiles      flags[block] = 1 if it met a value other than -1, 0, +1
//   ternary_unpack_tiles    flags[block] = 1 if it met bits that no encoder writes
//
// Adjacent packed bytes belong to different rows, adjacent trits to the same row. A warp takes the data of 512 packed
// bytes and transposes it in shared memory: trits are accessed 16 at a time along a row, packed bytes 16 at a time.
//
//   tl1        bm rows x 2048 / bm columns        tl2   32 rows x 96 columns        tl2 pairs   32 rows x 64 columns
//
// Macros: FORMAT, one of kTl1, kTl2 and kTl2Pairs.
#include "ternary_pack.cuh"

enum class Format { kTl1, kTl2, kTl2Pairs };

constexpr Format kFormat = Format::FORMAT;
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr unsigned kFullWarp = 0xffffffffu;

struct Shared {
    uint4 sixteen[kFormat == Format::kTl2 ? 192 : 32];  // tl2 also stages all 32 x 96 codes here, one per byte
};

struct Shape {
    long long stride;          // of rows of trits
    unsigned chunks;           // one per warp; for pairs, two per warp
    int first;                 // first column
    int rows, columns, step;   // BM, BK (32 for pairs), bm
    int across;                // tiles in a row of tiles
    int whole, packed_whole;   // trits, packed are aligned to 16 bytes
};

// The upper left weight of a chunk of `step` rows and `wide` columns. A tile has several adjacent chunks.
__device__ __forceinline__ long long corner(const Shape& at, unsigned chunk, int wide) {
    const unsigned per_step = at.columns / wide, steps = at.rows / at.step;
    const unsigned part = chunk % per_step, strip = chunk / per_step;
    const unsigned step = strip % steps, tile = strip / steps;
    const long long row = static_cast<long long>(tile / at.across) * at.rows + step * at.step;
    return row * at.stride + at.first + static_cast<long long>(tile % at.across) * at.columns + part * wide;
}

// The place of 16 packed bytes among a warp's 32 such pieces. There are no bank conflicts, whether lanes write words,
// write bytes of a few rows each, or read pieces in order.
__device__ __forceinline__ int place(int sixteen) {
    const int line = sixteen / 8;
    return sixteen ^ (line & 1) * 3 ^ (line & 2) << 1;
}

// Transposes 4 x 4 bytes: bytes i of the four words become word i.
__device__ __forceinline__ void turn(unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
    const unsigned ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    const unsigned ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab, cd, 0x5410), b = __byte_perm(ab, cd, 0x7632);
    c = __byte_perm(ab_high, cd_high, 0x5410), d = __byte_perm(ab_high, cd_high, 0x7632);
}

// --- pairs ----------------------------------------------------------------------------------------

// A lane's four rows and 16 columns.
struct Mine {
    int row, column, chunk;  // chunk: for pairs, 0 or 1

    __device__ __forceinline__ Mine(const Shape& at, int lane) {
        const int vectors = kFormat == Format::kTl1 ? 128 / at.step : 2;
        row = lane / vectors * 4 % at.step;
        column = lane % vectors * 16;
        chunk = kFormat == Format::kTl1 ? 0 : lane / 16;
    }

    // The lane's word of packed for four columns.
    __device__ __forceinline__ int word(const Shape& at, int four) const {
        const int c = column / 4 + four;
        if constexpr (kFormat == Format::kTl1) {
            const int wide = 64 / at.step;  // groups of four columns in a step
            return place(c / wide * 4 + row / 16 * wide + c % wide) * 4 + row % 16 / 4;
        } else {
            const int order = (row / 8 & 1) << 1 | row / 16;  // of eight rows
            return place(chunk * 16 + c * 2 + order / 2) * 4 + order % 2 * 2 + row % 8 / 4;
        }
    }
};

// Splits bytes that number pairs (up to 15) into two codes. A byte that is no pair becomes two zeros.
__device__ __forceinline__ void split_pair(unsigned number, unsigned& first, unsigned& second, unsigned& bad) {
    const unsigned beyond = reach(number, 9);
    bad |= beyond;
    number = (number & ~(15 * beyond)) | 4 * beyond;
    first = reach(number, 3) + reach(number, 6);
    second = number - 3 * first;
}

__device__ __forceinline__ void pack_pairs(const byte* trits, byte* packed, unsigned chunk, const Shape& at,
                                           uint4* shared, int lane, unsigned& bad) {
    const Mine mine(at, lane);
    constexpr int kPer = kFormat == Format::kTl1 ? 1 : 2;  // chunks per warp
    const bool there = kPer * chunk + mine.chunk < at.chunks;
    const byte* from = trits + corner(at, kPer * chunk + mine.chunk, kFormat == Format::kTl1 ? 2048 / at.step : 32)
                       + mine.row * at.stride + mine.column;
    unsigned codes[4][4];
    #pragma unroll
    for (int r = 0; r < 4; ++r) get_codes(from + r * at.stride, there ? 16 : 0, at.whole, codes[r], bad);
    unsigned* words = reinterpret_cast<unsigned*>(shared);
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        turn(codes[0][i], codes[1][i], codes[2][i], codes[3][i]);  // now by column
        words[mine.word(at, i)] = (3 * codes[0][i] + codes[1][i]) << 4 | (3 * codes[2][i] + codes[3][i]);
    }
    __syncwarp();
    const uint4 of = shared[place(lane)];
    const unsigned out[4] = {of.x, of.y, of.z, of.w};
    put(packed + 512LL * chunk + 16 * lane, kPer * chunk + lane / (32 / kPer) < at.chunks ? 16 : 0, at.packed_whole,
        out);
}

__device__ __forceinline__ void unpack_pairs(const byte* packed, byte* trits, unsigned chunk, const Shape& at,
                                             uint4* shared, int lane, unsigned& bad) {
    const Mine mine(at, lane);
    constexpr int kPer = kFormat == Format::kTl1 ? 1 : 2;
    unsigned in[4];
    get(packed + 512LL * chunk + 16 * lane, kPer * chunk + lane / (32 / kPer) < at.chunks ? 16 : 0, at.packed_whole,
        in);
    shared[place(lane)] = {in[0], in[1], in[2], in[3]};
    __syncwarp();
    if (kPer * chunk + mine.chunk >= at.chunks) return;
    byte* to = trits + corner(at, kPer * chunk + mine.chunk, kFormat == Format::kTl1 ? 2048 / at.step : 32)
               + mine.row * at.stride + mine.column;
    const unsigned* words = reinterpret_cast<const unsigned*>(shared);
    unsigned out[4][4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned word = words[mine.word(at, i)];
        split_pair(word >> 4 & 15 * kOnes, out[0][i], out[1][i], bad);
        split_pair(word & 15 * kOnes, out[2][i], out[3][i], bad);
        turn(out[0][i], out[1][i], out[2][i], out[3][i]);
    }
    #pragma unroll
    for (int r = 0; r < 4; ++r) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) out[r][i] = trits_of(out[r][i]);
        put(to + r * at.stride, 16, at.whole, out[r]);
    }
}

// --- triples --------------------------------------------------------------------------------------
//
// A lane has rows g, g + 8, g + 16 and g + 24 and the 24 columns from 24 q on, with g = lane % 8, q = lane / 8.

// The place of the `index`th 16 bytes of 32 rows of six: eight lanes reading 8 bytes of a row each have no conflicts.
__device__ __forceinline__ int sixteen(int index) { return index ^ (index / 6 >> 2 & 1); }

// The `eighth`th 8 bytes of a row's 96.
__device__ __forceinline__ uint2& eight(uint4* shared, int row, int eighth) {
    return reinterpret_cast<uint2*>(shared + sixteen(6 * row + eighth / 2))[eighth % 2];
}

// The packed byte of row g + 8 j and step 4 q + i, which holds six columns.
__device__ __forceinline__ byte& step_byte(uint4* shared, int lane, int j, int i) {
    const int order = (j & 1) << 1 | j >> 1;
    return reinterpret_cast<byte*>(shared + place(2 * (lane / 8 * 4 + i) + order / 2))[order % 2 * 8 + lane % 8];
}

// Bit 0 of four bytes, moved to bits 6, 4, 2, 0 (other bits of the product stay below), and back.
__device__ __forceinline__ unsigned signs_of(unsigned bytes) { return bytes * 0x40100401u >> 24 & 0x55u; }
__device__ __forceinline__ unsigned bytes_of(unsigned signs) {
    return (signs >> 6 & 1) | (signs >> 4 & 1) << 8 | (signs >> 2 & 1) << 16 | (signs & 1) << 24;
}

// Bytes a, b, c and d of twelve, as a word.
template <int a, int b, int c, int d> __device__ __forceinline__ unsigned pick(const unsigned (&w)[3]) {
    const unsigned low = __byte_perm(w[0], w[1], (a & 7) | (b & 7) << 4 | (c & 7) << 8 | (d & 7) << 12);
    constexpr unsigned kHigh = (a > 7 ? a - 4 : 0) | (b > 7 ? b - 4 : 1) << 4 | (c > 7 ? c - 4 : 2) << 8
                               | (d > 7 ? d - 4 : 3) << 12;
    return __byte_perm(low, w[2], kHigh);
}

__device__ __forceinline__ void pack_triples(const byte* trits, byte* packed, unsigned chunk, const Shape& at,
                                             uint4* shared, int lane, unsigned& bad) {
    const byte* from = trits + corner(at, chunk, 96);
    #pragma unroll 3
    for (int k = 0; k < 6; ++k) {
        const int index = 32 * k + lane;
        unsigned codes[4];
        get_codes(from + index / 6 * at.stride + index % 6 * 16, 16, at.whole, codes, bad);
        shared[sixteen(index)] = {codes[0], codes[1], codes[2], codes[3]};
    }
    __syncwarp();
    unsigned minus[4], steps[4][2];  // of row j: signs; two steps per word, at bits 0 and 16
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
        unsigned word[6];
        #pragma unroll
        for (int k = 0; k < 3; ++k) {
            const uint2 two = eight(shared, lane % 8 + 8 * j, lane / 8 * 3 + k);
            word[2 * k] = two.x, word[2 * k + 1] = two.y;
        }
        minus[j] = 0;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {  // four triples, one per byte
            const unsigned w[3] = {word[3 * half], word[3 * half + 1], word[3 * half + 2]};
            const unsigned number = 9 * pick<0, 3, 6, 9>(w) + 3 * pick<1, 4, 7, 10>(w) + pick<2, 5, 8, 11>(w);
            const unsigned negative = reach(number, 13) ^ kOnes;
            // 128 + number - 13; for negative ones 128 minus that difference: invert all bits, subtract 127
            const unsigned shifted = number + 115 * kOnes;
            const unsigned size = ((shifted ^ 255 * negative) - 127 * negative) & 127 * kOnes;
            minus[j] |= signs_of(negative) << (8 - 8 * half);
            steps[j][half] = (size << 4 | size >> 8) & 0xff00ffu;
        }
    }
    __syncwarp();
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            step_byte(shared, lane, j, i) = static_cast<byte>(steps[j][i / 2] >> (16 * (i % 2)));
        }
    }
    // 16 bits of rows g and g + 16, and of g + 8 and g + 24; then those of two adjacent lanes.
    const unsigned both = (minus[0] << 1 | minus[2]) | (minus[1] << 1 | minus[3]) << 16;
    const int left = lane / 8 * 8 + lane % 4 * 2;
    const unsigned one = __shfl_sync(kFullWarp, both, left), two = __shfl_sync(kFullWarp, both, left + 1);
    const unsigned signs[1] = {__byte_perm(one, two, lane % 8 < 4 ? 0x5410 : 0x7632)};
    put(packed + 512LL * at.chunks + 128LL * chunk + 4 * lane, 4, at.packed_whole, signs);
    __syncwarp();
    const uint4 of = shared[place(lane)];
    const unsigned out[4] = {of.x, of.y, of.z, of.w};
    put(packed + 512LL * chunk + 16 * lane, 16, at.packed_whole, out);
}

__device__ __forceinline__ void unpack_triples(const byte* packed, byte* trits, unsigned chunk, const Shape& at,
                                               uint4* shared, int lane, unsigned& bad) {
    unsigned in[4], signs[1];
    get(packed + 512LL * chunk + 16 * lane, 16, at.packed_whole, in);
    get(packed + 512LL * at.chunks + 128LL * chunk + 4 * lane, 4, at.packed_whole, signs);
    shared[place(lane)] = {in[0], in[1], in[2], in[3]};
    __syncwarp();
    unsigned steps[4][2];
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
        steps[j][0] = step_byte(shared, lane, j, 0) | static_cast<unsigned>(step_byte(shared, lane, j, 1)) << 16;
        steps[j][1] = step_byte(shared, lane, j, 2) | static_cast<unsigned>(step_byte(shared, lane, j, 3)) << 16;
    }
    const int from = lane / 8 * 8 + lane % 8 / 2, upper = lane % 2 * 16;
    const unsigned near = __shfl_sync(kFullWarp, signs[0], from) >> upper;      // rows g and g + 16
    const unsigned far = __shfl_sync(kFullWarp, signs[0], from + 4) >> upper;   // rows g + 8 and g + 24
    const unsigned minus[4] = {near >> 1, far >> 1, near, far};
    __syncwarp();
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
        unsigned word[6];
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned size = (steps[j][half] >> 4 & 0xf000fu) | (steps[j][half] & 0xf000fu) << 8;
            const unsigned negative = bytes_of(minus[j] >> (8 - 8 * half));
            const unsigned beyond = reach(size, 14);
            bad |= beyond | (negative & (reach(size, 1) ^ kOnes));
            const unsigned sound = size & ~(15 * beyond);
            const unsigned number = 13 * kOnes + (sound & ~(255 * negative)) - (sound & 255 * negative);
            const unsigned first = reach(number, 9) + reach(number, 18), rest = number - 9 * first;
            const unsigned second = reach(rest, 3) + reach(rest, 6);
            const unsigned w[3] = {first, second, rest - 3 * second};
            word[3 * half] = pick<0, 4, 8, 1>(w);
            word[3 * half + 1] = pick<5, 9, 2, 6>(w);
            word[3 * half + 2] = pick<10, 3, 7, 11>(w);
        }
        #pragma unroll
        for (int k = 0; k < 3; ++k) {
            eight(shared, lane % 8 + 8 * j, lane / 8 * 3 + k) = {trits_of(word[2 * k]), trits_of(word[2 * k + 1])};
        }
    }
    __syncwarp();
    byte* to = trits + corner(at, chunk, 96);
    #pragma unroll 2
    for (int k = 0; k < 6; ++k) {
        const int index = 32 * k + lane;
        const uint4 of = shared[sixteen(index)];
        const unsigned out[4] = {of.x, of.y, of.z, of.w};
        put(to + index / 6 * at.stride + index % 6 * 16, 16, at.whole, out);
    }
}

// --- kernels --------------------------------------------------------------------------------------

constexpr int kChunks = kFormat == Format::kTl2Pairs ? 2 : 1;  // per warp

extern "C" __global__ void __launch_bounds__(kThreads, 9)
ternary_pack_tiles(const byte* trits, byte* packed, int* flags, Shape at) {
    __shared__ Shared shared[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned bad = 0;
    for (unsigned chunk = blockIdx.x * kWarps + warp; kChunks * chunk < at.chunks; chunk += gridDim.x * kWarps) {
        if constexpr (kFormat == Format::kTl2) pack_triples(trits, packed, chunk, at, shared[warp].sixteen, lane, bad);
        else pack_pairs(trits, packed, chunk, at, shared[warp].sixteen, lane, bad);
        __syncwarp();  // before the next chunk overwrites it
    }
    report(flags, bad);
}

extern "C" __global__ void __launch_bounds__(kThreads, 9)
ternary_unpack_tiles(const byte* packed, byte* trits, int* flags, Shape at) {
    __shared__ Shared shared[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned bad = 0;
    for (unsigned chunk = blockIdx.x * kWarps + warp; kChunks * chunk < at.chunks; chunk += gridDim.x * kWarps) {
        uint4* mine = shared[warp].sixteen;
        if constexpr (kFormat == Format::kTl2) unpack_triples(packed, trits, chunk, at, mine, lane, bad);
        else unpack_pairs(packed, trits, chunk, at, mine, lane, bad);
        __syncwarp();  // before the next chunk overwrites it
    }
    report(flags, bad);
}
