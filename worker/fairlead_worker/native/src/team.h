/* How the threads of one step share work.
 *
 * A step is one parallel region: every thread runs the same code, and `share` hands out the items of one phase by an atomic counter, so
 * that a thread whose core is taken away (the API process lives on the same cores) holds up one item and not its half of the work. The
 * others wait for that item, and sleep when it takes long. Threads are those of torch's own OpenMP runtime: the library links none,
 * GOMP_parallel is found in the process. A second runtime would keep a second set of spinning threads. */
#ifndef FAIRLEAD_TEAM_H
#define FAIRLEAD_TEAM_H
#include <stdint.h>

typedef struct {
    _Alignas(64) int64_t next;
} Counter;

/* Shared by the threads of one region; all zeros but `threads` at its start. */
typedef struct {
    Counter counters[3];
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

/* Runs `item(args, i)` once for each i below `items`, on whichever thread is free; returns on every thread once all are done. */
void share(Member *member, int64_t items, void (*item)(const void *args, int64_t i), const void *args);

/* Runs `body(member, args)` on `threads` threads at once. */
void region(int32_t threads, void (*body)(Member *member, const void *args), const void *args);
#endif
