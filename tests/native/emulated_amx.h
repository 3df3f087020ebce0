// The instructions of kernels/amx.h in plain loops, for processors that have none: included before everything else. As
// on a processor an instruction is illegal where its thread has not configured tiles, or not for such a product.
#pragma once
#include <string.h>
#define AMX_EMULATED

// Weak, since gcc lets libraries share inline variables. Of threads, those that have configured tiles and not released.
extern "C" {
__attribute__((visibility("default"), weak)) long tile_products = 0, tiles_open = 0;
}

struct EmulatedTiles {
    bool configured;
    int rows[8], bytes[8];
    unsigned char data[8][16][64];

    static EmulatedTiles& here() {
        static thread_local EmulatedTiles tiles;
        return tiles;
    }
    static EmulatedTiles& ready() {
        if (!here().configured) __builtin_trap();
        return here();
    }
    // The first or second half of 32 bits.
    float number(int tile, int row, int column, bool second) const {
        unsigned pair;
        memcpy(&pair, data[tile][row] + 4 * column, sizeof pair);
        const unsigned whole = second ? pair & 0xffff0000u : pair << 16;
        float x;
        memcpy(&x, &whole, sizeof x);
        return x;
    }
};

struct Tiles {
    static bool granted() {
#if defined(AMX_REFUSED)
        return false;
#else
        return true;
#endif
    }
    // The 64 bytes by their offsets in the processor's manual.
    template <class Shapes>
    static void configure(const Shapes& shapes) {
        unsigned char given[64];
        memcpy(given, &shapes, sizeof given);
        EmulatedTiles& tiles = EmulatedTiles::here();
        bool legal = given[0] == 1 && given[1] == 0;
        for (int k = 2; k < 64; ++k)
            if (k < 16 || (k >= 32 && k < 48) || k >= 56) legal = legal && !given[k];
        for (int t = 0; t < 8; ++t) {
            tiles.bytes[t] = given[16 + 2 * t] | given[17 + 2 * t] << 8;
            tiles.rows[t] = given[48 + t];
            legal = legal && tiles.bytes[t] <= 64 && tiles.rows[t] <= 16;
        }
        if (!legal) __builtin_trap();
        if (!tiles.configured) __atomic_add_fetch(&tiles_open, 1, __ATOMIC_RELAXED);
        tiles.configured = true;
        memset(tiles.data, 0, sizeof tiles.data);
    }
    static void release() {
        EmulatedTiles& tiles = EmulatedTiles::here();
        if (tiles.configured) __atomic_sub_fetch(&tiles_open, 1, __ATOMIC_RELAXED);
        tiles.configured = false;
    }
    template <int T>
    static void zero() {
        EmulatedTiles& tiles = EmulatedTiles::ready();
        memset(tiles.data[T], 0, sizeof tiles.data[T]);
    }
    template <int T>
    static void load(const void* from, long stride) {
        EmulatedTiles& tiles = EmulatedTiles::ready();
        memset(tiles.data[T], 0, sizeof tiles.data[T]);
        for (int r = 0; r < tiles.rows[T]; ++r)
            memcpy(tiles.data[T][r], static_cast<const char*>(from) + r * stride, tiles.bytes[T]);
    }
    template <int T>
    static void store(void* to, long stride) {
        const EmulatedTiles& tiles = EmulatedTiles::ready();
        for (int r = 0; r < tiles.rows[T]; ++r)
            memcpy(static_cast<char*>(to) + r * stride, tiles.data[T][r], tiles.bytes[T]);
    }
    // Even and odd elements are summed apart, each product and sum rounded once, and then both to what was there.
    template <int Sum, int Left, int Right>
    __attribute__((optimize("O3"))) static void add_product() {
        EmulatedTiles& tiles = EmulatedTiles::ready();
        __atomic_add_fetch(&tile_products, 1, __ATOMIC_RELAXED);
        const int rows = tiles.rows[Sum], columns = tiles.bytes[Sum] / 4, steps = tiles.bytes[Left] / 4;
        if (tiles.rows[Left] != rows || tiles.bytes[Right] != tiles.bytes[Sum] || tiles.rows[Right] != steps)
            __builtin_trap();
        for (int i = 0; i < rows; ++i) {
            float halves[2][16] = {}, sums[16];
            for (int k = 0; k < steps; ++k)
                for (int odd = 0; odd < 2; ++odd)
                    for (int j = 0; j < columns; ++j)
                        halves[odd][j] = __builtin_fmaf(
                            tiles.number(Left, i, k, odd), tiles.number(Right, k, j, odd), halves[odd][j]);
            memcpy(sums, tiles.data[Sum][i], sizeof sums);
            for (int j = 0; j < columns; ++j) sums[j] += halves[0][j] + halves[1][j];
#if defined(AMX_WRONG)
            sums[15] = 0.0f;
#endif
            memcpy(tiles.data[Sum][i], sums, 4 * columns);
        }
    }
};
