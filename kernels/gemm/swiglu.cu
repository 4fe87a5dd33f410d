// Gated activations, forward and backward: SwiGLU, GeGLU (erf), GeGLU (tanh) and ReLU squared.
//
//   gate, up, y, dy, dgate, dup   (rows, cols) DTYPE, last axis contiguous, row strides in elements
//
//   forward    y = act(gate) * up                                         moves 3 rows cols elements
//   backward   dgate = dy * up * act'(gate),  dup = dy * act(gate)        moves 5 rows cols elements
//
// Both compute in float and round once. Memory-bound: 10 to 30 instructions per element hide behind 6 to 20 bytes.
// In-place is allowed (y = gate, dgate = gate, dup = up): each element is read and written by the same thread.
//
// Macros:
//   DTYPE        f16, bf16 or f32
//   ACTIVATION   kSilu, kGelu, kGeluTanh or kRelu2
//   VEC          elements per access: 16 bytes of them, or 1 for unaligned arrays
//   VECS         accesses per thread and array, all in flight at once
//
// blockDim = (threads per row, rows per block), grid = (chunks of a row, groups of rows). With T = blockDim.x, a chunk
// is VECS accesses of each of a row's T threads. Elements that fill no vector come last, one by one:
//
//   row       | v0 | v1 | ... | v(T-1) | v(T) | ... | v(VECS T - 1) | v(VECS T) | ...          | e | e | e
//   thread      0    1    ...   T-1      0      ...   T-1             0                          0   1   2
//   chunk       0    0    ...   0        0      ...   0               1                        the last one
#include "activation.cuh"
#include "vec.cuh"

typedef DTYPE scalar;

constexpr Activation kActivation = Activation::ACTIVATION;

// At most 56 registers per thread: 36 warps on an SM, with 64 to 96 bytes in flight per thread.
constexpr int kThreads = 128, kMinBlocks = 9;

struct Forward {
    static constexpr int kInputs = 2, kOutputs = 1;

    static __device__ __forceinline__ void compute(const float (&in)[kInputs], float (&out)[kOutputs]) {
        const float gate = in[0], up = in[1];
        out[0] = activated<kActivation, scalar>(gate).value * up;
    }
};

struct Backward {
    static constexpr int kInputs = 3, kOutputs = 2;

    static __device__ __forceinline__ void compute(const float (&in)[kInputs], float (&out)[kOutputs]) {
        const float gate = in[0], up = in[1], dy = in[2];
        const Activated act = activated<kActivation, scalar>(gate);
        out[0] = dy * act.slope * up;  // slope first: dy * up may be infinite where the slope is 0
        out[1] = dy * act.value;
    }
};

// The thread's first element in each array.
template <typename Pass> struct Place {
    const scalar* in[Pass::kInputs];
    scalar* out[Pass::kOutputs];

    __device__ __forceinline__ void advance(long long elements) {
        #pragma unroll
        for (int a = 0; a < Pass::kInputs; ++a) in[a] = ptx::opaque(in[a] + elements);
        #pragma unroll
        for (int a = 0; a < Pass::kOutputs; ++a) out[a] += elements;
    }
};

// Processes kVecs vectors of kSize elements, `step` elements apart; only whole vectors before `end` exist. All loads
// come first, so that they wait for memory together.
template <typename Pass, int kSize, int kVecs>
__device__ __forceinline__ void transform(const Place<Pass>& at, int step, int end) {
    typedef Vec<scalar, kSize> vec;
    vec in[kVecs][Pass::kInputs];
    #pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        if (i * step + kSize > end) continue;
        #pragma unroll
        for (int a = 0; a < Pass::kInputs; ++a) in[i][a] = load<vec, kSize, Cache::kOnce>(at.in[a] + i * step);
    }
    #pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        if (i * step + kSize > end) continue;
        vec out[Pass::kOutputs];
        #pragma unroll
        for (int w = 0; w < vec::kWords; ++w) {
            float wide[Pass::kInputs][vec::kPerWord], result[Pass::kOutputs][vec::kPerWord];
            #pragma unroll
            for (int a = 0; a < Pass::kInputs; ++a) Packed<scalar>::widen(in[i][a].word[w], wide[a]);
            #pragma unroll
            for (int e = 0; e < vec::kPerWord; ++e) {
                float x[Pass::kInputs], y[Pass::kOutputs];
                #pragma unroll
                for (int a = 0; a < Pass::kInputs; ++a) x[a] = wide[a][e];
                Pass::compute(x, y);
                #pragma unroll
                for (int a = 0; a < Pass::kOutputs; ++a) result[a][e] = y[a];
            }
            #pragma unroll
            for (int a = 0; a < Pass::kOutputs; ++a) out[a].word[w] = Packed<scalar>::narrow(result[a]);
        }
        #pragma unroll
        for (int a = 0; a < Pass::kOutputs; ++a) store<kSize>(at.out[a] + i * step, out[a]);
    }
}

// This thread's part of the row that begins at `at`.
template <typename Pass> __device__ __forceinline__ void transform_row(Place<Pass> at, long long cols) {
    const int step = blockDim.x * VEC;
    const long long column = (long long)blockIdx.x * VECS * step + threadIdx.x * VEC;
    const int end = min(cols - column, (long long)VECS * step);
    at.advance(column);
    transform<Pass, VEC, VECS>(at, step, end);
    const int rest = cols % VEC;
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < rest) {
        at.advance(end - rest + static_cast<int>(threadIdx.x));
        transform<Pass, 1, 1>(at, 0, 1);
    }
}

// y and z of the grid form one axis, because y is limited to 65535.
__device__ __forceinline__ long long this_row() {
    return ((long long)blockIdx.z * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
swiglu_forward(const scalar* gate, const scalar* up, scalar* y, long long rows, long long cols, long long gate_stride,
               long long up_stride, long long y_stride) {
    const long long r = this_row();
    if (r >= rows) return;
    transform_row<Forward>({{gate + r * gate_stride, up + r * up_stride}, {y + r * y_stride}}, cols);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
swiglu_backward(const scalar* dy, const scalar* gate, const scalar* up, scalar* dgate, scalar* dup, long long rows,
                long long cols, long long dy_stride, long long gate_stride, long long up_stride,
                long long dgate_stride, long long dup_stride) {
    const long long r = this_row();
    if (r >= rows) return;
    transform_row<Backward>({{gate + r * gate_stride, up + r * up_stride, dy + r * dy_stride},
                             {dgate + r * dgate_stride, dup + r * dup_stride}}, cols);
}
