#define _GNU_SOURCE
#include "team.h"

#include <limits.h>
#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Most waits are over within the spins. Longer ones sleep: a core that is idle is one that the kernel can move a waiting thread to, and uses
 * up no CPU quota. Yielding instead would hold a place in the queue of a busy core. */
enum { SPINS = 2048 };

/* A spin's pause. */
static void rest(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/* The core that this thread is on, told to the others: they read it and seldom see it change. */
static int32_t tell_core(const Member *member) {
    int32_t *told = member->team->cores + member->me, core = sched_getcpu();
    if (__atomic_load_n(told, __ATOMIC_RELAXED) != core)
        __atomic_store_n(told, core, __ATOMIC_RELAXED);
    return core;
}

/* Woken on the core of another thread of the team: away from there. Where a few busy cores share a cache the kernel wakes a thread on its
 * waker's core and looks for no idle one (SIS_UTIL), and two threads that wait for each other are never both seen waiting for a core:
 * they shared one for milliseconds, and the other one was idle. Where the mask has no core that the team is not on, nothing is done.
 * Afterwards the mask is as before: every core, where that comes to the same, for so it goes on to follow the container's set of them. */
static void step_aside(const Member *member) {
    const Team *team = member->team;
    const int32_t core = tell_core(member);
    cpu_set_t allowed, others, every, now;
    int alone = 1;
    for (int32_t thread = 0; thread < team->threads; thread++)
        alone &= thread == member->me || __atomic_load_n(team->cores + thread, __ATOMIC_RELAXED) != core;
    if (alone || sched_getaffinity(0, sizeof allowed, &allowed))
        return;
    others = allowed;
    for (int32_t thread = 0; thread < team->threads; thread++)
        CPU_CLR(__atomic_load_n(team->cores + thread, __ATOMIC_RELAXED), &others);
    if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others))
        return;
    memset(&every, 0xff, sizeof every);
    if (sched_setaffinity(0, sizeof every, &every) || sched_getaffinity(0, sizeof now, &now) || !CPU_EQUAL(&now, &allowed))
        sched_setaffinity(0, sizeof allowed, &allowed);
}

static void meet(Member *member) {
    Team *team = member->team;
    tell_core(member);
    int32_t round = __atomic_load_n(&team->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->threads) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        /* In one order with the sleeper's count and the kernel's look at `round`: one of the two sees the other. */
        __atomic_store_n(&team->round, round + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&team->sleepers, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &team->round, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
        return;
    }
    for (int spins = 0; __atomic_load_n(&team->round, __ATOMIC_ACQUIRE) == round; spins++) {
        if (spins < SPINS) {
            rest();
            continue;
        }
        __atomic_add_fetch(&team->sleepers, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &team->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0); /* returns at once if `round` is another by now */
        __atomic_sub_fetch(&team->sleepers, 1, __ATOMIC_RELAXED);
        step_aside(member);
    }
}

void share(Member *member, int64_t items, void (*item)(const void *args, int64_t i), const void *args) {
    const int32_t threads = member->team->threads, me = member->me;
    Counter *counters = member->team->counters + member->phase % 3 * threads;
    for (int32_t turn = 0; turn < threads; turn++) {
        const int32_t whose = (me + turn) % threads;
        const int64_t begin = run_begin(items, whose, threads), count = run_begin(items, whose + 1, threads) - begin;
        int64_t *next = &counters[whose].next;
        while (__atomic_load_n(next, __ATOMIC_RELAXED) < count) { /* only looked at where nothing is left: the line stays its owner's */
            const int64_t i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
            if (i < count)
                item(args, begin + i);
        }
    }
    /* Counters of the phase before: everybody has left it, and they are used again only two meetings from here. */
    __atomic_store_n(&member->team->counters[(member->phase + 2) % 3 * threads + me].next, 0, __ATOMIC_RELAXED);
    member->phase++;
    meet(member);
}

void region(int32_t threads, void (*body)(Member *member, const void *args), const void *args) {
    Counter counters[3 * threads];
    memset(counters, 0, sizeof counters);
    int32_t cores[threads];
    memset(cores, -1, sizeof cores);
    Team team = {.counters = counters, .cores = cores, .threads = threads};
#pragma omp parallel num_threads(threads)
    {
        /* Fewer threads than asked for (OMP_THREAD_LIMIT, a nested region) must not leave the others waiting for nobody. */
#pragma omp single
        team.threads = omp_get_num_threads();
        Member member = {.team = &team, .me = omp_get_thread_num()};
        body(&member, args);
    }
}
