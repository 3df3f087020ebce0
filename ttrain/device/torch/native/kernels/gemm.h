// Matrix products in fp32 sums. A tile of the result lives in registers while the inner axis runs by, in steps: one
// element of fp32, or a pair of bf16, which hardware multiplies and adds up at once where it can. Where there are matrix
// units for such pairs, they hold a square of the result instead.
#pragma once
#include "reduce.h"
#include "amx.h"
#include "vector_math.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int TILE_ROWS = 6, HEAD_ROWS = 4;  // 16 vector registers
#else
constexpr int TILE_ROWS = 8, HEAD_ROWS = 8;  // 32
#endif
// HEAD_ROWS is for tiles of attention, whose blocks are powers of two.
constexpr int TILE_VECTORS = 2, TILE_COLUMNS = TILE_VECTORS * W;

constexpr i64 round_up(i64 n, i64 step) { return (n + step - 1) / step * step; }

// FAST_PAIRS: vectors multiply pairs of bf16 faster than fp32. Those of AMD do, at twice the rate; those of Intel reach half
// of it. An older gcc takes AMD's later kinds for Zen 3 with more instructions. PAIRS: products take pairs, in such vectors
// or in matrix units. Elsewhere bf16 is widened as it is packed.
#if !defined(FAST_PAIRS) && defined(__AVX512BF16__)
#if defined(__znver3__) || defined(__znver4__) || defined(__znver5__) || defined(__znver6__)
#define FAST_PAIRS
#endif
#endif
#if defined(FAST_PAIRS) || defined(MATRIX_UNITS)
#define PAIRS
#endif

// One step of the inner axis: an element, or a pair of neighbours.
template <class E>
struct Inner;
template <>
struct Inner<float> {
    using Unit = float;
    using Vector = vf;
    static constexpr i64 elements = 1;
    static INLINE vf read(const float* p) { return load(p); }
    static INLINE vf repeat(const float* p) { return splat(*p); }
    static INLINE void add_product(vf& sum, vf left, vf right) { sum += left * right; }
};
template <>
struct Inner<bf16> {
    using Unit = u32;
    using Vector = vu;
    static constexpr i64 elements = 2;
    static INLINE vu read(const u32* p) {
        vu v;
        __builtin_memcpy(&v, p, sizeof v);
        return v;
    }
    static INLINE vu repeat(const u32* p) {
#if defined(__AVX512F__)
        vu v;  // straight from memory; by itself gcc goes through a scalar register, which costs the loop half its speed
        asm("vpbroadcastd %1, %0" : "=v"(v) : "m"(*p));
        return v;
#else
        u32 pair;
        __builtin_memcpy(&pair, p, sizeof pair);
        return splat_u(pair);
#endif
    }
    static INLINE void add_product(vf& sum, vu left, vu right) {
#if defined(__AVX512BF16__) && defined(PAIRS)
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
#else
        sum += bits_as<vf>(left << 16) * bits_as<vf>(right << 16);
        sum += bits_as<vf>(left & 0xFFFF0000u) * bits_as<vf>(right & 0xFFFF0000u);
#endif
    }
};
template <class E>
using Unit = typename Inner<E>::Unit;
// The type in which a product multiplies elements of E. VectorOperand: the same for products that never use matrix units,
// as those of attention.
#if defined(PAIRS)
template <class E>
using Operand = E;
#else
template <class E>
using Operand = float;
#endif
#if defined(FAST_PAIRS)
template <class E>
using VectorOperand = E;
#else
template <class E>
using VectorOperand = float;
#endif
template <class E>
constexpr bool WIDENS = sizeof(Operand<E>) != sizeof(E);
// Whether products of E may run in matrix units, which take whole squares of C and whole blocks of SIDE steps.
template <class E>
constexpr bool MAY_USE_AMX = AMX && Inner<E>::elements == 2;
static_assert(!AMX || (TILE_COLUMNS == SQUARE && W == SIDE), "a panel of B holds two registers side by side");
template <class E>
INLINE bool uses_amx() {
    if constexpr (MAY_USE_AMX<E>) return amx_usable();
    return false;
}

