// Attention of one head at a time, in a core's own caches: what the mask hides is never computed, and no matrix of all
// scores exists. Sums, scores and the softmax are fp32. Where vectors multiply pairs of bf16 faster than fp32, products
// of bf16 tensors take probabilities and the gradients of scores rounded to bf16; elsewhere all is widened on the way in.
// Queries, keys and values are [B, T, H, D], rows of T lying `Stride` apart, so they may be parts of one tensor; of keys
// and values there may be fewer heads, K of them `Apart` apart, each for H / K heads of queries. Under `Pairs` a query sees
// the other position of its aligned pair too; where that lies ahead, `slopes`, one a head, are taken off its score. Under
// `Documents` the query at t sees no key before t - positions[t], where its document begins; positions are [B, T]. With a
// `Window` it sees so many keys at most, its own the last.
#pragma once
#include "gemm.h"
#include "softmax.h"

// How many steps of a product lie in so many elements of its inner axis.
template <class E>
constexpr i64 units(i64 count) {
    return round_up(count, Inner<E>::elements) / Inner<E>::elements;
}
template <class E>
INLINE Unit<E>* as_units(float* p) {
    return reinterpret_cast<Unit<E>*>(p);
}

// Sizes of one head, padded so that products run in whole tiles; the padding holds zeros. A matrix of operands takes half
// of `matrix` floats where they are bf16.
template <i64 T, i64 D>
struct HeadSizes {
    static constexpr i64 times = round_up(T, TILE_COLUMNS), width = round_up(D, TILE_COLUMNS);
    static constexpr i64 block = T < 32 ? round_up(T, HEAD_ROWS) : 32;  // queries treated together
    static constexpr i64 queries = round_up(T, block);
    static constexpr i64 longest = times > queries ? times : queries;
    static constexpr i64 matrix = longest * width, scores = block * longest;
    static constexpr i64 forward = 4 * matrix + scores + block * width;
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
// Takes a slope off the score of the other position of a pair, which is not scaled yet.
template <bool Pairs, i64 T>
INLINE void prefer_near(float* row, i64 t, i64 head, const float* slopes, float scale) {
    if constexpr (Pairs)
        if (slopes && t % 2 == 0 && t + 1 < T) row[t + 1] -= slopes[head] / scale;
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

// paired [rows / 2][columns] of rows that lie `stride` apart.
template <class E>
INLINE void pair_rows(const E* x, i64 stride, i64 rows, i64 columns, Unit<E>* paired) {
    for (i64 t = 0; t < rows; t += Inner<E>::elements, paired += columns)
        for (i64 j = 0; j < columns; j += W) {
            const auto units = units_at(x + t * stride + j, stride);
            __builtin_memcpy(paired + j, &units, sizeof units);
        }
}
// An operand of one head in the orders that products read: rows [longest][width]; turned [width / pair][times], whose units
// are parts of a row; paired [longest / pair][width], whose units are of neighbouring rows. For fp32 paired is as rows.
template <class E, i64 T, i64 D>
struct HeadOperand {
    using S = HeadSizes<T, D>;
    static constexpr i64 pair = Inner<E>::elements, across = S::width / pair;
    E* rows;
    Unit<E>*turned, *paired;

    // Takes its room from scratch.
    HeadOperand(float*& scratch, bool turning, bool pairing) {
        auto take = [&](bool wanted) {
            float* taken = scratch;
            scratch += wanted ? S::matrix / pair : 0;
            return taken;
        };
        rows = reinterpret_cast<E*>(take(true));
        turned = reinterpret_cast<Unit<E>*>(take(turning));
        paired = pair == 1 ? reinterpret_cast<Unit<E>*>(rows) : reinterpret_cast<Unit<E>*>(take(pairing));
        if (S::longest != T || S::width != D) __builtin_memset(rows, 0, S::matrix * sizeof(E));
    }
    const Unit<E>* row(i64 t) const { return reinterpret_cast<const Unit<E>*>(rows + t * S::width); }

    template <class X>
    INLINE void read(const X* x, i64 stride) {
        for (i64 t = 0; t < T; ++t)
            over_row<D>([&](i64 j, auto lanes) { store(rows + t * S::width + j, load(x + t * stride + j, lanes)); });
    }
    INLINE void turn() {
        for (i64 t = 0; t < S::times; t += W)
            for (i64 j = 0; j < across; j += W) {
                vf square[W];
#pragma GCC unroll 16
                for (int i = 0; i < W; ++i) __builtin_memcpy(&square[i], row(t + i) + j, sizeof(vf));
                transpose_square(square);
#pragma GCC unroll 16
                for (int i = 0; i < W; ++i) __builtin_memcpy(turned + (j + i) * S::times + t, &square[i], sizeof(vf));
            }
    }
    INLINE void pair_up() {
        if constexpr (pair > 1) pair_rows(rows, S::width, S::longest, S::width, paired);
    }
};
template <i64 T, i64 D, class Y>
INLINE void round_rows(const float* matrix, float factor, Y* y, i64 stride) {
    constexpr i64 width = HeadSizes<T, D>::width;
    for (i64 t = 0; t < T; ++t)
        over_row<D>([&](i64 j, auto lanes) { store(y + t * stride + j, load(matrix + t * width + j) * factor, lanes); });
}

// y [B, T, H * D] and log_sum_exp [B, H, T]. Probabilities are kept as P: where that is fp32, a row of y has the bits that
// cached_attention() gives it. Scratch: HeadSizes::forward floats a thread.
template <
    class X, class P, bool Drop, bool Pairs, bool Documents, i64 Window, i64 B, i64 H, i64 K, i64 T, i64 D, i64 Stride, i64 Apart,
    int Threads>
INLINE void attention(
    const X* queries, const X* keys, const X* values, X* y, float* log_sum_exp, float scale, const float* slopes,
    const i64* positions, Mask mask, float* scratch) {
    using S = HeadSizes<T, D>;
    using E = VectorOperand<X>;
    constexpr i64 each = H / K;  // heads that share keys and values: one thread takes them all
    constexpr i64 chunks = chunks_of(B * K, Threads);
    parallel<Threads>(chunks, [&](int chunk, int seat) {
        float* room = scratch + seat * S::forward;
        HeadOperand<E, T, D> q(room, false, false), k(room, true, false);
        HeadOperand<P, T, D> v(room, false, true);
        float *scores = room, *out = scores + S::scores;
        for (i64 head = share(B * K, chunk, chunks) * each; head < share(B * K, chunk + 1, chunks) * each; ++head) {
            const i64 shared = head / H * T * Apart + head % H / each * D;
            const i64* places = Documents ? positions + head / H * T : nullptr;
            if (head % each == 0) {
                k.read(keys + shared, Apart);
                k.turn();
                v.read(values + shared, Apart);
                v.pair_up();
            }
            q.read(queries + head / H * T * Stride + head % H * D, Stride);
            for (i64 first = 0; first < T; first += S::block) {
                const i64 end = first + S::block < T ? first + S::block : T;
                const i64 begin = first_key<Documents, Window>(places, first) / TILE_COLUMNS * TILE_COLUMNS;
                const i64 columns = S::seen(first) - begin;
                multiply<E>(
                    S::block, columns, units<E>(D), q.row(first), q.across, 1, k.turned + begin, S::times, scores, S::longest,
                    false);
                alignas(64) float sums[round_up(S::block, W)] = {}, peaks[round_up(S::block, W)] = {};
                for (i64 t = first; t < end; ++t) {
                    float* row = scores + (t - first) * S::longest;
                    P* weights = reinterpret_cast<P*>(row);  // of values: over the scores that have been read
                    const i64 seen = keys_seen<Pairs, T>(t) - begin;
                    prefer_near<Pairs, T>(row - begin, t, head % H, slopes, scale);
                    if constexpr (Documents || Window) hide(row, first_key<Documents, Window>(places, t) - begin);
                    const vf lowest = splat(-3.4e38f);
                    vf highest = lowest, sum = {};
                    over_prefix<S::longest>(
                        seen, [&](i64 j, auto, auto keep) { highest = greater(highest, keep(load(row + j) * scale, lowest)); });
                    const float most = max_lanes(highest);
                    over_prefix<S::longest>(seen, [&](i64 j, auto, auto keep) {
                        vf e = keep(v_exp_no_overflow(load(row + j) * scale - most), vf{});
                        sum += e;
                        store(weights + j, Drop ? mask(e, (head * T + t) * T + begin + j) : e);
                    });
                    for (i64 j = round_up(seen, W); j < columns; j += W) store(weights + j, vf{});
                    sums[t - first] = sum_lanes(sum);
                    peaks[t - first] = most;
                }
                for (i64 t = first; t < end; t += W)
                    store_rest(
                        log_sum_exp + head * T + t, load(peaks + t - first) + v_log(load(sums + t - first)),
                        end - t < W ? end - t : W);
                multiply<P>(
                    S::block, S::width, units<P>(end - begin), as_units<P>(scores), S::longest, 1,
                    v.paired + begin / v.pair * S::width, S::width, out, S::width, false);
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
    using E = VectorOperand<X>;
    constexpr i64 each = H / K;  // heads that share keys and values: one thread takes them all
    constexpr i64 chunks = chunks_of(B * K, Threads);
    parallel<Threads>(chunks, [&](int chunk, int seat) {
        float* room = scratch + seat * S::backward;
        HeadOperand<E, T, D> q(room, false, true), g(room, false, true), k(room, true, true), v(room, true, false);
        float *dq = room, *dk = dq + S::matrix, *dv = dk + S::matrix, *p = dv + S::matrix, *ds = p + S::scores;
        // By pairs of queries; fp32 as it is. The pairs lie in the room that operands of bf16 leave of that of fp32.
        constexpr i64 pair = q.pair;
        static_assert(pair == 1 || 2 * S::scores <= 3 * S::matrix);
        Unit<E>* p_paired = as_units<E>(pair > 1 ? ds + S::scores : p);
        Unit<E>* ds_paired = pair > 1 ? p_paired + S::scores / pair : as_units<E>(ds);
        for (i64 head = share(B * K, chunk, chunks) * each; head < share(B * K, chunk + 1, chunks) * each; ++head) {
            const i64 at = (head / H * T * H + head % H) * D, given = head / H * T * Stride + head % H * D;
            const i64 shared = head / H * T * Apart + head % H / each * D;
            const i64* places = Documents ? positions + head / H * T : nullptr;
            q.read(queries + given, Stride);
            q.pair_up();
            g.read(dy + at, H * D);
            g.pair_up();
            if (head % each == 0) {
                k.read(keys + shared, Apart);
                k.turn();
                k.pair_up();
                v.read(values + shared, Apart);
                v.turn();
                __builtin_memset(dk, 0, 2 * S::matrix * sizeof(float));
            }
            for (i64 first = 0; first < T; first += S::block) {
                const i64 end = first + S::block < T ? first + S::block : T;
                const i64 begin = first_key<Documents, Window>(places, first) / TILE_COLUMNS * TILE_COLUMNS;
                const i64 columns = S::seen(first) - begin, before = begin * S::width;
                multiply<E>(
                    S::block, columns, units<E>(D), q.row(first), q.across, 1, k.turned + begin, S::times, p, S::longest, false);
                multiply<E>(
                    S::block, columns, units<E>(D), g.row(first), g.across, 1, v.turned + begin, S::times, ds, S::longest, false);
                for (i64 t = first; t < end; ++t) {
                    float *p_row = p + (t - first) * S::longest, *ds_row = ds + (t - first) * S::longest;
                    E *p_to = reinterpret_cast<E*>(p_row), *ds_to = reinterpret_cast<E*>(ds_row);
                    const vf product = sum_over<D>([&](i64 j, auto lanes) {
                        return load(dy + at + t * H * D + j, lanes) * load(y + at + t * H * D + j, lanes);
                    });
                    const float inner = sum_lanes(product), shift = log_sum_exp[head * T + t];
                    const i64 seen = keys_seen<Pairs, T>(t) - begin;
                    prefer_near<Pairs, T>(p_row - begin, t, head % H, slopes, scale);
                    if constexpr (Documents || Window) hide(p_row, first_key<Documents, Window>(places, t) - begin);
                    over_prefix<S::longest>(seen, [&](i64 j, auto, auto keep) {
                        vf probability = keep(v_exp_no_overflow(load(p_row + j) * scale - shift), vf{});
                        vf dp = load(ds_row + j);
                        const i64 index = (head * T + t) * T + begin + j;
                        if constexpr (Drop) dp = mask(dp, index);
                        store(ds_to + j, keep(probability * (dp - inner), vf{}));
                        store(p_to + j, Drop ? mask(probability, index) : probability);
                    });
                    for (i64 j = round_up(seen, W); j < columns; j += W) {
                        store(p_to + j, vf{});
                        store(ds_to + j, vf{});
                    }
                }
                multiply<E>(
                    S::block, S::width, units<E>(end - begin), as_units<E>(ds), S::longest, 1, k.paired + before / pair, S::width,
                    dq + first * S::width, S::width, false);
                if constexpr (pair > 1) {
                    pair_rows(reinterpret_cast<const E*>(p), S::longest * pair, S::block, columns, p_paired);
                    pair_rows(reinterpret_cast<const E*>(ds), S::longest * pair, S::block, columns, ds_paired);
                }
                const i64 apart = pair > 1 ? columns : S::longest, queries_first = first / pair * S::width;
                const i64 steps = units<E>(end - first);
                multiply<E>(
                    columns, S::width, steps, p_paired, 1, apart, g.paired + queries_first, S::width, dv + before, S::width, true);
                multiply<E>(
                    columns, S::width, steps, ds_paired, 1, apart, q.paired + queries_first, S::width, dk + before, S::width, true);
            }
            round_rows<T, D>(dq, scale, dqueries + given, Stride);
            if (head % each < each - 1) continue;
            round_rows<T, D>(dk, scale, dkeys + shared, Apart);
            round_rows<T, D>(dv, 1.0f, dvalues + shared, Apart);
        }
    });
}
