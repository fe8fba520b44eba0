/* Memory read bandwidth of the machine: the limit of a decoding step. For bench/engine/weight_bandwidth.py. */
#include "native.h"

enum { PIECE = 1 << 18 };

typedef int64_t __attribute__((vector_size(32), may_alias)) Four;

typedef struct {
    const char *memory;
    int64_t *sum;
} Reading;

static void read_piece(const void *args, int64_t i) {
    const Reading *reading = args;
    const char *from = reading->memory + i * PIECE;
    Four sums[8] = {{0}};
    for (int64_t at = 0; at < PIECE; at += 256)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            if (j % 2 == 0)
                __builtin_prefetch(from + at + 4096 + 32 * j, 0, 3);
            sums[j] += *(const Four *)(from + at + 32 * j);
        }
    int64_t all[4] = {0};
    for (int j = 0; j < 8; j++)
        for (int lane = 0; lane < 4; lane++)
            all[lane] += sums[j][lane];
    __atomic_fetch_add(reading->sum, all[0] + all[1] + all[2] + all[3], __ATOMIC_RELAXED);
}

typedef struct {
    Reading reading;
    int64_t pieces;
} Whole;

static void read_all(Member *member, const void *args) {
    const Whole *whole = args;
    share(member, whole->pieces, read_piece, &whole->reading);
}

/* The sum of all int64 of `memory`, aligned to 64, `bytes` a multiple of 256 KiB. The sum keeps the compiler from skipping reads. */
EXPORT int64_t fairlead_read(int32_t threads, const void *memory, int64_t bytes) {
    int64_t sum = 0;
    Whole whole = {{memory, &sum}, bytes / PIECE};
    region(threads, read_all, &whole);
    return sum;
}