// c (+)= A B for one tile of Rows over `steps` units: A[i, k] at a[i * a_row + k * Step], or row by row where it is packed
// (a_row 1, Step Rows); rows of B are `b_row` apart, those of c `c_row`. With each step a Fetch asks for a cache line from
// `next` on. Not inlined: by itself the loop keeps all sums in registers, whatever surrounds the call.
template <class E, bool Packed, int Rows = TILE_ROWS, bool Fetch = false>
__attribute__((noinline)) void tile_product(
    i64 steps, const Unit<E>* a, i64 a_row, i64 a_step, const Unit<E>* b, i64 b_row, float* c, i64 c_row, bool adding,
    const char* next = nullptr) {
    if constexpr (Packed) {
        a_row = 1;
        a_step = Rows;
    }
    vf tile[Rows][TILE_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; ++v) tile[i][v] = adding ? load(c + i * c_row + v * W) : vf{};
    for (i64 k = 0; k < steps; ++k) {
        if constexpr (Fetch) __builtin_prefetch(next + k * 64, 0, 2);
        typename Inner<E>::Vector row[TILE_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; ++v) row[v] = Inner<E>::read(b + v * W);
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i) {
            const auto left = Inner<E>::repeat(a + i * a_row);
#pragma GCC unroll 8
            for (int v = 0; v < TILE_VECTORS; ++v) Inner<E>::add_product(tile[i][v], left, row[v]);
            // Without this gcc loads all rows first, and runs out of registers.
            if constexpr (Rows == 6) asm volatile("" : "+x"(tile[i][0]), "+x"(tile[i][1])::"memory");
        }
        a += a_step;
        b += b_row;
    }
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; ++v) store(c + i * c_row + v * W, tile[i][v]);
}

// C (+)= A B in whole tiles: `rows` and `columns` are rounded up to them.
template <class E>
INLINE void multiply(
    i64 rows, i64 columns, i64 steps, const Unit<E>* a, i64 a_row, i64 a_step, const Unit<E>* b, i64 b_row, float* c,
    i64 c_row, bool adding) {
    for (i64 j = 0; j < columns; j += TILE_COLUMNS)
        for (i64 i = 0; i < rows; i += HEAD_ROWS)
            tile_product<E, false, HEAD_ROWS>(
                steps, a + i * a_row, a_row, a_step, b + j, b_row, c + i * c_row + j, c_row, adding);
}

// Sizes of C [M, N] = A [M, K] B [K, N], the distances between rows as the matrices are stored, and the blocks that are
// packed at a time: at most INNER steps of the inner axis, as many columns of B as make RIGHT units, DOWN rows of a transposed
// A. They stay in a core's second-level cache. Sums of WAITING elements of C wait in scratch for the next block of the
// inner axis. native/products.py computes the scratch in the same way.
constexpr i64 INNER = 512, RIGHT = 1 << 17, DOWN = 128 / TILE_ROWS * TILE_ROWS, WAITING = 1 << 18, LINE = 16;
static_assert(!AMX || DOWN % SQUARE == 0, "so that padding to whole squares needs no room");
struct Sizes {
    i64 M, N, K, a_row, b_row, c_row;
    template <class E>
    INLINE i64 steps() const {
        return (K + Inner<E>::elements - 1) / Inner<E>::elements;
    }
};

// The pair of elements at p and `next` further on; an odd inner axis ends with a pair of one. A vector of such.
INLINE float unit_at(const float* p, i64, bool) { return *p; }
INLINE vf units_at(const float* p, i64) { return load(p); }
#if defined(PAIRS)
INLINE u32 unit_at(const bf16* p, i64 next, bool alone) { return u32(p->bits) | (alone ? 0 : u32(p[next].bits) << 16); }
INLINE vu units_at(const bf16* p, i64 next) { return bits_as<vu>(load(p)) >> 16 | bits_as<vu>(load(p + next)); }
#else
INLINE float unit_at(const bf16* p, i64, bool) { return widen(*p); }
INLINE vf units_at(const bf16* p, i64) { return load(p); }
#endif

