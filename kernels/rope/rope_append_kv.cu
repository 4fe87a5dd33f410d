// QK-norm, RoPE and cache append in one launch: RMSNorm of each head of q and k, RoPE of both, then k and v are stored
// in their slots of a cache.
//
//   q, out            (batch, seqlen, nheads, head_dim)              DTYPE, last axis contiguous, other strides
//   k, v              (batch, seqlen, nheads_kv, head_dim)           in elements; out may alias q
//   k_cache, v_cache  (num_pages, page_size, nheads_kv, head_dim)    PAGE_DTYPE; a contiguous cache has one page per
//                                                                    sequence
//   k_scale, v_scale  (num_pages, page_size, nheads_kv) float        of quantized pages (codes.cuh); else null
//   q_weight, k_weight  (head_dim,), or both null                    DTYPE
//   turns             (rotary_dim / 2,)                              frequencies: rope.cuh
//   positions         (batch, seqlen) int or long long, or null      null: the row in the sequence
//
//   place of token s of sequence b:
//   seqused_k         (batch,) int, or null                          row = seqused_k[b] + s (null: s)
//   block_table       (batch, max_pages) int, or null                page = block_table[b, row / page_size] (null: b)
//   slot_mapping      (batch, seqlen) long long, or null             overrides both: page * page_size + row in the page
//
//   n = x * rstd * (weight_offset + weight)      y1 = n1 cos - n2 sin      y2 = n2 cos + n1 sin
//
// Quantized pages get  scale = max|y| / largest  and  code = round(y * (1 / scale))  of each head, in float. A scale that
// would be subnormal is 0; that of a NaN or an infinity is NaN; the codes are then 0.
//
// Rounds once, at the end. Reads and writes each element of q, k and v once. Rows outside the cache are not stored,
// because the host does not know the indices.
//
// Macros:
//   DTYPE        f16, bf16 or f32
//   PAGE_DTYPE   DTYPE, s8 or e4m3
//   VEC          elements per vector
//   ACCESS       elements per memory access: VEC, or 1 for arrays that are not aligned to a vector
//   INTERLEAVED  0 or 1: which components form a pair
//   UNITS        units per thread
//
// A unit is the part that a thread rotates by one set of angles: two vectors, or one of whole pairs. Units after
// rotary_dim are not rotated. Units of two vectors, in a head of 12 with rotary_dim 8:
//
//   half-split             | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 | 4 | 5 | 4 | 5 |
//   interleaved, VEC == 1  | 0 | 0 | 1 | 1 | 2 | 2 | 3 | 3 | 4 | 5 | 4 | 5 |
//
// blockDim = (threads per head, heads, tokens), gridDim = (tiles of tokens, parts of the heads). A tile of heads is
// blockDim.y heads of q, of k or of v. A thread computes its angles once and uses them for several tiles. Unit u of
// each head belongs to thread u % blockDim.x, so that adjacent threads read adjacent vectors.
#include "codes.cuh"
#include "math.cuh"
#include "reduce.cuh"
#include "rope.cuh"

typedef DTYPE scalar;
typedef PAGE_DTYPE page_scalar;
typedef Vec<scalar, VEC> vec;
typedef long long int64;

constexpr int kUnits = UNITS;
constexpr bool kPairsInside = INTERLEAVED && VEC > 1;
constexpr int kVectors = kPairsInside ? 1 : 2;   // per unit
constexpr int kElements = VEC * kVectors;        // per unit
constexpr int kFrequencies = kElements / 2;      // per unit
constexpr bool kCodes = kIsCode<page_scalar>;
typedef ChooseType<kCodes, page_scalar, s8>::type code;  // without codes not used
constexpr int kKept = kCodes ? kUnits : 1;       // units in float until the scale of their head is known
constexpr int kThreads = 128;
// Registers for over half of an SM's warps: 72 if an SM has 48 warps, 56 if it has 64; for half of them, 64, where 16
// elements of a thread wait for their scale.
constexpr bool kManyWait = kCodes && kUnits * kElements == 16;
constexpr int kMinBlocks = __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 ? 9 - kManyWait : 7;

