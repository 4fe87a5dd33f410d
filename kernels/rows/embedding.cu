// Rows of a table by index, and the gradient of the table, in a fixed order and without atomics.
//
//   ids (rows,) int or long long      weight (num_embeddings, cols) DTYPE      x, dx (rows, cols) DTYPE
//   dweight (num_embeddings, cols) float                                      last axes contiguous
//
//   forward    x[i] = scale weight[ids[i]], NaN where the index is outside the table        moves 2 rows cols elements
//   backward   dweight[v] = sum of scale dx[i] over ids[i] = v                              reads dx once
//
// The gradient takes four kernels. A key is (index << 32 | i): no two are equal, so any way to sort them gives one order.
//
//   sort     blocks of kRun keys           merge    two sorted runs become one, until one is left
//   sum      tiles of kTile sorted rows    carry    the sums of tiles into which an index continues
//
//      keys   3 3 5 5 | 5 5 5 5 | 5 5 7 8        sum writes 3, the first part of 5, 7 and 8 to dweight, and the parts of
//      tile      0    |    1    |    2           5 in tiles 1 and 2 to partial; carry adds them to row 5
//
// Macros:
//   DTYPE    f16, bf16 or f32
//   ACCESS   elements per access: a vector, of 16 bytes forward and kPart elements backward, or 1
#include "columns.cuh"
#include "math.cuh"

typedef DTYPE scalar;

constexpr int kVec = 16 / sizeof(scalar), kMaxThreads = 256;
constexpr int kRun = 1024, kTile = 32, kPart = 4, kAhead = 8;  // kAhead rows are in flight
constexpr unsigned kOutside = 0xffffffffu;  // index of rows that are not added: sorted to the end

typedef unsigned long long Key;

__device__ __forceinline__ long long index_at(const void* ids, long long i, int wide) {
    return wide ? static_cast<const long long*>(ids)[i] : static_cast<const int*>(ids)[i];
}

__device__ __forceinline__ unsigned index_of(Key key) { return unsigned(key >> 32); }

extern "C" __global__ void __launch_bounds__(kMaxThreads)
embedding_forward(const void* ids, const scalar* weight, scalar* x, int wide, float scale, long long num_embeddings,
                  long long rows, long long cols, long long weight_stride, long long x_stride) {
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long id = index_at(ids, row, wide);
    const bool inside = id >= 0 && id < num_embeddings;
    weight += inside ? id * weight_stride : 0, x += row * x_stride;
    Columns<kVec, 2, false>{row, cols}.each([&](int, long long column, int count) {
        float value[kVec];
        if (inside) fetch<ACCESS, Cache::kDefault>(weight + column, count, value);
        #pragma unroll
        for (int e = 0; e < kVec; ++e) value[e] = inside ? value[e] * scale : __int_as_float(0x7fffffff);
        put<ACCESS>(x + column, count, value);
    });
}

// Position of keys[i] after the run at `first` and its neighbour are merged; only keys before `end` exist.
__device__ __forceinline__ long long merged_place(const Key* keys, long long i, long long run, long long end) {
    const long long pair = i / (2 * run) * (2 * run), middle = pair + run;
    const bool left = i < middle;
    const Key key = keys[i];
    long long low = left ? min(middle, end) : pair, high = left ? min(middle + run, end) : middle;
    const long long start = low;
    while (low < high) {
        const long long half = (low + high) / 2;
        if (keys[half] < key) low = half + 1;
        else high = half;
    }
    return i + (low - start) - (left ? 0 : run);
}

