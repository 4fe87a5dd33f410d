// GEMM epilogues, applied to four adjacent columns of a row at a time.
//
//   kStore          c = product
//   kAdd            c = total + product            total (rows, cols) float; c may alias total
//   kLinear         c = product + residual + bias  residual like c, bias a row of it; either may be null
//   kGate           c = act(gate) up               gate and up are both products; see Loader, kInterleaved
//   kGateKeep       the same, and c1 = gate, h = up
//   kGateBackward   the product is dh; c = dh up act'(gate), c1 = dh act(gate), h = act(gate) up. c and c1 may alias gate
//                   and up
//
// Accumulators hold pairs of columns. They pass through shared memory, 16 rows per warp at a time, so that rows are
// read and written in whole sectors.
#pragma once
#include "activation.cuh"
#include "gemm_operand.cuh"
#include "scalar.cuh"

enum class Epilogue { kStore, kAdd, kLinear, kGate, kGateKeep, kGateBackward };

template <typename Out, typename In> struct Results {
    Out *c, *c1, *h;  // with kLinear c1 is the residual and h the bias
    const float* total;
    const In *gate, *up;  // with kGateBackward
    int64 stride, second_stride, total_stride, gate_stride;  // of c; c1 and h; total; gate and up
    int rows, cols;
};

// Four adjacent elements, of which `count` exist.
template <bool kAligned, typename T> __device__ __forceinline__ void get(const T* from, int count, float (&x)[4]) {
    if constexpr (kAligned) {
        load_four(from, x);
    } else {
        #pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = e < count ? widened(from[e]) : 0.0f;
    }
}

template <bool kAligned, typename T> __device__ __forceinline__ void put(T* to, int count, const float (&x)[4]) {
    if constexpr (kAligned) {
        store_four(to, x);
    } else {
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (e < count) to[e] = narrowed<T>(x[e]);
        }
    }
}

template <Epilogue kEpilogue, Activation kActivation, typename Out, int kSlabs, int kTiles, bool kAligned>
struct Finish {
    static constexpr bool kKeep = kEpilogue == Epilogue::kGateKeep;
    static constexpr int kGated = kKeep || kEpilogue == Epilogue::kGate ? 2 : 1;
    static constexpr int kColumns = 8 * kTiles / kGated;  // of c, per warp
    typedef Tile<float, 16, kColumns, true> Staged;       // one per warp

    // acc: the warp's accumulators; row0, col0: where they start in c; shared: the warp's own buffer.
    template <typename In>
    static __device__ __forceinline__ void run(const Accumulator (&acc)[kSlabs][kTiles],
                                               const Results<Out, In>& results, int row0, int col0,
                                               unsigned char* shared) {
        #pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            pass<0>(acc[slab], results, row0 + 16 * slab, col0, shared);
            if constexpr (kKeep) {
                pass<1>(acc[slab], results, row0 + 16 * slab, col0, shared);
                pass<2>(acc[slab], results, row0 + 16 * slab, col0, shared);
            }
        }
    }

private:
    // 16 rows through shared memory: 0: of c; with kGateKeep also 1: of gate, 2: of up.
    template <int kPass, typename In>
    static __device__ __forceinline__ void pass(const Accumulator (&acc)[kTiles], const Results<Out, In>& results,
                                                int row0, int col0, unsigned char* shared) {
        const int lane = threadIdx.x % 32;
        #pragma unroll
        for (int j = 0; j < kTiles / kGated; ++j) {
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                float pair[2];
                #pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float x = acc[j * kGated][2 * h + e], up = acc[j * kGated + kGated - 1][2 * h + e];
                    if constexpr (kGated == 1 || kPass == 1) pair[e] = x;
                    else if constexpr (kPass == 2) pair[e] = up;
                    else pair[e] = activated<kActivation, Out>(x).value * up;
                }
                const int byte = 32 * j + lane % 4 * 8;
                store_pair<float>(shared + Staged::at(0, lane / 4 + 8 * h, byte / 16) + byte % 16, pair);
            }
        }
        __syncwarp();
        constexpr int kAcross = kColumns / 4;
        #pragma unroll 4
        for (int i = lane; i < 16 * kAcross; i += 32) {
            const int row = row0 + i / kAcross, col = col0 + i % kAcross * 4;
            if (row >= results.rows || col >= results.cols) continue;
            const float4 x = *reinterpret_cast<const float4*>(shared + Staged::at(0, i / kAcross, i % kAcross));
            float sum[4] = {x.x, x.y, x.z, x.w};
            if constexpr (kPass == 0) {
                finish(results, row, col, sum);
            } else {
                Out* const to = kPass == 1 ? results.c1 : results.h;
                put<kAligned>(to + row * results.second_stride + col, results.cols - col, sum);
            }
        }
        __syncwarp();
    }

    static __device__ __forceinline__ void add(const Out* from, int count, float (&sum)[4]) {
        float x[4];
        get<kAligned>(from, count, x);
        #pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += x[e];
    }

    template <typename In>
    static __device__ __forceinline__ void finish(const Results<Out, In>& results, int row, int col,
                                                  float (&sum)[4]) {
        const int64 at = row * results.stride + col;
        const int count = results.cols - col;
        if constexpr (kEpilogue == Epilogue::kAdd) {
            float total[4];
            get<kAligned>(results.total + row * results.total_stride + col, count, total);
            #pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += total[e];
        }
        if constexpr (kEpilogue == Epilogue::kLinear) {
            const Out *const residual = results.c1, *const bias = results.h;
            if (residual) add(residual + row * results.second_stride + col, count, sum);
            if (bias) add(bias + col, count, sum);
        }
        if constexpr (kEpilogue == Epilogue::kGateBackward) {
            const int64 second = row * results.second_stride + col, kept = row * results.gate_stride + col;
            float gate[4], up[4], h[4];
            get<kAligned>(results.gate + kept, count, gate);
            get<kAligned>(results.up + kept, count, up);
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const Activated act = activated<kActivation, Out>(gate[e]);
                gate[e] = sum[e] * up[e] * act.slope;
                h[e] = act.value * up[e];
                up[e] = sum[e] * act.value;
            }
            put<kAligned>(results.c + at, count, gate);
            put<kAligned>(results.c1 + second, count, up);
            put<kAligned>(results.h + second, count, h);
        } else {
            put<kAligned>(results.c + at, count, sum);
        }
    }
};
