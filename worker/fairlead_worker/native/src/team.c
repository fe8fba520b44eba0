#define _GNU_SOURCE
#include "team.h"

#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <omp.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Most waits are over within the spins. Longer ones sleep: a core that is idle is one that the kernel can move a waiting thread to, and uses
 * up no CPU quota. Yielding instead would hold a place in the queue of a busy core. */
enum { SPINS = 2048 };

static void meet(Member *member) {
    Team *team = member->team;
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
            _mm_pause();
            continue;
        }
        __atomic_add_fetch(&team->sleepers, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &team->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0); /* returns at once if `round` is another by now */
        __atomic_sub_fetch(&team->sleepers, 1, __ATOMIC_RELAXED);
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
    Team team = {.counters = counters, .threads = threads};
#pragma omp parallel num_threads(threads)
    {
        /* Fewer threads than asked for (OMP_THREAD_LIMIT, a nested region) must not leave the others waiting for nobody. */
#pragma omp single
        team.threads = omp_get_num_threads();
        Member member = {.team = &team, .me = omp_get_thread_num()};
        body(&member, args);
    }
}
