// Softmax cross-entropy over rows of logits. A target below zero marks a row without one: no loss, no gradient.
#pragma once
#include "parallel.h"
#include "vector_math.h"

// log sum exp of a row of C logits.
template <i64 C, class T>
INLINE float log_sum_exp_of(const T* x) {
    const vf lowest = splat(-3.4e38f);
    vf highest = lowest;
    over_row<C>([&](i64 j, auto lanes) { highest = vmax(highest, first_lanes(load(x + j, lanes), lanes.count, lowest)); });
    const float most = max_lanes(highest);
    vf sum = {};
    over_row<C>([&](i64 j, auto lanes) { sum += first_lanes(v_exp(load(x + j, lanes) - most), lanes.count, vf{}); });
    return most + v_log(splat(sum_lanes(sum)))[0];
}

// dx = weight (softmax(x) - onehot(target)); dx may be x.
template <i64 C, class T>
INLINE void row_gradient(const T* x, i64 target, float log_sum_exp, float weight, T* dx) {
    if (target < 0) {
        __builtin_memset(dx, 0, C * sizeof(T));
        return;
    }
    const float at_target = weight * (v_exp(splat(get(x + target) - log_sum_exp))[0] - 1.0f);
    over_row<C>([&](i64 j, auto lanes) { store(dx + j, v_exp(load(x + j, lanes) - log_sum_exp) * weight, lanes); });
    put(dx + target, at_target);
}

// losses[i] = log sum exp - logit of the target. Gradient: the row is replaced by its gradient; else log_sum_exp is kept.
template <class T, bool Gradient, i64 C, int Threads>
INLINE void cross_entropy(
    i64 rows, T* logits, const i64* targets, const float* weight, float* losses, float* log_sum_exp) {
    parallel<Threads>([&](int part) {
        for (i64 i = share(rows, part, Threads); i < share(rows, part + 1, Threads); ++i) {
            T* x = logits + i * C;
            const i64 target = targets[i];
            const float total = log_sum_exp_of<C>(x);
            losses[i] = target < 0 ? 0.0f : total - get(x + target);
            if (log_sum_exp) log_sum_exp[i] = total;
            if constexpr (Gradient) row_gradient<C>(x, target, total, *weight, x);
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
