// Threads of our own, one pool a process: the host makes it and fills the pointer in after loading a library. A region is
// cut into chunks, more than there are threads. Every thread begins with a range of its own, so that neighbouring regions
// find their data in the caches where they left it, and then takes what others have not begun. The caller goes on as soon
// as nothing is left: it waits for chunks in work, never for a thread that the system has put aside. Who waits spins for a
// moment and then sleeps, which leaves the core to whoever wants it; and where a thread was put aside in the middle of a
// chunk, the caller does without the others for a while. What a chunk computes does not depend on who takes it.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "vector.h"

// Also where no function of a library needs threads: the host looks for the names in every library.
#define VISIBLE __attribute__((visibility("default"), used))

constexpr i64 SPIN_NS = 100000;  // longer than what lies between two regions of a step, shorter than a time slice
// The caller rests from the others as many times as long as it waited for one that was put aside, from one to the other:
// twice as often where that happens again soon after.
constexpr int LEAST_REST = 4, MOST_REST = 64;
constexpr i64 SOON_NS = 10000000;
constexpr int MOST_THREADS = 1024, EACH = 4;  // chunks that every thread gets in the mean

inline i64 nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * i64(1000000000) + now.tv_nsec;
}

// A place to sleep at. Who wants somebody awake changes what that one waits for first.
struct alignas(64) Bed {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t rise = PTHREAD_COND_INITIALIZER;
    int asleep;

    template <class Ready>
    void wait(const Ready& ready) {
        const i64 end = nanoseconds() + SPIN_NS;
        do {
            for (int turn = 0; turn < 32; ++turn) {
                if (ready()) return;
#if defined(__x86_64__)
                __builtin_ia32_pause();
#elif defined(__aarch64__)
                asm volatile("yield");
#endif
            }
        } while (nanoseconds() < end);
        pthread_mutex_lock(&lock);
        __atomic_store_n(&asleep, 1, __ATOMIC_SEQ_CST);
        while (!ready()) pthread_cond_wait(&rise, &lock);
        asleep = 0;
        pthread_mutex_unlock(&lock);
    }
    void wake() {
        if (!__atomic_load_n(&asleep, __ATOMIC_SEQ_CST)) return;
        pthread_mutex_lock(&lock);
        pthread_cond_signal(&rise);
        pthread_mutex_unlock(&lock);
    }
};

// A range of chunks: the region's number, the next chunk and the last one's end in one word, so that a chunk can only be
// taken of the region that its taker has read about.
struct alignas(64) Range {
    u64 word;
};

struct Pool {
    using Run = void (*)(const void* body, int chunk, int seat);

    int workers, busy;  // threads beside the caller; whether somebody is inside
    u32 region;       // counts up
    Run run;
    const void* body;
    int team, chunks;
    i64 alone_until, rest;  // the other threads are not called before; the last rest in times of what was waited
    alignas(64) int finished;
    Bed beds[MOST_THREADS];  // the first is the caller's
    Range ranges[MOST_THREADS];

