// Trits to packed codes and back.
//
//   trits    (N, K) int8, last axis contiguous          code = trit + 1
//   packed   lines of `pitch` bytes, side by side
//
//   ternary_pack      flags[block] = whether it met anything but -1, 0, +1
//   ternary_unpack    flags[block] = whether it met anything that no encoder writes
//
// A block takes lines in turn, a thread the units of a line:
//
//   w2         a word of 16 codes: codes 4i .. 4i + 3 in the four bytes, at bits 2i; padding 1
//   hf_bitnet  16 bytes: of the rows r, r + R, r + 2R, r + 3R (R lines) at bits 0, 2, 4, 6; padding rows 0
//   planes     two bytes of each plane: bit e says that weight e is +1, that it is -1
//   base3      a byte: five digits, the first one lowest; padding 1
//
// Four codes are handled at a time, as the bytes of a word. Memory is the limit: a trit is a byte, and its code a
// quarter of one or less. Trits go 16 to an access, packed bytes 2 to 16; base3's fives become sixteens by way of
// shared memory, and its packed bytes go one to a thread.
//
// Macros: FORMAT, one of kW2, kHfBitnet, kPlanes and kBase3.
#include "vec.cuh"

enum class Format { kW2, kHfBitnet, kPlanes, kBase3 };

typedef unsigned char byte;

constexpr Format kFormat = Format::FORMAT;
constexpr int kThreads = 256;
constexpr int kColumns = kFormat == Format::kBase3 ? 5 : 16;  // of a unit
constexpr int kTile = 5 * kThreads;                          // trits of base3 at a time
constexpr unsigned kOnes = 0x01010101u;

__device__ __forceinline__ unsigned codes_of(unsigned trits) { return ((trits & 3 * kOnes) + kOnes) & 3 * kOnes; }

// Code 3 gives +2.
__device__ __forceinline__ unsigned trits_of(unsigned codes) { return ((codes | 128 * kOnes) - kOnes) ^ 128 * kOnes; }

__device__ __forceinline__ unsigned threes(unsigned codes) { return codes & codes >> 1 & kOnes; }

// Bits of the four bytes 4i .. 4i + 3 of which `count` bytes are there.
__device__ __forceinline__ unsigned there(long long count, int i) {
    const long long left = count - 4 * i;
    return left >= 4 ? 0xffffffffu : left <= 0 ? 0u : (1u << (8 * left)) - 1;
}

// kWords words from bytes of which `count` are there, the others 0; in one access where `whole`.
template <int kWords>
__device__ __forceinline__ void get(const byte* from, long long count, bool whole, unsigned (&word)[kWords]) {
    if (whole && count >= 4 * kWords) {
        detail::read_words<Cache::kOnce, 4 * kWords>(from, word);
        return;
    }
    #pragma unroll
    for (int i = 0; i < kWords; ++i) {
        word[i] = 0;
        #pragma unroll
        for (int b = 0; b < 4; ++b) {
            if (4 * i + b < count) word[i] |= static_cast<unsigned>(from[4 * i + b]) << (8 * b);
        }
    }
}

__device__ __forceinline__ unsigned two_bytes(const byte* from, bool whole) {
    unsigned word;
    if (whole) detail::read_words<Cache::kOnce, 2>(from, &word);
    else word = from[0] | static_cast<unsigned>(from[1]) << 8;
    return word;
}

__device__ __forceinline__ void put(byte* to, long long count, bool whole, const unsigned (&word)[4]) {
    if (whole && count >= 16) {
        detail::write_words<16>(to, word);
        return;
    }
    #pragma unroll
    for (int b = 0; b < 16; ++b) {
        if (b < count) to[b] = static_cast<byte>(word[b / 4] >> (8 * (b % 4)));
    }
}

// 16 codes, from the trits of which `count` are there and the others are 0.
__device__ __forceinline__ void get_codes(const byte* trits, long long count, bool whole, unsigned (&codes)[4],
                                          unsigned& bad) {
    unsigned word[4];
    get(trits, count, whole, word);
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        codes[i] = codes_of(word[i]);
        bad |= (word[i] ^ trits_of(codes[i])) | threes(codes[i]);
    }
}

// Bit 0 of four bytes as four bits, and back: the products' bits never meet.
__device__ __forceinline__ unsigned gathered(unsigned bytes) { return (bytes * 0x10204080u) >> 28; }
__device__ __forceinline__ unsigned spread(unsigned bits) { return ((bits & 15) * 0x00204081u) & kOnes; }

struct Shape {
    long long stride;  // of trits' rows
    long long pitch;   // of packed lines
    int lines, n, k, units;
    int whole, packed_whole;  // rows, lines are aligned to their accesses
};

// A line of base3: kThreads units at a time, whose trits lie in shared memory meanwhile.
__device__ __forceinline__ void pack_base3(const byte* row, byte* to, const Shape& at, unsigned& bad) {
    __shared__ alignas(16) byte tile[kTile];
    for (int first = 0; first < at.units; first += kThreads) {
        const long long column = (long long)first * kColumns;
        const int mine = 16 * static_cast<int>(threadIdx.x), unit = first + static_cast<int>(threadIdx.x);
        if (mine < kTile) {
            unsigned word[4];
            get(row + column + mine, at.k - column - mine, at.whole, word);
            *reinterpret_cast<uint4*>(tile + mine) = {word[0], word[1], word[2], word[3]};
        }
        __syncthreads();
        int number = 0, power = 1;
        #pragma unroll
        for (int i = 0; i < 5; ++i, power *= 3) {
            const int code = static_cast<signed char>(tile[5 * threadIdx.x + i]) + 1;
            bad |= static_cast<unsigned>(code) > 2u;
            number += code * power;
        }
        if (unit < at.units) to[unit] = static_cast<byte>(number);
        __syncthreads();  // free for the next ones
    }
}

