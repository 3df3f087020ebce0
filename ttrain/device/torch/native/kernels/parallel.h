// Threads: those of the OpenMP runtime that torch already runs, so that one pool serves both. The host fills the
// pointers once after loading; without a runtime everything runs on the calling thread.
#pragma once
#include "vector.h"

// Also where no function of a library needs threads: the host looks for the pointers in every library.
#define VISIBLE __attribute__((visibility("default"), used))
extern "C" {
inline VISIBLE void (*ttrain_fork)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
inline VISIBLE int (*ttrain_thread_number)() = nullptr;
inline VISIBLE int (*ttrain_thread_count)() = nullptr;
}

template <class Body>
struct Task {
    const Body* body;
    int parts;
    static void run(void* data) {
        const Task& task = *static_cast<const Task*>(data);
        // The runtime may grant fewer threads than asked for: every part still runs exactly once.
        const int step = ttrain_thread_count();
        for (int part = ttrain_thread_number(); part < task.parts; part += step) (*task.body)(part);
    }
};

// body(part) for part = 0 .. parts-1, each on a thread of its own where possible.
template <class Body>
INLINE void parallel(int parts, const Body& body) {
    if (parts == 1 || !ttrain_fork) {
        for (int part = 0; part < parts; ++part) body(part);
        return;
    }
    Task<Body> task{&body, parts};
    ttrain_fork(Task<Body>::run, &task, unsigned(parts), 0);
}
template <int Parts, class Body>
INLINE void parallel(const Body& body) {
    if constexpr (Parts == 1) body(0);
    else parallel(Parts, body);
}

// Where part number `part` of `parts` begins when `count` items are split evenly in multiples of `grain`.
INLINE i64 share(i64 count, int part, int parts, i64 grain = 1) {
    const i64 blocks = (count + grain - 1) / grain;
    const i64 begin = blocks * part / parts * grain;
    return begin < count ? begin : count;
}

// body(row) for all rows, a contiguous range a thread.
template <i64 Rows, int Threads, class Body>
INLINE void over_rows(const Body& body) {
    parallel<Threads>([&](int part) {
        const i64 end = share(Rows, part + 1, Threads);
        for (i64 row = share(Rows, part, Threads); row < end; ++row) body(row);
    });
}

// Pointers of one launch: inputs, outputs, workspace, in the order of the op's declaration.
template <class T>
INLINE const T* in(void* const* a, int index) {
    return static_cast<const T*>(a[index]);
}
template <class T>
INLINE T* out(void* const* a, int index) {
    return static_cast<T*>(a[index]);
}

// step(offset, lanes) over N elements in a row, each thread a range of whole cache lines.
template <i64 N, int Threads, class Step>
INLINE void over_columns(const Step& step) {
    parallel<Threads>([&](int part) {
        const i64 end = share(N, part + 1, Threads, 64);
        i64 j = share(N, part, Threads, 64);
        for (; j + W <= end; j += W) step(j, Full{});
        if constexpr (N % W != 0) {
            if (j < end) step(j, Part<N % W>{});
        }
    });
}
INLINE i64 number(void* const* a, int index) { return reinterpret_cast<i64>(a[index]); }
