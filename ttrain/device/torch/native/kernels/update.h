// Optimizers over blocks of the parameters' tensors (see Block in reduce.h): one pass over memory.
#pragma once
#include "reduce.h"
#include "vector_math.h"

// step(load, store, j) over the elements of a block: full vectors, then the rest; j is the first element's number.
template <class Step>
INLINE void over_elements(i64 count, const Step& step) {
    const i64 whole = count / W * W;
    for (i64 j = 0; j < whole; j += W)
        step([&](auto* p) { return load(p + j); }, [&](auto* p, vf v) { store(p + j, v); }, j);
    if (const i64 rest = count - whole)
        step([&](auto* p) { return load_rest(p + whole, rest); },
             [&](auto* p, vf v) { store_rest(p + whole, v, rest); }, whole);
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
        over_elements(block.count, [&](const auto& load, const auto& store, i64) {
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
        over_elements(block.count, [&](const auto& load, const auto& store, i64) {
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
        over_elements(block.count, [&](const auto& load, const auto& store, i64) {
            store(block.template at<C>(0), load(block.template at<const P>(1)));
        });
    });
}

// A product that is not joined with a sum into one operation, so that it is rounded as the rows of torch round it.
INLINE vf product(vf a, vf b) {
    vf y = a * b;
#if defined(__x86_64__)
    asm("" : "+x"(y));
#elif defined(__aarch64__)
    asm("" : "+w"(y));
#endif
    return y;
}
INLINE vf product(vf a, float b) { return product(a, splat(b)); }

// How a slot is rounded to T: stochastically, by 16 bits of the hash of (key, element), or to nearest. See ops/rounded.py.
template <class T, bool Stochastic>
struct Rounding {
    u32 key = 0;
    Rounding(const i64* seed, u32 stream) {
        if constexpr (Stochastic) key = mask_key(*seed, stream);
    }
    INLINE vf operator()(vf x, u32 element) const {
        if constexpr (!Stochastic || sizeof(T) == 4) return x;
        vu sum = bits_as<vu>(x) + (mix(lane_indices() + (element + key)) & 0xFFFFu);
        return bits_as<vf>(x == x ? sum & 0xFFFF0000u : splat_u(0x7FC00000u));
    }
};

// adamw on parameters P and moments S. One more slot, the last: the number of the block's first element.
template <class P, class G, class S, class C, bool RoundP, bool RoundM, bool RoundV, bool Copy, int Threads>
INLINE void adamw_rounded(
    const void* table, const i64* begins, const float* lr, const float* step, const float* factor, const i64* seed,
    u32 stream, AdamW s, double exact_beta1, double exact_beta2, double weight_decay) {
    constexpr int slots = Copy ? 6 : 5;
    const float clip = factor ? *factor : 1.0f;
    const double first = 1 - __builtin_pow(exact_beta1, *step), second = 1 - __builtin_pow(exact_beta2, *step);
    const float rate = float(*lr / first), scale = float(1 / __builtin_sqrt(second)), decay = float(1 - *lr * weight_decay);
    const float rest1 = float(1 - exact_beta1), rest2 = float(1 - exact_beta2);
    const Rounding<P, RoundP> round_p(seed, stream);
    const Rounding<S, RoundM> round_m(seed, stream + 1);
    const Rounding<S, RoundV> round_v(seed, stream + 2);
    over_blocks<slots, Threads>(table, begins, [&](i64, const Block<slots>& block) {
        P* p = block.template at<P>(0);
        const G* g = block.template at<const G>(1);
        S *m = block.template at<S>(2), *v = block.template at<S>(3);
        const u32 start = u32(reinterpret_cast<u64>(block.address[slots - 1]));
        over_elements(block.count, [&](const auto& load, const auto& store, i64 j) {
            const u32 element = start + u32(j);
            vf gradient = product(load(g), clip);
            vf moment = product(load(m), s.beta1) + product(gradient, rest1);
            vf variance = product(load(v), s.beta2) + product(product(gradient, gradient), rest2);
            vf root = product(v_sqrt(variance), scale) + s.eps;
            vf value = product(load(p), decay) - product(moment, rate) / root;
            value = round_p(value, element);
            store(m, round_m(moment, element));
            store(v, round_v(variance, element));
            store(p, value);
            if constexpr (Copy) store(block.template at<C>(4), value);
        });
    });
}

// sgd on parameters P and velocities U, with the same last slot.
template <class P, class G, class U, bool RoundP, bool RoundU, bool Momentum, bool Nesterov, bool Decay, int Threads>
INLINE void sgd_rounded(
    const void* table, const i64* begins, const float* lr, const float* factor, const i64* seed, u32 stream,
    float momentum, float weight_decay) {
    constexpr int slots = Momentum ? 4 : 3;
    const float clip = factor ? *factor : 1.0f, rate = *lr;
    const Rounding<P, RoundP> round_p(seed, stream);
    const Rounding<U, RoundU> round_u(seed, stream + 1);
    over_blocks<slots, Threads>(table, begins, [&](i64, const Block<slots>& block) {
        P* p = block.template at<P>(0);
        const G* g = block.template at<const G>(1);
        const u32 start = u32(reinterpret_cast<u64>(block.address[slots - 1]));
        over_elements(block.count, [&](const auto& load, const auto& store, i64 j) {
            const u32 element = start + u32(j);
            vf old = load(p), change = product(load(g), clip);
            if constexpr (Decay) change = change + product(old, weight_decay);
            if constexpr (Momentum) {
                U* u = block.template at<U>(2);
                vf velocity = product(load(u), momentum) + change;
                store(u, round_u(velocity, element));
                change = Nesterov ? change + product(velocity, momentum) : velocity;
            }
            store(p, round_p(old - product(change, rate), element));
        });
    });
}
