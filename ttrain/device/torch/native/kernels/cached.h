// Attention over caches: the keys and values of new tokens are written into caches, and queries attend to those they see.
#pragma once
#include "gemv.h"

// cache [Lead, C, D] <- rows [Lead, N, D], row n at place positions[n].
template <class T, i64 Lead, i64 N, i64 C, i64 D>
INLINE void cache_write(const T* rows, const i64* positions, T* cache) {
    for (i64 i = 0; i < Lead * N; ++i)
        if (u64(positions[i % N]) < u64(C))
            __builtin_memcpy(cache + (i / N * C + positions[i % N]) * D, rows + i * D, D * sizeof(T));
}

// The bias that is subtracted from a score: none, or a head's slope times the distance of a key, or of a future key.
enum class PositionBias { none, distance, future };

// y [Lead, N, D] for q [Lead, N, K], keys [Lead / Shared, Texts * C, K] and values [Lead / Shared, Texts * C, D]: query n
// stands at positions[n], among the C places of its text, and sees the keys there below visible[n], with a Window only
// the nearest. Slopes [H].
template <
    class T, PositionBias Bias, i64 Window, i64 Lead, i64 H, i64 Shared, i64 N, i64 Texts, i64 C, i64 K, i64 D, int Threads>
INLINE void cached_attention(
    const T* q, const T* keys, const T* values, const i64* positions, const i64* visible, T* y, float scale,
    const float* slopes) {
    over_rows<Lead * N, Threads>([&](i64 row) {
        const i64 n = row % N, lead = row / N, text = Texts > 1 ? positions[n] / C * C : 0, at = positions[n] - text;
        const i64 seen = visible[n] - text < C ? visible[n] - text : C;
        const i64 first = Window && at - Window + 1 > 0 ? at - Window + 1 : 0, group = lead / Shared * Texts * C + text;
        const auto* query = reinterpret_cast<const Unit<T>*>(q + row * K);
        const auto* matrix = reinterpret_cast<const Unit<T>*>(keys + group * K);
        constexpr i64 steps = K / Inner<T>::elements;
        alignas(64) float scores[C + NEAR], out[(D + W - 1) / W * W] = {};
        vf highest = splat(-3.4e38f), sum = {};  // rounded as in attention(), for the same bits
        for (i64 j = first; j < seen; j += NEAR) {
            const Unit<T>* from[NEAR];
            rows_from(matrix, steps, j, seen, from);
            vf found[GROUPS][1] = {};
            add_turned<1, T>(steps, query, 0, from, from[0] + NEAR * steps, found);
            for (int g = 0; g < GROUPS; ++g) {
                vf score = found[g][0];
                if constexpr (Bias != PositionBias::none) {
                    const vf far = __builtin_convertvector(bits_as<vi>(lane_indices()), vf) + float(j + g * W - at);
                    score -= slopes[lead % H] / scale * greater(far, Bias == PositionBias::future ? vf{} : -far);
                }
                store(scores + j + g * W, score);
                highest = greater(highest, score * scale);  // lanes beyond the last key hold its score, or less
            }
        }
        const float most = max_lanes(highest);
        for (i64 j = first; j < seen; j += W) {
            const vf e = first_lanes(v_exp_no_overflow(load(scores + j) * scale - most), int(seen - j), vf{});
            store(scores + j, e);
            sum += e;
        }
        for (i64 j = first; j < seen; ++j)
            over_row<D>([&](i64 d, auto lanes) {
                store(out + d, load(out + d) + scores[j] * load(values + (group + j) * D + d, lanes));
            });
        const float inverse_sum = 1.0f / sum_lanes(sum);
        over_row<D>([&](i64 d, auto lanes) { store(y + row * D + d, load(out + d) * inverse_sum, lanes); });
    });
}
