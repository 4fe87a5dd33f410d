// Vectors of a row: N consecutive elements that one thread reads or writes at once, packed in words.
//
// Only the shape decides which thread owns which vector, so sums are added in the same order wherever an array is
// in memory. Alignment decides how a vector is loaded: one access of up to 128 bits, or, with kAccess < N, element by
// element (the rest of the line then comes from L1).
#pragma once
#include "dtype.cuh"

enum class Cache {
    kOnce,      // read once: evict first, to spare weights and shared data in L2
    kConstant,  // constant while the kernel runs: the read-only path
    kDefault,   // read again soon, by this block or the next kernel
};

template <typename T, int N> struct Vec {
    using Scalar = T;
    static constexpr int kSize = N;
    static constexpr int kPerWord = Packed<T>::kPerWord;
    static constexpr int kWords = (N + kPerWord - 1) / kPerWord;
    unsigned word[kWords];  // a vector of one 16-bit value fills half of its word
};

namespace detail {

template <Cache kCache, typename A> __device__ __forceinline__ A read(const A* p) {
    if constexpr (kCache == Cache::kOnce) return __ldcs(p);
    else if constexpr (kCache == Cache::kConstant) return __ldg(p);
    else return *p;
}

// One access of kBytes, in words.
template <Cache kCache, int kBytes> __device__ __forceinline__ void read_words(const void* p, unsigned* word) {
    static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4 || kBytes == 2, "no such access");
    if constexpr (kBytes == 16) {
        const uint4 w = read<kCache>(static_cast<const uint4*>(p));
        word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
    } else if constexpr (kBytes == 8) {
        const uint2 w = read<kCache>(static_cast<const uint2*>(p));
        word[0] = w.x, word[1] = w.y;
    } else if constexpr (kBytes == 4) {
        word[0] = read<kCache>(static_cast<const unsigned*>(p));
    } else {
        word[0] = read<kCache>(static_cast<const unsigned short*>(p));
    }
}

// In asm, because the compiler splits a plain uint4 store whose words have been floats.
template <int kBytes> __device__ __forceinline__ void write_words(void* p, const unsigned* word) {
    const size_t address = __cvta_generic_to_global(p);
    if constexpr (kBytes == 16) {
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                     :: "l"(address), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
    } else if constexpr (kBytes == 8) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(address), "r"(word[0]), "r"(word[1]) : "memory");
    } else if constexpr (kBytes == 4) {
        asm volatile("st.global.b32 [%0], %1;" :: "l"(address), "r"(word[0]) : "memory");
    } else if constexpr (kBytes == 2) {
        asm volatile("st.global.b16 [%0], %1;" :: "l"(address), "h"((unsigned short)word[0]) : "memory");
    } else {
        asm volatile("st.global.b8 [%0], %1;" :: "l"(address), "r"(word[0]) : "memory");
    }
}

}  // namespace detail

template <typename V, int kAccess, Cache kCache> __device__ __forceinline__ V load(const typename V::Scalar* p) {
    constexpr int kBytes = sizeof(typename V::Scalar);
    V v;
    if constexpr (kAccess == V::kSize) {
        detail::read_words<kCache, V::kSize * kBytes>(p, v.word);
    } else {
        #pragma unroll
        for (int w = 0; w < V::kWords; ++w) {
            v.word[w] = 0;
            #pragma unroll
            for (int e = 0; e < V::kPerWord; ++e) {
                unsigned element;
                detail::read_words<kCache, kBytes>(p + w * V::kPerWord + e, &element);
                v.word[w] |= element << (16 * e);
            }
        }
    }
    return v;
}

template <int kAccess, typename V> __device__ __forceinline__ void store(typename V::Scalar* p, const V& v) {
    constexpr int kBytes = sizeof(typename V::Scalar);
    if constexpr (kAccess == V::kSize) {
        detail::write_words<V::kSize * kBytes>(p, v.word);
    } else {
        #pragma unroll
        for (int e = 0; e < V::kSize; ++e) {
            const unsigned element = v.word[e / V::kPerWord] >> (16 * (e % V::kPerWord));
            detail::write_words<kBytes>(p + e, &element);
        }
    }
}

template <typename T, int N> __device__ __forceinline__ float element(const Vec<T, N>& v, int e) {
    float wide[Packed<T>::kPerWord];
    Packed<T>::widen(v.word[e / Packed<T>::kPerWord], wide);
    return wide[e % Packed<T>::kPerWord];
}

template <typename T, int N> __device__ __forceinline__ Vec<T, N> packed(const float* value) {
    constexpr int kPerWord = Packed<T>::kPerWord;
    Vec<T, N> v;
    #pragma unroll
    for (int w = 0; w < Vec<T, N>::kWords; ++w) {
        float word[kPerWord] = {};
        #pragma unroll
        for (int e = 0; e < kPerWord && w * kPerWord + e < N; ++e) word[e] = value[w * kPerWord + e];
        v.word[w] = Packed<T>::narrow(word);
    }
    return v;
}

template <typename T, int N> __device__ __forceinline__ Vec<T, N> operator+(Vec<T, N> a, const Vec<T, N>& b) {
    #pragma unroll
    for (int w = 0; w < Vec<T, N>::kWords; ++w) {
        float sum[Packed<T>::kPerWord], other[Packed<T>::kPerWord];
        Packed<T>::widen(a.word[w], sum);
        Packed<T>::widen(b.word[w], other);
        #pragma unroll
        for (int e = 0; e < Packed<T>::kPerWord; ++e) sum[e] += other[e];
        a.word[w] = Packed<T>::narrow(sum);
    }
    return a;
}

// Makes the compiler forget what it derived from a value, so that it recomputes rather than keep it in registers:
// floats unpacked from words (twice the registers), or addresses.
__device__ __forceinline__ void forget(int& value) { asm volatile("" : "+r"(value)); }

template <typename V> __device__ __forceinline__ V fresh(V v) {
    if constexpr (V::kPerWord > 1) {
        #pragma unroll
        for (int w = 0; w < V::kWords; ++w) asm volatile("" : "+r"(v.word[w]));
    }
    return v;
}