// Mirrored by kernels/rope/rope_append_kv.py.
struct AppendShape {
    int64 inputs[3][3];                  // of q, k, v; strides: batch, token, head
    int64 outputs[3][3];                 // of out: the same; of k_cache, v_cache: page, row, head
    int64 scales[2][3];                  // of k_scale, v_scale: the same
    int64 positions[2], slots[2];        // strides: batch, token
    int64 block_table;                   // stride: batch
    unsigned tokens, seqlen;
    int heads[3];                        // of q, k, v
    int num_pages, page_size;
    unsigned max_pages;                  // per sequence; 0 if pages have no rows
    int head_dim, rotary_dim;
    int units, rotary_units;             // all units; rotated units
    int position_bytes;                  // 4 or 8
    float inverse_head_dim, eps, weight_offset, attention_factor;
};

// Where a unit's vectors begin in a head; -1 past its end.
struct Unit {
    int at[kVectors];
    bool rotates;

    __device__ __forceinline__ Unit(int unit, const AppendShape& shape) {
        rotates = unit < shape.rotary_units;
        const int i = rotates ? unit : unit - shape.rotary_units;
        const int begin = rotates ? 0 : shape.rotary_dim, end = rotates ? shape.rotary_dim : shape.head_dim;
        const bool neighbours = INTERLEAVED && !kPairsInside && rotates;
        const int apart = neighbours ? 1 : rotates ? shape.rotary_units : shape.units - shape.rotary_units;
        #pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            const int column = begin + ((neighbours ? 2 * i : i) + k * apart) * VEC;
            at[k] = unit < shape.units && column < end ? column : -1;
        }
    }
};

// A unit of one head in registers.
struct UnitData {
    vec vector[kVectors];

    __device__ __forceinline__ void load_from(const scalar* head, const Unit& unit) {
        #pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (unit.at[k] >= 0) vector[k] = load<vec, ACCESS, Cache::kOnce>(head + unit.at[k]);
        }
    }

    __device__ __forceinline__ void store_to(scalar* head, const Unit& unit) const {
        #pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (unit.at[k] >= 0) store<ACCESS>(head + unit.at[k], vector[k]);
        }
    }

    // Several short chains of additions: faster than one long chain, and more accurate.
    __device__ __forceinline__ float squares(float scale) const {
        constexpr int kSums = VEC < 4 ? VEC : 4;
        float sum[kSums] = {}, total = 0.0f;
        #pragma unroll
        for (int i = 0; i < kElements; ++i) {
            const float x = element(vector[i / VEC], i % VEC) * scale;
            sum[i % kSums] = fmaf(x, x, sum[i % kSums]);
        }
        #pragma unroll
        for (int i = 0; i < kSums; ++i) total += sum[i];
        return total;
    }

    // The numbers, unchanged.
    __device__ __forceinline__ void widen(float (&x)[kElements]) const {
        #pragma unroll
        for (int i = 0; i < kElements; ++i) x[i] = element(vector[i / VEC], i % VEC);
    }

    // Normalised (if there is a weight) and rotated (if the unit is).
    __device__ __forceinline__ void finish(const Unit& unit, const scalar* weight, float rstd, float weight_offset,
                                           const Rotation<kFrequencies>& by, float (&x)[kElements]) {
        #pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            vector[k] = fresh(vector[k]);
            vec gain = {};
            if (weight != nullptr && unit.at[k] >= 0) {
                gain = load<vec, ACCESS, Cache::kConstant>(weight + unit.at[k]);
            }
            #pragma unroll
            for (int e = 0; e < VEC; ++e) {
                float& n = x[k * VEC + e] = element(vector[k], e);
                if (weight != nullptr) n = n * rstd * (element(gain, e) + weight_offset);
            }
        }
        if (unit.rotates) {
            #pragma unroll
            for (int i = 0; i < kFrequencies; ++i) {
                const int first = kPairsInside ? 2 * i : i, second = kPairsInside ? 2 * i + 1 : i + VEC;
                rotate(x[first], x[second], by.cos[i], by.sin[i]);
            }
        }
    }

    __device__ __forceinline__ void pack(const float (&x)[kElements]) {
        #pragma unroll
        for (int k = 0; k < kVectors; ++k) vector[k] = packed<scalar, VEC>(x + k * VEC);
    }
};

