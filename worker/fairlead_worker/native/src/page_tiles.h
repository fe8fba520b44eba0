/* The two products of attention over tiles of 16 keys, in words of 32 bits: a float, or two neighbouring bfloat16.
 *
 * A tile of keys is [key_words][16] words (word w of key k at [w][k]), a tile of values [words][value_dim] (for bfloat16 a word holds one
 * dimension of two neighbouring keys). So both products multiply a broadcast word of a row by a vector of 64 bytes, and add up in
 * registers; the order of additions within a row is the same whatever number of rows goes together.
 *
 * Tiles lie anywhere, which no prefetcher in hardware foresees. `ahead` (NULL: nothing) are those wanted next: for each line that is used one
 * of theirs is asked for, mostly the same, so that memory is read all the time and not in bursts, which cores hold back. */
#ifndef FAIRLEAD_PAGE_TILES_H
#define FAIRLEAD_PAGE_TILES_H
#include <immintrin.h>
#include <stdint.h>

#include "native.h"

enum { TILE = 16, ROWS = 6, TILES = 8 };
#define INLINE static inline __attribute__((always_inline))

typedef uint32_t __attribute__((may_alias)) Word;

INLINE __m512 multiply_add(Kind kind, uint32_t word, __m512i vector, __m512 sum) {
    __m512i words = _mm512_set1_epi32((int32_t)word);
    if (kind == BFLOAT16)
        return _mm512_dpbf16_ps(sum, (__m512bh)words, (__m512bh)vector);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(words), _mm512_castsi512_ps(vector), sum);
}

INLINE void ask(const void *line) { _mm_prefetch((const char *)line, _MM_HINT_T1); }

/* scores[row][tile * 16 + key] of `rows` rows by `n` tiles of keys, both constant where it is called. */
INLINE void score(Kind kind, int rows, int n, const Word *query, int64_t words, const Word *const *tiles, const Word *const *ahead, float *scores) {
    __m512 sums[ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int t = 0; t < n; t++)
            sums[r][t] = _mm512_setzero_ps();
    for (int64_t w = 0; w < words; w++) {
        __m512i keys[4];
#pragma GCC unroll 4
        for (int t = 0; t < n; t++)
            keys[t] = _mm512_loadu_si512(tiles[t] + w * TILE);
        if (ahead)
#pragma GCC unroll 4
            for (int t = 0; t < n; t++)
                ask(ahead[t] + w * TILE);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int t = 0; t < n; t++)
                sums[r][t] = multiply_add(kind, query[r * words + w], keys[t], sums[r][t]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int t = 0; t < n; t++)
            _mm512_storeu_ps(scores + r * TILES * TILE + t * TILE, sums[r][t]);
}

/* output[row] = output[row] * keep[row] + weights[row] * values, `n` vectors of dimensions of it; `tail` where the only one is partial. Of the
 * tiles ahead the second half is asked for: the first has been while scores became weights. */
INLINE void mix(Kind kind, int rows, int n, const float *weights, const Word *const *tiles, const Word *const *ahead, int count, int64_t dim,
                const float *keep, float *output, int64_t stride, __mmask16 tail) {
    __m512 sums[ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int d = 0; d < n; d++)
            sums[r][d] = _mm512_mul_ps(_mm512_loadu_ps(output + r * stride + d * 16), _mm512_set1_ps(keep[r]));
    int words = kind == BFLOAT16 ? TILE / 2 : TILE;
    for (int t = 0; t < count; t++) {
        const Word *row = (const Word *)weights + t * words;
        const Word *tile = tiles[t], *next = ahead ? ahead[t] : NULL;
        for (int w = 0; w < words; w++) {
            __m512i values[4];
#pragma GCC unroll 4
            for (int d = 0; d < n; d++)
                values[d] = n == 1 ? _mm512_maskz_loadu_epi32(tail, tile + w * dim) : _mm512_loadu_si512(tile + w * dim + d * 16);
            if (next && 2 * w >= words)
#pragma GCC unroll 4
                for (int d = 0; d < n; d++)
                    ask(next + w * dim + d * 16);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int d = 0; d < n; d++)
                    sums[r][d] = multiply_add(kind, row[r * TILES * TILE + w], values[d], sums[r][d]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int d = 0; d < n; d++)
            _mm512_storeu_ps(output + r * stride + d * 16, sums[r][d]);
}

#define EACH_ROWS(rows, call)                                                                                                          \
    switch (rows) {                                                                                                                    \
    case 1: call(1); break;                                                                                                            \
    case 2: call(2); break;                                                                                                            \
    case 3: call(3); break;                                                                                                            \
    case 4: call(4); break;                                                                                                            \
    case 5: call(5); break;                                                                                                            \
    default: call(6); break;                                                                                                           \
    }

/* All `rows` by all `count` tiles (1 to 8); `tiles` and `ahead` have an entry to spare where the count is odd. */
INLINE void score_all(Kind kind, int64_t rows, const Word *query, int64_t words, const Word *const *tiles, const Word *const *ahead, int count,
                      float *scores) {
    for (int t = 0; t < count;) {
        int n = count - t > 2 ? 4 : 2;
        for (int64_t r = 0; r < rows; r += ROWS) {
            const Word *q = query + r * words;
            const Word *const *asked = ahead && r == 0 ? ahead + t : NULL; /* once, whatever the number of rows */
            float *s = scores + r * TILES * TILE + t * TILE;
#define FOUR(m) score(kind, m, 4, q, words, tiles + t, asked, s)
#define TWO(m) score(kind, m, 2, q, words, tiles + t, asked, s)
            if (n == 4)
                EACH_ROWS(rows - r, FOUR)
            else
                EACH_ROWS(rows - r, TWO)
        }
        t += n;
    }
}

INLINE void mix_all(Kind kind, int64_t rows, const float *weights, const Word *const *tiles, const Word *const *ahead, int count, int64_t dim,
                    const float *keep, float *output, int64_t stride) {
    for (int64_t d = 0; d < dim;) {
        int n = dim - d >= 64 ? 4 : dim - d >= 32 ? 2 : 1;
        __mmask16 tail = dim - d >= 16 ? 0xFFFF : (__mmask16)((1u << (dim - d)) - 1);
        const Word *at[TILES], *to[TILES];
        for (int t = 0; t < count; t++)
            at[t] = tiles[t] + d, to[t] = ahead ? ahead[t] + d : NULL;
        for (int64_t r = 0; r < rows; r += ROWS) {
            const float *w = weights + r * TILES * TILE, *k = keep + r;
            const Word *const *asked = ahead && r == 0 ? to : NULL;
            float *o = output + r * stride + d;
#define MIX4(m) mix(kind, m, 4, w, at, asked, count, dim, k, o, stride, tail)
#define MIX2(m) mix(kind, m, 2, w, at, asked, count, dim, k, o, stride, tail)
#define MIX1(m) mix(kind, m, 1, w, at, asked, count, dim, k, o, stride, tail)
            if (n == 4)
                EACH_ROWS(rows - r, MIX4)
            else if (n == 2)
                EACH_ROWS(rows - r, MIX2)
            else
                EACH_ROWS(rows - r, MIX1)
        }
        d += n * 16;
    }
}
#endif
