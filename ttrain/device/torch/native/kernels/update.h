// What generated optimizers are made of: they work on blocks of the parameters' tensors (see Block in reduce.h).
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
INLINE vf product(float a, vf b) { return product(b, splat(a)); }

// How a slot is rounded to T: stochastically, by 16 bits of the hash of (key, element), or to nearest. See ops/update.py.
template <class T, bool Stochastic>
struct Rounding {
    u32 key = 0;
    Rounding(const i64* seed, u32 stream) {
        if constexpr (Stochastic) key = stream_key(*seed, stream);
    }
    INLINE vf operator()(vf x, u32 element) const {
        if constexpr (!Stochastic || sizeof(T) == 4) return x;
        vu sum = bits_as<vu>(x) + (mix(lane_indices() + (element + key)) & 0xFFFFu);
        return bits_as<vf>(x == x ? sum & 0xFFFF0000u : splat_u(0x7FC00000u));
    }
};