// A matrix whose rows run along the inner axis, in the units that are read; and a vector or unit of it as it is packed.
template <class E>
INLINE auto in_order(const E* matrix) {
    if constexpr (WIDENS<E>) return matrix;
    else return reinterpret_cast<const Unit<E>*>(matrix);
}
INLINE vf packed_vector(const bf16* p) { return load(p); }
INLINE vf packed_vector(const float* p) { return load(p); }
INLINE vf packed_vector(const u32* p) { return load(reinterpret_cast<const float*>(p)); }
INLINE float packed_unit(bf16 unit) { return widen(unit); }
INLINE float packed_unit(float unit) { return unit; }
INLINE u32 packed_unit(u32 unit) { return unit; }

// Steps k0 .. k1 and columns j0 .. j1 of the right matrix in panels of TILE_COLUMNS columns and `deep` steps,
// [panel][step][column]. B is stored [K, N], or [N, K] where Turned. Columns and steps beyond the end are zero.
template <class E, bool Turned>
INLINE void pack_right(Sizes s, const E* b, i64 k0, i64 k1, i64 j0, i64 j1, i64 deep, Unit<Operand<E>>* panels) {
    using U = Unit<Operand<E>>;
    constexpr i64 elements = Inner<Operand<E>>::elements;
    const i64 steps = k1 - k0;
    for (i64 j = j0; j < j1; j += TILE_COLUMNS, panels += deep * TILE_COLUMNS) {
        __builtin_memset(panels + steps * TILE_COLUMNS, 0, (deep - steps) * TILE_COLUMNS * sizeof(U));
        const i64 count = j + TILE_COLUMNS <= j1 ? TILE_COLUMNS : j1 - j;
        if constexpr (Turned) {
            const i64 row = s.b_row / elements;
            const auto* source = in_order(b) + j * row + k0;
            i64 k = 0;
            if (count == TILE_COLUMNS)
                for (; k + W <= steps; k += W)
                    for (int v = 0; v < TILE_VECTORS; ++v) {
                        vf square[W];
#pragma GCC unroll 16
                        for (int i = 0; i < W; ++i) square[i] = packed_vector(source + (v * W + i) * row + k);
                        transpose_square(square);
#pragma GCC unroll 16
                        for (int i = 0; i < W; ++i)
                            __builtin_memcpy(panels + (k + i) * TILE_COLUMNS + v * W, &square[i], sizeof(vf));
                    }
            for (; k < steps; ++k)
                for (i64 c = 0; c < TILE_COLUMNS; ++c)
                    panels[k * TILE_COLUMNS + c] = c < count ? packed_unit(source[c * row + k]) : U{};
        } else {
            for (i64 k = 0; k < steps; ++k) {
                const E* row = b + (k0 + k) * elements * s.b_row + j;
                U* panel = panels + k * TILE_COLUMNS;
                if (count == TILE_COLUMNS && (k0 + k + 1) * elements <= s.K)
                    for (int c = 0; c < TILE_COLUMNS; c += W) {
                        const auto units = units_at(row + c, s.b_row);
                        __builtin_memcpy(panel + c, &units, sizeof units);
                    }
                else
                    for (i64 c = 0; c < TILE_COLUMNS; ++c)
                        panel[c] = c < count ? unit_at(row + c, s.b_row, (k0 + k + 1) * elements > s.K) : U{};
            }
        }
    }
}

