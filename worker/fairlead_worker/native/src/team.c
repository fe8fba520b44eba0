#include "team.h"

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

/* About 20 us: longer than any phase's tail, shorter than what a neighbour would miss its core for. */
enum { SPINS = 512 };

static void meet(Member *member) {
    Team *team = member->team;
    int32_t round = __atomic_load_n(&team->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->threads) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&team->round, __ATOMIC_ACQUIRE) == round; spins++) {
        if (spins < SPINS)
            _mm_pause();
        else
            sched_yield();
    }
}

void share(Member *member, int64_t items, void (*item)(const void *args, int64_t i), const void *args) {
    Team *team = member->team;
    int64_t *next = &team->counters[member->phase % 3].next;
    for (int64_t i; (i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < items;)
        item(args, i);
    /* The counter of the phase before: everybody has left it, and it is used again only two meetings from here. */
    if (member->me == 0)
        __atomic_store_n(&team->counters[(member->phase + 2) % 3].next, 0, __ATOMIC_RELAXED);
    member->phase++;
    meet(member);
}

void region(int32_t threads, void (*body)(Member *member, const void *args), const void *args) {
    Team team = {.threads = threads};
#pragma omp parallel num_threads(threads)
    {
        /* Fewer threads than asked for (OMP_THREAD_LIMIT, a nested region) must not leave the others waiting for nobody. */
#pragma omp single
        team.threads = omp_get_num_threads();
        Member member = {.team = &team, .me = omp_get_thread_num()};
        body(&member, args);
    }
}
