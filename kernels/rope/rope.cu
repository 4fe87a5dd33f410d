// RoPE of queries and keys in one launch, in place or not. The backward is the same with the sine negated.
//
//   q, q_out   (batch, seqlen, nheads, head_dim)      DTYPE, last axis contiguous, other strides in elements
//   k, k_out   (batch, seqlen, nheads_kv, head_dim)   the same
//   positions  (batch, seqlen)                        int or long long, any strides; or absent: consecutive
//   turns      (rotary_dim / 2,)                      frequencies: rope.cuh
//
//   y1 = x1 cos - x2 sin      y2 = x2 cos + x1 sin      for each pair of the first rotary_dim components
//
// Reads and writes each element of q and k once, and reads the positions. Memory-bound. An output may alias its input:
// each element is read and written by the same thread.
//
// Macros:
//   DTYPE        f16, bf16 or f32
//   VEC          elements per vector and access. It divides rotary_dim / 2 and the copied tail, and arrays are
//                aligned to it
//   INTERLEAVED  0 or 1: which components form a pair
//
// A unit is a thread's share of a head: two vectors rotary_dim / 2 apart, so that adjacent lanes read adjacent vectors.
// Half-split, the two hold both halves of their pairs. Interleaved, each holds whole pairs (with VEC = 1 a vector is
// half a pair, and the two are adjacent). If the outputs are separate arrays, more units copy the tail after
// rotary_dim:
//
//   unit   | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 4 | 5 |     one box per vector
//           <--------- rotary_dim --------->
//
// blockDim = (units, heads, tokens), gridDim = (tokens, heads of q and then of k, units). A thread computes its unit's
// angles once and rotates all its heads by them.
#include "rope.cuh"

typedef DTYPE scalar;
typedef Vec<scalar, VEC> vec;
typedef long long int64;

constexpr bool kInterleaved = INTERLEAVED;
constexpr int kRotations = kInterleaved && VEC > 1 ? 2 : 1;
typedef Rotation<VEC / kRotations> Angles[kRotations];  // of a unit

struct HeadStrides { int64 batch, seqlen, head; };

// Mirrored by kernels/rope/rope.py.
struct RopeShape {
    HeadStrides q, k, q_out, k_out;
    int64 positions_batch, positions_seqlen;  // strides; 0 if shared
    int64 first;                              // of consecutive positions
    unsigned tokens, seqlen;                  // tokens = batch * seqlen
    int nheads, nheads_kv;
    int q_blocks;                             // of gridDim.y
    int position_bytes;                       // 4 or 8; 0: consecutive positions
    int rotary_dim, tail;                     // rotated components; copied components
    float cos_scale, sin_scale;               // the attention factor; negative sine in the backward
};

__device__ __forceinline__ int64 position_at(const void* positions, int64 b, int64 s, const RopeShape& shape) {
    const int64 i = b * shape.positions_batch + s * shape.positions_seqlen;
    if (shape.position_bytes == 8) return __ldg(static_cast<const int64*>(positions) + i);
    if (shape.position_bytes == 4) return __ldg(static_cast<const int*>(positions) + i);
    return shape.first + s;
}

// Positions of a unit's vectors in a head. With an odd number of copied vectors, the last has no partner.
struct Unit {
    int first, second;
    bool rotates, has_second;

    __device__ __forceinline__ Unit(int unit, int rotating, int units, const RopeShape& shape) {
        constexpr bool kSideBySide = kInterleaved && VEC == 1;
        rotates = unit < rotating;
        first = rotates ? (kSideBySide ? 2 : VEC) * unit : shape.rotary_dim + (unit - rotating) * VEC;
        second = first + (!rotates ? (units - rotating) * VEC : kSideBySide ? 1 : shape.rotary_dim / 2);
        has_second = second < shape.rotary_dim + shape.tail;
    }
};

template <int N> __device__ __forceinline__ void rotate(vec (&unit)[2], const Rotation<N> (&by)[1]) {
    rotate(unit[0], unit[1], by[0]);
}

template <int N> __device__ __forceinline__ void rotate(vec (&unit)[2], const Rotation<N> (&by)[2]) {
    rotate(unit[0], by[0]);
    rotate(unit[1], by[1]);
}

extern "C" __global__ void __launch_bounds__(128, 10)
rope(const scalar* q, const scalar* k, scalar* q_out, scalar* k_out, const void* positions, const Turn* turns,
     const __grid_constant__ RopeShape shape) {
    const int rotating = shape.rotary_dim / (2 * VEC);
    const int units = rotating + (shape.tail / VEC + 1) / 2;
    const int unit = blockIdx.z * blockDim.x + threadIdx.x;
    const unsigned token = blockIdx.x * blockDim.z + threadIdx.z;
    if (unit >= units || token >= shape.tokens) return;
    const int64 b = token / shape.seqlen, s = token % shape.seqlen;
    const Unit at(unit, rotating, units, shape);

    const bool is_q = blockIdx.y < shape.q_blocks;
    const int blocks = is_q ? shape.q_blocks : gridDim.y - shape.q_blocks;
    const int step = blocks * blockDim.y;
    const int end = is_q ? shape.nheads : shape.nheads_kv;
    const HeadStrides from = is_q ? shape.q : shape.k, to = is_q ? shape.q_out : shape.k_out;
    int h = (is_q ? blockIdx.y : blockIdx.y - shape.q_blocks) * blockDim.y + threadIdx.y;
    const scalar* x = (is_q ? q : k) + b * from.batch + s * from.seqlen + h * from.head;
    scalar* y = (is_q ? q_out : k_out) + b * to.batch + s * to.seqlen + h * to.head;

    vec held[2];
    const auto read = [&] {
        if (h >= end) return;
        held[0] = load<vec, VEC, Cache::kOnce>(x + at.first);
        if (at.has_second) held[1] = load<vec, VEC, Cache::kOnce>(x + at.second);
    };
    read();  // overlaps with the computation of the angles
    Angles by;
    if (at.rotates) {
        const int64 position = position_at(positions, b, s, shape);
        const Turn* mine = turns + (kInterleaved ? at.first / 2 : at.first);
        #pragma unroll
        for (int i = 0; i < kRotations; ++i) {
            by[i] = rotation<VEC / kRotations>(mine + i * (shape.rotary_dim / 4), position, shape.cos_scale,
                                               shape.sin_scale);
        }
    }
    #pragma unroll 1  // a second head in flight would cost registers for a third of the warps
    while (h < end) {
        if (at.rotates) rotate(held, by);
        store<VEC>(y + at.first, held[0]);
        if (at.has_second) store<VEC>(y + at.second, held[1]);
        h += step;
        x += step * from.head;
        y += step * to.head;
        read();
    }
}
