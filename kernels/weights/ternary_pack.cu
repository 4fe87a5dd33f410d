// Packs trits into codes, and unpacks them.
//
//   trits    (N, K) int8, last axis contiguous          code = trit + 1
//   packed   lines of `pitch` bytes
//
//   ternary_pack      flags[block] = 1 if it met a value other than -1, 0, +1
//   ternary_unpack    flags[block] = 1 if it met bits that no encoder writes
//
// Blocks take turns with pieces of lines; a thread takes the units of a piece:
//
//   w2         a word of 16 codes: codes 4i .. 4i + 3 in the four bytes, at bits 2i; padding is 1
//   hf_bitnet  16 bytes: rows r, r + R, r + 2R, r + 3R (R lines) at bits 0, 2, 4, 6; padding rows are 0
//   planes     two bytes of each plane: bit e is set if weight e is +1 (first plane) or -1 (second)
//   base3      four bytes of five digits each, the first digit lowest; padding is 1
//   i2_s       16 bytes, half a block of 128 weights: weights b + 32 i at bits 6 - 2i. The whole array is one line
//   bitnet_gpu a word of 16 codes, trit + 2: word q of a tile of 16 x 32 has 16 columns (the upper ones if q / 8 is
//              odd) of row q / 16 * 8 + q % 8. A line is 16 rows
//
// Four codes are processed at a time, as the bytes of a word. Memory-bound: a trit takes a byte, its code a quarter of
// a byte or less. Trits are accessed 16 at a time, packed bytes 2 to 16. base3 regroups its units of 20 into accesses
// of 16 through shared memory.
//
// Macros: FORMAT, one of kW2, kHfBitnet, kPlanes, kBase3, kI2S and kBitnetGpu.
#include "ternary_pack.cuh"

enum class Format { kW2, kHfBitnet, kPlanes, kBase3, kI2S, kBitnetGpu };

constexpr Format kFormat = Format::FORMAT;
constexpr int kThreads = 256;
constexpr int kPiece = 4 * kThreads;  // in units
constexpr int kZero = kFormat == Format::kBitnetGpu ? 2 : 1;  // the code of trit 0

// A mask of those of the four bytes 4i .. 4i + 3 before `count`.
__device__ __forceinline__ unsigned there(long long count, int i) {
    const long long left = count - 4 * i;
    return left >= 4 ? 0xffffffffu : left <= 0 ? 0u : (1u << (8 * left)) - 1;
}

__device__ __forceinline__ unsigned two_bytes(const byte* from, bool whole) {
    unsigned word;
    if (whole) detail::read_words<Cache::kOnce, 2>(from, &word);
    else word = from[0] | static_cast<unsigned>(from[1]) << 8;
    return word;
}

// Bit 0 of four bytes as four bits, and back. The products' bits never overlap.
__device__ __forceinline__ unsigned gathered(unsigned bytes) { return (bytes * 0x10204080u) >> 28; }
__device__ __forceinline__ unsigned spread(unsigned bits) { return ((bits & 15) * 0x00204081u) & kOnes; }

struct Shape {
    long long stride;  // of rows of trits
    long long pitch;   // of packed lines
    long long k;
    int lines, n, units;
    int whole, packed_whole;  // rows, lines are aligned to their accesses
};

// The 16 trits of a word of w2 or bitnet_gpu.
struct Sixteen {
    long long at, count;

    __device__ __forceinline__ Sixteen(const Shape& shape, int line, int unit) {
        if constexpr (kFormat == Format::kW2) {
            at = line * shape.stride + 16LL * unit;
            count = shape.k - 16LL * unit;
        } else {
            const int row = unit % 32 / 16 * 8 + unit % 8, column = unit / 32 * 32 + unit / 8 % 2 * 16;
            at = (16LL * line + row) * shape.stride + column;
            count = 16;
        }
    }
};

// The four runs of 16 trits that share 16 bytes.
struct Runs {
    long long at, apart, count;
    int many;

    __device__ __forceinline__ Runs(const Shape& shape, int line, int unit) {
        if constexpr (kFormat == Format::kHfBitnet) {
            at = line * shape.stride + 16LL * unit;
            apart = shape.lines * shape.stride;
            count = shape.k - 16LL * unit;
            many = line + 3LL * shape.lines < shape.n ? 4 : (shape.n - 1 - line) / shape.lines + 1;
        } else {
            at = line * shape.stride + unit / 2 * 128LL + unit % 2 * 16;
            apart = 32, count = 16, many = 4;
        }
    }
};

