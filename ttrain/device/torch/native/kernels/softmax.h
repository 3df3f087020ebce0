// Softmax over rows and its gradient. A causal row sees the first t + 1 of its T columns; the others are neither read nor
// computed, and hold zero.
#pragma once
#include "parallel.h"
#include "vector_math.h"

struct AllLanes {
    INLINE vf operator()(vf v, vf) const { return v; }
};
struct FirstLanes {
    int count;
    INLINE vf operator()(vf v, vf other) const { return first_lanes(v, count, other); }
};

// step(offset, lanes, keep) over the first n columns of a row of C; keep(v, other) replaces lanes that lie beyond.
template <i64 C, class Step>
INLINE void over_prefix(i64 n, const Step& step) {
    i64 j = 0;
    for (; j + W <= n; j += W) step(j, Full{}, AllLanes{});
    if (j == n) return;
    if constexpr (C % W != 0) {
        if (j + W > C) return step(j, Part<C % W>{}, FirstLanes{int(n - j)});
    }
    step(j, Full{}, FirstLanes{int(n - j)});
}

// Zero in the columns that no step of over_prefix has written.
template <i64 C, class T>
INLINE void clear_after(T* row, i64 n) {
    const i64 begin = (n + W - 1) / W * W;
    if (begin < C) __builtin_memset(row + begin, 0, (C - begin) * sizeof(T));
}

// y = softmax(scale x).
template <class T, bool Causal, i64 Rows, i64 C, int Threads>
INLINE void softmax(const T* x, T* y, float scale) {
    over_rows<Rows, Threads>([&](i64 i) {
        alignas(64) float row[(C + W - 1) / W * W];
        const i64 n = Causal ? i % C + 1 : C;
        const vf lowest = splat(-3.4e38f);
        vf highest = lowest, sum = {};
        over_prefix<C>(n, [&](i64 j, auto lanes, auto keep) {
            vf v = load(x + i * C + j, lanes) * scale;
            store(row + j, v);
            highest = greater(highest, keep(v, lowest));
        });
        const float most = max_lanes(highest);
        over_prefix<C>(n, [&](i64 j, auto, auto keep) {
            vf e = keep(v_exp_no_overflow(load(row + j) - most), vf{});
            store(row + j, e);
            sum += e;
        });
        const float inverse_sum = 1.0f / sum_lanes(sum);
        over_prefix<C>(n, [&](i64 j, auto lanes, auto) { store(y + i * C + j, load(row + j) * inverse_sum, lanes); });
        clear_after<C>(y + i * C, n);
    });
}

// dx = scale y (dy - sum(dy y)). dx may be dy.
template <class T, i64 Rows, i64 C, int Threads>
INLINE void softmax_grad(const T* dy, const T* y, T* dx, float scale) {
    over_rows<Rows, Threads>([&](i64 i) {
        const T *g = dy + i * C, *p = y + i * C;
        const vf products = sum_over<C>([&](i64 j, auto lanes) { return load(g + j, lanes) * load(p + j, lanes); });
        const float inner = sum_lanes(products);
        over_row<C>([&](i64 j, auto lanes) {
            store(dx + i * C + j, (load(g + j, lanes) - inner) * load(p + j, lanes) * scale, lanes);
        });
    });
}