// Steps k0 .. k1 and rows i0 .. i1 of the left matrix for matrix units, in blocks of SIDE rows and SIDE steps,
// [rows][steps][row][step], as many as whole squares of C and `deep` steps need. What lies beyond the ends is zero.
template <class E, bool Turned>
INLINE void pack_blocks(Sizes s, const E* a, i64 k0, i64 k1, i64 i0, i64 i1, i64 deep, Unit<E>* blocks) {
    constexpr i64 elements = Inner<E>::elements;
    const i64 next = elements * s.a_row, end = i0 + round_up(i1 - i0, SQUARE);
    for (i64 k = k0; k < k1; k += SIDE)
        for (i64 i = i0; i < end; i += SIDE) {
            Unit<E>* block = blocks + (i - i0) * deep + (k - k0) * SIDE;
            if (i + SIDE <= i1 && (k + SIDE) * elements <= s.K) {  // k1 is the end, or whole blocks before it
                vf rows[W];
#pragma GCC unroll 16
                for (int r = 0; r < W; ++r)
                    if constexpr (Turned)
                        rows[r] = bits_as<vf>(units_at(a + (k + r) * next + i, s.a_row));
                    else
                        __builtin_memcpy(&rows[r], a + (i + r) * s.a_row + k * elements, sizeof(vf));
                if constexpr (Turned) transpose_square(rows);
                __builtin_memcpy(block, rows, sizeof rows);
                continue;
            }
            for (i64 r = 0; r < SIDE; ++r)
                for (i64 c = 0; c < SIDE; ++c) {
                    const E* from = a + (Turned ? (k + c) * next + i + r : (i + r) * s.a_row + (k + c) * elements);
                    block[r * SIDE + c] = i + r < i1 && k + c < k1
                                              ? unit_at(from, Turned ? s.a_row : 1, (k + c + 1) * elements > s.K)
                                              : Unit<E>{};
                }
        }
}

// Steps k0 .. k1 and rows i0 .. i1 of the left matrix in panels of TILE_ROWS rows, [panel][step][row]. A is stored [M, K],
// or [K, M] where Turned. Rows beyond the end repeat the last one, and their sums are dropped. With amx in blocks instead.
template <class E, bool Turned>
INLINE void pack_left(Sizes s, const E* a, i64 k0, i64 k1, i64 i0, i64 i1, i64 deep, bool amx, Unit<Operand<E>>* panels) {
    if constexpr (MAY_USE_AMX<E>)
        if (amx) return pack_blocks<E, Turned>(s, a, k0, k1, i0, i1, deep, panels);
    constexpr i64 elements = Inner<Operand<E>>::elements, near = 16;  // steps at a time, whose pages serve several panels
    const i64 steps = k1 - k0, panel = steps * TILE_ROWS, next = elements * s.a_row;
    i64 i = i0;
    if constexpr (Turned)
        if (k1 * elements <= s.K) {
            // Columns at a time: whole panels, and a whole cache line of bf16, which may have left the cache a step later.
            // A part of a vector lies side by side in one panel.
            constexpr i64 line = TILE_ROWS == 6 ? 3 * W : 2 * W;
            constexpr int part = TILE_ROWS == 6 ? 2 : W < TILE_ROWS ? W : TILE_ROWS;
            const i64 whole = (i1 - i0) / line * line;
            for (i64 first = 0; first < steps; first += near)
                for (i64 j = 0; j < whole; j += line)
                    for (i64 k = first; k < first + near && k < steps; ++k)
#pragma GCC unroll 8
                        for (i64 r = 0; r < line; r += W) {
                            const auto units = units_at(a + (k0 + k) * next + i0 + j + r, s.a_row);
                            auto* to = panels + j * steps + k * TILE_ROWS;
#pragma GCC unroll 8
                            for (int p = 0; p < W; p += part)
                                __builtin_memcpy(
                                    to + (r + p) / TILE_ROWS * panel + (r + p) % TILE_ROWS,
                                    reinterpret_cast<const Unit<Operand<E>>*>(&units) + p, part * sizeof(*panels));
                        }
            i += whole;
            panels += whole * steps;
        }
    for (; i < i1; i += TILE_ROWS, panels += panel)
        for (i64 k = 0; k < steps; ++k) {
            if constexpr (Turned && elements == 1 && !WIDENS<E>)
                if (i + TILE_ROWS <= i1) {
                    __builtin_memcpy(panels + k * TILE_ROWS, a + (k0 + k) * next + i, TILE_ROWS * sizeof(E));
                    continue;
                }
            for (i64 r = 0; r < TILE_ROWS; ++r) {
                const i64 from = i + r < i1 ? i + r : i1 - 1;
                panels[k * TILE_ROWS + r] =
                    Turned ? unit_at(a + (k0 + k) * next + from, s.a_row, (k0 + k + 1) * elements > s.K)
                           : packed_unit(in_order(a)[from * (s.a_row / elements) + k0 + k]);
            }
        }
}

