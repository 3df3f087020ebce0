// Softmax cross-entropy over rows of logits. A target below zero marks a row without one: no loss, no gradient. One beyond
// the last class makes the loss NaN instead of reading other memory.
#pragma once
#include "gemm.h"

// log sum exp of a row of C logits.
template <i64 C, class T>
INLINE float log_sum_exp_of(const T* x) {
    const vf lowest = splat(-3.4e38f);
    vf highest[4] = {lowest, lowest, lowest, lowest};
    over_row<C>([&](i64 j, auto lanes) {
        highest[j / W % 4] = greater(highest[j / W % 4], first_lanes(load(x + j, lanes), lanes.count, lowest));
    });
    const float most = max_lanes(greater(greater(highest[0], highest[1]), greater(highest[2], highest[3])));
    const vf sum = sum_over<C>(
        [&](i64 j, auto lanes) { return first_lanes(v_exp(load(x + j, lanes) - most), lanes.count, vf{}); });
    return most + v_log(splat(sum_lanes(sum)))[0];
}

// dx = weight (softmax(x) - onehot(target)); dx may be x.
template <i64 C, class T>
INLINE void row_gradient(const T* x, i64 target, float log_sum_exp, float weight, T* dx) {
    if (target < 0) {
        __builtin_memset(dx, 0, C * sizeof(T));
        return;
    }
    const bool known = target < C;
    const float at_target = known ? weight * (v_exp(splat(get(x + target) - log_sum_exp))[0] - 1.0f) : 0.0f;
    over_row<C>([&](i64 j, auto lanes) { store(dx + j, v_exp(load(x + j, lanes) - log_sum_exp) * weight, lanes); });
    if (known) put(dx + target, at_target);
}

// losses[i] = log sum exp - logit of the target, for rows that lie `stride` apart. Gradient: the row is replaced by its
// gradient, with zeros up to the next row; else log_sum_exp is kept.
template <class T, bool Gradient, i64 C>
INLINE void cross_entropy(
    i64 rows, i64 stride, T* logits, const i64* targets, const float* weight, float* losses, float* log_sum_exp,
    int threads) {
    parallel(threads, [&](int part) {
        for (i64 i = share(rows, part, threads); i < share(rows, part + 1, threads); ++i) {
            T* x = logits + i * stride;
            const i64 target = targets[i];
            const float total = log_sum_exp_of<C>(x);
            losses[i] = target < 0 ? 0.0f : target < C ? total - get(x + target) : __builtin_nanf("");
            if (log_sum_exp) log_sum_exp[i] = total;
            if constexpr (Gradient) {
                row_gradient<C>(x, target, total, *weight, x);
                __builtin_memset(x + C, 0, (stride - C) * sizeof(T));
            }
        }
    });
}

template <class T, i64 Rows, i64 C, int Threads>
INLINE void cross_entropy_grad(
    const T* logits, const i64* targets, const float* log_sum_exp, const float* weight, T* dlogits) {
    over_rows<Rows, Threads>([&](i64 i) {
        row_gradient<C>(logits + i * C, targets[i], log_sum_exp[i], *weight, dlogits + i * C);
    });
}

// weight * the sum of the rows' losses, in order.
INLINE void sum_losses(i64 rows, const float* losses, const float* weight, float* loss) {
    double sum = 0;
    for (i64 i = 0; i < rows; ++i) sum += losses[i];
    *loss = float(*weight * sum);
}

// The loss of logits = hidden head^T without ever holding more than `chunk` rows of them, and with Gradient dhidden [N, H]
// and dhead [C, H]. Rows of logits lie `stride` apart. The head's gradient is summed in `total`, which is dhead itself
// where that is fp32 or there is one chunk.
template <class T, class Total, bool Gradient, i64 N, i64 H, i64 C>
INLINE void linear_cross_entropy(
    i64 chunk, i64 stride, const T* hidden, const T* head, const i64* targets, const float* weight, float* loss,
    T* dhidden, T* dhead, T* logits, float* losses, Total* total, float* scratch, i64 own, int threads) {
    const float* no_bias = nullptr;
    for (i64 row = 0; row < N; row += chunk) {
        const i64 rows = row + chunk < N ? chunk : N - row;
        const T* h = hidden + row * H;
        product<false, true, false, false, After::nothing>(
            Sizes{rows, C, H, H, H, stride}, h, head, no_bias, logits, scratch, own, threads);
        cross_entropy<T, Gradient, C>(rows, stride, logits, targets + row, weight, losses + row, nullptr, threads);
        if constexpr (Gradient) {
            product<false, false, false, false, After::nothing>(
                Sizes{rows, H, C, stride, H, H}, logits, head, no_bias, dhidden + row * H, scratch, own, threads);
            const Sizes s{C, H, rows, stride, H, H};
            if (row == 0)
                product<true, false, false, false, After::nothing>(s, logits, h, no_bias, total, scratch, own, threads);
            else
                product<true, false, false, true, After::nothing>(s, logits, h, no_bias, total, scratch, own, threads);
        }
    }
    sum_losses(N, losses, weight, loss);
    if constexpr (Gradient && sizeof(T) != sizeof(Total))
        parallel(threads, [&](int part) {
            const i64 end = share(C * H, part + 1, threads, 64);
            for (i64 j = share(C * H, part, threads, 64); j < end; ++j) put(dhead + j, get(total + j));
        });
}
