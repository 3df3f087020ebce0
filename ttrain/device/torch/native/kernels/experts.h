// Mixtures of experts: pairs of a token and one of its experts, sorted by expert, so that each expert has a panel of rows.
#pragma once
#include "gemv.h"

// ids [N, K] <- those of the K largest scores [N, E]. NaN comes before numbers, and of equal ones the first.
template <class T, i64 N, i64 E, i64 K, int Threads>
INLINE void top_k(const T* scores, i64* ids) {
    over_rows<N, Threads>([&](i64 n) {
        float kept[K + 1];  // the last is the one that falls out
        i64 own[K + 1], count = 0;
        for (i64 e = 0; e < E; ++e) {
            const float x = get(scores + n * E + e);
            i64 at = count < K ? count++ : K;
            for (; at > 0 && (x > kept[at - 1] || (x != x && kept[at - 1] == kept[at - 1])); --at) {
                kept[at] = kept[at - 1];
                own[at] = own[at - 1];
            }
            kept[at] = x;
            own[at] = e;
        }
        __builtin_memcpy(ids + n * K, own, K * sizeof(i64));
    });
}

// small [N, K] <- the elements of wide [N, E] at ids; or the other way, and zero elsewhere.
template <class T, i64 N, i64 E, i64 K, int Threads>
INLINE void gather(const T* wide, const i64* ids, T* small) {
    over_rows<N, Threads>([&](i64 n) {
        for (i64 k = n * K; k < (n + 1) * K; ++k) small[k] = wide[n * E + ids[k]];
    });
}
template <class T, i64 N, i64 E, i64 K, int Threads>
INLINE void scatter(const T* small, const i64* ids, T* wide) {
    over_rows<N, Threads>([&](i64 n) {
        __builtin_memset(wide + n * E, 0, E * sizeof(T));
        for (i64 k = n * K; k < (n + 1) * K; ++k) wide[n * E + ids[k]] = small[k];
    });
}

template <i64 M, i64 E>
INLINE void sort_by_expert(const i64* ids, i64* order, i64* places, i64* offsets) {
    __builtin_memset(offsets, 0, (E + 1) * sizeof(i64));
    for (i64 m = 0; m < M; ++m) ++offsets[ids[m] + 1];
    for (i64 e = 0; e < E; ++e) offsets[e + 1] += offsets[e];
    for (i64 m = 0; m < M; ++m) {
        places[m] = offsets[ids[m]]++;
        order[places[m]] = m;
    }
    __builtin_memmove(offsets + 1, offsets, E * sizeof(i64));  // each had gone on to the end of its rows
    offsets[0] = 0;
}

// y [M, C] <- the token's row of x for each pair, times its weight.
template <class T, bool Weighted, i64 M, i64 K, i64 C, int Threads>
INLINE void dispatch(const T* x, const i64* order, const float* weights, T* y) {
    over_rows<M, Threads>([&](i64 j) {
        const T* from = x + order[j] / K * C;
        over_row<C>([&](i64 c, auto lanes) {
            vf value = load(from + c, lanes);
            if constexpr (Weighted) value *= weights[order[j]];
            store(y + j * C + c, value, lanes);
        });
    });
}

// y [N, C] <- the sum of the token's rows, times their weights.
template <class T, bool Weighted, i64 N, i64 K, i64 C, int Threads>
INLINE void combine(const T* rows, const i64* places, const float* weights, T* y) {
    over_rows<N, Threads>([&](i64 n) {
        over_row<C>([&](i64 c, auto lanes) {
            vf sum = {};
            for (i64 k = n * K; k < (n + 1) * K; ++k) {
                vf value = load(rows + places[k] * C + c, lanes);
                if constexpr (Weighted) value *= weights[k];
                sum += value;
            }
            store(y + n * C + c, sum, lanes);
        });
    });
}

template <class T, i64 N, i64 K, i64 C, int Threads>
INLINE void row_products(const T* dy, const T* rows, const i64* places, float* dweights) {
    over_rows<N * K, Threads>([&](i64 k) {
        const T *left = dy + k / K * C, *right = rows + places[k] * C;
        dweights[k] = sum_lanes(sum_over<C>([&](i64 c, auto lanes) { return load(left + c, lanes) * load(right + c, lanes); }));
    });
}

