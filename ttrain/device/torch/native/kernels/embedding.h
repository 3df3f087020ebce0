// The gradient of a lookup: rows of dy added up by id, in fp32, in the order in which they occur.
#pragma once
#include "parallel.h"

// dweight [V, C] = the sums of dy [N, C] by id, plus `base` [V, C] where given; dweight may be base. Occurrences are
// sorted by id first, so that every row is written once; a thread takes a range of columns of all rows. Ids beyond the last
// row are left out; their lookup has made the loss NaN.
template <class T, bool Base, i64 N, i64 V, i64 C, int Threads>
INLINE void embedding_grad(const T* dy, const i64* ids, const T* base, T* dweight, i32* starts, i32* order) {
    __builtin_memset(starts, 0, (V + 1) * sizeof(i32));
    for (i64 i = 0; i < N; ++i)
        if (u64(ids[i]) < u64(V)) ++starts[ids[i] + 1];
    for (i64 v = 0; v < V; ++v) starts[v + 1] += starts[v];
    for (i64 i = 0; i < N; ++i)
        if (u64(ids[i]) < u64(V)) order[starts[ids[i]]++] = i32(i);  // afterwards starts[v] is where id v ends
    if constexpr (!Base)  // in one piece, which goes past the caches where it is large
        over_ranges(Threads, V * C, 64, [&](i64 begin, i64 end) {
            __builtin_memset(dweight + begin, 0, (end - begin) * sizeof(T));
        });
    over_ranges(Threads, C, 64 / sizeof(T), [&](i64 left, i64 right) {
        for (i64 v = 0, k = 0; v < V; ++v) {
            const i64 end = starts[v];
            T* row = dweight + v * C;
            if (k == end) {
                if (Base && base != dweight)
                    __builtin_memcpy(row + left, base + v * C + left, (right - left) * sizeof(T));
                continue;
            }
            i64 j = left;
            for (; j + W <= right; j += W) {
                vf sum = {};
                for (i64 n = k; n < end; ++n) sum += load(dy + order[n] * C + j);
                if constexpr (Base) sum += load(base + v * C + j);
                store(row + j, sum);
            }
            for (; j < right; ++j) {
                float sum = 0;
                for (i64 n = k; n < end; ++n) sum += get(dy + order[n] * C + j);
                put(row + j, Base ? sum + get(base + v * C + j) : sum);
            }
            k = end;
        }
    });
}
