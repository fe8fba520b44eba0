/* Work sharing among the threads of a step.
 *
 * A step is one parallel region: every thread runs the same code. `share` gives each thread an equal run of a phase's items, which it takes
 * one by one from an atomic counter of its own. A thread that is done takes items from the others' runs. So a thread that loses its core
 * (the API process runs on the same cores) delays one item instead of its part of the work; the others wait for that item, and sleep if it
 * takes long.
 *
 * Each thread has its own counter because cores do not always share a cache. If a hypervisor places two of them on two chiplets, a line
 * takes 230 ns from one to the other instead of 50 (and memory is read at 60 to 70 GB/s instead of 45).
 *
 * The threads are those of torch's own OpenMP runtime: the library links none, and finds GOMP_parallel in the process. A second runtime
 * would keep a second set of spinning threads. */
#ifndef FAIRLEAD_TEAM_H
#define FAIRLEAD_TEAM_H
#include <stdint.h>

typedef struct {
    _Alignas(64) int64_t next;
} Counter;

/* Shared by the threads of one region. */
typedef struct {
    Counter *counters; /* [3][threads] */
    int32_t *cores; /* [threads] each thread's core at its last barrier; -1: unknown */
    _Alignas(64) int32_t arrived;
    _Alignas(64) int32_t round;
    int32_t sleepers; /* threads that sleep in the kernel until the next round */
    int32_t threads;
} Team;

/* One thread of a team. */
typedef struct {
    Team *team;
    int32_t me;
    int32_t phase;
} Member;

/* Start of the run of items of thread `me`; the last run ends at `items`. */
static inline int64_t run_begin(int64_t items, int64_t me, int64_t threads) { return items * me / threads; }

/* The thread whose run ends after item `i`, or -1. The thread that computes i then probably continues with i + 1. */
static inline int64_t run_ends(int64_t items, int64_t i, int64_t threads) {
    const int64_t next = ((i + 1) * threads + items - 1) / items;
    return run_begin(items, next, threads) == i + 1 ? next - 1 : -1;
}

/* Runs `item(args, i)` once for each i below `items`. Each thread takes its own run in order, then what others have left. Returns on every
 * thread after all items are done. */
void share(Member *member, int64_t items, void (*item)(const void *args, int64_t i), const void *args);

/* Runs `body(member, args)` on `threads` threads in parallel. */
void region(int32_t threads, void (*body)(Member *member, const void *args), const void *args);
#endif