// body(e, begin, end, seat) for the panels of all experts. The result of each has `size` columns or rows, cut into tiles of
// `grain`: begin .. end are those of expert e that this call gets. A tile costs the rows of its panel, and as much as BESIDE
// rows to be begun, so all chunks take equally long, however uneven the panels are.
constexpr i64 BESIDE = 16;
template <class Body>
INLINE void over_panels(int threads, i64 experts, const i64* offsets, i64 size, i64 grain, const Body& body) {
    const i64 tiles = (size + grain - 1) / grain, all = tiles * (offsets[experts] + experts * BESIDE);
    const i64 chunks = chunks_of(experts * tiles, threads);
    parallel(threads, chunks, [&](int chunk, int seat) {
        for (i64 e = 0; e < experts; ++e) {
            const i64 each = offsets[e + 1] - offsets[e] + BESIDE, before = tiles * (offsets[e] + e * BESIDE);
            const auto until = [&](i64 place) {
                const i64 passed = place <= before ? 0 : (place - before + each - 1) / each * grain;
                return passed < size ? passed : size;
            };
            const i64 begin = until(share(all, chunk, chunks)), end = until(share(all, chunk + 1, chunks));
            if (begin < end) body(e, begin, end, seat);
        }
    });
}

// The rows of expert e, from offsets[e] up to offsets[e + 1], by its matrix B_e: [K, N], or [N, K] where TurnB. Panels of few
// rows never pack it; matrix units add in another order, and a row has the same bits in a panel of any height.
template <bool TurnB, class E>
__attribute__((noinline)) void grouped_matmul(
    i64 experts, Sizes s, const E* a, const E* b, const i64* offsets, E* c, float* scratch, i64 own, int threads) {
    const E* none = nullptr;
    over_panels(threads, experts, offsets, s.N, TILE_COLUMNS, [&](i64 e, i64 j0, i64 j1, int seat) {
        const E *rows = a + offsets[e] * s.K, *matrix = b + e * s.N * s.K;
        E* to = c + offsets[e] * s.N;
        Sizes panel = s;
        panel.M = offsets[e + 1] - offsets[e];
        if (!uses_amx<Operand<E>>() && panel.M < 5) {
            panel.N = j1 - j0;
            matrix += j0 * (TurnB ? s.b_row : 1);
            if (panel.M == 1) few_rows<1, TurnB, false, After::nothing>(panel, rows, matrix, none, to + j0, 1);
            if (panel.M == 2) few_rows<2, TurnB, false, After::nothing>(panel, rows, matrix, none, to + j0, 1);
            if (panel.M == 3) few_rows<3, TurnB, false, After::nothing>(panel, rows, matrix, none, to + j0, 1);
            if (panel.M == 4) few_rows<4, TurnB, false, After::nothing>(panel, rows, matrix, none, to + j0, 1);
        } else {
            nothing_packed(scratch + seat * own);
            product_part<false, TurnB, false, false, After::nothing>(
                panel, rows, matrix, none, to, 0, panel.M, j0, j1, scratch + seat * own);
        }
    });
}

// C_e [M, N] = A_e^T B_e over the rows of expert e; zero where it has none.
template <class E>
__attribute__((noinline)) void grouped_outer(
    i64 experts, Sizes s, const E* a, const E* b, const i64* offsets, E* c, float* scratch, i64 own, int threads) {
    const E* none = nullptr;
    over_panels(threads, experts, offsets, s.M, EVEN, [&](i64 e, i64 i0, i64 i1, int seat) {
        Sizes panel = s;
        panel.K = offsets[e + 1] - offsets[e];
        E* to = c + e * s.M * s.N;
        nothing_packed(scratch + seat * own);
        if (panel.K == 0) __builtin_memset(to + i0 * s.N, 0, (i1 - i0) * s.N * sizeof(E));
        else
            product_part<true, false, false, false, After::nothing>(
                panel, a + offsets[e] * s.M, b + offsets[e] * s.N, none, to, i0, i1, 0, s.N, scratch + seat * own);
    });
}
