// Wrappers for PTX instructions without a CUDA C++ equivalent, one function each.
//
// Fragments of mma.sync, lane = 4 g + t (g = 0..7, t = 0..3), E elements per 32-bit register:
//
//   A, 16 x 8E      a0: row g, a1: row g + 8, columns E t ..      a2, a3: the same rows, columns 4E + E t ..
//   B, 8E x 8       b0: rows E t .., column g                     b1: the same column, rows 4E + E t ..
//   C, 16 x 8       c0 c1: row g, columns 2t, 2t + 1              c2 c3: the same columns, row g + 8
#pragma once
#include "dtype.cuh"

typedef unsigned Operand[4];   // A, or two B
typedef float Accumulator[4];  // C

namespace ptx {

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Hides from the compiler how an address was computed. Otherwise it would compute all addresses of a tile before the
// loop and keep them in registers, instead of using immediate offsets.
__device__ __forceinline__ unsigned opaque(unsigned address) {
    asm volatile("" : "+r"(address));
    return address;
}

template <typename T> __device__ __forceinline__ T* opaque(T* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// Keeps a value in a register. Otherwise ptxas recomputes it from thread and block indices when registers run short.
__device__ __forceinline__ unsigned kept(unsigned x) { return __shfl_sync(0xffffffffu, x, threadIdx.x % 32); }

// Loads four 8 x 8 matrices of 16-bit elements (8 x 4 of 32-bit ones). Lane 8 j + r passes the address of row r of
// matrix j.
__device__ __forceinline__ void ldmatrix4(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void ldmatrix4_transposed(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ unsigned load_shared(unsigned address) {
    unsigned word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}

__device__ __forceinline__ void load_shared(unsigned address, unsigned (&word)[4]) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(address));
}

__device__ __forceinline__ void store_shared(unsigned address, unsigned word) {
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void store_shared(unsigned address, const unsigned (&word)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
}

// Copies 16 bytes from global to shared memory, bypassing registers and L1. Bytes beyond `bytes` (0 or 16) become zero.
__device__ __forceinline__ void cp_async16(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
}

// The same for kBytes bytes; 4 and 8 go through L1.
template <int kBytes> __device__ __forceinline__ void cp_async(unsigned to, const void* from, int bytes) {
    if constexpr (kBytes == 16) {
        cp_async16(to, from, bytes);
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(to), "l"(__cvta_generic_to_global(from)), "n"(kBytes), "r"(bytes) : "memory");
    }
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all but the kNewest latest groups of this thread. Other threads' copies need a barrier on top.
template <int kNewest> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(kNewest) : "memory");
}

// c += a b, with 32 bytes of A per row.
template <typename T>
__device__ __forceinline__ void mma(Accumulator& c, const Operand& a, unsigned b0, unsigned b1);

template <> __device__ __forceinline__ void mma<f16>(Accumulator& c, const Operand& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <> __device__ __forceinline__ void mma<bf16>(Accumulator& c, const Operand& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The hardware reads the upper 19 bits of each operand; mma.cuh rounds to them.
template <> __device__ __forceinline__ void mma<f32>(Accumulator& c, const Operand& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// In C++ the same product takes an addition of zero more.
__device__ __forceinline__ unsigned long long multiply_wide(unsigned a, unsigned b) {
    unsigned long long product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}

__device__ __forceinline__ unsigned subtract_f16x2(unsigned x, unsigned y) {
    unsigned z;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ unsigned multiply_f16x2(unsigned x, unsigned y) {
    unsigned z;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ unsigned fma_bf16x2(unsigned x, unsigned y, unsigned z) {
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(z));
    return x;
}

__device__ __forceinline__ float exp2(float x) {  // 2 ulp; results below 2^-126 are 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {  // 1 ulp
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float tanh(float x) {  // relative error 2^-11, half a unit of float16
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace ptx
