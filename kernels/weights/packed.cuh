// Weights in panels (weights/packed_panels.py) of 32 rows: the fields of their blocks, and their decoding.
//
//   weight = (scale * run_scale) * value[code] - (minimum * run_minimum), each operation rounded to float;
//   with RUN_MINIMUMS and no MINIMUM these are zero points: weight = scale * (code - run_minimum);
//   with SCALE 8 scales are nested: (scales[run_scale] * scale + offset) takes the place of scale * run_scale
//
// Macros: BLOCK, RUN weights; BITS of a code; SCALE (1: 2^(byte - 128), 2: half, 4: float, 8: float, and float offset);
// RUN_SCALES, MINIMUM, RUN_MINIMUMS: whether blocks have them; CODES: kIntegers, from which OFFSET is subtracted,
// kTable: indices of `values` (2^BITS, then 256 scales if they are nested), or kE4M3.
#pragma once
#include "scalar.cuh"
#include "vec.cuh"

enum Code { kIntegers, kTable, kE4M3 };

constexpr bool kNested = SCALE == 8;
constexpr int kRows = 32, kUnit = 32, kTableSize = CODES == kTable ? (1 << BITS) + 256 * kNested : 1;
constexpr int kRuns = BLOCK / RUN, kUnits = BLOCK / kUnit;
constexpr int kLow = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2, kHigh = BITS - kLow;  // bits of the two planes
constexpr int kRowBytes = SCALE + 2 * MINIMUM + kRuns * (RUN_SCALES + RUN_MINIMUMS) + BLOCK * BITS / 8;
constexpr int kBlockBytes = kRowBytes * kRows;
constexpr bool kZeros = RUN_MINIMUMS && !MINIMUM;
// Whether scale * value has no rounding: 11 bits of a half, 8 of a run's scale, and the code.
constexpr bool kExactProducts = SCALE == 2 && CODES == kIntegers && 11 + 8 * RUN_SCALES + BITS <= 24;

// The values of codes and of nested scales, in shared memory: lanes read different ones.
__device__ __forceinline__ void copy_table(float (&table)[kTableSize], const float* values) {
    if constexpr (CODES == kTable) {
        for (int i = threadIdx.x; i < kTableSize; i += blockDim.x) table[i] = values[i];
        __syncthreads();
    }
}

__device__ __forceinline__ float scale_of(unsigned short half) { return widened(f16{half}); }
__device__ __forceinline__ float scale_of(float scale) { return scale; }
__device__ __forceinline__ float scale_of(unsigned char e) {  // 2^(e - 128); of 0 and 1 it is denormal
    return __uint_as_float(e < 2 ? 0x00200000u << e : e - 1u << 23);
}

// Value of byte i of `codes`. A float's mantissa takes an integer as it is, above a power of two that is subtracted.
__device__ __forceinline__ float value_of(const float* table, unsigned codes, int i) {
    if (CODES == kTable) {  // in bytes, four codes at a time
        const unsigned offset = __byte_perm(codes << 2, 0, 0x4440 | i);
        return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(table) + offset);
    }
    if (CODES == kE4M3) {
        const unsigned code = codes >> 8 * i & 255, magnitude = code & 127;
        const float value = __fmul_rn(__uint_as_float(magnitude << 20), 0x1p120f);  // the bias is 127, not 7
        const unsigned bits = magnitude == 127 ? 0x7fffffffu : __float_as_uint(value);
        return __uint_as_float(bits | (code & 128) << 24);
    }
    if (BITS < 8) return __uint_as_float(__byte_perm(codes, 0x4300, 0x5044 | i << 8)) - (128.0f + OFFSET);
    return __uint_as_float(__byte_perm(codes, 0x4700, 0x5404 | i << 4)) - (32768.0f + OFFSET);
}