// Rows i0 .. i1 of a left matrix in order, widened, up to whole tiles. Rows beyond the end repeat the last one.
template <class E>
INLINE void widen_rows(Sizes s, const E* a, i64 k0, i64 steps, i64 i0, i64 i1, float* rows) {
    for (i64 i = i0; i < i0 + round_up(i1 - i0, TILE_ROWS); ++i, rows += steps) {
        const E* from = a + (i < i1 ? i : i1 - 1) * s.a_row + k0;
        i64 k = 0;
        for (; k + W <= steps; k += W) store(rows + k, load(from + k));
        for (; k < steps; ++k) rows[k] = get(from + k);
    }
}

// One tile of C, with amx a square, from `packed` rows of A, or from rows in order, which may fetch what is at `next`.
template <class E>
INLINE void add_tile(
    bool amx, bool packed, i64 steps, i64 deep, const Unit<E>* a, i64 a_row, const Unit<E>* panel, float* sums,
    bool adding, const char* next) {
    if constexpr (MAY_USE_AMX<E>)
        if (amx) {
            const i64 row = packed ? SIDE : a_row;
            return multiply_tiles(
                deep / SIDE, a, row, SIDE * (packed ? deep : row), packed ? SIDE * SIDE : SIDE, panel, sums, adding);
        }
    if (packed)
        tile_product<E, true>(steps, a, 1, TILE_ROWS, panel, TILE_COLUMNS, sums, TILE_COLUMNS, adding);
    else if (next)
        tile_product<E, false, TILE_ROWS, true>(
            steps, a, a_row, 1, panel, TILE_COLUMNS, sums, TILE_COLUMNS, adding, next);
    else
        tile_product<E, false>(steps, a, a_row, 1, panel, TILE_COLUMNS, sums, TILE_COLUMNS, adding);
}

// What becomes of a finished sum: y = f(x A + bias); Adding adds to what C holds.
enum class After { nothing, relu, tanh, gelu, gelu_tanh };
template <After What>
INLINE vf after(vf x) {
    if constexpr (What == After::relu) return v_relu(x);
    if constexpr (What == After::tanh) return v_tanh(x);
    if constexpr (What == After::gelu) return v_gelu(x);
    if constexpr (What == After::gelu_tanh) return v_gelu_tanh(x);
    return x;
}

// Asks for the cache lines of a tile of C long before they are written: otherwise every store waits for memory.
template <class C>
INLINE void fetch_tile(const C* c, i64 c_row, i64 rows) {
    for (i64 r = 0; r < rows; ++r)
        for (int byte = 0; byte < TILE_COLUMNS * int(sizeof(C)); byte += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(c + r * c_row) + byte, 1);
}

// The finished sums of a tile go to `rows` rows and `columns` columns of c. A function is one of the rounded sum, as where
// the sum is stored first.
template <bool Bias, bool Adding, After What, class C, class B>
INLINE void finish(const float* sums, C* c, i64 c_row, const B* bias, i64 rows, i64 columns) {
    for (i64 r = 0; r < rows; ++r)
        for (i64 l = 0; l < columns; l += W) {
            C* to = c + r * c_row + l;
            vf x = load(sums + r * TILE_COLUMNS + l);
            if (l + W <= columns) {
                if constexpr (Bias) x += load(bias + l);
                x = after<What>(What == After::nothing ? x : rounded<C>(x));
                if constexpr (Adding) x += load(to);
                store(to, x);
            } else {
                if constexpr (Bias) x += load_rest(bias + l, columns - l);
                x = after<What>(What == After::nothing ? x : rounded<C>(x));
                if constexpr (Adding) x += load_rest(to, columns - l);
                store_rest(to, x, columns - l);
            }
        }
}

