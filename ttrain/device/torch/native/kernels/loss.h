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
        [&](i64 j, auto lanes) { return first_lanes(v_exp_no_overflow(load(x + j, lanes) - most), lanes.count, vf{}); });
    return most + v_log(splat(sum_lanes(sum)))[0];
}

template <class T, i64 Rows, i64 C, int Threads>
INLINE void log_sum_exp(const T* x, float* y) {
    over_rows<Rows, Threads>([&](i64 i) { y[i] = log_sum_exp_of<C>(x + i * C); });
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

// losses[i] = log sum exp - logit of the target; log_sum_exp is kept.
template <class T, i64 C>
INLINE void cross_entropy(
    i64 rows, const T* logits, const i64* targets, float* losses, float* log_sum_exp, int threads) {
    over_ranges(threads, rows, 1, [&](i64 begin, i64 end) {
        for (i64 i = begin; i < end; ++i) {
            const T* x = logits + i * C;
            const i64 target = targets[i];
            log_sum_exp[i] = log_sum_exp_of<C>(x);
            losses[i] = target < 0 ? 0.0f : target < C ? log_sum_exp[i] - get(x + target) : __builtin_nanf("");
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
