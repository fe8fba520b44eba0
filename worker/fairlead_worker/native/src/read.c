/* How fast the machine reads memory: the limit of a decoding step. For bench/cpu_limit.py. */
#include <immintrin.h>

#include "native.h"

enum { PIECE = 1 << 18 };

typedef struct {
    const char *memory;
    int64_t *sum;
} Reading;

static void read_piece(const void *args, int64_t i) {
    const Reading *reading = args;
    const char *from = reading->memory + i * PIECE;
    __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t at = 0; at < PIECE; at += 256)
        for (int j = 0; j < 4; j++) {
            _mm_prefetch(from + at + 4096 + 64 * j, _MM_HINT_T0);
            sums[j] = _mm512_add_epi64(sums[j], _mm512_load_si512(from + at + 64 * j));
        }
    __m512i all = _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3]));
    __atomic_fetch_add(reading->sum, _mm512_reduce_add_epi64(all), __ATOMIC_RELAXED);
}

typedef struct {
    Reading reading;
    int64_t pieces;
} Whole;

static void read_all(Member *member, const void *args) {
    const Whole *whole = args;
    share(member, whole->pieces, read_piece, &whole->reading);
}

/* The sum of all whole int64 of `memory`, at a multiple of 64, `bytes` a multiple of 256 KiB: the sum so that nothing is left out. */
EXPORT int64_t fairlead_read(int32_t threads, const void *memory, int64_t bytes) {
    int64_t sum = 0;
    Whole whole = {{memory, &sum}, bytes / PIECE};
    region(threads, read_all, &whole);
    return sum;
}
