// Optimizers over blocks of the parameters' tensors (see Block in reduce.h): one pass over memory.
#pragma once
#include "reduce.h"
#include "vector_math.h"

// step(j, load, store) over the elements of a block: full vectors, then the rest.
template <class Step>
INLINE void over_elements(i64 count, const Step& step) {
    const i64 whole = count / W * W;
    for (i64 j = 0; j < whole; j += W)
        step([&](auto* p) { return load(p + j); }, [&](auto* p, vf v) { store(p + j, v); });
    if (const i64 rest = count - whole)
        step([&](auto* p) { return load_rest(p + whole, rest); },
             [&](auto* p, vf v) { store_rest(p + whole, v, rest); });
}

struct AdamW {
    float beta1, beta2, eps, weight_decay;
};

// Slots: parameter, gradient, first and second moment and, with Copy, the parameter rounded to the compute dtype.
template <class G, class C, bool Copy, int Threads>
INLINE void adamw(
    const void* table, const i64* begins, const float* lr, const float* step, const float* factor, AdamW s,
    double exact_beta1, double exact_beta2) {
    constexpr int slots = Copy ? 5 : 4;
    const float clip = factor ? *factor : 1.0f, decay = 1.0f - *lr * s.weight_decay;
    const double first = 1 - __builtin_pow(exact_beta1, *step), second = 1 - __builtin_pow(exact_beta2, *step);
    const float rate = float(*lr / first), scale = float(1 / __builtin_sqrt(second));
    const float rest1 = float(1 - exact_beta1), rest2 = float(1 - exact_beta2);
    over_blocks<slots, Threads>(table, begins, [&](i64, const Block<slots>& block) {
        float *p = block.template at<float>(0), *m = block.template at<float>(2), *v = block.template at<float>(3);
        const G* g = block.template at<const G>(1);
        over_elements(block.count, [&](const auto& load, const auto& store) {
            vf gradient = load(g) * clip;
            vf moment = load(m) * s.beta1 + gradient * rest1;
            vf variance = load(v) * s.beta2 + gradient * gradient * rest2;
            vf value = load(p) * decay - rate * moment / (v_sqrt(variance) * scale + s.eps);
            store(m, moment);
            store(v, variance);
            store(p, value);
            if constexpr (Copy) store(block.template at<C>(4), value);
        });
    });
}

// Slots: parameter, gradient and, with Momentum, velocity.
template <class G, bool Momentum, bool Nesterov, int Threads>
INLINE void sgd(
    const void* table, const i64* begins, const float* lr, const float* factor, float momentum, float weight_decay) {
    constexpr int slots = Momentum ? 3 : 2;
    const float clip = factor ? *factor : 1.0f, rate = *lr;
    over_blocks<slots, Threads>(table, begins, [&](i64, const Block<slots>& block) {
        float* p = block.template at<float>(0);
        const G* g = block.template at<const G>(1);
        over_elements(block.count, [&](const auto& load, const auto& store) {
            vf old = load(p), change = load(g) * clip + old * weight_decay;
            if constexpr (Momentum) {
                float* u = block.template at<float>(2);
                vf velocity = load(u) * momentum + change;
                store(u, velocity);
                change = Nesterov ? change + velocity * momentum : velocity;
            }
            store(p, old - change * rate);
        });
    });
}

// Slots: copy, parameter.
template <class C, class P, int Threads>
INLINE void refresh(const void* table, const i64* begins) {
    over_blocks<2, Threads>(table, begins, [&](i64, const Block<2>& block) {
        over_elements(block.count, [&](const auto& load, const auto& store) {
            store(block.template at<C>(0), load(block.template at<const P>(1)));
        });
    });
}
