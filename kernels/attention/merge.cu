// Merges attention over two disjoint sets of keys (Milakov and Gimelshein 2018).
//
//   out1, out2, out   (outer, middle, inner, cols)  DTYPE, last axis contiguous
//   lse1, lse2, lse   (outer, middle, inner)        LSE1, LSE2; double for lse if either is, else float
//
//   lse = ln(e^lse1 + e^lse2)      out = e^(lse1 - lse) out1 + e^(lse2 - lse) out2
//
// Moves three times out; 4 flops per element. In place is allowed (out = out1, lse = lse1): an element of out is read
// and written by the same thread, and all threads of a row, in one warp, have read lse1 before one writes lse.
// A part with lse -inf saw no key: it has weight 0, and its out does not count, whatever it holds.
//
// Double is for differences and sums of lse only. The exponential and the logarithm of their difference are float: all
// threads of a row compute them, and double is up to 64 times slower.
//
// Macros:
//   DTYPE    f16, bf16 or f32
//   LSE1, LSE2   f32 or f64
//   ACCESS   elements per access: a vector of 16 bytes, or 1 where not all rows are aligned to vectors
//
//   attention_merge(out1, lse1, out2, lse2, out, lse, shape)
//   grid   (ceil(rows / blockDim.y))     block (threads per row: a power of two up to 32, rows)
#include "math.cuh"
#include "scalar.cuh"
#include "vec.cuh"

typedef DTYPE scalar;
typedef double f64;
typedef decltype(LSE1() + LSE2()) lse_scalar;

// Strides in elements, of each array in the order of the arguments: outer, middle, inner.
struct MergeShape { long long rows, middle, inner, cols, strides[6][3]; };

struct Row {
    long long outer, middle, inner;

    template <typename T> __device__ __forceinline__ T* of(T* array, const long long (&stride)[3]) const {
        return array + outer * stride[0] + middle * stride[1] + inner * stride[2];
    }
};

extern "C" __global__ void __launch_bounds__(256)
attention_merge(const scalar* out1, const LSE1* lse1, const scalar* out2, const LSE2* lse2, scalar* out,
                lse_scalar* lse, const __grid_constant__ MergeShape shape) {
    typedef Vec<scalar, ACCESS> Vector;
    const long long number = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    const bool exists = number < shape.rows;  // threads of other rows repeat the last one, and write nothing
    const long long last = exists ? number : shape.rows - 1, next = last / shape.inner;
    const Row row{next / shape.middle, next % shape.middle, last % shape.inner};
    const auto& strides = shape.strides;

    const lse_scalar a = *row.of(lse1, strides[1]), b = *row.of(lse2, strides[3]);
    const lse_scalar difference = a > b ? b - a : a - b;
    const float smaller = a == b ? 1.0f : expf(float(difference));  // of the two weights, the larger is 1; or NaN
    const float inverse = 1.0f / (1.0f + smaller);
    const float weight1 = (a >= b ? 1.0f : smaller) * inverse, weight2 = (b >= a ? 1.0f : smaller) * inverse;
    const bool seen1 = a != lse_scalar(-infinity()), seen2 = b != lse_scalar(-infinity());
    __syncwarp();
    if (exists && threadIdx.x == 0) *row.of(lse, strides[5]) = (a > b ? a : b) + lse_scalar(log1pf(smaller));

    out1 = row.of(out1, strides[0]), out2 = row.of(out2, strides[2]), out = row.of(out, strides[4]);
    for (long long column = threadIdx.x * ACCESS; exists && column < shape.cols; column += blockDim.x * ACCESS) {
        const Vector x = load<Vector, ACCESS, Cache::kOnce>(out1 + column);
        const Vector y = load<Vector, ACCESS, Cache::kOnce>(out2 + column);
        float sum[ACCESS];
        #pragma unroll
        for (int e = 0; e < ACCESS; ++e) {
            sum[e] = seen1 ? weight1 * element(x, e) : 0.0f;
            if (seen2) sum[e] = fmaf(weight2, element(y, e), sum[e]);
        }
        store<ACCESS>(out + column, packed<scalar, ACCESS>(sum));
    }
}
