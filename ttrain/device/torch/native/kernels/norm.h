// Layer norm, or RMS norm where rows are not `Centred`, over rows of C elements, its gradient, and both fused with the residual sum.
#pragma once
#include "parallel.h"

// Mean and 1 / sqrt(variance + eps) of a row, in two passes over a row that lies in the first-level cache.
struct Statistics {
    float mean, rstd;
};
template <i64 C, bool Centred>
INLINE Statistics statistics(const float* row, float eps) {
    const float mean =
        Centred ? sum_lanes(sum_over<C>([&](i64 j, auto lanes) { return load(row + j, lanes); })) / C : 0.0f;
    const vf square = sum_over<C>([&](i64 j, auto lanes) {
        vf d = first_lanes(load(row + j, lanes) - mean, lanes.count, vf{});
        return d * d;
    });
    return {mean, 1.0f / __builtin_sqrtf(sum_lanes(square) / C + eps)};
}

// total = x + branch (where there is a branch), y = (total - mean) rstd weight + bias.
template <class T, class P, bool Centred, bool Branch, bool Bias, i64 Rows, i64 C, int Threads>
INLINE void layer_norm(
    const T* x, const T* branch, const P* weight, const P* bias, float eps, T* total, T* y, float* mean, float* rstd) {
    over_rows<Rows, Threads>([&](i64 i) {
        alignas(64) float row[C];
        over_row<C>([&](i64 j, auto lanes) {
            vf v = load(x + i * C + j, lanes);
            if constexpr (Branch) {
                v = rounded<T>(v + load(branch + i * C + j, lanes));
                store(total + i * C + j, v, lanes);
            }
            store(row + j, v, lanes);
        });
        const Statistics s = statistics<C, Centred>(row, eps);
        over_row<C>([&](i64 j, auto lanes) {
            vf v = (load(row + j, lanes) - s.mean) * s.rstd * load(weight + j, lanes);
            if constexpr (Bias) v += load(bias + j, lanes);
            store(y + i * C + j, v, lanes);
        });
        if constexpr (Centred) mean[i] = s.mean;
        rstd[i] = s.rstd;
    });
}

// dx = rstd (g - mean(g) - normal mean(g normal)), without mean(g) where not `Centred`, with g = dy weight, normal = (x - mean) rstd; plus `extra` where given.
// Rows are cut into Parts ranges; each adds up its own dweight and dbias in `sums` [Parts, 2, C], and the ranges are
// then added in order: the result does not depend on the number of threads.
template <class T, class P, bool Centred, bool Bias, bool Extra, i64 Rows, i64 C, int Parts, int Threads>
INLINE void layer_norm_grad(
    const T* dy, const T* x, const float* mean, const float* rstd, const P* weight, const T* extra, T* dx, P* dweight,
    P* dbias, float* sums) {
    parallel<Threads>(Parts, [&](int part, int) {
        float* weight_sum = sums + part * 2 * C;
        float* bias_sum = weight_sum + C;
        __builtin_memset(weight_sum, 0, 2 * C * sizeof(float));
        for (i64 i = share(Rows, part, Parts); i < share(Rows, part + 1, Parts); ++i) {
            const float m = Centred ? mean[i] : 0.0f, r = rstd[i];
            vf inner[4] = {};
            const vf sum = sum_over<C>([&](i64 j, auto lanes) {
                vf d = load(dy + i * C + j, lanes), normal = (load(x + i * C + j, lanes) - m) * r;
                vf dn = d * normal, w = load(weight + j, lanes);
                store(weight_sum + j, load(weight_sum + j, lanes) + dn, lanes);
                if constexpr (Bias) store(bias_sum + j, load(bias_sum + j, lanes) + d, lanes);
                inner[j / W % 4] += dn * w;
                return d * w;
            });
            const float a = Centred ? sum_lanes(sum) / C : 0.0f;
            const float b = sum_lanes((inner[0] + inner[1]) + (inner[2] + inner[3])) / C;
            over_row<C>([&](i64 j, auto lanes) {
                vf normal = (load(x + i * C + j, lanes) - m) * r;
                vf v = (load(dy + i * C + j, lanes) * load(weight + j, lanes) - a - normal * b) * r;
                if constexpr (Extra) v += load(extra + i * C + j, lanes);
                store(dx + i * C + j, v, lanes);
            });
        }
    });
    over_row<C>([&](i64 j, auto lanes) {
        vf dw = {}, db = {};
        for (int part = 0; part < Parts; ++part) {
            dw += load(sums + part * 2 * C + j, lanes);
            if constexpr (Bias) db += load(sums + part * 2 * C + C + j, lanes);
        }
        store(dweight + j, dw, lanes);
        if constexpr (Bias) store(dbias + j, db, lanes);
    });
}
