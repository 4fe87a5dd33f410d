// Attention weights that dropout keeps: see reference/attention/core.py. One call of Philox serves
//
//                 keys   j    j + 8   j + 16   j + 24
//     query i            w0    w1       w2       w3      low half of a word
//     query i + 8        w0    w1       w2       w3      high half
//
// which one lane has in accumulators of mma.sync, whether queries are the rows or the columns. A lane with fewer of
// these keys or queries uses a part of the call.
#pragma once
#include "scores.cuh"
#include "philox.cuh"

// Calls visit(a, c, e, kept) for a lane's pairs of query tile a and key tile c, 8 apart from `query` and
// `key` on; e is 0 or 1, the one of the two neighbouring columns. kKeyRows: the columns are queries, else keys.
template <int kQueryTiles, int kKeyTiles, bool kKeyRows, typename Visit>
__device__ __forceinline__ void draw(Seed seed, const AttentionScores& scores, unsigned sequence, unsigned head,
                                     unsigned query, unsigned key, Visit visit) {
    query += scores.query0, key += scores.key0;
    constexpr int kQ = kQueryTiles > 1 ? 2 : 1, kK = kKeyTiles % 4 == 0 ? 4 : kKeyTiles > 1 ? 2 : 1;
    #pragma unroll
    for (int first_q = 0; first_q < kQueryTiles; first_q += kQ) {
        #pragma unroll
        for (int first_k = 0; first_k < kKeyTiles; first_k += kK) {
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                const unsigned i = query + 8 * first_q + (kKeyRows ? e : 0), j = key + 8 * first_k + (kKeyRows ? 0 : e);
                unsigned words[4] = {i >> 4 << 3 | i & 7, j >> 5 << 3 | j & 7, head, sequence};
                philox4x32(words, seed);
                if (kK == 1 && j & 8) words[0] = words[1], words[2] = words[3];
                if (kK < 4 && j & 16) words[0] = words[2], words[1] = words[3];
                #pragma unroll
                for (int c = 0; c < kK; ++c) {
                    #pragma unroll
                    for (int a = 0; a < kQ; ++a) {
                        const bool high = kQ == 2 ? a == 1 : i & 8;
                        // the half in the upper bits, as `dropped` has its limit; what is below decides nothing
                        visit(first_q + a, first_k + c, e, (high ? words[c] : words[c] << 16) >= scores.dropped);
                    }
                }
            }
        }
    }
}
