// Kernels that tests/emulator/test_machine.py runs on the emulator, for every architecture. Each is about one way in
// which threads part, meet, call or address memory; the oracles are in the test.

struct Pair {
  int a;
  float b;
};

struct Settings {
  float scale;
  int table[6];
  char tag;
};

__constant__ float TABLE[8] = {1.f, 2.f, 4.f, 8.f, 16.f, 32.f};  // the last two are zero
__device__ int SCRATCH[256];
__device__ int START = 7;

// -- divergence ---------------------------------------------------------------------------------------------------

extern "C" __global__ void nested_ifs(const int* x, int* y) {
  int t = threadIdx.x, v = x[t];
  if (v & 1) {
    if (v & 2) {
      v = v * 3;
      if (v & 8) v += 100;
    } else {
      v = -v;
    }
  } else if (v & 4) {
    v = v / 3;
  }
  y[t] = v + __shfl_xor_sync(0xffffffff, v, 1);  // together again
}

extern "C" __global__ void trip_counts(const int* x, int* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int steps = 0;
  for (int v = x[i]; v != 1; steps++) v = v & 1 ? 3 * v + 1 : v / 2;
  y[i] = steps;
}

extern "C" __global__ void early_return(const int* x, int* y) {
  __shared__ int s[96];
  int t = threadIdx.x;
  s[t] = x[t];
  if (t % 3 == 0) return;
  __syncthreads();  // of those that are left
  if (t == 1) {
    int sum = 0;
    for (int i = 0; i < 96; i++) sum += s[i];
    y[0] = sum;
  }
}

extern "C" __global__ void jump_table(const int* x, int* y) {
  int t = threadIdx.x, v = x[t];
  switch (v) {
    case 0: v = t * t; break;
    case 1: v = t - 5; break;
    case 2: v = t << 3; break;
    case 3: v = ~t; break;
    case 4: v = t / 7; [[fallthrough]];
    case 5: v += 1000; break;
    case 6: v = t % 7; break;
    case 7: v = __popc(t); break;
    default: v = -1;
  }
  y[t] = v;
}

extern "C" __global__ void do_while(const int* x, int* y) {
  int t = threadIdx.x, v = x[t], n = 0;
  do {
    v = v * 5 + 1;
    if (v % 7 == 0) break;
    if (v % 3 == 0) continue;
    n += v & 15;
  } while (++n < 40);
  y[t] = n;
}

extern "C" __global__ void where_am_i(int* y) {
  int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  int threads = blockDim.x * blockDim.y * blockDim.z;
  int lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  int* out = y + 8 * (block * threads + thread);
  out[0] = threadIdx.x, out[1] = threadIdx.y, out[2] = threadIdx.z;
  out[3] = blockIdx.x, out[4] = blockIdx.y, out[5] = blockIdx.z;
  out[6] = lane, out[7] = gridDim.x * gridDim.y * gridDim.z * 10000 + threads;
}

// -- calls, and memory that is not global --------------------------------------------------------------------------

__noinline__ __device__ Pair twice(Pair p, int n) { return {p.a * n, p.b * n + TABLE[n & 7]}; }

__noinline__ __device__ int both(const Pair& p, int n) {
  Pair q = twice(p, n);
  return q.a + (int)twice(q, 3).b;
}

extern "C" __global__ void calls(const int* x, float* y) {
  int t = threadIdx.x;
  Pair p = twice({x[t], 0.5f}, t & 3);
  if (t & 1) p.a += both(p, 2);
  y[t] = p.a + p.b;
}

extern "C" __global__ void local_array(const int* x, int* y, int n) {
  int t = threadIdx.x, count[16];
#pragma unroll 1
  for (int i = 0; i < 16; i++) count[i] = 0;
#pragma unroll 1
  for (int i = 0; i < n; i++) count[x[t * n + i]]++;
  for (int i = 0; i < 16; i++) y[t * 16 + i] = count[i];
}

extern "C" __global__ void globals(float* y, int* z) {
  int t = threadIdx.x;
  SCRATCH[t] = t * t + START;
  __syncthreads();
  y[t] = TABLE[t & 7];
  z[t] = SCRATCH[blockDim.x - 1 - t];
}

__noinline__ __device__ float load(const float* p, int i) { return p[i]; }

extern "C" __global__ void generic_pointers(const float* x, float* y) {
  __shared__ float s[64];
  float mine[4];
  int t = threadIdx.x;
  s[t] = 2 * x[t];
#pragma unroll 1
  for (int i = 0; i < 4; i++) mine[i] = 3 * x[(t + i) & 63];
  __syncthreads();
  const float* from = t % 3 == 0 ? x : t % 3 == 1 ? s : mine;
  y[t] = load(from, t & 3) + (__isShared(from) ? 1000 : 0) + (__isGlobal(from) ? 2000 : 0);
}

struct Padded {  // with padding, which copies read and nobody writes
  char a;
  double b;
  short c;
};

