// Packs trits into the blocks of llama.cpp's GGUF files (codes with a float16 scale), and unpacks them.
//
//   trits    (N, K) int8, last axis contiguous, K a multiple of the block       code = trit + 1
//   packed   contiguous blocks:
//
//            weights   bytes
//   tq1_0    256       48 + 4 of base-3 fractions   scale (2)     qs[m]: weights m + 32 n, n = 0 .. 4, m < 32
//                                                                 qs[32 + m]: 160 + m + 16 n, m < 16
//                                                                 qh[m]: 240 + m + 4 n, n = 0 .. 3
//   tq2_0    256       64 of four codes             scale (2)     byte 32 h + b: weights 128 h + b + 32 i at bits 2i
//   q2_0     64        scale (2)      16 of four codes            byte b: weights 4 b + i at bits 2i
//
//   ternary_pack_blocks      flags[block] = 1 if it met a value other than -1, 0, +1, or a scale beyond float16
//   ternary_unpack_blocks    flags[block] = 1 if it met bits that no encoder writes
//
// A fraction holds digits d0 .. d4 as 0.d0d1d2d3d4 in base 3, rounded up to a multiple of 1 / 256. Multiplied by
// 3^(n + 1), its integer part ends in digit n. A missing fifth digit is 0.
//
// Blocks of 54, 66 and 18 bytes only allow accesses of two bytes. So a warp takes 16 or 32 blocks at a time and stages
// their codes in shared memory, without the scales. Packed bytes then move in words, each half of which is a scale or
// two bytes of codes. Global accesses are adjacent and as wide as possible, and there are no bank conflicts.
//
// Macros: FORMAT, one of kTq1, kTq2 and kQ2.
#include "dtype.cuh"
#include "ternary_pack.cuh"

enum class Format { kTq1, kTq2, kQ2 };

constexpr Format kFormat = Format::FORMAT;
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlock = kFormat == Format::kQ2 ? 64 : 256;                                    // weights per block
constexpr int kBytes = kFormat == Format::kTq1 ? 54 : kFormat == Format::kTq2 ? 66 : 18;     // bytes
constexpr int kHalves = kBytes / 2, kCodeHalves = kHalves - 1;                               // two-byte halves per block
constexpr int kScaleAt = kFormat == Format::kQ2 ? 0 : kHalves - 1;                           // which half is the scale
constexpr int kBlocks = kFormat == Format::kQ2 ? 32 : 16;                                    // blocks per warp
constexpr int kWords = kBlocks * kHalves / 2, kSteps = (kWords + 31) / 32;  // words per warp, per lane
constexpr unsigned kFullWarp = 0xffffffffu;

struct Shared {
    alignas(16) unsigned codes[kBlocks * kCodeHalves / 2];
    alignas(16) uint4 digits[kFormat == Format::kTq1 ? 128 : 1];  // codes of eight blocks of tq1_0, one per byte
};

struct Shape {
    long long stride;                     // of rows of trits
    long long blocks;                     // in all
    long long scale_stride;               // of rows of scale
    int per_row;                          // blocks
    int scale_step;                       // between the scales of adjacent blocks
    int whole, packed_whole;              // trits, packed are aligned to their accesses
};

// The blocks of a warp.
struct Part {
    long long first, row;
    int column, many;  // column: first block in its row; many: blocks that exist
    bool flat;         // rows of trits are contiguous
    const Shape& at;

    __device__ __forceinline__ Part(const Shape& shape, long long part) : first(part * kBlocks), at(shape) {
        row = first / at.per_row;
        column = static_cast<int>(first - row * at.per_row);
        many = static_cast<int>(min(static_cast<long long>(kBlocks), at.blocks - first));
        flat = at.stride == static_cast<long long>(at.per_row) * kBlock;
    }

    // block: counted from the warp's first.
    __device__ __forceinline__ long long trits_of_block(int block) const {
        if (flat) return (first + block) * kBlock;
        const unsigned across = column + block;
        return (row + across / at.per_row) * at.stride + static_cast<long long>(across % at.per_row) * kBlock;
    }
    __device__ __forceinline__ long long scale_of_block(int block) const {
        const unsigned across = column + block;
        return (row + across / at.per_row) * at.scale_stride
               + static_cast<long long>(across % at.per_row) * at.scale_step;
    }
};

// --- four codes per byte --------------------------------------------------------------------------

