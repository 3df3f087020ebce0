// Vectors of fp32 lanes on the compiler's own vector extension (gcc and clang): the widest the target has.
// Tensors are stored as fp32 or bf16; arithmetic is fp32. Loads and stores need no alignment.
#pragma once
#include <stddef.h>
#include <stdint.h>

using i64 = int64_t;
using i32 = int32_t;
using u64 = uint64_t;
using u32 = uint32_t;
using u16 = uint16_t;

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef i32 vi __attribute__((vector_size(W * 4)));
typedef u32 vu __attribute__((vector_size(W * 4)));
typedef u16 vh __attribute__((vector_size(W * 2)));

struct bf16 {
    u16 bits;
};

template <class To, class From>
INLINE To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To y;
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
}

INLINE vf splat(float x) { return x - vf{}; }
INLINE vu splat_u(u32 x) { return x - vu{}; }

// bf16 is the upper half of a fp32; rounding is to nearest even, and a NaN stays one. One instruction each where the
// compiler would not find it: gcc converts wide vectors in halves. The hardware's rounding takes subnormals for zero.
INLINE vf widen(vh h) {
#if defined(__AVX2__)
    vu u;
    asm("vpmovzxwd %1, %0" : "=v"(u) : "vm"(h));
    return bits_as<vf>(u << 16);
#else
    return bits_as<vf>(__builtin_convertvector(h, vu) << 16);
#endif
}
// A vector whose upper halves are the bf16 of x.
INLINE vu narrowed_bits(vf x) {
    vu u = bits_as<vu>(x);
    return x == x ? u + 0x7FFF + ((u >> 16) & 1) : u | 0x400000;
}
INLINE vh narrow(vf x) {
#if defined(__AVX512BF16__)
    vh h;
    asm("vcvtneps2bf16 %1, %0" : "=v"(h) : "v"(x));
    return h;
#else
    return __builtin_convertvector(narrowed_bits(x) >> 16, vh);
#endif
}
INLINE float widen(bf16 h) { return bits_as<float>(u32(h.bits) << 16); }
INLINE bf16 narrow(float x) {
    u32 u = bits_as<u32>(x);
    return bf16{u16(x == x ? (u + 0x7FFF + ((u >> 16) & 1)) >> 16 : (u >> 16) | 0x40)};
}

INLINE float get(const float* p) { return *p; }
INLINE float get(const bf16* p) { return widen(*p); }
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(bf16* p, float x) { *p = narrow(x); }

// Which lanes of a vector a step works on: all, or the first N of the end of a row. Missing lanes load as zero.
struct Full {
    static constexpr int count = W;
};
template <int N>
struct Part {
    static constexpr int count = N;
};

// Vectors that a step takes together: some whole ones, or one. Their operations alternate, so that a chain of them need not
// wait for itself; more would not fit the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TOGETHER = 4;
#else
constexpr int TOGETHER = 2;
#endif
template <int Vectors, class Lanes>
struct Group {
    static constexpr int vectors = Vectors;
    static constexpr Lanes lanes{};
};
#define EACH_VECTOR _Pragma("GCC unroll 4") for (int u = 0; u < group.vectors; ++u)

template <class Lanes>
INLINE vf load(const float* p, Lanes) {
    vf v = {};
    __builtin_memcpy(&v, p, Lanes::count * 4);
    return v;
}
template <class Lanes>
INLINE vf load(const bf16* p, Lanes) {
    vh h = {};
    __builtin_memcpy(&h, p, Lanes::count * 2);
    return widen(h);
}
template <class Lanes>
INLINE void store(float* p, vf v, Lanes) {
    __builtin_memcpy(p, &v, Lanes::count * 4);
}
template <class Lanes>
INLINE void store(bf16* p, vf v, Lanes) {
    vh h = narrow(v);
    __builtin_memcpy(p, &h, Lanes::count * 2);
}
template <class T>
INLINE vf load(const T* p) {
    return load(p, Full{});
}
template <class T>
INLINE void store(T* p, vf v) {
    store(p, v, Full{});
}

// What a value becomes by being stored as T and loaded again.
template <class T>
INLINE vf rounded(vf v) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == 2) return widen(narrow(v));
#else
    if constexpr (sizeof(T) == 2) return bits_as<vf>(narrowed_bits(v) & 0xFFFF0000);
#endif
    return v;
}

// v, which no multiplication that it is made by is joined with the addition that follows: which ones a compiler joins may
// depend on what else is nearby.
INLINE vf apart(vf v) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
    return v;
}

INLINE vu lane_indices() {
    vu v;
    for (int i = 0; i < W; ++i) v[i] = u32(i);
    return v;
}

// The first `count` lanes of v, the others replaced by `other`.
INLINE vf first_lanes(vf v, int count, vf other) { return bits_as<vi>(lane_indices()) < (count - vi{}) ? v : other; }