__noinline__ __device__ Padded next(Padded p) {
  p.a++, p.c--;
  return p;
}

extern "C" __global__ void padding(double* y, int n) {
  int t = threadIdx.x;
  Padded p, all[3];
  p.a = t, p.b = n, p.c = 2 * t;
#pragma unroll 1
  for (int i = 0; i < 3; i++) all[i] = p = next(p);
  Padded q = all[n % 3];
  q = next(q);
  y[t] = q.a * 10000 + q.b + q.c;
}

extern "C" __global__ void by_value(Settings s, const __grid_constant__ Settings c, short n, float* y, int which) {
  int t = threadIdx.x;
  const Settings& chosen = c;
  y[t] = s.scale * s.table[(t + which) % 6] + chosen.table[t % 6] * chosen.scale + n + s.tag;
}

extern "C" __global__ void widths(const char* in, long long* y) {
  int t = threadIdx.x;
  const char* p = in + 64 * t;
  const int4 a = *(const int4*)p;
  const double2 b = *(const double2*)(p + 16);
  const short4 c = *(const short4*)(p + 32);
  const uchar4 d = *(const uchar4*)(p + 40);
  const ushort2 e = *(const ushort2*)(p + 44);
  const longlong2 f = *(const longlong2*)(p + 48);
  long long* out = y + 12 * t;
  out[0] = a.x ^ a.w, out[1] = (long long)a.y * a.z;
  out[2] = (long long)(b.x + b.y);
  out[3] = c.x - c.w, out[4] = c.y * c.z;
  out[5] = d.x + d.y + d.z + d.w, out[6] = e.x - e.y;
  out[7] = f.x / (f.y | 1), out[8] = (unsigned long long)f.x >> 3;
  out[9] = *(const signed char*)p, out[10] = *(const unsigned char*)p;
  out[11] = *(const short*)(p + 2) * 65536LL + *(const unsigned short*)(p + 2);
}

// -- order between threads -----------------------------------------------------------------------------------------

extern "C" __global__ void spin_lock(int* lock, int* counter) {
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      __threadfence();
      int v = *(volatile int*)counter;
      *(volatile int*)counter = v + 1;
      __threadfence();
      atomicExch(lock, 0);
      done = true;
    }
  }
}

extern "C" __global__ void last_block(const float* x, volatile float* partial, unsigned* ticket, float* y, int n) {
  __shared__ float s[64];
  __shared__ bool last;
  int t = threadIdx.x;
  float a = 0;
  for (int i = blockIdx.x * 64 + t; i < n; i += gridDim.x * 64) a += x[i];
  s[t] = a;
  __syncthreads();
  for (int o = 32; o; o /= 2) {
    if (t < o) s[t] += s[t + o];
    __syncthreads();
  }
  if (t == 0) {
    partial[blockIdx.x] = s[0];
    __threadfence();
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && t == 0) {
    float total = 0;
    for (int i = 0; i < gridDim.x; i++) total += partial[i];
    y[0] = total;
  }
}

// Warp 1 waits for warp 0 and warp 0 for warp 1, by flags in global memory.
extern "C" __global__ void flags(volatile int* flag, volatile int* box, int* y, int n) {
  int t = threadIdx.x;
  for (int i = 1; i <= n; i++) {
    if (t < 32) {
      while (flag[1] != i - 1) __nanosleep(20);
      box[t] = i * 1000 + t;
      __threadfence();
      __syncwarp();
      if (t == 0) flag[0] = i;
    } else {
      while (flag[0] != i) {
      }
      y[(i - 1) * 32 + t - 32] = box[t - 32];
      __syncwarp();
      if (t == 32) flag[1] = i;
    }
    __syncwarp();
  }
}

// Lane 0 of each warp ends last; the warp must not be taken for stuck while the others poll.
extern "C" __global__ void end_while_polled(volatile int* flag, int* y) {
  int t = threadIdx.x;
  if (t < 32) {
    if (t == 0) {
      for (int i = 0; i < 50; i++) y[0] += flag[1];
      return;
    }
    __syncwarp();  // lane 0 need not come: it ends
    int sum = __reduce_add_sync(0xfffffffe, t);
    if (t == 1) y[1] = sum, flag[0] = 1;
  } else {
    while (flag[0] == 0) {
    }
    y[t] = 1;
  }
}

extern "C" __global__ void named_barriers(const float* x, float* y, int n) {
  __shared__ float s[2][32];
  int t = threadIdx.x & 31;
  bool producer = threadIdx.x < 32;
  for (int i = 0; i < n; i++) {
    int b = i & 1;
    if (producer) {
      if (i >= 2) asm volatile("bar.sync %0, 64;" ::"r"(3 + b) : "memory");  // empty
      s[b][t] = x[32 * i + t];
      asm volatile("bar.arrive %0, 64;" ::"r"(1 + b) : "memory");  // full
    } else {
      asm volatile("bar.sync %0, 64;" ::"r"(1 + b) : "memory");
      y[32 * i + t] = s[b][31 - t];
      if (i + 2 < n) asm volatile("bar.arrive %0, 64;" ::"r"(3 + b) : "memory");
    }
  }
}