// kCount weights of a row, from one that is a multiple of kCount in a block: their codes and scales, as they are read.
// Scales, and words of more than kCount codes, are read by other lanes too.
template <int kCount> class Codes {
public:
    // From weight first + more of a block: both are multiples of kCount, and `more` is a constant that does not carry
    // into `first`, so that it becomes an offset of the loads.
    __device__ __forceinline__ void read(const unsigned char* block, unsigned first, unsigned more, unsigned row) {
        const unsigned char* at = block;
        scale_ = __ldg(reinterpret_cast<const Scale*>(at) + row);
        if (kNested) offset_ = __ldg(reinterpret_cast<const float*>(at) + kRows + row);
        at += SCALE * kRows;
        if (MINIMUM) minimum_ = __ldg(reinterpret_cast<const unsigned short*>(at) + row);
        at += 2 * MINIMUM * kRows;
        #pragma unroll
        for (int i = 0; i < kCovered; ++i) {
            const unsigned char* run = at + first / RUN * kRows + row + (more / RUN + i) * kRows;
            if (RUN_SCALES) run_scale_[i] = __ldg(reinterpret_cast<const signed char*>(run));
            if (RUN_MINIMUMS) run_minimum_[i] = __ldg(run + RUN_SCALES * kRuns * kRows);
        }
        at += kRuns * (RUN_SCALES + RUN_MINIMUMS) * kRows;
        read_plane<kLow>(low_, at, first, more, row);
        if constexpr (kHigh > 0) read_plane<kHigh>(high_, at + BLOCK * kLow / 8 * kRows, first, more, row);
        step_ = (first + more) / 4;
    }

    // Codes of weights 4 step .. 4 step + 3, a byte each.
    __device__ __forceinline__ unsigned codes(int step) const {
        unsigned result = part<kLow, kLowWords>(low_, step);
        if constexpr (kHigh > 0) result |= part<kHigh, kHighWords>(high_, step) << kLow;
        return result;
    }

    // Word i of the low plane.
    __device__ __forceinline__ unsigned word(int i) const { return low_[i]; }

    __device__ __forceinline__ float scale() const { return scale_of(scale_); }

    __device__ __forceinline__ float minimum() const { return MINIMUM ? scale_of(minimum_) : 0.0f; }

    __device__ __forceinline__ int run_scale(int step) const { return RUN_SCALES ? run_scale_[4 * step / RUN] : 1; }

    __device__ __forceinline__ int run_minimum(int step) const {
        return RUN_MINIMUMS ? run_minimum_[4 * step / RUN] : 1;
    }

    __device__ __forceinline__ void decode(const float* table, float (&weight)[kCount]) const {
        float scale = this->scale(), minimum = this->minimum(), zero = 0.0f;
        const float block_scale = scale, block_minimum = minimum;
        #pragma unroll
        for (int step = 0; step < kCount / 4; ++step) {
            if (step * 4 % RUN == 0) {
                if (kNested) scale = __fadd_rn(__fmul_rn(table[(1 << BITS) + (run_scale(step) & 255)], block_scale), offset_);
                else if (RUN_SCALES) scale = __fmul_rn(block_scale, run_scale(step));
                if (RUN_MINIMUMS && MINIMUM) minimum = __fmul_rn(block_minimum, run_minimum(step));
                if (kZeros) zero = run_minimum(step);
            }
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                float value = value_of(table, codes(step), i);
                if (kZeros) value -= zero;
                float& result = weight[4 * step + i];
                if (!MINIMUM) result = __fmul_rn(scale, value);
                else result = kExactProducts ? fmaf(scale, value, -minimum) : __fsub_rn(__fmul_rn(scale, value), minimum);
            }
        }
    }

private:
    typedef typename ChooseType<SCALE == 2, unsigned short, unsigned char>::type SmallScale;
    typedef typename ChooseType<SCALE >= 4, float, SmallScale>::type Scale;

    template <int kBits> static constexpr Cache kReads = kCount * kBits < 32 ? Cache::kConstant : Cache::kOnce;
    static constexpr int kCovered = kCount < RUN ? 1 : kCount / RUN;
    static constexpr int kLowWords = kCount * kLow < 32 ? 1 : kCount * kLow / 32;
    static constexpr int kHighWords = kHigh == 0 ? 0 : kCount * kHigh < 32 ? 1 : kCount * kHigh / 32;

    template <int kBits, int kWords>
    static __device__ __forceinline__ void
    read_plane(unsigned (&word)[kWords], const unsigned char* plane, unsigned first, unsigned more, unsigned row) {
        const unsigned* at = reinterpret_cast<const unsigned*>(plane) + first * kBits / 32 * kRows + row;
        #pragma unroll
        for (int i = 0; i < kWords; ++i) word[i] = detail::read<kReads<kBits>>(at + (more * kBits / 32 + i) * kRows);
    }

    // Bits of a plane that belong to four weights. Where a word has more than kCount weights, step_ says which they are.
    template <int kBits, int kWords> __device__ __forceinline__ unsigned part(const unsigned (&plane)[kWords], int step) const {
        constexpr int kParts = 8 / kBits;  // fours of weights in a word
        if (kBits == 8) return plane[step];
        const int position = kCount / 4 % kParts == 0 ? step % kParts : (step_ + step) % kParts;
        return plane[step / kParts] >> kBits * position & 0x01010101u * ((1 << kBits) - 1);
    }

    Scale scale_;
    float offset_;
    unsigned short minimum_;
    signed char run_scale_[kCovered];
    unsigned char run_minimum_[kCovered];
    unsigned low_[kLowWords], high_[kHighWords == 0 ? 1 : kHighWords];
    unsigned step_;
};
