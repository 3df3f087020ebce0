// Softmax over rows, its gradient, and the forms that attention needs: causal, with the log of the sum, with dropout.
// A causal row sees the first t + 1 of its T columns; the others are neither read nor computed, and hold zero.
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

template <bool Causal, i64 C>
INLINE i64 visible(i64 row) {
    return Causal ? row % C + 1 : C;
}

// y = softmax(scale x), then dropout (Drop); log_sum_exp of scale x per row (Statistic).
template <class T, bool Causal, bool Statistic, bool Drop, i64 Rows, i64 C, int Threads>
INLINE void softmax(const T* x, T* y, float* log_sum_exp, float scale, Mask mask) {
    over_rows<Rows, Threads>([&](i64 i) {
        alignas(64) float row[(C + W - 1) / W * W];
        const i64 n = visible<Causal, C>(i);
        const vf lowest = splat(-3.4e38f);
        vf highest = lowest;
        over_prefix<C>(n, [&](i64 j, auto lanes, auto keep) {
            vf v = load(x + i * C + j, lanes) * scale;
            store(row + j, v);
            highest = greater(highest, keep(v, lowest));
        });
        const float most = max_lanes(highest);
        vf sum = {};
        over_prefix<C>(n, [&](i64 j, auto, auto keep) {
            vf e = keep(v_exp(load(row + j) - most), vf{});
            store(row + j, e);
            sum += e;
        });
        const float total = sum_lanes(sum), share = 1.0f / total;
        over_prefix<C>(n, [&](i64 j, auto lanes, auto) {
            vf v = load(row + j) * share;
            if constexpr (Drop) v = mask(v, i * C + j);
            store(y + i * C + j, v, lanes);
        });
        clear_after<C>(y + i * C, n);
        if constexpr (Statistic) log_sum_exp[i] = most + v_log(splat(total))[0];
    });
}

// Causal probabilities from scores and their log_sum_exp; with Drop also as dropout leaves them. y may be x.
template <class T, bool Drop, i64 Rows, i64 C, int Threads>
INLINE void probabilities(const T* x, const float* log_sum_exp, T* y, T* dropped, float scale, Mask mask) {
    over_rows<Rows, Threads>([&](i64 i) {
        const i64 n = visible<true, C>(i);
        const float shift = log_sum_exp[i];
        over_prefix<C>(n, [&](i64 j, auto lanes, auto keep) {
            vf v = keep(v_exp(load(x + i * C + j, lanes) * scale - shift), vf{});
            store(y + i * C + j, v, lanes);
            if constexpr (Drop) store(dropped + i * C + j, mask(v, i * C + j), lanes);
        });
        clear_after<C>(y + i * C, n);
        if constexpr (Drop) clear_after<C>(dropped + i * C, n);
    });
}

// dx = scale y (g - sum(g y)), where g is dy, masked by dropout where Drop. dx may be dy.
template <class T, bool Causal, bool Drop, i64 Rows, i64 C, int Threads>
INLINE void softmax_grad(const T* dy, const T* y, T* dx, float scale, Mask mask) {
    over_rows<Rows, Threads>([&](i64 i) {
        const i64 n = visible<Causal, C>(i);
        const T *g = dy + i * C, *p = y + i * C;
        vf sum = {};
        over_prefix<C>(n, [&](i64 j, auto lanes, auto keep) {
            vf v = load(g + j, lanes);
            if constexpr (Drop) v = mask(v, i * C + j);
            sum += keep(v * load(p + j, lanes), vf{});
        });
        const float inner = sum_lanes(sum);
        over_prefix<C>(n, [&](i64 j, auto lanes, auto keep) {
            vf v = load(g + j, lanes);
            if constexpr (Drop) v = mask(v, i * C + j);
            store(dx + i * C + j, keep((v - inner) * load(p + j, lanes) * scale, vf{}), lanes);
        });
        clear_after<C>(dx + i * C, n);
    });
}