__device__ __forceinline__ void unpack_base3(const byte* from, byte* row, const Shape& at, unsigned& bad) {
    __shared__ alignas(16) byte tile[kTile];
    for (int first = 0; first < at.units; first += kThreads) {
        const long long column = (long long)first * kColumns;
        const int mine = 16 * static_cast<int>(threadIdx.x), unit = first + static_cast<int>(threadIdx.x);
        int number = unit < at.units ? from[unit] : 0;
        bad |= number > 242;
        #pragma unroll
        for (int i = 0; i < 5; ++i, number /= 3) {
            tile[5 * threadIdx.x + i] = static_cast<byte>(number % 3 - 1);
            bad |= unit < at.units && column + 5 * threadIdx.x + i >= at.k && number % 3 != 1;
        }
        __syncthreads();
        if (mine < kTile) {
            const uint4 trits = *reinterpret_cast<const uint4*>(tile + mine);
            const unsigned word[4] = {trits.x, trits.y, trits.z, trits.w};
            put(row + column + mine, at.k - column - mine, at.whole, word);
        }
        __syncthreads();  // free for the next ones
    }
}

__device__ __forceinline__ void report(int* flags, unsigned bad) {
    const int any = __syncthreads_or(bad != 0);
    if (threadIdx.x == 0) flags[blockIdx.x] = any;
}

extern "C" __global__ void __launch_bounds__(kThreads)
ternary_pack(const byte* trits, byte* packed, int* flags, Shape at) {
    unsigned bad = 0;
    for (int line = blockIdx.x; line < at.lines; line += gridDim.x) {
        const byte* row = trits + line * at.stride;
        byte* to = packed + line * at.pitch;
        if constexpr (kFormat == Format::kBase3) {
            pack_base3(row, to, at, bad);
            continue;
        }
        for (int unit = threadIdx.x; unit < at.units; unit += kThreads) {
            const long long column = (long long)unit * kColumns, count = at.k - column;
            unsigned codes[4];
            if constexpr (kFormat == Format::kW2) {
                get_codes(row + column, count, at.whole, codes, bad);
                const unsigned word = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6;
                detail::write_words<4>(to + 4 * unit, &word);
            } else if constexpr (kFormat == Format::kHfBitnet) {
                unsigned joined[4] = {};
                #pragma unroll
                for (int q = 0; q < 4; ++q) {
                    if (line + (long long)q * at.lines >= at.n) continue;
                    get_codes(row + (long long)q * at.lines * at.stride + column, count, at.whole, codes, bad);
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) joined[i] |= codes[i] << (2 * q);
                }
                put(to + column, count, at.packed_whole, joined);
            } else if constexpr (kFormat == Format::kPlanes) {
                get_codes(row + column, count, at.whole, codes, bad);
                unsigned plus = 0, minus = 0;
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    plus |= gathered(codes[i] >> 1 & kOnes) << (4 * i);
                    minus |= gathered(~(codes[i] | codes[i] >> 1) & kOnes) << (4 * i);
                }
                detail::write_words<2>(to + 2 * unit, &plus);
                detail::write_words<2>(to + at.pitch / 2 + 2 * unit, &minus);
            }
        }
    }
    report(flags, bad);
}

extern "C" __global__ void __launch_bounds__(kThreads)
ternary_unpack(const byte* packed, byte* trits, int* flags, Shape at) {
    unsigned bad = 0;
    for (int line = blockIdx.x; line < at.lines; line += gridDim.x) {
        const byte* from = packed + line * at.pitch;
        byte* row = trits + line * at.stride;
        if constexpr (kFormat == Format::kBase3) {
            unpack_base3(from, row, at, bad);
            continue;
        }
        for (int unit = threadIdx.x; unit < at.units; unit += kThreads) {
            const long long column = (long long)unit * kColumns, count = at.k - column;
            if constexpr (kFormat == Format::kW2) {
                unsigned word[1], out[4];
                get(from + 4 * unit, 4, at.packed_whole, word);
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const unsigned codes = word[0] >> (2 * i) & 3 * kOnes, inside = there(count, i);
                    bad |= (threes(codes) & inside) | ((codes ^ kOnes) & ~inside);
                    out[i] = trits_of(codes);
                }
                put(row + column, count, at.whole, out);
            } else if constexpr (kFormat == Format::kHfBitnet) {
                unsigned word[4];
                get(from + column, count, at.packed_whole, word);
                #pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const bool padding = line + (long long)q * at.lines >= at.n;
                    unsigned out[4];
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const unsigned codes = word[i] >> (2 * q) & 3 * kOnes;
                        bad |= padding ? codes : threes(codes);
                        out[i] = trits_of(codes);
                    }
                    if (!padding) put(row + (long long)q * at.lines * at.stride + column, count, at.whole, out);
                }
            } else if constexpr (kFormat == Format::kPlanes) {
                const unsigned plus = two_bytes(from + 2 * unit, at.packed_whole);
                const unsigned minus = two_bytes(from + at.pitch / 2 + 2 * unit, at.packed_whole);
                const unsigned inside = count >= 16 ? 0xffffu : count <= 0 ? 0u : (1u << count) - 1;
                bad |= (plus & minus & inside) | ((plus | minus) & ~inside);
                unsigned out[4];
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    out[i] = trits_of(spread(plus >> (4 * i)) + kOnes - spread(minus >> (4 * i)));
                }
                put(row + column, count, at.whole, out);
            }
        }
    }
    report(flags, bad);
}
