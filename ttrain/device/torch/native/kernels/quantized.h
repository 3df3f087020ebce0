// Weights [outputs, inputs] in fewer bits as the right matrix of a product; see device/quantized.py. Their elements are
// widened PIECE by PIECE into a block, from which panels are packed: `inputs` has whole pieces.
#pragma once
#include "gemm.h"

constexpr i64 PIECE = 16, SCALED = 64, GROUPED = 256;

template <int Bits>
struct Quantized;

template <>
struct Quantized<8> {
    i64 inputs;
    const int8_t* codes;
    const float* absmax;
    explicit operator const char*() const { return nullptr; }  // of which nothing is fetched ahead

    // to[i] = the element at `column` + i of a row.
    template <class E>
    INLINE void widen(i64 row, i64 column, i64 count, E* to) const {
        typedef int8_t vb __attribute__((vector_size(W)));
        for (i64 i = 0; i < count; i += W) {
            vb some;
            __builtin_memcpy(&some, codes + row * inputs + column + i, sizeof some);
#if defined(__AVX2__)
            vi wide;
            asm("vpmovsxbd %1, %0" : "=v"(wide) : "vm"(some));
#else
            const vi wide = __builtin_convertvector(some, vi);
#endif
            store(to + i, __builtin_convertvector(wide, vf) * splat(absmax[row]) * splat(7.874015718698502e-3f));
        }
    }
};

template <>
struct Quantized<4> {
    i64 inputs;
    const uint8_t *codes, *absmax;
    const float *above, *mean, *levels, *scales;  // tables: the 16 levels of a code, the 256 of a scale
    explicit operator const char*() const { return nullptr; }

    template <class E>
    INLINE void widen(i64 row, i64 column, i64 count, E* to) const {
        for (i64 i = 0; i < count; i += PIECE) {
            const i64 first = row * inputs + column + i, block = first / SCALED;
            const vf scale = apart(splat(scales[absmax[block]]) * splat(above[block / GROUPED])) + splat(*mean);
            const uint8_t* from = codes + first / 2;
#if defined(__AVX512F__)
            typedef u64 vq __attribute__((vector_size(64)));
            vq byte;
            vf found;
            asm("vpmovzxbq %1, %0" : "=v"(byte) : "m"(*reinterpret_cast<const u64*>(from)));
            const vq index = byte >> 4 | byte << 32;  // of which the permutation reads the lowest four bits
            asm("vpermps %1, %2, %0" : "=v"(found) : "v"(load(levels)), "v"(index));
            store(to + i, found * scale);
#else
            for (int k = 0; k < PIECE; ++k) put(to + i + k, levels[from[k / 2] >> (k % 2 ? 0 : 4) & 15] * scale[0]);
#endif
        }
    }
};

template <class E, bool Turned, int Bits>
INLINE void pack_right(
    Sizes s, Quantized<Bits> b, i64 k0, i64 k1, i64 j0, i64 j1, i64 deep, Unit<Operand<E>>* panels) {
    constexpr i64 elements = Inner<Operand<E>>::elements;
    alignas(64) E block[INNER * elements * TILE_COLUMNS];
    const i64 first = k0 * elements, last = k1 * elements < s.K ? k1 * elements : s.K, deep_elements = last - first;
    s.K = deep_elements;
    s.b_row = Turned ? deep_elements : TILE_COLUMNS;
    for (i64 j = j0; j < j1; j += TILE_COLUMNS, panels += deep * TILE_COLUMNS) {
        const i64 columns = j + TILE_COLUMNS < j1 ? TILE_COLUMNS : j1 - j;
        if constexpr (Turned)
            for (i64 c = 0; c < columns; ++c) b.widen(j + c, first, deep_elements, block + c * deep_elements);
        else
            for (i64 k = first; k < last; ++k) b.widen(k, j, columns, block + (k - first) * TILE_COLUMNS);
        pack_right<E, Turned>(s, block, 0, k1 - k0, 0, columns, deep, panels);
    }
}
