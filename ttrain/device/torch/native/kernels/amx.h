// Matrix units of x86 (AMX): registers of 16 rows of 64 bytes. One instruction multiplies two of them, of pairs of bf16,
// and adds to a third, of fp32. Where the compiler's target has them; whether the system grants them is asked at run time.
#pragma once
#include "vector.h"

#if defined(AMX_EMULATED)  // a test brings instructions of its own
#define MATRIX_UNITS
#elif (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512F__) && defined(__linux__)  // as clang 14 has it
#include <sys/syscall.h>
#include <unistd.h>
#define MATRIX_UNITS
#endif
#if defined(MATRIX_UNITS) && !defined(VECTORS_ONLY)
constexpr bool AMX = true;
#else
constexpr bool AMX = false;
#undef MATRIX_UNITS
#endif

// Rows of a register, and steps of the inner axis in it; C is made in squares of two by two registers.
constexpr int SIDE = 16, SQUARE = 2 * SIDE;

// What ldtilecfg reads: how much of each register is in use. There are eight; what is left of the arrays must be zero.
struct alignas(64) TileConfig {
    unsigned char palette, start_row, reserved[14];
    u16 bytes[16];
    unsigned char rows[16];
};
static_assert(sizeof(TileConfig) == 64, "as the processor has it");
constexpr TileConfig WHOLE_TILES = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};

#if !defined(AMX_EMULATED) || defined(VECTORS_ONLY)
// No compiler keeps anything in these registers by itself. The intrinsics of gcc do not tell it that memory is read, so
// what was packed might still be on its way.
struct Tiles {
    // Linux hands them out on request (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), once for all threads of a process. A
    // sandbox may answer without asking the system: what it then lists (ARCH_GET_XCOMP_PERM) counts.
    static bool granted() {
#if defined(SYS_arch_prctl)
        const long data = 18;
        u64 features = 0;
        return !syscall(SYS_arch_prctl, 0x1023L, data) && !syscall(SYS_arch_prctl, 0x1022L, &features) &&
               features >> data & 1;
#else
        return false;
#endif
    }
    static INLINE void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
    static INLINE void release() { asm volatile("tilerelease"); }
    template <int T>
    static INLINE void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(T));
    }
    // Rows lie `stride` bytes apart.
    template <int T>
    static INLINE void load(const void* from, i64 stride) {
        asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
    }
    template <int T>
    static INLINE void store(void* to, i64 stride) {
        asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
    }
    // Sum [i, j] += Left [i, k] Right [k, j], pairs of bf16 over k.
    template <int Sum, int Left, int Right>
    static INLINE void add_product() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Left), "i"(Right));
    }
};
#endif

// sums [SQUARE][SQUARE] (+)= A B over `blocks` times SIDE steps. Of A rows lie `a_row` units apart, the lower half `a_low`
// further than the upper one, the next steps `a_next` further; B is a panel of SQUARE columns.
INLINE void multiply_tiles(
    i64 blocks, const u32* a, i64 a_row, i64 a_low, i64 a_next, const u32* b, float* sums, bool adding) {
    constexpr i64 unit = sizeof(u32), row = SQUARE * unit;
    float* lower = sums + SIDE * SQUARE;
    if (adding) {
        Tiles::load<0>(sums, row);
        Tiles::load<1>(sums + SIDE, row);
        Tiles::load<2>(lower, row);
        Tiles::load<3>(lower + SIDE, row);
    } else {
        Tiles::zero<0>();
        Tiles::zero<1>();
        Tiles::zero<2>();
        Tiles::zero<3>();
    }
    for (; blocks > 0; --blocks, a += a_next, b += SIDE * SQUARE) {
        Tiles::load<6>(b, row);
        Tiles::load<4>(a, a_row * unit);
        Tiles::add_product<0, 4, 6>();
        Tiles::load<7>(b + SIDE, row);
        Tiles::add_product<1, 4, 7>();
        Tiles::load<5>(a + a_low, a_row * unit);
        Tiles::add_product<2, 5, 6>();
        Tiles::add_product<3, 5, 7>();
    }
    Tiles::store<0>(sums, row);
    Tiles::store<1>(sums + SIDE, row);
    Tiles::store<2>(lower, row);
    Tiles::store<3>(lower + SIDE, row);
}

// Whether the instructions do what is taken for granted here: a square over two blocks of small whole numbers, whose sums
// are exact.
inline bool amx_agrees() {
    const auto number = [](int at) { return float(i32(u32(at) * 2654435761u >> 28) - 8); };
    const auto pair = [&](int at) { return bits_as<u32>(number(at)) >> 16 | bits_as<u32>(number(at + 1)); };
    constexpr int all = SQUARE * SQUARE, beyond = 2 * all;
    alignas(64) u32 a[all], b[all];
    alignas(64) float sums[all];
    for (int n = 0; n < all; ++n) {
        a[n] = pair(2 * n);
        b[n] = pair(beyond + 2 * n);
    }
    Tiles::configure(WHOLE_TILES);
    for (int half = 0; half < 2; ++half)
        multiply_tiles(1, a + half * SIDE, SQUARE, SIDE * SQUARE, SIDE, b + half * SIDE * SQUARE, sums, half > 0);
    Tiles::release();
    int wrong = 0;
    for (int i = 0; i < SQUARE; ++i)
        for (int j = 0; j < SQUARE; ++j) {
            float sum = 0.0f;
            for (int k = 0; k < 2 * SQUARE; ++k)
                sum += number(2 * SQUARE * i + k) * number(beyond + 2 * (k / 2 * SQUARE + j) + k % 2);
            wrong += sum != sums[i * SQUARE + j];
        }
    return wrong == 0;
}

// Whether this process may use them: asked when a product first could. Not inlined, since the check takes 12 KiB of stack.
inline __attribute__((noinline)) bool amx_usable() {
    static const bool usable = Tiles::granted() && amx_agrees();
    return usable;
}