// Steps of the inner axis that are summed at a time: blocks of equal size, always in the same order. A turned A is packed
// anew for each group of columns of B that is packed at a time. Shorter blocks can make all columns one group.
template <class E, bool TurnA>
INLINE i64 inner_block(Sizes s) {
    const i64 all = s.steps<E>(), fits = RIGHT / round_up(s.N, 32) / 16 * 16;
    const i64 most = TurnA && all > INNER && fits >= INNER / 2 && fits < INNER ? fits : INNER;
    const i64 blocks = (all + most - 1) / most;
    return round_up((all + blocks - 1) / blocks, 16);
}
constexpr i64 EVEN = TILE_ROWS == 6 ? 96 : 32;  // rows that make whole tiles, and squares
// Columns of B that are packed at a time. Few rows of A are multiplied sooner than memory brings the columns after them,
// so these are fetched meanwhile, and both have to fit.
constexpr i64 FEW = 128;
INLINE i64 columns_packed(i64 inner, bool few = false) { return RIGHT / (few ? 8 : 1) / inner / 32 * 32; }

// Scratch begins with a line that tells which columns of B lie packed in it, -1 for none, where one block is the whole inner
// axis: the next rows of the same columns find them.
INLINE void nothing_packed(float* scratch) { *reinterpret_cast<i64*>(scratch) = -1; }

// Rows i0 .. i1 and columns j0 .. j1 of C.
template <bool TurnA, bool TurnB, bool Bias, bool Adding, After What, class E, class Right, class C, class B>
INLINE void product_part(
    Sizes s, const E* a, Right b, const B* bias, C* c, i64 i0, i64 i1, i64 j0, i64 j1, float* scratch) {
    using P = Operand<E>;
    constexpr bool widens = WIDENS<E> && !TurnA;
    const i64 all = s.steps<P>(), inner = inner_block<P, TurnA>(s), blocks = (all + inner - 1) / inner;
    const bool amx = uses_amx<P>(), few = TurnB && s.M <= FEW && !amx;
    const i64 across = columns_packed(inner, few), rows_waiting = WAITING / across / EVEN * EVEN;
    const i64 down_most = blocks > 1 ? rows_waiting : s.M, a_row = s.a_row / Inner<P>::elements;
    auto& packed = *reinterpret_cast<i64*>(scratch);
    auto* left = reinterpret_cast<Unit<P>*>(scratch + LINE);
    auto* right = left + DOWN * inner;
    float* waiting = scratch + LINE + DOWN * inner + RIGHT;
    const auto* rows = reinterpret_cast<const Unit<P>*>(a);
    const i64 high = amx ? SQUARE : TILE_ROWS;
    alignas(64) float tile[(MAY_USE_AMX<P> ? SQUARE : TILE_ROWS) * TILE_COLUMNS];
    if constexpr (MAY_USE_AMX<P>)
        if (amx) Tiles::configure(WHOLE_TILES);
    for (i64 jc = j0; jc < j1; jc += across) {
        const i64 bytes = few ? s.b_row * i64(sizeof(E)) : 0;  // 0 fetches nothing
        const char *first = (const char*)b, *next = first + (jc + across < j1 ? jc + across : j1) * bytes;
        const char* fetched = first + (jc + 2 * across < s.N ? jc + 2 * across : s.N) * bytes;
        for (i64 im = i0; im < i1; im += down_most)
            for (i64 k0 = 0; k0 < all; k0 += inner) {
                const i64 jend = jc + across < j1 ? jc + across : j1, imend = im + down_most < i1 ? im + down_most : i1;
                const i64 k1 = k0 + inner < all ? k0 + inner : all, steps = k1 - k0;
                const i64 deep = amx ? round_up(steps, SIDE) : steps;
                const bool last = k1 == all;
                if (blocks > 1 || packed != jc) pack_right<E, TurnB>(s, b, k0, k1, jc, jend, deep, right);
                packed = jc;
                for (i64 ic = im; ic < imend; ic += DOWN) {
                    const i64 iend = ic + DOWN < imend ? ic + DOWN : imend;
                    // Whole tiles or squares of an A in order are read where they lie, unless they are widened.
                    const i64 direct = TurnA || deep > steps ? ic : ic + (iend - ic) / high * high;
                    if constexpr (widens) widen_rows(s, a, k0, steps, ic, iend, left);
                    else if (direct < iend) pack_left<E, TurnA>(s, a, k0, k1, direct, iend, deep, amx, left);
                    for (i64 j = jc; j < jend; j += TILE_COLUMNS)
                        for (i64 i = ic; i < iend; i += high) {
                            float* sums = blocks == 1 ? tile : waiting + (i - im) * across + (j - jc) * high;
                            const i64 down = iend - i < high ? iend - i : high;
                            const i64 across = jend - j < TILE_COLUMNS ? jend - j : TILE_COLUMNS;
                            C* at = c + i * s.c_row + j;
                            if (last) fetch_tile(at, s.c_row, down);
                            const auto* from = widens ? left + (i - ic) * steps
                                               : i < direct ? rows + i * a_row + k0
                                                            : left + (i - direct) * deep;
                            add_tile<P>(
                                amx, !widens && i >= direct, steps, deep, from, widens ? steps : a_row,
                                right + (j - jc) * deep, sums, k0 > 0, next < fetched ? next : nullptr);
                            next += 64 * steps;
                            if (last)
                                finish<Bias, Adding, What>(sums, at, s.c_row, Bias ? bias + j : bias, down, across);
                        }
                }
            }
    }
    if constexpr (MAY_USE_AMX<P>)
        if (amx) Tiles::release();
}

