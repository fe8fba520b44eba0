#include "tile.h"

#include <immintrin.h>
#include <string.h>

#include "native.h"

typedef __m512i (*Load)(const char *weights, int half);
typedef __m512i (*Multiply)(__m512i sum, __m512i weights, __m512i x);

#define INLINE static inline __attribute__((always_inline))

INLINE __m512i load_whole(const char *weights, int half) { return _mm512_loadu_si512(weights + 64 * half); }
INLINE __m512i load_bytes(const char *weights, int half) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(weights + 32 * half)));
}
INLINE __m512i multiply_float(__m512i sum, __m512i weights, __m512i x) {
    return _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(weights), _mm512_castsi512_ps(sum)));
}
INLINE __m512i multiply_bfloat16(__m512i sum, __m512i weights, __m512i x) {
    return _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(sum), (__m512bh)x, (__m512bh)weights));
}
INLINE __m512i multiply_int16(__m512i sum, __m512i weights, __m512i x) { return _mm512_dpwssd_epi32(sum, x, weights); }

/* `rows` is a constant at each call, so that the loops over it unroll and `sums` lives in registers. Each sum runs over the inputs in
 * their order, whatever `rows` is: this is why a row's bits do not depend on its company. */
INLINE void tile(const Tile *job, const int rows, const int step_bytes, Load load, Multiply multiply) {
    __m512i sums[TILE_ROWS][2];
    char *kept = job->sums;
    const char *weights = job->weights, *ahead = job->ahead;
    const int64_t stride = job->x_stride, ahead_step = job->ahead_step;
    const int passing = job->passing;
    /* Rows by fours: four rows need three registers of addresses, [x], [x + stride], [x + 2 * stride] and [x + stride3]. */
    const char *x0 = job->x, *x4 = x0 + 4 * stride, *x8 = x0 + 8 * stride;
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            sums[row][half] = _mm512_loadu_si512(kept + 128 * row + 64 * half);
    for (int64_t step = 0; step < job->steps; step++) {
        __m512i left = load(weights, 0), right = load(weights, 1);
        for (int byte = 0; byte < step_bytes; byte += 64)
            if (passing)
                _mm_prefetch(ahead + byte, _MM_HINT_T1);
            else
                _mm_prefetch(ahead + byte, _MM_HINT_T0);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            const char *at = (row < 4 ? x0 : row < 8 ? x4 : x8) + row % 4 * stride;
            int32_t pair;
            memcpy(&pair, at, 4);
            __m512i x = _mm512_set1_epi32(pair);
            sums[row][0] = multiply(sums[row][0], left, x);
            sums[row][1] = multiply(sums[row][1], right, x);
        }
        weights += step_bytes;
        ahead += ahead_step;
        x0 += 4;
        x4 += 4;
        x8 += 4;
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            _mm512_storeu_si512(kept + 128 * row + 64 * half, sums[row][half]);
}

#define CASE(rows, ...)                                                                                                                    \
    case rows:                                                                                                                             \
        tile(job, rows, __VA_ARGS__);                                                                                                      \
        break;
#define TILES(name, ...)                                                                                                                   \
    static void name(const Tile *job, int64_t rows) {                                                                                      \
        switch (rows) {                                                                                                                    \
            CASE(1, __VA_ARGS__)                                                                                                           \
            CASE(2, __VA_ARGS__)                                                                                                           \
            CASE(3, __VA_ARGS__)                                                                                                           \
            CASE(4, __VA_ARGS__)                                                                                                           \
            CASE(5, __VA_ARGS__)                                                                                                           \
            CASE(6, __VA_ARGS__)                                                                                                           \
            CASE(7, __VA_ARGS__)                                                                                                           \
            CASE(8, __VA_ARGS__)                                                                                                           \
            CASE(9, __VA_ARGS__)                                                                                                           \
            CASE(10, __VA_ARGS__)                                                                                                          \
            CASE(11, __VA_ARGS__)                                                                                                          \
            CASE(12, __VA_ARGS__)                                                                                                          \
        }                                                                                                                                  \
    }
TILES(tile_float, 128, load_whole, multiply_float)
TILES(tile_bfloat16, 128, load_whole, multiply_bfloat16)
TILES(tile_int8, 64, load_bytes, multiply_int16)

void multiply_tile(int32_t kind, const Tile *job, int64_t rows) {
    if (kind == FLOAT32)
        tile_float(job, rows);
    else if (kind == BFLOAT16)
        tile_bfloat16(job, rows);
    else
        tile_int8(job, rows);
}