// The greater and the lesser of two; b where either is a NaN. One instruction, which gcc does not dare to use by itself.
INLINE vf greater(vf a, vf b) {
#if defined(__AVX__)
    vf y;
    asm("vmaxps %2, %1, %0" : "=v"(y) : "v"(a), "v"(b));
    return y;
#else
    return a > b ? a : b;
#endif
}
INLINE vf lesser(vf a, vf b) {
#if defined(__AVX__)
    vf y;
    asm("vminps %2, %1, %0" : "=v"(y) : "v"(a), "v"(b));
    return y;
#else
    return a < b ? a : b;
#endif
}

// x 2^n for whole n, rounded once where the result is subnormal.
INLINE vf times_power_of_two(vf x, vf n) {
#if defined(__AVX512F__)
    vf y;
    asm("vscalefps %2, %1, %0" : "=v"(y) : "v"(x), "v"(n));
    return y;
#else
    const vi whole = __builtin_convertvector(n, vi), half = whole >> 1;  // in two factors: 2^n may lie out of range
    return x * bits_as<vf>((half + 127) << 23) * bits_as<vf>((whole - half + 127) << 23);
#endif
}

// 1 / x for normal x whose inverse is normal, to within 1.5 units in the last place.
INLINE vf inverse(vf x) {
#if defined(__AVX512F__)
    vf y;
    asm("vrcp14ps %1, %0" : "=v"(y) : "v"(x));
    return y + y * (1.0f - x * y);
#else
    return 1.0f / x;
#endif
}

// Sum and maximum over the lanes, always in the same order: the upper half onto the lower, until one is left. To turn the
// lanes around changes no bit, so it does not matter in which lane a row begins.
template <int N>
struct Lanes {
    typedef float type __attribute__((vector_size(N * 4)));
};
template <int N = W>
INLINE float sum_lanes(typename Lanes<N>::type v) {
    if constexpr (N == 2) {
        return v[0] + v[1];
    } else {
        typename Lanes<N / 2>::type half[2];
        __builtin_memcpy(half, &v, sizeof v);
        return sum_lanes<N / 2>(half[0] + half[1]);
    }
}
template <int N = W>
INLINE float max_lanes(typename Lanes<N>::type v) {
    if constexpr (N == 2) {
        return v[0] > v[1] ? v[0] : v[1];
    } else {
        typename Lanes<N / 2>::type half[2];
        __builtin_memcpy(half, &v, sizeof v);
        return max_lanes<N / 2>(half[0] > half[1] ? half[0] : half[1]);
    }
}

// rows[i][j] <-> rows[j][i] for a square of W rows: blocks of half the size change places, down to single lanes.
#if __has_builtin(__builtin_shufflevector)
template <int... I>
struct Indices {};
template <int N, int... I>
struct CountTo : CountTo<N - 1, N - 1, I...> {};
template <int... I>
struct CountTo<0, I...> {
    using type = Indices<I...>;
};
template <int Half, int... I>
INLINE void exchange(vf& a, vf& b, Indices<I...>) {
    const vf first = a, second = b;
    a = __builtin_shufflevector(first, second, (I & Half ? W + I - Half : I)...);
    b = __builtin_shufflevector(first, second, (I & Half ? W + I : I + Half)...);
}
template <int Half = W / 2>
INLINE void transpose_square(vf (&rows)[W]) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
        if (!(i & Half)) exchange<Half>(rows[i], rows[i + Half], typename CountTo<W>::type{});
    if constexpr (Half > 1) transpose_square<Half / 2>(rows);
}
#else
INLINE void transpose_square(vf (&rows)[W]) {
    for (int i = 0; i < W; ++i)
        for (int j = 0; j < i; ++j) {
            const float kept = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = kept;
        }
}
#endif

// Sum of term(offset, lanes) over a row of N elements, a vector each; lanes beyond the end must be zero. Four sums, since one
// would wait for itself.
template <i64 N, class Term>
INLINE vf sum_over(const Term& term) {
    vf sum[4] = {};
    i64 j = 0;
    for (; j + 4 * W <= N; j += 4 * W)
        for (int k = 0; k < 4; ++k) sum[k] += term(j + k * W, Full{});
    for (; j + W <= N; j += W) sum[j / W % 4] += term(j, Full{});
    if constexpr (N % W != 0) sum[N / W % 4] += term(N / W * W, Part<N % W>{});
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// step(offset, group) from j to the end of a row, or of a part of it in whole vectors; the row has N elements.
template <i64 N, class Step>
INLINE void over_groups(i64 j, i64 end, const Step& step) {
    for (; j + TOGETHER * W <= end; j += TOGETHER * W) step(j, Group<TOGETHER, Full>{});
    for (; j + W <= end; j += W) step(j, Group<1, Full>{});
    if constexpr (N % W != 0) {
        if (j < end) step(j, Group<1, Part<N % W>>{});
    }
}

// step(offset, lanes) over a row of N elements: full vectors, then the rest.
template <i64 N, class Step>
INLINE void over_row(const Step& step) {
    for (i64 j = 0; j + W <= N; j += W) step(j, Full{});
    if constexpr (N % W != 0) step(N / W * W, Part<N % W>{});
}
