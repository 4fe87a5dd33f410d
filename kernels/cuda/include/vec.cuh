// Vectors of a row: the N consecutive elements that one thread reads or writes at a time, packed in words.
//
// What a vector holds and which thread owns it depends on the shape alone, so that sums are added up in the
// same order wherever an array lies in memory. How it is fetched depends on the alignment: in one access of up
// to 128 bits, or, kAccess < N, element by element (the other elements of the line come from L1).
#pragma once
#include "dtype.cuh"

enum class Cache {
    kOnce,      // read once: evict first, so that it displaces neither weights nor what others keep in L2
    kConstant,  // nobody writes it while the kernel runs: the read-only path
    kDefault,   // read again soon, by this block or the next kernel
};

template <typename T, int N> struct Vec {
    using Scalar = T;
    static constexpr int kSize = N;
    static constexpr int kPerWord = Packed<T>::kPerWord;
    static constexpr int kWords = (N + kPerWord - 1) / kPerWord;
    unsigned word[kWords];  // a vector of one 16-bit number fills half of its word
};

namespace detail {

template <Cache kCache, typename A> __device__ __forceinline__ A read(const A* p) {
    if constexpr (kCache == Cache::kOnce) return __ldcs(p);
    else if constexpr (kCache == Cache::kConstant) return __ldg(p);
    else return *p;
}

// One access of kBytes, as words.
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

template <int kBytes> __device__ __forceinline__ void write_words(void* p, const unsigned* word) {
    if constexpr (kBytes == 16) *static_cast<uint4*>(p) = make_uint4(word[0], word[1], word[2], word[3]);
    else if constexpr (kBytes == 8) *static_cast<uint2*>(p) = make_uint2(word[0], word[1]);
    else if constexpr (kBytes == 4) *static_cast<unsigned*>(p) = word[0];
    else *static_cast<unsigned short*>(p) = static_cast<unsigned short>(word[0]);
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

template <typename T, int N> __device__ __forceinline__ void unpack(const Vec<T, N>& v, float (&value)[N]) {
    constexpr int kPerWord = Packed<T>::kPerWord;
    #pragma unroll
    for (int w = 0; w < Vec<T, N>::kWords; ++w) {
        float wide[kPerWord];
        Packed<T>::widen(v.word[w], wide);
        #pragma unroll
        for (int e = 0; e < kPerWord; ++e) {
            if (w * kPerWord + e < N) value[w * kPerWord + e] = wide[e];
        }
    }
}

template <typename T, int N> __device__ __forceinline__ Vec<T, N> pack(const float (&value)[N]) {
    constexpr int kPerWord = Packed<T>::kPerWord;
    Vec<T, N> v;
    #pragma unroll
    for (int w = 0; w < Vec<T, N>::kWords; ++w) {
        float wide[kPerWord];
        #pragma unroll
        for (int e = 0; e < kPerWord; ++e) wide[e] = w * kPerWord + e < N ? value[w * kPerWord + e] : 0.0f;
        v.word[w] = Packed<T>::narrow(wide);
    }
    return v;
}

// Rounds to T and back.
template <typename T, int N> __device__ __forceinline__ void round_to(float (&value)[N]) {
    if constexpr (sizeof(T) < sizeof(float)) unpack(pack<T>(value), value);
}
