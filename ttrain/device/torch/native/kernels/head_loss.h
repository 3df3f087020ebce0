// Cross-entropy of an output head, with or without bias, weights of rows and label smoothing. Of V rows of the head C are
// ids that exist; the others get zeros.
#pragma once
#include "loss.h"

// losses[i] = weight * (cross-entropy + smoothing * (logit of the target - mean logit)), plain[i] without the smoothing;
// the weight enters here if there is one for Each row, else with the sum. Gradient: the row is replaced by its gradient,
// with zeros up to the next row.
template <class T, bool Gradient, bool Each, bool Smooth, i64 C>
INLINE void head_rows(
    i64 rows, i64 stride, T* logits, const i64* targets, const float* weights, float smoothing, float* losses,
    float* plain, int threads) {
    over_ranges(threads, rows, 1, [&](i64 begin, i64 end) {
        for (i64 i = begin; i < end; ++i) {
            T* x = logits + i * stride;
            const i64 target = targets[i];
            if (target < 0) {
                losses[i] = 0.0f;
                if constexpr (Smooth) plain[i] = 0.0f;
                if constexpr (Gradient) __builtin_memset(x, 0, stride * sizeof(T));
                continue;
            }
            const bool known = target < C;
            const float total = log_sum_exp_of<C>(x), weight = weights[Each ? i : 0], factor = Each ? weight : 1.0f;
            const float at_target = known ? get(x + target) : __builtin_nanf("");
            losses[i] = factor * (total - at_target);
            if constexpr (Smooth) {
                plain[i] = losses[i];
                const vf sum = sum_over<C>([&](i64 j, auto lanes) { return load(x + j, lanes); });
                losses[i] += factor * smoothing * (at_target - sum_lanes(sum) / C);
            }
            if constexpr (Gradient) {
                const float spread = Smooth ? smoothing / C : 0.0f;
                over_row<C>([&](i64 j, auto lanes) {
                    store(x + j, (v_exp_no_overflow(load(x + j, lanes) - total) - spread) * weight, lanes);
                });
                const float probability = v_exp(splat(at_target - total))[0];
                if (known) put(x + target, weight * (probability - spread - (1.0f - (Smooth ? smoothing : 0.0f))));
                __builtin_memset(x + C, 0, (stride - C) * sizeof(T));
            }
        }
    });
}

// Both losses of logits = hidden head^T + bias without ever holding more than `chunk` rows of them, and with Gradient
// dhidden [N, H], if Whole also dhead [V, H] and dbias [V]. The head's gradient is summed in `total`, which is dhead itself where that is
// fp32 or there is one chunk, the bias's in `columns` [C].
template <class T, class Total, bool Gradient, bool Whole, bool Bias, bool Each, bool Smooth, i64 N, i64 H, i64 C, i64 V>
INLINE void head_cross_entropy(
    i64 chunk, i64 stride, const T* hidden, const T* head, const i64* targets, const float* weights, const T* bias,
    float smoothing, float* loss, float* entropy, T* dhidden, T* dhead, T* dbias, T* logits, float* losses, Total* total,
    float* columns, float* scratch, i64 own, int threads) {
    const float* no_bias = nullptr;
    float* plain = losses + N;
    for (i64 row = 0; row < N; row += chunk) {
        const i64 rows = row + chunk < N ? chunk : N - row;
        const T* h = hidden + row * H;
        product<false, true, Bias, false, After::nothing>(
            Sizes{rows, C, H, H, H, stride}, h, head, bias, logits, scratch, own, threads);
        head_rows<T, Gradient, Each, Smooth, C>(
            rows, stride, logits, targets + row, Each ? weights + row : weights, smoothing, losses + row, plain + row, threads);
        if constexpr (Gradient) {
            product<false, false, false, false, After::nothing>(
                Sizes{rows, H, C, stride, H, H}, logits, head, no_bias, dhidden + row * H, scratch, own, threads);
        }
        if constexpr (Whole) {
            const Sizes s{C, H, rows, stride, H, H};
            if (row == 0)
                product<true, false, false, false, After::nothing>(s, logits, h, no_bias, total, scratch, own, threads);
            else
                product<true, false, false, true, After::nothing>(s, logits, h, no_bias, total, scratch, own, threads);
            if constexpr (Bias)
                over_ranges(threads, C, 64, [&](i64 begin, i64 end) {
                    for (i64 j = begin; j < end; ++j) {
                        float sum = row == 0 ? 0.0f : columns[j];
                        for (i64 i = 0; i < rows; ++i) sum += get(logits + i * stride + j);
                        columns[j] = sum;
                    }
                });
        }
    }
    const float one = 1.0f;
    sum_losses(N, losses, Each ? &one : weights, loss);
    if constexpr (Smooth) sum_losses(N, plain, Each ? &one : weights, entropy);
    if constexpr (Whole) {
        if constexpr (sizeof(T) != sizeof(Total))
            over_ranges(threads, C * H, 64, [&](i64 begin, i64 end) {
                for (i64 j = begin; j < end; ++j) put(dhead + j, get(total + j));
            });
        __builtin_memset(dhead + C * H, 0, (V - C) * H * sizeof(T));
        if constexpr (Bias)
            for (i64 j = 0; j < V; ++j) put(dbias + j, j < C ? columns[j] : 0.0f);
    }
}

// log_probs[i] = logit of the target - log sum exp, 0 without a target; entropies of all rows in nats where they are wanted.
template <class T, bool Bias, i64 N, i64 H, i64 C>
INLINE void head_log_probs(
    i64 chunk, const T* hidden, const T* head, const i64* targets, const T* bias, float* log_probs, float* entropies,
    T* logits, float* scratch, i64 own, int threads) {
    for (i64 row = 0; row < N; row += chunk) {
        const i64 rows = row + chunk < N ? chunk : N - row;
        product<false, true, Bias, false, After::nothing>(
            Sizes{rows, C, H, H, H, C}, hidden + row * H, head, bias, logits, scratch, own, threads);
        over_ranges(threads, rows, 1, [&](i64 begin, i64 end) {
            for (i64 i = begin; i < end; ++i) {
                const T* x = logits + i * C;
                const i64 target = targets[row + i];
                const float total = log_sum_exp_of<C>(x), missing = target < 0 ? 0.0f : __builtin_nanf("");
                log_probs[row + i] = u64(target) < u64(C) ? get(x + target) - total : missing;
                if (!entropies) continue;
                const vf sum = sum_over<C>([&](i64 j, auto lanes) {
                    const vf logarithm = load(x + j, lanes) - total;
                    return first_lanes(v_exp_no_overflow(logarithm), lanes.count, vf{}) * logarithm;
                });
                entropies[row + i] = -sum_lanes(sum);
            }
        });
    }
}
