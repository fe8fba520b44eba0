// What two threads of this machine can do, one line of JSON for each round: reading memory, handing a cache line to and fro, multiplying in
// bfloat16 from the first cache. x86-64 with AVX512-BF16.
#define _GNU_SOURCE
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { PIECE = 1 << 18, TURNS = 20000, ROWS = 12, STEPS = 192, REPEATS = 50000, ROWS_BYTES = 12288 };
_Static_assert(4 * ROWS * STEPS <= ROWS_BYTES, "a tile's rows");
static const int64_t BYTES = 768ll << 20, HUGE_PAGE = 2ll << 20;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

// Bytes a second of all threads, each a piece at a time.
static double read_rate(const char *memory, int threads) {
    int64_t next = 0, sum = 0;
    double began = now();
#pragma omp parallel num_threads(threads) reduction(+ : sum)
    for (int64_t piece; (piece = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < BYTES / PIECE;) {
        const char *at = memory + piece * PIECE;
        __m512i parts[4] = {0};
        for (int64_t byte = 0; byte < PIECE; byte += 256)
            for (int part = 0; part < 4; part++) {
                _mm_prefetch(at + byte + 4096 + 64 * part, _MM_HINT_T0);
                parts[part] = _mm512_add_epi64(parts[part], _mm512_load_si512(at + byte + 64 * part));
            }
        sum += _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(parts[0], parts[1]), _mm512_add_epi64(parts[2], parts[3])));
    }
    double seconds = now() - began;
    return (uint64_t)sum == 0x0101010101010101ull * (uint64_t)(BYTES / 8) ? BYTES / seconds : -1;
}

// Seconds that a cache line takes from one thread to the other: two cores of one chiplet, or of two.
static double hand_over(void) {
    static _Alignas(128) volatile int64_t turn;
    turn = 0;
    double began = now();
#pragma omp parallel num_threads(2)
    for (int64_t n = omp_get_thread_num(); n < 2 * TURNS; n += 2) {
        while (turn != n) {}
        turn = n + 1;
    }
    return (now() - began) / (2 * TURNS);
}

// A tile of 12 rows by 32 outputs, as the worker's linear layers have it: two loads of weights for each pair of inputs, a broadcast for each row.
static __attribute__((noinline)) void tile(const char *rows, const char *weights, float *out) {
    __m512 sums[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int step = 0; step < STEPS; step++) {
        __m512i left = _mm512_load_si512(weights + 128 * step), right = _mm512_load_si512(weights + 128 * step + 64);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            memcpy(&pair, rows + 4 * (r * STEPS + step), 4);
            __m512i both = _mm512_set1_epi32(pair);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], (__m512bh)both, (__m512bh)left);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], (__m512bh)both, (__m512bh)right);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        _mm512_store_ps(out + 32 * r, sums[r][0]);
        _mm512_store_ps(out + 32 * r + 16, sums[r][1]);
    }
}

// Operations a second of all threads; a product and a sum are two.
static double multiply_rate(int threads) {
    double slowest = 0;
#pragma omp parallel num_threads(threads) reduction(max : slowest)
    {
        char *rows = aligned_alloc(4096, ROWS_BYTES), *weights = aligned_alloc(4096, 128 * STEPS);
        float *out = aligned_alloc(4096, 4096);
        memset(rows, 0, ROWS_BYTES);
        memset(weights, 0, 128 * STEPS);
        double began = now();
        for (int n = 0; n < REPEATS; n++) {
            tile(rows, weights, out);
            __asm__ volatile("" ::: "memory");  // all of them, one after the other
        }
        slowest = now() - began;
        free(rows), free(weights), free(out);
    }
    return 2.0 * threads * REPEATS * ROWS * 32 * 2 * STEPS / slowest;
}

int main(int count, char **words) {
    int rounds = count > 1 ? atoi(words[1]) : 5;
    char *memory = mmap(NULL, BYTES + HUGE_PAGE + 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return perror("mmap"), 1;
    memory = (char *)(((uintptr_t)memory + HUGE_PAGE - 1) & -HUGE_PAGE);
    madvise(memory, BYTES, MADV_HUGEPAGE);
    memset(memory, 1, BYTES);
    for (int round = 0; round < rounds; round++) {
        double one = read_rate(memory, 1), two = read_rate(memory, 2), line = hand_over();
        double flops = multiply_rate(1), both = multiply_rate(2);
        if (one < 0 || two < 0) return fputs("not all was read\n", stderr), 1;
        printf("{\"read_1\": %.0f, \"read_2\": %.0f, \"line_s\": %.3g, \"flops_1\": %.0f, \"flops_2\": %.0f}\n", one, two, line, flops, both);
        fflush(stdout);
    }
}
