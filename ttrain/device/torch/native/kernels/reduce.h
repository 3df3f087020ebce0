// Sums over axes, the norm of all gradients, and sums of squared differences.
#pragma once
#include "parallel.h"

// x [R, C] -> y [C]: the rows are cut into Parts ranges, whose sums `sums` [Parts, C] are added in order.
template <class T, class Y, i64 R, i64 C, int Parts, int Threads>
INLINE void sum_columns(const T* x, Y* y, float* sums) {
    parallel<Threads>(Parts, [&](int part, int) {
        float* sum = sums + part * C;
        __builtin_memset(sum, 0, C * sizeof(float));
        i64 i = share(R, part, Parts);
        const i64 end = share(R, part + 1, Parts);
        for (; i + 4 <= end; i += 4) {
            const T* row = x + i * C;
            over_row<C>([&](i64 j, auto lanes) {
                vf four = (load(row + j, lanes) + load(row + C + j, lanes)) +
                          (load(row + 2 * C + j, lanes) + load(row + 3 * C + j, lanes));
                store(sum + j, load(sum + j, lanes) + four, lanes);
            });
        }
        for (; i < end; ++i)
            over_row<C>([&](i64 j, auto lanes) {
                store(sum + j, load(sum + j, lanes) + load(x + i * C + j, lanes), lanes);
            });
    });
    over_row<C>([&](i64 j, auto lanes) {
        vf sum = {};
        for (int part = 0; part < Parts; ++part) sum += load(sums + part * C + j, lanes);
        store(y + j, sum, lanes);
    });
}

// x [A, R, C] -> y [A, C], every element of y by itself: for short sums, and sums within rows (C = 1).
template <class T, class Y, i64 A, i64 R, i64 C, int Threads>
INLINE void sum_middle(const T* x, Y* y) {
    over_rows<A, Threads>([&](i64 i) {
        if constexpr (C == 1) {
            put(y + i, sum_lanes(sum_over<R>([&](i64 j, auto lanes) { return load(x + i * R + j, lanes); })));
        } else {
            over_row<C>([&](i64 j, auto lanes) {
                vf sum = {};
                for (i64 r = 0; r < R; ++r) sum += load(x + (i * R + r) * C + j, lanes);
                store(y + i * C + j, sum, lanes);
            });
        }
    });
}

// Sum over i < count of term(i, lanes), a vector a term; blocks of Block elements give one partial sum each.
constexpr i64 BLOCK = 4096;
template <class Term>
INLINE float sum_block(i64 count, const Term& term) {
    vf sum[4] = {};
    i64 j = 0;
    for (; j + 4 * W <= count; j += 4 * W)
        for (int k = 0; k < 4; ++k) sum[k] += term(j + k * W);
    for (; j + W <= count; j += W) sum[0] += term(j);
    float total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    return total;
}

// Elements `count % W` at the end of a block, as a vector padded with zeros.
template <class T>
INLINE vf load_rest(const T* p, i64 count) {
    T rest[W] = {};
    for (i64 j = 0; j < count; ++j) rest[j] = p[j];
    return load(rest);
}
template <class T>
INLINE void store_rest(T* p, vf v, i64 count) {
    T rest[W];
    store(rest, v);
    for (i64 j = 0; j < count; ++j) p[j] = rest[j];
}

template <class T>
INLINE float square_sum(const T* p, i64 count) {
    vf rest = load_rest(p + count / W * W, count % W);
    return sum_block(count, [&](i64 j) {
               vf v = load(p + j);
               return v * v;
           }) +
           sum_lanes(rest * rest);
}

// Blocks of several tensors for kernels that treat all elements alike. Row k of the table holds the block's addresses
// in every slot and, last, its number of elements; `begins` [chunks + 1] tells which blocks each chunk has.
template <int Slots>
struct Block {
    void* address[Slots];
    i64 count;
    template <class T>
    INLINE T* at(int slot) const {
        return static_cast<T*>(address[slot]);
    }
};
template <int Slots, int Threads, class Body>
INLINE void over_blocks(const void* table, const i64* begins, const Body& body) {
    parallel<Threads>(Threads == 1 ? 1 : EACH * Threads, [&](int chunk, int) {
        const auto* blocks = static_cast<const Block<Slots>*>(table);
        for (i64 k = begins[chunk]; k < begins[chunk + 1]; ++k) body(k, blocks[k]);
    });
}

// partial[k] = the sum of squares of block k.
template <class T, int Threads>
INLINE void square_sums(const void* table, const i64* begins, float* partial) {
    over_blocks<1, Threads>(table, begins, [&](i64 k, const Block<1>& block) {
        partial[k] = square_sum(block.at<const T>(0), block.count);
    });
}
INLINE void root_of_sum(i64 count, const float* partial, float* y) {
    double sum = 0;
    for (i64 k = 0; k < count; ++k) sum += partial[k];
    *y = float(__builtin_sqrt(sum));
}

// weight * sum (prediction - target)^2.
template <class T, class U, i64 N, int Threads>
INLINE void squared_error(const T* prediction, const U* target, const float* weight, float* loss, float* partial) {
    constexpr i64 blocks = (N + BLOCK - 1) / BLOCK;
    over_rows<blocks, Threads>([&](i64 k) {
        const T* p = prediction + k * BLOCK;
        const U* t = target + k * BLOCK;
        const i64 count = k + 1 < blocks ? BLOCK : N - k * BLOCK, whole = count / W * W;
        vf rest = load_rest(p + whole, count - whole) - load_rest(t + whole, count - whole);
        partial[k] = sum_block(count, [&](i64 j) {
                         vf d = load(p + j) - load(t + j);
                         return d * d;
                     }) +
                     sum_lanes(rest * rest);
    });
    double sum = 0;
    for (i64 k = 0; k < blocks; ++k) sum += partial[k];
    *loss = *weight * float(sum);
}