// Folds four codes, the bytes of a word, into one byte, and back.
__device__ __forceinline__ unsigned folded(unsigned codes) {
    const unsigned pairs = codes | codes >> 6;
    return (pairs | pairs >> 12) & 0xffu;
}
__device__ __forceinline__ unsigned unfolded(unsigned bits) {
    const unsigned pairs = (bits | bits << 12) & 0x000f000fu;
    return (pairs | pairs << 6) & 3 * kOnes;
}

__device__ __forceinline__ void pack_codes_q2(const byte* trits, const Part& part, unsigned* codes, int lane,
                                              unsigned& bad) {
    #pragma unroll
    for (int step = 0; step < 4; ++step) {  // 16 weights, one word
        const int i = 32 * step + lane, block = i / 4;
        unsigned four[4];
        get_codes(trits + part.trits_of_block(block) + i % 4 * 16, block < part.many ? 16 : 0, part.at.whole, four,
                  bad);
        codes[i] = folded(four[0]) | folded(four[1]) << 8 | folded(four[2]) << 16 | folded(four[3]) << 24;
    }
}

__device__ __forceinline__ void unpack_codes_q2(const unsigned* codes, const Part& part, byte* trits, int lane,
                                                unsigned& bad) {
    #pragma unroll
    for (int step = 0; step < 4; ++step) {
        const int i = 32 * step + lane, block = i / 4;
        if (block >= part.many) continue;
        unsigned out[4];
        #pragma unroll
        for (int w = 0; w < 4; ++w) {
            const unsigned four = unfolded(codes[i] >> (8 * w) & 0xffu);
            bad |= threes(four);
            out[w] = trits_of(four);
        }
        put(trits + part.trits_of_block(block) + i % 4 * 16, 16, part.at.whole, out);
    }
}

__device__ __forceinline__ void pack_codes_tq2(const byte* trits, const Part& part, unsigned* codes, int lane,
                                               unsigned& bad) {
    #pragma unroll 1
    for (int i = lane; i < 64; i += 32) {  // four runs of 16 weights, 32 apart: 16 bytes
        const int block = i / 4;
        unsigned joined[4];
        join_runs<0, 2>(trits + part.trits_of_block(block) + i % 4 / 2 * 128 + i % 2 * 16, 32, 4,
                        block < part.many ? 16 : 0, part.at.whole, joined, bad);
        reinterpret_cast<uint4*>(codes)[i] = {joined[0], joined[1], joined[2], joined[3]};
    }
}

__device__ __forceinline__ void unpack_codes_tq2(const unsigned* codes, const Part& part, byte* trits, int lane,
                                                 unsigned& bad) {
    #pragma unroll 1
    for (int i = lane; i < 64; i += 32) {
        const int block = i / 4;
        if (block >= part.many) continue;
        const uint4 in = reinterpret_cast<const uint4*>(codes)[i];
        const unsigned joined[4] = {in.x, in.y, in.z, in.w};
        split_runs<0, 2>(joined, trits + part.trits_of_block(block) + i % 4 / 2 * 128 + i % 2 * 16, 32, 4, 16,
                         part.at.whole, bad);
    }
}

// --- fractions ------------------------------------------------------------------------------------

// The place of 16 codes (run `run` of a block) in shared memory. Eight lanes write adjacent runs. When reading, four
// lanes of each of two blocks read at a time, lane u digit n of unit u:
//
//   unit 0: bytes  0 .. 15 of qs, runs 0, 2, 4, 6, 8        unit 2: bytes 32 .. 47, runs 10 .. 14
//   unit 1: bytes 16 .. 31,       runs 1, 3, 5, 7, 9        unit 3: qh, run 15
//
// Runs 10 .. 15 are permuted so that those eight lanes cover all 128 bytes of the banks, in both directions.
__device__ __forceinline__ int sixteen(int block, int run) {
    return 16 * block + (static_cast<int>(0xbfdeca9876543210ull >> (4 * run) & 15) ^ (block & 1) << 2);
}
__device__ __forceinline__ int run_of(int unit, int digit) { return unit == 2 ? 10 + digit : unit + 2 * digit; }

// Four numbers 0 .. 242 (bytes) as fractions of 243, rounded up to 1 / 256: the highest byte of a 32-bit product.
__device__ __forceinline__ unsigned fractions(unsigned numbers) {
    unsigned of[4];
    #pragma unroll
    for (int b = 0; b < 4; ++b) of[b] = (numbers >> (8 * b) & 0xffu) * (0xffffffffu / 243) + 0xffffffu;
    return __byte_perm(__byte_perm(of[0], of[1], 0x73), __byte_perm(of[2], of[3], 0x73), 0x5410);
}

