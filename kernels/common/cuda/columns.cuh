// Rows of any length: the vectors of a row that a thread owns, and reductions over the threads of a row.
//
// blockDim = (threads per row, rows per block). Thread t owns vectors t, t + blockDim.x, ... of its row for any access,
// so that sums have the same bits wherever an array lies.
#pragma once
#include "ptx.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "vec.cuh"

constexpr float kNothing = -3.4028235e38f;  // the maximum of no scores; finite, so that -inf - kNothing is -inf

// A thread's vectors of kVec elements of a row that ends at column `end`: up to kVecs in registers (kHeld), or any
// number, in a loop that is unrolled kVecs times.
template <int kVec, int kVecs, bool kHeld> struct Columns {
    const long long row, end;

    // f(i, column, count) for vector i in registers.
    template <typename F> __device__ __forceinline__ void each(F f) const {
        long long column = threadIdx.x * kVec;
        #pragma unroll kVecs
        for (int i = 0; kHeld ? i < kVecs : column < end; ++i, column += blockDim.x * kVec) {
            if (column < end) f(kHeld ? i : 0, column, int(min(end - column, (long long)kVec)));
        }
    }
};

// kVec elements, the first `count` of which exist, by vectors if kAccess is kVec. Floats for 16-bit elements take two
// accesses.
template <int kAccess, Cache kCached, int kVec, typename T>
__device__ __forceinline__ void fetch(const T* p, int count, float (&value)[kVec]) {
    if constexpr (kAccess == kVec && sizeof(T) > 1) {
        constexpr int kPart = kVec * sizeof(T) > 16 ? 16 / sizeof(T) : kVec;
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            const Vec<T, kPart> part = load<Vec<T, kPart>, kPart, kCached>(p + e / kPart * kPart);
            value[e] = element(part, e % kPart);
        }
    } else {
        #pragma unroll
        for (int e = 0; e < kVec; ++e) value[e] = e < count ? widened(p[e]) : 0.0f;
    }
}

template <int kAccess, int kVec, typename T>
__device__ __forceinline__ void put(T* p, int count, const float (&value)[kVec]) {
    if constexpr (kAccess == kVec) {
        store<kVec>(p, packed<T, kVec>(value));
    } else {
        #pragma unroll
        for (int e = 0; e < kVec; ++e) {
            if (e < count) p[e] = narrowed<T>(value[e]);
        }
    }
}

// The maximum or the sum over the threads of a row: part of a warp, or a whole block.
template <bool kMax, int kMaxThreads> __device__ __forceinline__ float over_row(float value) {
    const auto combine = [&](int width) {
        for (int offset = width / 2; offset > 0; offset /= 2) {
            const float other = __shfl_xor_sync(kFullWarp, value, offset);
            value = kMax ? fmaxf(value, other) : value + other;
        }
    };
    combine(min(blockDim.x, 32));
    if (blockDim.x <= 32) return value;
    __shared__ float scratch[kMaxThreads / 32];  // each instance of this function has its own, and is called once
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = lane < blockDim.x / 32 ? scratch[lane] : kMax ? kNothing : 0.0f;
    combine(32);
    return value;
}

__device__ __forceinline__ float exponential(float t) { return ptx::exp2(t * 1.4426950408889634f); }