constexpr int kFirst = kFormat == Format::kI2S ? 6 : 0, kStep = kFormat == Format::kI2S ? -2 : 2;

// One byte from each of four words: byte i of the first, j of the second and so on.
__device__ __forceinline__ unsigned bytes_of(unsigned a, int i, unsigned b, int j, unsigned c, int k, unsigned d,
                                             int l) {
    return __byte_perm(__byte_perm(a, b, i | (4 + j) << 4), __byte_perm(c, d, k | (4 + l) << 4), 0x5410);
}

// base3 stages codes in shared memory, kThreads units at a time. A thread has five words; five is odd, so 32 threads
// access different banks.
__device__ __forceinline__ void pack_base3(const byte* row, byte* to, int from_unit, int units, const Shape& at,
                                           unsigned& bad) {
    __shared__ alignas(16) unsigned tile[5 * kThreads];
    for (int first = from_unit; first < units; first += kThreads) {
        const long long column = 20LL * first;
        for (int mine = threadIdx.x; mine < 5 * kThreads / 4; mine += kThreads) {
            unsigned codes[4];
            get_codes(row + column + 16 * mine, at.k - column - 16 * mine, at.whole, codes, bad);
            reinterpret_cast<uint4*>(tile)[mine] = {codes[0], codes[1], codes[2], codes[3]};
        }
        __syncthreads();
        const unsigned* word = tile + 5 * threadIdx.x;
        unsigned numbers[1] = {0};
        #pragma unroll
        for (int j = 0; j < 4; ++j) {  // bytes 5j .. 5j + 4
            const unsigned four = j == 0 ? word[0] : __byte_perm(word[j], word[j + 1], 0x3210 + 0x1111 * j);
            numbers[0] |= __dp4a(four, 0x1b090301u, (word[j + 1] >> (8 * j) & 0xffu) * 81) << (8 * j);
        }
        const int unit = first + static_cast<int>(threadIdx.x);
        put(to + 4LL * unit, at.pitch - 4LL * unit, at.packed_whole, numbers);
        __syncthreads();  // before the next units overwrite the tile
    }
}

