// Moves without arithmetic: heads and transposes.
#pragma once
#include "parallel.h"

// x [B, T, Parts, H, D] -> Parts tensors [B, H, T, D] (Split), or back.
template <class T, bool Split, i64 B, i64 Time, int Parts, i64 H, i64 D, int Threads>
INLINE void move_heads(T* packed, T* const* parts) {
    over_rows<B * Time, Threads>([&](i64 i) {
        const i64 b = i / Time, t = i % Time;
        for (int part = 0; part < Parts; ++part)
            for (i64 h = 0; h < H; ++h) {
                T* whole = packed + ((i * Parts + part) * H + h) * D;
                T* one = parts[part] + ((b * H + h) * Time + t) * D;
                __builtin_memcpy(Split ? one : whole, Split ? whole : one, D * sizeof(T));
            }
    });
}

// x [A, R, C] -> y [A, C, R], in squares that fit a few cache lines each way.
template <class T, i64 A, i64 R, i64 C, int Threads>
INLINE void transpose(const T* x, T* y) {
    constexpr i64 square = 32, down = (R + square - 1) / square;
    over_rows<A * down, Threads>([&](i64 k) {
        const i64 a = k / down, top = k % down * square, bottom = top + square < R ? top + square : R;
        for (i64 left = 0; left < C; left += square) {
            const i64 right = left + square < C ? left + square : C;
            for (i64 c = left; c < right; ++c)
                for (i64 r = top; r < bottom; ++r) y[(a * C + c) * R + r] = x[(a * R + r) * C + c];
        }
    });
}