// The digits of four fractions, first digit first.
struct Digits {
    unsigned even, odd;  // bytes 0 and 2; bytes 1 and 3

    explicit __device__ __forceinline__ Digits(unsigned bytes) : even(bytes & 0xff00ffu), odd(bytes >> 8 & 0xff00ffu) {}
    __device__ __forceinline__ unsigned next() {
        even *= 3, odd *= 3;
        const unsigned digits = (even >> 8 & 0xff00ffu) | (odd & 0xff00ff00u);
        even &= 0xff00ffu, odd &= 0xff00ffu;
        return digits;
    }
};

__device__ __forceinline__ void pack_codes_tq1(const byte* trits, const Part& part, unsigned* codes, uint4* digits,
                                               int lane, unsigned& bad) {
    for (int first = 0; first < kBlocks; first += 8) {
        __syncwarp();
        #pragma unroll
        for (int i = lane; i < 128; i += 32) {
            const int block = i / 16, run = i % 16;
            unsigned four[4];
            get_codes(trits + part.trits_of_block(first + block) + 16 * run, first + block < part.many ? 16 : 0,
                      part.at.whole, four, bad);
            digits[sixteen(block, run)] = {four[0], four[1], four[2], four[3]};
        }
        __syncwarp();
        const int block = lane / 4, unit = lane % 4;
        unsigned* to = codes + (first + block) * (kCodeHalves / 2) + 4 * unit;
        if (unit == 3) {
            const uint4 digit = digits[sixteen(block, 15)];
            to[0] = fractions(3 * (3 * (3 * (3 * digit.x + digit.y) + digit.z) + digit.w));
        }
        __syncwarp();  // keeps the compiler from merging the stores, which would conflict in a bank
        if (unit < 3) {
            uint4 number = {};
            #pragma unroll
            for (int n = 0; n < 5; ++n) {
                const uint4 digit = digits[sixteen(block, run_of(unit, n))];
                number = {3 * number.x + digit.x, 3 * number.y + digit.y, 3 * number.z + digit.z,
                          3 * number.w + digit.w};
            }
            to[0] = fractions(number.x), to[1] = fractions(number.y);
            to[2] = fractions(number.z), to[3] = fractions(number.w);
        }
    }
}

__device__ __forceinline__ void unpack_codes_tq1(const unsigned* codes, const Part& part, byte* trits, uint4* digits,
                                                 int lane, unsigned& bad) {
    for (int first = 0; first < kBlocks; first += 8) {
        const int block = lane / 4, unit = lane % 4;
        const bool there = first + block < part.many;
        const unsigned* from = codes + (first + block) * (kCodeHalves / 2) + 4 * unit;
        unsigned wrong = 0;
        __syncwarp();
        if (unit == 3) {
            Digits word(from[0]);
            uint4 digit;
            digit.x = word.next(), digit.y = word.next(), digit.z = word.next(), digit.w = word.next();
            digits[sixteen(block, 15)] = digit;
            wrong = fractions(3 * (3 * (3 * (3 * digit.x + digit.y) + digit.z) + digit.w)) ^ from[0];
        }
        __syncwarp();  // as above
        if (unit < 3) {
            unsigned number[4] = {};
            Digits word[4] = {Digits(from[0]), Digits(from[1]), Digits(from[2]), Digits(from[3])};
            #pragma unroll
            for (int n = 0; n < 5; ++n) {
                unsigned digit[4];
                #pragma unroll
                for (int w = 0; w < 4; ++w) {
                    digit[w] = word[w].next();
                    number[w] = 3 * number[w] + digit[w];
                }
                digits[sixteen(block, run_of(unit, n))] = {digit[0], digit[1], digit[2], digit[3]};
            }
            #pragma unroll
            for (int w = 0; w < 4; ++w) wrong |= fractions(number[w]) ^ from[w];
        }
        if (there) bad |= wrong;
        __syncwarp();
        #pragma unroll
        for (int i = lane; i < 128; i += 32) {
            const uint4 of = digits[sixteen(i / 16, i % 16)];
            const unsigned out[4] = {trits_of(of.x), trits_of(of.y), trits_of(of.z), trits_of(of.w)};
            if (first + i / 16 < part.many) {
                put(trits + part.trits_of_block(first + i / 16) + i % 16 * 16, 16, part.at.whole, out);
            }
        }
    }
}

