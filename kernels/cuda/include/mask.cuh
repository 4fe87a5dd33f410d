// Which keys a row sees: limits per row, computed once, so that an element costs a comparison of its column, a
// constant, with a register.
#pragma once

enum class Mask {
    kNone,    // all keys
    kCausal,  // up to window_right right of the diagonal
    kLocal,   // and from window_left left of it
};

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Keys [begin, end) that row positions [first, last] (on the diagonal of key position + shift) may see; and those,
// [all_begin, all_end), that every one of them sees.
struct KeyRange {
    int begin, end, all_begin, all_end;

    template <Mask kMask>
    static __device__ __forceinline__ KeyRange of(int first, int last, int seqlen_k, int left, int right) {
        KeyRange keys{0, seqlen_k, 0, seqlen_k};
        if constexpr (kMask != Mask::kNone) {
            keys.end = min(seqlen_k, last + right + 1);
            keys.all_end = min(seqlen_k, first + right + 1);
        }
        if constexpr (kMask == Mask::kLocal) {
            keys.begin = max(0, first - left);
            keys.all_begin = max(0, last - left);
        }
        return keys;
    }
};

// Scores of columns [8 tile + e] that lie outside [begin, end) of their row become -inf. Both are relative to this
// lane's first column.
template <Mask kMask, int kTiles>
__device__ __forceinline__ void mask_row(float (&s)[kTiles][4], int h, int begin, int end) {
    #pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            bool visible = 8 * j + e < end;
            if constexpr (kMask == Mask::kLocal) visible = visible && 8 * j + e >= begin;
            s[j][2 * h + e] = visible ? s[j][2 * h + e] : minus_infinity();
        }
    }
}
