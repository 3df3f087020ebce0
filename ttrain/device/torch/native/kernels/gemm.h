// The inner loop of every matrix product here: a tile of the result lives in registers while the inner axis runs by.
#pragma once
#include "parallel.h"

constexpr int TILE_ROWS = W == 8 ? 4 : 8;  // 16 vector registers with AVX2, 32 elsewhere
constexpr int TILE_VECTORS = 2;
constexpr int TILE_COLUMNS = TILE_VECTORS * W;

constexpr i64 round_up(i64 n, i64 step) { return (n + step - 1) / step * step; }

// A tile of `Rows` x Vectors * W sums.
template <int Rows, int Vectors>
struct Tile {
    vf sum[Rows][Vectors];

    INLINE Tile() {
        for (int i = 0; i < Rows; ++i)
            for (int v = 0; v < Vectors; ++v) sum[i][v] = vf{};
    }
    // sum += A B: A[i, k] at a[i * a_row + k * a_step], rows of B contiguous, `b_step` apart.
    INLINE void add_product(i64 inner, const float* a, i64 a_row, i64 a_step, const float* b, i64 b_step) {
        for (i64 k = 0; k < inner; ++k) {
            vf right[Vectors];
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v) right[v] = load(b + v * W);
#pragma GCC unroll 16
            for (int i = 0; i < Rows; ++i) {
                const vf left = splat(a[i * a_row]);
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; ++v) sum[i][v] += left * right[v];
            }
            a += a_step;
            b += b_step;
        }
    }
    INLINE void load_from(const float* c, i64 c_row) {
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v) sum[i][v] = load(c + i * c_row + v * W);
    }
    INLINE void store_to(float* c, i64 c_row) const {
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v) store(c + i * c_row + v * W, sum[i][v]);
    }
};
using InnerTile = Tile<TILE_ROWS, TILE_VECTORS>;

// C (+)= A B in whole tiles: `rows` a multiple of TILE_ROWS, `columns` of TILE_COLUMNS.
template <bool Adding>
INLINE void multiply(
    i64 rows, i64 columns, i64 inner, const float* a, i64 a_row, i64 a_step, const float* b, i64 b_step, float* c,
    i64 c_row) {
    for (i64 j = 0; j < columns; j += TILE_COLUMNS)
        for (i64 i = 0; i < rows; i += TILE_ROWS) {
            InnerTile tile;
            if constexpr (Adding) tile.load_from(c + i * c_row + j, c_row);
            tile.add_product(inner, a + i * a_row, a_row, a_step, b + j, b_step);
            tile.store_to(c + i * c_row + j, c_row);
        }
}