    // Chunks of this region, until none is left to begin; how many it were.
    int work(u32 number, int seat) {
        int taken = 0;
        const int around = __atomic_load_n(&team, __ATOMIC_RELAXED);
        for (int k = 0; k < around; ++k) {
            u64& word = ranges[(seat + k) % around].word;
            for (;;) {
                u64 seen = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
                const int chunk = int(seen >> 16 & 0xFFFF), end = int(seen & 0xFFFF);
                if (u32(seen >> 32) != number) return taken;
                if (chunk >= end) break;
                // Of this region if the word is still the same afterwards.
                const Run function = __atomic_load_n(&run, __ATOMIC_RELAXED);
                const void* given = __atomic_load_n(&body, __ATOMIC_RELAXED);
                if (seat >= __atomic_load_n(&team, __ATOMIC_RELAXED)) return taken;
                if (!__atomic_compare_exchange_n(
                        &word, &seen, seen + (1 << 16), false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
                    continue;
                function(given, chunk, seat);
                ++taken;
                const int all = chunks;  // read before it may be another region's
                if (__atomic_add_fetch(&finished, 1, __ATOMIC_SEQ_CST) == all && seat) beds[0].wake();
            }
        }
        return taken;
    }

    bool all_finished() const { return __atomic_load_n(&finished, __ATOMIC_SEQ_CST) == chunks; }

    void fork(Run function, const void* given, int members, int count) {
        const i64 begun = nanoseconds();
        if (begun < alone_until) {
            for (int chunk = 0; chunk < count; ++chunk) function(given, chunk, 0);
            return;
        }
        const u32 number = region + 1;
        __atomic_store_n(&run, function, __ATOMIC_RELAXED);
        __atomic_store_n(&body, given, __ATOMIC_RELAXED);
        __atomic_store_n(&team, members, __ATOMIC_RELAXED);
        chunks = count;
        finished = 0;
        for (int seat = 0; seat < members; ++seat) {
            const u64 begin = u64(count) * seat / members, end = u64(count) * (seat + 1) / members;
            __atomic_store_n(&ranges[seat].word, u64(number) << 32 | begin << 16 | end, __ATOMIC_RELEASE);
        }
        __atomic_store_n(&region, number, __ATOMIC_SEQ_CST);
        for (int seat = 1; seat < members; ++seat) beds[seat].wake();
        const int taken = work(number, 0);
        if (all_finished()) return;
        const i64 done = nanoseconds();
        beds[0].wait([&] { return all_finished(); });
        // Much longer than a chunk takes: a thread has lost its core in the middle of one.
        const i64 waited = nanoseconds() - done;
        if (!taken || waited <= SPIN_NS + 3 * (done - begun) / taken) return;
        rest = begun - alone_until > SOON_NS ? LEAST_REST : 2 * rest < MOST_REST ? 2 * rest : MOST_REST;
        alone_until = done + (1 + rest) * waited;
    }

    struct Worker {
        Pool* pool;
        int seat;
    };
    static void* serve(void* data) {
        const Worker self = *static_cast<Worker*>(data);
        free(data);
        u32 seen = 0;
        for (;;) {
            self.pool->beds[self.seat].wait(
                [&] { return __atomic_load_n(&self.pool->region, __ATOMIC_SEQ_CST) != seen; });
            seen = __atomic_load_n(&self.pool->region, __ATOMIC_ACQUIRE);
            self.pool->work(seen, self.seat);
        }
        return nullptr;
    }

    // Starts threads until there are so many, the caller among them, or the system refuses. They take no signals.
    void grow(int wanted) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_attr_t settings;
        pthread_attr_init(&settings);
        pthread_attr_setdetachstate(&settings, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&settings, 8 << 20);
        for (; workers + 1 < wanted && workers + 1 < MOST_THREADS; ++workers) {
            auto* worker = static_cast<Worker*>(malloc(sizeof(Worker)));
            *worker = {this, workers + 1};
            pthread_t made;
            if (pthread_create(&made, &settings, serve, worker)) {
                free(worker);
                break;
            }
        }
        pthread_attr_destroy(&settings);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
};

// Where a plan also launches products of a library, the threads are those of the OpenMP runtime that the library uses: two
// pools whose threads spin would take the cores from each other. The host fills these pointers then, and clears them again.
extern "C" {
inline VISIBLE void (*ttrain_openmp_fork)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
inline VISIBLE int (*ttrain_openmp_number)() = nullptr;
inline VISIBLE int (*ttrain_openmp_count)() = nullptr;
}
struct OpenMPTask {
    Pool::Run run;
    const void* body;
    i64 chunks;
    static void work(void* data) {
        const OpenMPTask& task = *static_cast<const OpenMPTask*>(data);
        // The runtime may grant fewer threads than asked for: every chunk still runs exactly once.
        const i64 seat = ttrain_openmp_number(), seats = ttrain_openmp_count();
        for (i64 chunk = task.chunks * seat / seats; chunk < task.chunks * (seat + 1) / seats; ++chunk)
            task.run(task.body, int(chunk), int(seat));
    }
};

extern "C" {
inline VISIBLE Pool ttrain_own_pool;  // that of the library that is loaded first serves all
inline VISIBLE Pool* ttrain_pool = nullptr;
inline VISIBLE int ttrain_grow(Pool* pool, int threads) {
    pool->grow(threads);
    return pool->workers + 1;
}
}

// body(chunk, seat) for chunk = 0 .. chunks-1, on at most so many threads; no two at a time have the same seat, which is
// less than `threads`. Whoever finds the pool taken does everything by itself.
template <class Body>
INLINE void parallel(int threads, i64 chunks, const Body& body) {
    const Pool::Run run = [](const void* given, int chunk, int seat) { (*static_cast<const Body*>(given))(chunk, seat); };
    Pool* pool = ttrain_pool;
    if (threads > 1 && chunks > 1 && ttrain_openmp_fork) {
        OpenMPTask task{run, &body, chunks};
        ttrain_openmp_fork(OpenMPTask::work, &task, unsigned(threads), 0);
    } else if (threads > 1 && chunks > 1 && pool && !__atomic_exchange_n(&pool->busy, 1, __ATOMIC_ACQUIRE)) {
        pool->fork(run, &body, threads <= pool->workers ? threads : pool->workers + 1, int(chunks));
        __atomic_store_n(&pool->busy, 0, __ATOMIC_RELEASE);
    } else {
        for (int chunk = 0; chunk < chunks; ++chunk) run(&body, chunk, 0);
    }
}
template <int Threads, class Body>
INLINE void parallel(i64 chunks, const Body& body) {
    if constexpr (Threads == 1)
        for (int chunk = 0; chunk < chunks; ++chunk) body(chunk, 0);
    else parallel(Threads, chunks, body);
}

// Into how many chunks `count` items are cut for so many threads.
constexpr i64 chunks_of(i64 count, int threads) {
    const i64 most = threads == 1 ? 1 : i64(EACH) * threads;
    return count < most ? count : most;
}

// Where chunk number `part` of `parts` begins when `count` items are split evenly in multiples of `grain`.
INLINE i64 share(i64 count, i64 part, i64 parts, i64 grain = 1) {
    const i64 blocks = (count + grain - 1) / grain;
    const i64 begin = blocks * part / parts * grain;
    return begin < count ? begin : count;
}

// body(begin, end) for ranges of `count` items, in multiples of `grain`.
template <class Body>
INLINE void over_ranges(int threads, i64 count, i64 grain, const Body& body) {
    const i64 chunks = chunks_of((count + grain - 1) / grain, threads);
    parallel(threads, chunks, [&](int chunk, int) {
        body(share(count, chunk, chunks, grain), share(count, chunk + 1, chunks, grain));
    });
}

// body(row) for all rows, a contiguous range a chunk.
template <i64 Rows, int Threads, class Body>
INLINE void over_rows(const Body& body) {
    constexpr i64 chunks = chunks_of(Rows, Threads);
    parallel<Threads>(chunks, [&](int chunk, int) {
        const i64 end = share(Rows, chunk + 1, chunks);
        for (i64 row = share(Rows, chunk, chunks); row < end; ++row) body(row);
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

// step(offset, group) over N elements in a row, each chunk a range of whole cache lines.
template <i64 N, int Threads, class Step>
INLINE void over_columns(const Step& step) {
    constexpr i64 chunks = chunks_of((N + 63) / 64, Threads);
    parallel<Threads>(chunks, [&](int chunk, int) {
        over_groups<N>(share(N, chunk, chunks, 64), share(N, chunk + 1, chunks, 64), step);
    });
}
INLINE i64 number(void* const* a, int index) { return reinterpret_cast<i64>(a[index]); }
