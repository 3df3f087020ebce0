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
INLINE vf product(vf a, vf b) { return apart(a * b); }
INLINE vf product(vf a, float b) { return product(a, splat(b)); }
INLINE vf product(float a, vf b) { return product(b, splat(a)); }

// 16 bits of a fp32 number, as the lower half of a lane.
struct half16 {
    u16 bits;
};
INLINE vf load(const half16* p) {
    vh h;
    __builtin_memcpy(&h, p, sizeof h);
    return bits_as<vf>(__builtin_convertvector(h, vu));
}
INLINE void store(half16* p, vf v) {
    vh h = __builtin_convertvector(bits_as<vu>(v), vh);
    __builtin_memcpy(p, &h, sizeof h);
}

// Master weights as a bf16 copy and a remainder: the sum of their bits, the remainder's signed. See ops/update.py.
INLINE vf weight(vf copy, vf rest) {
    return bits_as<vf>((bits_as<vu>(copy) << 16) + bits_as<vu>(bits_as<vi>(bits_as<vu>(rest) << 16) >> 16));
}
INLINE vf quieted(vf x) { return x == x ? x : bits_as<vf>(splat_u(0x7FC00000u)); }
INLINE vf upper(vf x) { return bits_as<vf>((bits_as<vu>(x) + 0x8000u) >> 16); }

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
