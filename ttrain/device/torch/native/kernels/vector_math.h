// Functions of fp32 vectors, accurate to a few units in the last place, without tables and without branches.
#pragma once
#include "vector.h"

// e^x: 2^n e^r with |r| <= ln 2 / 2; the polynomial is that of Cephes' expf (S. Moshier). Zero below -104, infinite above
// 88.73, in between right down to the subnormal numbers. Without overflow: for x of at most 89, or NaN.
INLINE vf v_exp_no_overflow(vf x) {
    x = greater(splat(-104.0f), x);  // in this order a NaN passes
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    vf n = (x * 1.44269504f + magic) - magic;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return times_power_of_two(p, n);
}
INLINE vf v_exp(vf x) { return v_exp_no_overflow(lesser(splat(89.0f), x)); }

// ln x by the polynomial of Cephes' logf: x = m 2^e with m in [sqrt 1/2, sqrt 2).
INLINE vf v_log(vf x) {
    const vf tiny = splat(1.17549435e-38f);
    vf scaled = x < tiny ? x * 8388608.0f : x;
    vi u = bits_as<vi>(scaled);
    vi exponent = ((u - 0x3F3504F3) >> 23);
    vf m = bits_as<vf>(u - (exponent << 23)) - 1.0f;
    vf e = __builtin_convertvector(exponent, vf) - (x < tiny ? splat(23.0f) : vf{});
    vf p = m * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    vf z = m * m;
    vf y = p * m * z + apart(e * -2.12194440e-4f) - z * 0.5f;
    y = m + y + e * 0.693359375f;
    const vf infinity = splat(__builtin_inff());
    y = x == infinity ? infinity : y;
    y = x > vf{} ? y : splat(__builtin_nanf(""));
    return x == vf{} ? -infinity : y;
}

INLINE vf v_sqrt(vf x) {
    vf y;
    for (int i = 0; i < W; ++i) y[i] = __builtin_sqrtf(x[i]);
    return y;
}

INLINE vf v_abs(vf x) { return bits_as<vf>(bits_as<vu>(x) & 0x7FFFFFFFu); }
INLINE vf v_copysign(vf magnitude, vf sign) {
    return bits_as<vf>((bits_as<vu>(magnitude) & 0x7FFFFFFFu) | (bits_as<vu>(sign) & 0x80000000u));
}

// tanh x: Cephes' odd polynomial near zero, 1 - 2 / (e^2|x| + 1) elsewhere.
INLINE vf v_tanh(vf x) {
    vf a = v_abs(x), z = x * x;
    vf p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    vf far = v_copysign(1.0f - 2.0f / (v_exp(a + a) + 1.0f), x);
    return a < splat(0.625f) ? p * z * x + x : far;
}

// Standard normal distribution at x: density and cumulative probability, both with a small relative error everywhere.
// erfc(z) = e^(-z^2) t P(t), t = 1 / (1 + z / 2); P is a minimax fit of degree 8 for 0 <= z <= 10 (relative error 5e-8).
struct Normal {
    vf density, below;
};
INLINE Normal normal(vf x) {
    vf a = v_abs(x), z = a * 0.70710678f;
    vf square = a * a * 0.5f;
    vf e = v_exp_no_overflow(-square);
    vf t = inverse(1.0f + 0.5f * z);
    vf p = t * -0.059068966656923294f + 0.2845749855041504f;
    p = p * t - 0.48719996213912964f;
    p = p * t + 0.2780672013759613f;
    p = p * t - 0.026625696569681168f;
    p = p * t + 0.2026868760585785f;
    p = p * t + 0.2431037575006485f;
    p = p * t + 0.282375305891037f;
    p = p * t + 0.28208643198013306f;
    vf tail = 0.5f * e * t * p;
    return {e * 0.39894228f, x > vf{} ? 1.0f - tail : tail};
}

INLINE vf v_clip(vf x) { return lesser(splat(1.0f), x); }  // at most 1; in this order a NaN passes
INLINE vf v_relu(vf x) { return greater(vf{}, x); }  // in this order a NaN passes
INLINE vf v_max(vf x, vf y) { return ((x > y) | (x != x)) ? x : y; }  // a NaN of either passes
INLINE vf v_greater(vf x, vf y) { return x > y ? splat(1.0f) : vf{}; }
INLINE vf v_sign(vf x) { return x > vf{} ? splat(1.0f) : x < vf{} ? splat(-1.0f) : x; }
INLINE vf v_relu_grad(vf dy, vf y) { return y > vf{} ? dy : vf{}; }
INLINE vf v_tanh_grad(vf dy, vf y) { return dy * (1.0f - y * y); }

// 1 / (1 + e^-x), and 0 where e^-x overflows, of which there is no inverse.
INLINE vf logistic(vf x) { return x < splat(-88.0f) ? vf{} : inverse(1.0f + v_exp(-x)); }
INLINE vf v_silu(vf x) { return x * logistic(x); }
INLINE vf v_silu_grad(vf dy, vf x) {
    vf s = logistic(x);
    return dy * s * (1.0f + x * (1.0f - s));
}
INLINE vf v_gelu(vf x) { return x * normal(x).below; }
INLINE vf v_gelu_grad(vf dy, vf x) {
    Normal n = normal(x);
    return dy * (n.below + x * n.density);
}

// The tanh form in terms of s = 1 / (1 + e^-2u), since (1 + tanh u) / 2 = s; u = sqrt(2 / pi) (x + 0.044715 x^3).
// Where e^-2u would overflow it is held at e^87: s x is 0 to fp32 long before.
INLINE vf decay(vf x, vf square) {
    return v_exp_no_overflow(lesser(splat(87.0f), x * (-1.59576912f - 0.07135481627f * square)));
}
INLINE vf v_gelu_tanh(vf x) { return x * inverse(1.0f + decay(x, x * x)); }
INLINE vf v_gelu_tanh_grad(vf dy, vf x) {
    vf square = x * x, e = decay(x, square), s = inverse(1.0f + e);
    // ds/dx = s (1 - s) 2 du/dx, where 1 - s is exact only as e s.
    return dy * (s + x * s * (e * s) * (1.59576912f + 0.21406444881f * square));
}

// The dropout mask of core/random_bits.py: 32-bit integer arithmetic, so the same on every device.
INLINE u32 mix(u32 x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}
INLINE vu mix(vu x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}
INLINE u32 stream_key(i64 seed, u32 stream) { return mix(u32(seed) ^ mix(u32(u64(seed) >> 32) ^ mix(stream))); }

struct Mask {
    u32 key, threshold;
    float factor;  // 1 / (1 - p)
    INLINE vf operator()(vf x, i64 index) const {
        vu hash = mix(lane_indices() + (u32(index) + key));
        return hash >= threshold ? x * factor : vf{};
    }
};