__device__ __forceinline__ void unpack_base3(const byte* from, byte* row, int from_unit, int units, const Shape& at,
                                             unsigned& bad) {
    __shared__ alignas(16) unsigned tile[5 * kThreads];
    for (int first = from_unit; first < units; first += kThreads) {
        const long long column = 20LL * first, byte_at = 4LL * (first + static_cast<int>(threadIdx.x));
        unsigned numbers[1], digit[5];
        get(from + byte_at, at.pitch - byte_at, at.packed_whole, numbers);
        numbers[0] |= 121 * kOnes & ~there(at.pitch - byte_at, 0);  // missing bytes become digits 1
        unsigned even = numbers[0] & 0xff00ffu, odd = numbers[0] >> 8 & 0xff00ffu;
        bad |= ((even + 13 * 0x10001u) | (odd + 13 * 0x10001u)) & 0x1000100u;
        #pragma unroll
        for (int i = 0; i < 5; ++i) {
            const unsigned thirds = even * 171 >> 9 & 0x7f007fu, odd_thirds = odd * 171 >> 9 & 0x7f007fu;
            digit[i] = (even - 3 * thirds) | (odd - 3 * odd_thirds) << 8;
            even = thirds, odd = odd_thirds;
        }
        #pragma unroll
        for (int w = 0; w < 5; ++w) {
            const int e = 4 * w;
            tile[5 * threadIdx.x + w] = bytes_of(digit[e % 5], e / 5, digit[(e + 1) % 5], (e + 1) / 5,
                                                 digit[(e + 2) % 5], (e + 2) / 5, digit[(e + 3) % 5], (e + 3) / 5);
        }
        __syncthreads();
        for (int mine = threadIdx.x; mine < 5 * kThreads / 4; mine += kThreads) {
            const uint4 codes = reinterpret_cast<const uint4*>(tile)[mine];
            unsigned out[4] = {codes.x, codes.y, codes.z, codes.w};
            const long long count = at.k - column - 16 * mine;
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                bad |= (out[i] ^ kOnes) & ~there(count, i);
                out[i] = trits_of(out[i]);
            }
            put(row + column + 16 * mine, count, at.whole, out);
        }
        __syncthreads();  // before the next units overwrite the tile
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
ternary_pack(const byte* trits, byte* packed, int* flags, Shape at) {
    unsigned bad = 0;
    for (int line = blockIdx.x; line < at.lines; line += gridDim.x) {
        byte* to = packed + line * at.pitch;
        for (int piece = blockIdx.y * kPiece; piece < at.units; piece += gridDim.y * kPiece) {
            const int end = min(at.units, piece + kPiece);
            if constexpr (kFormat == Format::kBase3) {
                pack_base3(trits + line * at.stride, to, piece, end, at, bad);
                continue;
            }
            for (int unit = piece + threadIdx.x; unit < end; unit += kThreads) {
                if constexpr (kFormat == Format::kW2 || kFormat == Format::kBitnetGpu) {
                    const Sixteen of(at, line, unit);
                    unsigned codes[4];
                    get_codes(trits + of.at, of.count, at.whole, codes, bad);
                    const unsigned word = interleaved(codes) + (kZero == 2 ? 0x55555555u : 0u);
                    detail::write_words<4>(to + 4LL * unit, &word);
                } else if constexpr (kFormat == Format::kHfBitnet || kFormat == Format::kI2S) {
                    const Runs of(at, line, unit);
                    unsigned joined[4];
                    join_runs<kFirst, kStep>(trits + of.at, of.apart, of.many, of.count, at.whole, joined, bad);
                    put(to + 16LL * unit, of.count, at.packed_whole, joined);
                } else if constexpr (kFormat == Format::kPlanes) {
                    const long long column = 16LL * unit;
                    unsigned codes[4], plus = 0, minus = 0;
                    get_codes(trits + line * at.stride + column, at.k - column, at.whole, codes, bad);
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        plus |= gathered(codes[i] >> 1 & kOnes) << (4 * i);
                        minus |= gathered(~(codes[i] | codes[i] >> 1) & kOnes) << (4 * i);
                    }
                    detail::write_words<2>(to + 2LL * unit, &plus);
                    detail::write_words<2>(to + at.pitch / 2 + 2LL * unit, &minus);
                }
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
        for (int piece = blockIdx.y * kPiece; piece < at.units; piece += gridDim.y * kPiece) {
            const int end = min(at.units, piece + kPiece);
            if constexpr (kFormat == Format::kBase3) {
                unpack_base3(from, trits + line * at.stride, piece, end, at, bad);
                continue;
            }
            for (int unit = piece + threadIdx.x; unit < end; unit += kThreads) {
                if constexpr (kFormat == Format::kW2 || kFormat == Format::kBitnetGpu) {
                    const Sixteen of(at, line, unit);
                    unsigned word[1], out[4];
                    get(from + 4LL * unit, 4, at.packed_whole, word);
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const unsigned codes = word[0] >> (2 * i) & 3 * kOnes, inside = there(of.count, i);
                        bad |= (threes(codes ^ (kZero == 2 ? 3 * kOnes : 0u)) & inside) | ((codes ^ kOnes) & ~inside);
                        out[i] = trits_of<kZero>(codes);
                    }
                    put(trits + of.at, of.count, at.whole, out);
                } else if constexpr (kFormat == Format::kHfBitnet || kFormat == Format::kI2S) {
                    const Runs of(at, line, unit);
                    unsigned joined[4];
                    get(from + 16LL * unit, of.count, at.packed_whole, joined);
                    split_runs<kFirst, kStep>(joined, trits + of.at, of.apart, of.many, of.count, at.whole, bad);
                } else if constexpr (kFormat == Format::kPlanes) {
                    const long long column = 16LL * unit, count = at.k - column;
                    const unsigned plus = two_bytes(from + 2LL * unit, at.packed_whole);
                    const unsigned minus = two_bytes(from + at.pitch / 2 + 2LL * unit, at.packed_whole);
                    const unsigned inside = count >= 16 ? 0xffffu : count <= 0 ? 0u : (1u << count) - 1;
                    bad |= (plus & minus & inside) | ((plus | minus) & ~inside);
                    unsigned out[4];
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        out[i] = trits_of(spread(plus >> (4 * i)) + kOnes - spread(minus >> (4 * i)));
                    }
                    put(trits + line * at.stride + column, count, at.whole, out);
                }
            }
        }
    }
    report(flags, bad);
}
