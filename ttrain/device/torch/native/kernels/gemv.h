// Products of few rows. Reading the right matrix is all that they cost: it is read once, where it lies, and never packed.
// Each sum takes the steps of the inner axis in the order of product(), so both round alike.
#pragma once
#include "gemm.h"

// Columns at a time: enough independent sums that no addition waits for the one before it.
constexpr int NEAR = 16, GROUPS = NEAR / W;

// sums[g][r] += row r of A times group g of NEAR rows of B, which is stored [N, K]: squares of it are transposed in
// registers. `b` has the addresses of these rows. The memory at `next`, which is read after them, is prefetched.
template <int Rows, class E>
INLINE void add_turned(
    i64 steps, const Unit<E>* a, i64 a_row, const Unit<E>* const (&b)[NEAR], const void* next, vf (&sums)[GROUPS][Rows]) {
    using Vector = typename Inner<E>::Vector;
    const auto* ahead = static_cast<const vf*>(next);
    i64 k = 0;
    for (; k + W <= steps; k += W)
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; ++g) {
            vf square[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) {
                __builtin_memcpy(&square[i], b[g * W + i] + k, sizeof(vf));
                __builtin_prefetch(ahead + g * steps + k + i, 0, 2);
            }
            transpose_square(square);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i)
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r)
                    Inner<E>::add_product(sums[g][r], Inner<E>::repeat(a + r * a_row + k + i), bits_as<Vector>(square[i]));
        }
    for (; k < steps; ++k)
        for (int g = 0; g < GROUPS; ++g) {
            Vector column = {};
            for (int i = 0; i < W; ++i) column[i] = b[g * W + i][k];
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) Inner<E>::add_product(sums[g][r], Inner<E>::repeat(a + r * a_row + k), column);
        }
}

// Addresses of NEAR rows of a matrix from `first` on; for rows beyond the end that of the last row.
template <class U>
INLINE void rows_from(const U* matrix, i64 row, i64 first, i64 rows, const U* (&from)[NEAR]) {
    for (int i = 0; i < NEAR; ++i) from[i] = matrix + (first + i < rows ? first + i : rows - 1) * row;
}

// sums [Rows, SUMMED] += A B for `columns` columns of B, which is stored [K, N], some steps of the inner axis at a time.
constexpr i64 SUMMED = 1024;
template <int Rows, int Steps, class E>
INLINE void add_rows(const E* a, i64 a_row, const E* b, i64 b_row, i64 columns, float* sums) {
    using P = Operand<E>;
    Unit<P> left[Rows][Steps];
    for (int r = 0; r < Rows; ++r)
        for (int k = 0; k < Steps; ++k) left[r][k] = packed_unit(in_order(a + r * a_row)[k]);
    for (i64 j = 0; j < columns; j += W) {
        vf tile[Rows];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) tile[r] = load(sums + r * SUMMED + j);
#pragma GCC unroll 8
        for (int k = 0; k < Steps; ++k) {
            const E* from = b + k * Inner<P>::elements * b_row + j;
            typename Inner<P>::Vector row = {};
            if (j + W <= columns) row = units_at(from, b_row);
            else
                for (i64 i = 0; i < columns - j; ++i) row[i] = unit_at(from + i, b_row, false);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) Inner<P>::add_product(tile[r], Inner<P>::repeat(&left[r][k]), row);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) store(sums + r * SUMMED + j, tile[r]);
    }
}

// C = f(A B + bias) for A [Rows, K]; B is stored [K, N], or [N, K] where TurnB. The inner axis has whole pairs of bf16.
template <int Rows, bool TurnB, bool Bias, After What, class E, class C, class B>
__attribute__((noinline)) void few_rows(Sizes s, const E* a, const E* b, const B* bias, C* c, int threads) {
    constexpr i64 elements = Inner<Operand<E>>::elements, together = 4, wide = TurnB ? NEAR : SUMMED;
    over_ranges(threads, s.N, NEAR, [&](i64 begin, i64 end) {
        for (i64 j = begin; j < end; j += wide) {
            const i64 columns = j + wide < end ? wide : end - j;
            alignas(64) float sums[Rows * wide] = {};
            if constexpr (TurnB) {  // bf16 stays in pairs: widening takes longer than reading
                constexpr i64 pair = Inner<E>::elements;
                const Unit<E>* from[NEAR];
                rows_from(reinterpret_cast<const Unit<E>*>(b), s.b_row / pair, j, s.N, from);
                vf found[GROUPS][Rows] = {};
                add_turned<Rows, E>(
                    s.steps<E>(), reinterpret_cast<const Unit<E>*>(a), s.a_row / pair, from, from[0] + NEAR * (s.b_row / pair),
                    found);
                for (int r = 0; r < Rows; ++r)
                    for (int g = 0; g < GROUPS; ++g) store(sums + r * wide + g * W, found[g][r]);
            } else {
                const i64 steps = s.steps<Operand<E>>();
                i64 k = 0;
                for (; k + together <= steps; k += together)
                    add_rows<Rows, together>(a + k * elements, s.a_row, b + k * elements * s.b_row + j, s.b_row, columns, sums);
                for (; k < steps; ++k)
                    add_rows<Rows, 1>(a + k * elements, s.a_row, b + k * elements * s.b_row + j, s.b_row, columns, sums);
            }
            for (int r = 0; r < Rows; ++r)
                finish<Bias, false, What>(sums + r * wide, c + r * s.c_row + j, s.c_row, Bias ? bias + j : bias, 1, columns);
        }
    });
}
