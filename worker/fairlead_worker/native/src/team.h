/* How the threads of one step share work.
 *
 * A step is one parallel region: every thread runs the same code, and `share` gives each an equal run of the items of one phase, which it
 * takes one by one by an atomic counter of its own; who is done takes from the others' runs. So a thread whose core is taken away (the API
 * process lives on the same cores) holds up one item and not its half of the work. The others wait for that item, and sleep when it takes
 * long. A counter is of one thread because cores do not always share a cache: where a hypervisor puts two of them on two chiplets, a line
 * takes 230 ns from one to the other instead of 50 (and memory is read at 60 to 70 GB/s instead of 45). Threads are those of torch's own
 * OpenMP runtime: the library links none, GOMP_parallel is found in the process. A second runtime would keep a second set of spinning threads. */
#ifndef FAIRLEAD_TEAM_H
#define FAIRLEAD_TEAM_H
#include <stdint.h>

typedef struct {
    _Alignas(64) int64_t next;
} Counter;

/* Shared by the threads of one region. */
typedef struct {
    Counter *counters; /* [3][threads] */
    int32_t *cores;    /* [threads] where each was at its last meeting; -1: nowhere yet */
    _Alignas(64) int32_t arrived;
    _Alignas(64) int32_t round;
    int32_t sleepers; /* waiting for the next round in the kernel */
    int32_t threads;
} Team;

/* One thread's place in its team. */
typedef struct {
    Team *team;
    int32_t me;
    int32_t phase;
} Member;

/* Where the run of items of thread `me` begins; that of the last one ends at `items`. */
static inline int64_t run_begin(int64_t items, int64_t me, int64_t threads) { return items * me / threads; }

/* The thread whose run ends behind item `i`, or -1: whoever computes it will probably go on with i + 1. */
static inline int64_t run_ends(int64_t items, int64_t i, int64_t threads) {
    const int64_t next = ((i + 1) * threads + items - 1) / items;
    return run_begin(items, next, threads) == i + 1 ? next - 1 : -1;
}

/* Runs `item(args, i)` once for each i below `items`: each thread those of its run in their order, then what others have left; returns on
 * every thread once all are done. */
void share(Member *member, int64_t items, void (*item)(const void *args, int64_t i), const void *args);

/* Runs `body(member, args)` on `threads` threads at once. */
void region(int32_t threads, void (*body)(Member *member, const void *args), const void *args);
#endif
