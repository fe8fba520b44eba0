/* `team.c` on cores that a test chooses: which masks a thread asks for when it wakes beside another. */
#include "team.c"

#include <time.h>

static _Thread_local int32_t asked;
static int32_t shared_core, cores;
static _Thread_local uint64_t mask_now;
static uint64_t wanted_masks[4];

static uint64_t bits(const cpu_set_t *mask) {
    uint64_t found = 0;
    for (int core = 0; core < 64; core++)
        found |= (uint64_t)!!CPU_ISSET(core, mask) << core;
    return found;
}

int stand_in_getcpu(void) { return shared_core ? 0 : omp_get_thread_num(); }

int stand_in_getaffinity(pid_t pid, size_t size, cpu_set_t *mask) {
    (void)pid, (void)size;
    CPU_ZERO(mask);
    for (int core = 0; core < cores; core++)
        if (mask_now >> core & 1)
            CPU_SET(core, mask);
    return 0;
}

int stand_in_setaffinity(pid_t pid, size_t size, const cpu_set_t *mask) {
    (void)pid, (void)size;
    mask_now = bits(mask);
    if (asked < 4)
        wanted_masks[asked] = mask_now;
    asked++;
    return 0;
}

static void slow(const void *args, int64_t i) {
    (void)args, (void)i;
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
}

static uint64_t narrowed;

static void wait_once(Member *member, const void *args) {
    asked = 0, mask_now = narrowed;
    share(member, 1, slow, NULL); /* one thread works, the other waits until it sleeps */
    if (asked)
        *(int32_t *)args = asked;
}

/* The masks that the waiting one of two threads asked for, as bits; how many. Of `there` cores it may use those of `mask`. */
__attribute__((visibility("default"))) int32_t wait_beside(int32_t same, int32_t there, uint64_t mask, uint64_t *wanted) {
    int32_t count = 0;
    shared_core = same, cores = there, narrowed = mask;
    region(2, wait_once, &count);
    memcpy(wanted, wanted_masks, sizeof wanted_masks);
    return count;
}