extern "C" __global__ void counting_barriers(const int* x, int* y) {
  int v = x[blockIdx.x * blockDim.x + threadIdx.x];
  int count = __syncthreads_count(v & 1), all = __syncthreads_and(v > 0), any = __syncthreads_or(v > 90);
  if (threadIdx.x == blockDim.x - 1) {
    y[3 * blockIdx.x] = count, y[3 * blockIdx.x + 1] = all, y[3 * blockIdx.x + 2] = any;
  }
}

extern "C" __global__ void atomics(const int* x, int* z, float* f, double* d, unsigned long long* u) {
  __shared__ int s[12];
  int t = threadIdx.x;
  if (t < 12) s[t] = z[t];
  __syncthreads();
  for (int* to : {s, z}) {
    int v = x[blockIdx.x * blockDim.x + t];
    atomicAdd(to, v), atomicSub(to + 1, v), atomicMin(to + 2, v), atomicMax(to + 3, v);
    atomicMin((unsigned*)to + 4, (unsigned)v), atomicMax((unsigned*)to + 5, (unsigned)v);
    atomicAnd(to + 6, v | 15), atomicOr(to + 7, v & 0xff), atomicXor(to + 8, v);
    atomicInc((unsigned*)to + 9, 4), atomicDec((unsigned*)to + 10, 4);
    atomicCAS(to + 11, 5, 6);
  }
  atomicAdd(f, 0.25f), atomicAdd(d, 0.25), atomicAdd(u, 1ull << 33), atomicMax(u + 1, (unsigned long long)x[t]);
  __syncthreads();
  if (t < 12 && blockIdx.x == 0) z[12 + t] = s[t];
}

extern "C" __global__ void partial_masks(const int* x, unsigned* y) {
  int t = threadIdx.x, lane = t & 31, v = x[t];
  unsigned* out = y + 8 * t;
  if (lane < 20) {
    const unsigned m = 0x000fffff;
    out[0] = __ballot_sync(m, v & 1);
    out[1] = __any_sync(m, v > 90) | __all_sync(m, v > 0) << 1;
    out[2] = __match_any_sync(m, v & 3);
    out[3] = __reduce_add_sync(m, (unsigned)v), out[4] = __reduce_max_sync(m, v);
    out[5] = __shfl_sync(m, v, lane / 4 * 4, 4);
    out[6] = __activemask();
  } else {
    const unsigned m = 0xfff00000;
    out[0] = __ballot_sync(m, v & 2);
    out[1] = __shfl_up_sync(m, v, lane > 20), out[2] = __shfl_down_sync(m, v, lane < 31);
    out[3] = __reduce_or_sync(m, (unsigned)v);
    out[4] = out[5] = out[6] = 0;
  }
  __syncwarp();
  out[7] = __ballot_sync(0xffffffff, v & 4);
}

// -- inline PTX ----------------------------------------------------------------------------------------------------

// Registers and labels of an inline { } may have the names of those around it, and of another copy of it.
__device__ __forceinline__ int power(int v, int n) {
  int r;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .s32 r1, r2;\n"
      "mov.s32 r1, 1;\n"
      "mov.s32 r2, %2;\n"
      "again:\n"
      "setp.eq.s32 p, r2, 0;\n"
      "@p bra end;\n"
      "{ .reg .s32 r1x, r2; mov.s32 r2, %1; mov.s32 r1x, r2; mul.lo.s32 r1, r1, r1x; }\n"
      "sub.s32 r2, r2, 1;\n"
      "bra again;\n"
      "end:\n"
      "mov.s32 %0, r1;\n"
      "}"
      : "=r"(r)
      : "r"(v), "r"(n));
  return r;
}

extern "C" __global__ void inline_scopes(const int* x, int* y) {
  int t = threadIdx.x;
  y[t] = power(x[t], t & 3) - power(t, 2);
}

extern "C" __global__ void predicated(const int* x, int* y) {
  int t = threadIdx.x, v = x[t], r = 1, flag;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.gt.and.s32 p|q, %2, 50, 1;\n"
      "@p add.s32 %0, %0, %2;\n"
      "@!p st.global.s32 [%3], -1;\n"
      "@q sub.s32 %0, %0, 7;\n"
      "selp.s32 %1, 1, 0, q;\n"
      "}"
      : "+r"(r), "=r"(flag)
      : "r"(v), "l"(y + 128 + t)
      : "memory");
  y[t] = r;
  y[64 + t] = flag;
}

extern "C" __global__ void clocks(long long* y) {
  long long before = clock64();
  unsigned low = clock();
  y[threadIdx.x] = threadIdx.x;
  long long after = clock64();
  y[32 + threadIdx.x] = after > before && clock() > low;
}
