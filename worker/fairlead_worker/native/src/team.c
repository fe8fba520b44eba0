#define _GNU_SOURCE
#include "team.h"

#include <limits.h>
#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Most waits end within the spins; longer ones sleep. The kernel can move a waiting thread to an idle core, and sleeping uses no CPU quota.
 * Yielding instead would hold a place in the queue of a busy core. */
enum { SPINS = 2048 };

/* The pause of a spin. */
static void rest(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/* Publishes the core of this thread. The others read it and seldom see it change. */
static int32_t tell_core(const Member *member) {
    int32_t *told = member->team->cores + member->me, core = sched_getcpu();
    if (__atomic_load_n(told, __ATOMIC_RELAXED) != core)
        __atomic_store_n(told, core, __ATOMIC_RELAXED);
    return core;
}

/* Moves a thread away that woke up on the core of another thread of its team. If a few busy cores share a cache, the kernel wakes a thread
 * on its waker's core and does not search an idle one (SIS_UTIL). Two threads that wait for each other are never both seen waiting for a
 * core: they shared one for milliseconds while another core was idle. If the mask has no core without a team thread, nothing is done.
 * Afterwards the mask is restored: to every core, if that is equivalent, so that it keeps following the container's set of cores. */
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
        /* Sequentially consistent with the sleeper's count and the kernel's read of `round`: one of the two sees the other. */
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
        syscall(SYS_futex, &team->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0); /* returns immediately if `round` has changed */
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
        while (__atomic_load_n(next, __ATOMIC_RELAXED) < count) { /* read only if nothing is left: the line stays in its owner's cache */
            const int64_t i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
            if (i < count)
                item(args, begin + i);
        }
    }
    /* Counters of the previous phase: every thread has left it, and they are reused only two barriers later. */
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
        /* With fewer threads than requested (OMP_THREAD_LIMIT, a nested region) the others must not wait for missing threads. */
#pragma omp single
        team.threads = omp_get_num_threads();
        Member member = {.team = &team, .me = omp_get_thread_num()};
        body(&member, args);
    }
}