// --- blocks ---------------------------------------------------------------------------------------

// Half `half` of the warp's bytes: its block, whether it is the scale, and where its codes (or adjacent ones) are.
struct Half {
    int block, place;
    bool scales;

    explicit __device__ __forceinline__ Half(int half) : block(half / kHalves) {
        const int in = half % kHalves;
        scales = in == kScaleAt;
        place = block * kCodeHalves + min(max(in - (kScaleAt == 0), 0), kCodeHalves - 1);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 5)
ternary_pack_blocks(const byte* trits, byte* packed, int* flags, const float* scale, Shape at) {
    __shared__ Shared shared[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned* codes = shared[warp].codes;
    const unsigned short* halves = reinterpret_cast<const unsigned short*>(codes);
    unsigned bad = 0;
    for (long long p = (long long)blockIdx.x * kWarps + warp; p * kBlocks < at.blocks; p += gridDim.x * kWarps) {
        const Part part(at, p);
        unsigned my_scale = 0;  // of block `lane`
        if (lane < part.many) {
            const float of[2] = {scale[part.scale_of_block(lane)], 0.0f};
            my_scale = Packed<f16>::narrow(of);
            bad |= (my_scale & 0x7c00u) == 0x7c00u;
        }
        if constexpr (kFormat == Format::kTq1) pack_codes_tq1(trits, part, codes, shared[warp].digits, lane, bad);
        else if constexpr (kFormat == Format::kTq2) pack_codes_tq2(trits, part, codes, lane, bad);
        else pack_codes_q2(trits, part, codes, lane, bad);
        __syncwarp();
        byte* to = packed + part.first * kBytes;
        #pragma unroll 3
        for (int i = 0; i < kSteps; ++i) {
            const int w = min(32 * i + lane, kWords - 1);  // all lanes take part, to share their scales
            unsigned word[1] = {0};
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Half half(2 * w + h);
                const unsigned of_block = __shfl_sync(kFullWarp, my_scale, half.block), of_codes = halves[half.place];
                word[0] |= (half.scales ? of_block : of_codes) << (16 * h);
            }
            put(to + 4 * w, 32 * i + lane < kWords ? part.many * kBytes - 4 * w : 0, at.packed_whole, word);
        }
        __syncwarp();  // before the next blocks overwrite the codes
    }
    report(flags, bad);
}

extern "C" __global__ void __launch_bounds__(kThreads, 5)
ternary_unpack_blocks(const byte* packed, byte* trits, int* flags, Shape at) {
    __shared__ Shared shared[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned* codes = shared[warp].codes;
    unsigned short* halves = reinterpret_cast<unsigned short*>(codes);
    unsigned bad = 0;
    for (long long p = (long long)blockIdx.x * kWarps + warp; p * kBlocks < at.blocks; p += gridDim.x * kWarps) {
        const Part part(at, p);
        const byte* from = packed + part.first * kBytes;
        #pragma unroll 1
        for (int first = lane; first < 32 * kSteps; first += 96) {  // three words per lane in flight
            unsigned word[3][1];                                    // zero past the end
            #pragma unroll
            for (int i = 0; i < 3; ++i) {
                const int w = first + 32 * i;
                get(from + 4 * w, w < kWords ? part.many * kBytes - 4 * w : 0, at.packed_whole, word[i]);
            }
            #pragma unroll
            for (int i = 0; i < 6; ++i) {
                const Half half(2 * (first + i / 2 * 32) + i % 2);
                const unsigned bits = word[i / 2][0] >> (16 * (i % 2)) & 0xffffu;
                bad |= half.scales & ((bits & 0x7c00u) == 0x7c00u);
                if (!half.scales && half.block < kBlocks) halves[half.place] = static_cast<unsigned short>(bits);
            }
        }
        __syncwarp();
        if constexpr (kFormat == Format::kTq1) unpack_codes_tq1(codes, part, trits, shared[warp].digits, lane, bad);
        else if constexpr (kFormat == Format::kTq2) unpack_codes_tq2(codes, part, trits, lane, bad);
        else unpack_codes_q2(codes, part, trits, lane, bad);
        __syncwarp();  // before the next blocks overwrite the codes
    }
    report(flags, bad);
}