// 1 / sqrt(mean of squares + eps) of a head, in all threads that hold part of it.
__device__ __forceinline__ float rstd_of(const UnitData (&head)[kUnits], const AppendShape& shape) {
    const auto sum = [&](float scale) {
        float squares = 0.0f;
        #pragma unroll
        for (int u = 0; u < kUnits; ++u) squares += head[u].squares(scale);
        return warp_sum(squares, blockDim.x);
    };
    float total = sum(1.0f);
    const float scale = square_scale<Packed<scalar>::kWideRange>(total, shape.eps);
    if (__any_sync(kFullWarp, scale != 1.0f)) total = sum(scale);
    return scale * rsqrt_accurate(fmaf(total, shape.inverse_head_dim, shape.eps * scale * scale));
}

// The scale of a head of quantized pages, in all threads that hold part of it.
__device__ __forceinline__ float scale_of(const float (&head)[kKept][kElements]) {
    unsigned top = 0;  // |x| as integers in the same order, NaN above infinity
    #pragma unroll
    for (int u = 0; u < kKept; ++u) {
        #pragma unroll
        for (int i = 0; i < kElements; ++i) top = max(top, __float_as_uint(head[u][i]) & 0x7fffffffu);
    }
    for (int offset = blockDim.x / 2; offset > 0; offset /= 2) {
        top = max(top, __shfl_xor_sync(kFullWarp, top, offset));
    }
    const float scale = __uint_as_float(top) / code::kLargest;
    if (scale < 0x1p-126f) return 0.0f;
    return scale < infinity() ? scale : __uint_as_float(0x7fffffffu);
}

// Stores a unit of a head as codes.
__device__ __forceinline__ void store_codes(code* head, const Unit& unit, const float (&x)[kElements],
                                            float scale) {
    const bool usable = scale > 0.0f;
    const float inverse = usable ? 1.0f / scale : 0.0f;
    #pragma unroll
    for (int k = 0; k < kVectors; ++k) {
        if (unit.at[k] < 0) continue;
        unsigned word[(VEC + 3) / 4] = {};
        #pragma unroll
        for (int e = 0; e < VEC; ++e) {
            const float scaled = usable ? x[k * VEC + e] * inverse : 0.0f;
            const float kept = fmaxf(fminf(scaled, code::kLargest), -code::kLargest);
            word[e / 4] |= encode<code>(kept) << (e % 4 * 8);
        }
        #pragma unroll
        for (int e = 0; e < VEC; e += ACCESS) {
            const unsigned later = word[e / 4] >> (e % 4 * 8);
            detail::write_words<ACCESS>(head + unit.at[k] + e, ACCESS == VEC ? word : &later);
        }
    }
}

// A token's slot: page and row in it. Page -1: not stored.
struct Place { int page, row; };

