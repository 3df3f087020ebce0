// Attention of one head at a time, in a core's own caches: what the mask hides is never computed, and no matrix of all
// scores exists. Everything is widened to fp32 on the way in and rounded once on the way out. Queries, keys and values
// are [B, T, H, D], rows of T lying `Stride` apart, so they may be parts of one tensor; of keys and values there may be
// fewer heads, K of them `Apart` apart, each for H / K heads of queries. Under `Pairs` a query sees the other position of
// its aligned pair too; where that lies ahead, `slopes`, one a head, are taken off its score. Under `Documents` the query
// at t sees no key before t - positions[t], where its document begins; positions are [B, T]. With a `Window` it sees so
// many keys at most, its own the last.
#pragma once
#include "gemm.h"
#include "softmax.h"

// Sizes of one head, padded so that products run in whole tiles; the padding holds zeros.
template <i64 T, i64 D>
struct HeadSizes {
    static constexpr i64 times = round_up(T, TILE_COLUMNS), width = round_up(D, TILE_COLUMNS);
    static constexpr i64 block = T < 32 ? round_up(T, TILE_ROWS) : 32;  // queries treated together
    static constexpr i64 queries = round_up(T, block);
    static constexpr i64 longest = times > queries ? times : queries;
    static constexpr i64 matrix = longest * width, scores = block * longest;
    static constexpr bool padded = longest != T || width != D;
    static constexpr i64 forward = 3 * matrix + scores + block * width;
    static constexpr i64 backward = 9 * matrix + 2 * scores;
    // Columns that queries first .. first + block - 1 can see, in whole tiles.
    static INLINE i64 seen(i64 first) {
        const i64 last = first + block < T ? first + block : T;
        return round_up(last, TILE_COLUMNS);
    }
};

// How many keys a query sees: those from the first on.
template <bool Pairs, i64 T>
INLINE i64 keys_seen(i64 t) {
    if constexpr (!Pairs) return t + 1;
    return (t | 1) + 1 < T ? (t | 1) + 1 : T;
}
template <bool Pairs, i64 T>
INLINE void prefer_near(float* row, i64 t, i64 head, const float* slopes) {
    if constexpr (Pairs)
        if (slopes && t % 2 == 0 && t + 1 < T) row[t + 1] -= slopes[head];
}

template <bool Documents, i64 Window>
INLINE i64 first_key(const i64* positions, i64 t) {
    const i64 first = Documents ? t - positions[t] : 0, near = Window ? t + 1 - Window : 0;
    return first > near ? first : near;
}
// Scores of the first n keys of a row: low enough that their probabilities are zero.
INLINE void hide(float* row, i64 n) {
    for (i64 j = 0; j < n; ++j) row[j] = -3.4e38f;
}

// matrix [T, width] <- factor * the rows x[t * stride ..][0 .. D).
template <i64 T, i64 D, class X>
INLINE void widen_rows(const X* x, i64 stride, float factor, float* matrix) {
    constexpr i64 width = HeadSizes<T, D>::width;
    for (i64 t = 0; t < T; ++t)
        over_row<D>([&](i64 j, auto lanes) { store(matrix + t * width + j, load(x + t * stride + j, lanes) * factor); });
}
// transposed [width, times] <- matrix [longest, width], padding included.
template <i64 T, i64 D>
INLINE void transpose_rows(const float* matrix, float* transposed) {
    constexpr i64 width = HeadSizes<T, D>::width, times = HeadSizes<T, D>::times;
    for (i64 t = 0; t < times; t += W)
        for (i64 j = 0; j < width; j += W) {
            vf rows[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) rows[i] = load(matrix + (t + i) * width + j);
            transpose_square(rows);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) store(transposed + (j + i) * times + t, rows[i]);
        }
}
template <i64 T, i64 D, class Y>
INLINE void round_rows(const float* matrix, Y* y, i64 stride) {
    constexpr i64 width = HeadSizes<T, D>::width;
    for (i64 t = 0; t < T; ++t)
        over_row<D>([&](i64 j, auto lanes) { store(y + t * stride + j, load(matrix + t * width + j), lanes); });
}

// y [B, T, H * D] and log_sum_exp [B, H, T]. Scratch: HeadSizes::forward floats a thread.
template <
    class X, bool Drop, bool Pairs, bool Documents, i64 Window, i64 B, i64 H, i64 K, i64 T, i64 D, i64 Stride, i64 Apart,
    int Threads>