// Into how many ranges of columns and of rows C is cut. Columns come first, since each range packs its part of B but once a
// thread, and no range is wider than what is packed at a time; rows make up the number where there are more of them, or
// where each range of columns would pack a turned A anew.
struct Cut {
    i64 across = 1, down = 1;
    template <class E, bool TurnA>
    static INLINE Cut of(Sizes s, int threads) {
        if (threads == 1) return {};
        const i64 wanted = EACH * threads, tiles = (s.N + TILE_COLUMNS - 1) / TILE_COLUMNS;
        const i64 whole = columns_packed(inner_block<E, TurnA>(s));
        const i64 most = (s.M + 4 * TILE_ROWS - 1) / (4 * TILE_ROWS), wide = s.N >= (TurnA ? 4 : 1) * s.M;
        const i64 least = wide ? wanted : (wanted + most - 1) / most;
        Cut cut;
        cut.across = (s.N + whole - 1) / whole;
        if (cut.across < least) cut.across = tiles < least ? tiles : least;
        cut.down = (wanted + cut.across - 1) / cut.across;
        while (cut.across * cut.down % threads) ++cut.down;  // or one thread does a chunk more while the others wait
        if (cut.down > most) cut.down = most;
        return cut;
    }
};

// C = f(A B + bias), or C += A B where Adding. A is stored [M, K], or [K, M] where TurnA; B [K, N], or [N, K] where TurnB. For
// bf16 matrices whose rows run along K the distance of rows is even, and an odd K needs zeros between rows. B may also be
// anything else that pack_right reads.
// Scratch: `own` floats a thread. Compiled once for all sizes, so not inlined.
template <bool TurnA, bool TurnB, bool Bias, bool Adding, After What, class E, class Right, class C, class B>
__attribute__((noinline)) void product(
    Sizes s, const E* a, Right b, const B* bias, C* c, float* scratch, i64 own, int threads) {
    const Cut cut = Cut::of<Operand<E>, TurnA>(s, threads);
    const i64 high = uses_amx<Operand<E>>() ? SQUARE : TILE_ROWS;
    for (int seat = 0; seat < threads; ++seat) nothing_packed(scratch + seat * own);
    parallel(threads, cut.across * cut.down, [&](int chunk, int seat) {
        const i64 j = chunk / cut.down, i = chunk % cut.down;
        product_part<TurnA, TurnB, Bias, Adding, What>(
            s, a, b, bias, c, share(s.M, i, cut.down, high), share(s.M, i + 1, cut.down, high),
            share(s.N, j, cut.across, TILE_COLUMNS), share(s.N, j + 1, cut.across, TILE_COLUMNS), scratch + seat * own);
    });
}