__device__ __forceinline__ Place place_of(int b, int s, int row, const int* block_table, const int64* slot_mapping,
                                          const AppendShape& shape) {
    if (slot_mapping != nullptr) {
        const int64 slot = slot_mapping[b * shape.slots[0] + s * shape.slots[1]];
        if (slot < 0 || slot >= static_cast<int64>(shape.num_pages) * shape.page_size) return {-1, 0};
        const int page = static_cast<int>(slot / shape.page_size);
        return {page, static_cast<int>(slot - static_cast<int64>(page) * shape.page_size)};
    }
    const int i = block_table != nullptr ? row / shape.page_size : 0;
    if (row < 0 || static_cast<unsigned>(i) >= shape.max_pages) return {-1, 0};
    const int page = block_table != nullptr ? block_table[b * shape.block_table + i] : b;
    const int in_page = row - i * shape.page_size;
    return {page < shape.num_pages && in_page < shape.page_size ? page : -1, in_page};
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
rope_append_kv(const scalar* q, const scalar* k, const scalar* v, scalar* out, page_scalar* k_cache,
               page_scalar* v_cache, const scalar* q_weight, const scalar* k_weight, const Turn* turns,
               const void* positions, const int* seqused_k, const int* block_table, const int64* slot_mapping,
               float* k_scale, float* v_scale, const __grid_constant__ AppendShape shape) {
    // Threads whose token is past the end own nothing but take part in their warp's shuffles.
    const unsigned token = blockIdx.x * blockDim.z + threadIdx.z;
    const bool exists = token < shape.tokens;
    const int b = exists ? token / shape.seqlen : 0, s = exists ? token % shape.seqlen : 0;
    const int row = seqused_k != nullptr && exists ? seqused_k[b] + s : s;
    const Place place = exists ? place_of(b, s, row, block_table, slot_mapping, shape) : Place{-1, 0};

    Rotation<kFrequencies> by[kUnits];
    int64 position = row;
    if (positions != nullptr && exists) {
        const int64 i = b * shape.positions[0] + s * shape.positions[1];
        position = shape.position_bytes == 8 ? static_cast<const int64*>(positions)[i]
                                             : static_cast<const int*>(positions)[i];
    }
    #pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const int unit = min(static_cast<int>(u * blockDim.x + threadIdx.x), shape.rotary_units - 1);
        by[u] = rotation<kFrequencies>(turns + unit * kFrequencies, position, shape.attention_factor,
                                       shape.attention_factor);
    }

    const int tiles_q = (shape.heads[0] + blockDim.y - 1) / blockDim.y;
    const int tiles_kv = (shape.heads[1] + blockDim.y - 1) / blockDim.y;
    for (int tile = blockIdx.y; tile < tiles_q + 2 * tiles_kv; tile += gridDim.y) {
        const int which = tile < tiles_q ? 0 : tile < tiles_q + tiles_kv ? 1 : 2;  // q, k or v
        const int before = which == 0 ? 0 : which == 1 ? tiles_q : tiles_q + tiles_kv;
        const int h = (tile - before) * blockDim.y + threadIdx.y;
        const bool mine = exists && h < shape.heads[which] && (which == 0 || place.page >= 0);
        const int64* in = shape.inputs[which];
        const scalar* source = (which == 0 ? q : which == 1 ? k : v) + b * in[0] + s * in[1] + h * in[2];

        UnitData head[kUnits] = {};
        int thread = threadIdx.x;
        const auto unit = [&](int u) { return Unit(u * blockDim.x + thread, shape); };
        #pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            if (mine) head[u].load_from(source, unit(u));
        }
        float x[kKept][kElements];
        if (which < 2) {
            const scalar* weight = which == 0 ? q_weight : k_weight;
            const float rstd = weight != nullptr ? rstd_of(head, shape) : 1.0f;
            forget(thread);  // recompute where units are: kept, it would take registers
            #pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                float(&finished)[kElements] = x[u % kKept];
                head[u].finish(unit(u), weight, rstd, shape.weight_offset, by[u], finished);
                if constexpr (!kCodes) head[u].pack(finished);
            }
        } else if constexpr (kCodes) {
            #pragma unroll
            for (int u = 0; u < kUnits; ++u) head[u].widen(x[u % kKept]);
        }
        forget(thread);
        const int64* to = shape.outputs[which];
        const int64 at = h * to[2] + (which == 0 ? b * to[0] + s * to[1] : place.page * to[0] + place.row * to[1]);
        page_scalar* const pages = which == 1 ? k_cache : v_cache;
        if (kCodes && which > 0) {
            const float scale = scale_of(x);
            code* target = reinterpret_cast<code*>(pages) + at;
            #pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                if (mine) store_codes(target, unit(u), x[u % kKept], scale);
            }
            const int64* of_scale = shape.scales[which - 1];
            float* scales = which == 1 ? k_scale : v_scale;
            if (mine && thread == 0) {
                scales[place.page * of_scale[0] + place.row * of_scale[1] + h * of_scale[2]] = scale;
            }
            continue;
        }
        scalar* target = (which == 0 ? out : reinterpret_cast<scalar*>(pages)) + at;
        #pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            if constexpr (kCodes) head[u].pack(x[u % kKept]);
            if (mine) head[u].store_to(target, unit(u));
        }
    }
}