INLINE void attention(
    const X* queries, const X* keys, const X* values, X* y, float* log_sum_exp, float scale, const float* slopes,
    const i64* positions, Mask mask, float* scratch) {
    using S = HeadSizes<T, D>;
    constexpr i64 each = H / K;  // heads that share keys and values: one thread takes them all
    constexpr i64 chunks = chunks_of(B * K, Threads);
    parallel<Threads>(chunks, [&](int chunk, int seat) {
        float* q = scratch + seat * S::forward;
        float *k = q + S::matrix, *v = k + S::matrix, *scores = v + S::matrix, *out = scores + S::scores;
        if (S::padded) __builtin_memset(q, 0, 3 * S::matrix * sizeof(float));
        for (i64 head = share(B * K, chunk, chunks) * each; head < share(B * K, chunk + 1, chunks) * each; ++head) {
            const i64 shared = head / H * T * Apart + head % H / each * D;
            const i64* places = Documents ? positions + head / H * T : nullptr;
            if (head % each == 0) {
                widen_rows<T, D>(keys + shared, Apart, 1.0f, v);  // v holds k for a moment
                transpose_rows<T, D>(v, k);
                widen_rows<T, D>(values + shared, Apart, 1.0f, v);
            }
            widen_rows<T, D>(queries + head / H * T * Stride + head % H * D, Stride, scale, q);
            for (i64 first = 0; first < T; first += S::block) {
                const i64 end = first + S::block < T ? first + S::block : T;
                const i64 begin = first_key<Documents, Window>(places, first) / TILE_COLUMNS * TILE_COLUMNS;
                const i64 columns = S::seen(first) - begin;
                multiply(
                    S::block, columns, D, q + first * S::width, S::width, 1, k + begin, S::times, scores, S::longest, false);
                alignas(64) float sums[S::block];
                for (i64 t = first; t < end; ++t) {
                    float* row = scores + (t - first) * S::longest;
                    const i64 seen = keys_seen<Pairs, T>(t) - begin;
                    prefer_near<Pairs, T>(row - begin, t, head % H, slopes);
                    if constexpr (Documents || Window) hide(row, first_key<Documents, Window>(places, t) - begin);
                    const vf lowest = splat(-3.4e38f);
                    vf highest = lowest, sum = {};
                    over_prefix<S::longest>(
                        seen, [&](i64 j, auto, auto keep) { highest = greater(highest, keep(load(row + j), lowest)); });
                    const float most = max_lanes(highest);
                    over_prefix<S::longest>(seen, [&](i64 j, auto, auto keep) {
                        vf e = keep(v_exp(load(row + j) - most), vf{});
                        sum += e;
                        store(row + j, Drop ? mask(e, (head * T + t) * T + begin + j) : e);
                    });
                    for (i64 j = round_up(seen, W); j < columns; j += W) store(row + j, vf{});
                    sums[t - first] = sum_lanes(sum);
                    log_sum_exp[head * T + t] = most + v_log(splat(sums[t - first]))[0];
                }
                multiply(
                    S::block, S::width, end - begin, scores, S::longest, 1, v + begin * S::width, S::width, out, S::width, false);
                for (i64 t = first; t < end; ++t) {
                    X* row = y + ((head / H * T + t) * H + head % H) * D;
                    const float share_of_one = 1.0f / sums[t - first];
                    over_row<D>([&](i64 j, auto lanes) {
                        store(row + j, load(out + (t - first) * S::width + j) * share_of_one, lanes);
                    });
                }
            }
        }
    });
}

// Gradients of queries, keys and values, which lie as those do. Scratch: HeadSizes::backward floats a thread.
template <
    class X, bool Drop, bool Pairs, bool Documents, i64 Window, i64 B, i64 H, i64 K, i64 T, i64 D, i64 Stride, i64 Apart,
    int Threads>
