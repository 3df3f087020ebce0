// Rotary positions: of each head's D features the first R and the R after them are turned by the angles of their place.
#pragma once
#include "parallel.h"

// x, y [Rows, H, D]; cos, sin [Places, R], of which row i has the one at i % Places; `Sign` is -1 to turn back.
template <class X, int Sign, i64 Rows, i64 H, i64 D, i64 Places, i64 R, int Threads>
INLINE void rotary(const X* x, const float* cos, const float* sin, X* y) {
    over_rows<Rows, Threads>([&](i64 i) {
        const float *c = cos + i % Places * R, *s = sin + i % Places * R;
        for (i64 at = i * H * D; at < (i + 1) * H * D; at += D) {
            over_row<R>([&](i64 j, auto lanes) {
                const vf a = load(x + at + j, lanes), b = load(x + at + R + j, lanes);
                const vf across = load(s + j, lanes) * float(Sign), along = load(c + j, lanes);
                store(y + at + j, a * along - apart(b * across), lanes);
                store(y + at + R + j, b * along + apart(a * across), lanes);
            });
            if constexpr (2 * R < D)
                over_row<D - 2 * R>([&](i64 j, auto lanes) { store(y + at + 2 * R + j, load(x + at + 2 * R + j, lanes), lanes); });
        }
    });
}