extern "C" __global__ void __launch_bounds__(kRun)
embedding_sort(const void* ids, Key* keys, int wide, long long num_embeddings, long long rows) {
    __shared__ Key buffer[2][kRun];
    const long long i = (long long)blockIdx.x * kRun + threadIdx.x;
    const long long id = i < rows ? index_at(ids, i, wide) : -1;
    const bool inside = id >= 0 && id < num_embeddings;
    buffer[0][threadIdx.x] = Key(inside ? unsigned(id) : kOutside) << 32 | Key(i);
    int now = 0;
    for (int run = 1; run < kRun; run *= 2, now ^= 1) {
        __syncthreads();
        const long long place = merged_place(buffer[now], threadIdx.x, run, kRun);
        buffer[now ^ 1][place] = buffer[now][threadIdx.x];
    }
    __syncthreads();
    if (i < rows) keys[i] = buffer[now][threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(kMaxThreads)
embedding_merge(const Key* keys, Key* merged, long long run, long long rows) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows) merged[merged_place(keys, i, run, rows)] = keys[i];
}

typedef float Part[kPart];

// dweight (+)= scale * sum. The first part of an index sets its row, unless what the row holds counts.
__device__ __forceinline__ void flush(float* dweight, int count, const Part& sum, float scale, bool adds) {
    #pragma unroll
    for (int e = 0; e < kPart; ++e) {
        if (e < count) dweight[e] = fmaf(scale, sum[e], adds ? dweight[e] : 0.0f);
    }
}

// blockIdx.x: tile; a thread has kPart columns.
extern "C" __global__ void __launch_bounds__(kMaxThreads)
embedding_sum(const Key* keys, const scalar* dx, float* dweight, float* partial, float scale, int adds, long long rows,
              long long cols, long long dx_stride, long long dweight_stride) {
    const long long column = ((long long)blockIdx.y * blockDim.x + threadIdx.x) * kPart;
    const long long first = (long long)blockIdx.x * kTile;
    if (column >= cols) return;
    const int count = int(min(cols - column, (long long)kPart)), height = int(min(rows - first, (long long)kTile));
    bool carried = first > 0 && index_of(keys[first - 1]) == index_of(keys[first]);  // from the tile before
    Part sum = {};
    for (int start = 0; start < height; start += kAhead) {
        Part value[kAhead];
        Key key[kAhead];
        #pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            key[i] = start + i < height ? keys[first + start + i] : ~0ull;
            if (index_of(key[i]) == kOutside) continue;
            fetch<ACCESS, Cache::kOnce>(dx + (key[i] & 0xffffffffu) * dx_stride + column, count, value[i]);
        }
        #pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const unsigned id = index_of(key[i]);
            if (id == kOutside) continue;
            #pragma unroll
            for (int e = 0; e < kPart; ++e) sum[e] += value[i][e];
            const bool last = start + i + 1 == height;
            if (!last && index_of(keys[first + start + i + 1]) == id) continue;
            if (carried) flush(partial + blockIdx.x * cols + column, count, sum, 1.0f, false);
            else flush(dweight + id * dweight_stride + column, count, sum, scale, adds);
            carried = false;
            #pragma unroll
            for (int e = 0; e < kPart; ++e) sum[e] = 0.0f;
        }
    }
}

// For the tile in which an index starts that continues into further tiles: adds their parts, in order.
extern "C" __global__ void __launch_bounds__(kMaxThreads)
embedding_carry(const Key* keys, const float* partial, float* dweight, float scale, long long rows, long long cols,
                long long dweight_stride) {
    const long long column = (long long)blockIdx.y * blockDim.x + threadIdx.x;
    const long long first = (long long)blockIdx.x * kTile, next = first + kTile;
    if (column >= cols || next >= rows) return;
    const unsigned id = index_of(keys[next - 1]);
    const bool started = first == 0 || index_of(keys[first - 1]) != id;
    if (id == kOutside || !started || index_of(keys[next]) != id) return;
    float sum = 0.0f;
    for (long long at = next; at < rows && index_of(keys[at]) == id; at += kTile) {
        sum += partial[at / kTile * cols + column];
    }
    dweight[id * dweight_stride + column] = fmaf(scale, sum, dweight[id * dweight_stride + column]);
}