INLINE void attention_grad(
    const X* dy, const X* queries, const X* keys, const X* values, const X* y, const float* log_sum_exp, X* dqueries,
    X* dkeys, X* dvalues, float scale, const float* slopes, const i64* positions, Mask mask,
    float* scratch) {
    using S = HeadSizes<T, D>;
    constexpr i64 each = H / K;  // heads that share keys and values: one thread takes them all
    constexpr i64 chunks = chunks_of(B * K, Threads);
    parallel<Threads>(chunks, [&](int chunk, int seat) {
        float* q = scratch + seat * S::backward;
        float *k = q + S::matrix, *k_turned = k + S::matrix, *v = k_turned + S::matrix, *v_turned = v + S::matrix;
        float *g = v_turned + S::matrix, *dq = g + S::matrix, *dk = dq + S::matrix, *dv = dk + S::matrix;
        float *p = dv + S::matrix, *ds = p + S::scores;
        if (S::padded) __builtin_memset(q, 0, 6 * S::matrix * sizeof(float));
        for (i64 head = share(B * K, chunk, chunks) * each; head < share(B * K, chunk + 1, chunks) * each; ++head) {
            const i64 at = (head / H * T * H + head % H) * D, given = head / H * T * Stride + head % H * D;
            const i64 shared = head / H * T * Apart + head % H / each * D;
            const i64* places = Documents ? positions + head / H * T : nullptr;
            widen_rows<T, D>(queries + given, Stride, scale, q);
            widen_rows<T, D>(dy + at, H * D, 1.0f, g);
            if (head % each == 0) {
                widen_rows<T, D>(keys + shared, Apart, 1.0f, k);
                widen_rows<T, D>(values + shared, Apart, 1.0f, v);
                transpose_rows<T, D>(k, k_turned);
                transpose_rows<T, D>(v, v_turned);
                __builtin_memset(dk, 0, 2 * S::matrix * sizeof(float));
            }
            for (i64 first = 0; first < T; first += S::block) {
                const i64 end = first + S::block < T ? first + S::block : T;
                const i64 begin = first_key<Documents, Window>(places, first) / TILE_COLUMNS * TILE_COLUMNS;
                const i64 columns = S::seen(first) - begin, before = begin * S::width;
                const float *q_block = q + first * S::width, *g_block = g + first * S::width;
                multiply(S::block, columns, D, q_block, S::width, 1, k_turned + begin, S::times, p, S::longest, false);
                multiply(S::block, columns, D, g_block, S::width, 1, v_turned + begin, S::times, ds, S::longest, false);
                for (i64 t = first; t < end; ++t) {
                    float *p_row = p + (t - first) * S::longest, *ds_row = ds + (t - first) * S::longest;
                    const vf product = sum_over<D>([&](i64 j, auto lanes) {
                        return load(dy + at + t * H * D + j, lanes) * load(y + at + t * H * D + j, lanes);
                    });
                    const float inner = sum_lanes(product), shift = log_sum_exp[head * T + t];
                    const i64 seen = keys_seen<Pairs, T>(t) - begin;
                    prefer_near<Pairs, T>(p_row - begin, t, head % H, slopes);
                    if constexpr (Documents || Window) hide(p_row, first_key<Documents, Window>(places, t) - begin);
                    over_prefix<S::longest>(seen, [&](i64 j, auto, auto keep) {
                        vf probability = keep(v_exp(load(p_row + j) - shift), vf{}), dp = load(ds_row + j);
                        const i64 index = (head * T + t) * T + begin + j;
                        if constexpr (Drop) dp = mask(dp, index);
                        store(ds_row + j, keep(probability * (dp - inner), vf{}));
                        store(p_row + j, Drop ? mask(probability, index) : probability);
                    });
                    for (i64 j = round_up(seen, W); j < columns; j += W) {
                        store(p_row + j, vf{});
                        store(ds_row + j, vf{});
                    }
                }
                const i64 count = end - first;
                multiply(
                    S::block, S::width, end - begin, ds, S::longest, 1, k + before, S::width, dq + first * S::width, S::width,
                    false);
                multiply(columns, S::width, count, p, 1, S::longest, g_block, S::width, dv + before, S::width, true);
                multiply(columns, S::width, count, ds, 1, S::longest, q_block, S::width, dk + before, S::width, true);
            }
            // q carried the scale, so dk has it already.
            for (i64 t = 0; t < T; ++t)
                over_row<D>([&](i64 j, auto) { store(dq + t * S::width + j, load(dq + t * S::width + j) * scale); });
            round_rows<T, D>(dq, dqueries + given, Stride);
            if (head % each < each - 1) continue;
            round_rows<T, D>(dk, dkeys + shared, Apart);
            round_rows<T, D>(dv, dvalues + shared, Apart);
        }
    });
}
