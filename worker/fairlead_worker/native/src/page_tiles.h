/* The two products of attention over tiles of 16 keys, in words of 32 bits: a float, or two neighbouring bfloat16.
 *
 * A tile of keys is [key_words][16] words (word w of key k at [w][k]), a tile of values [words][value_dim] (for bfloat16 a word holds one
 * dimension of two neighbouring keys). So both products multiply a broadcast factor of a row by a vector of words, and add up in registers.
 * The order of additions within a row is the same for any number of rows.
 *
 * Tiles have arbitrary addresses, which hardware prefetchers cannot predict. `ahead` (NULL: nothing) are the next tiles: for each line that
 * is used one of theirs is prefetched, mostly the same one. So memory is read steadily and not in bursts, which cores throttle. */
#ifndef FAIRLEAD_PAGE_TILES_H
#define FAIRLEAD_PAGE_TILES_H
#include "simd.h"

enum {
    TILE = 16,
    ROWS = LANES == 16 ? 6 : 3,
    TILES = 8,
    TILE_VECS = TILE / LANES,
    MOST_VECS = 4 /* vectors of the other operand, for ROWS rows: their sums fill the registers */
};

INLINE void ask(const void *line) { __builtin_prefetch(line, 0, 2); }

/* scores[row][tile * 16 + key] of `rows` rows by `n` vectors of keys; both are constants at each call. */
INLINE void score(Kind kind, int rows, int n, const Word *query, int64_t words, const Word *const *tiles, const Word *const *ahead, float *scores) {
    Vec sums[ROWS][MOST_VECS];
    const int size = factor_size(kind);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < n; v++)
            sums[r][v] = splat(0);
    for (int64_t w = 0; w < words; w++) {
        if (ahead)
#pragma GCC unroll 4
            for (int t = 0; t < n / TILE_VECS; t++)
                ask(ahead[t] + w * TILE);
#pragma GCC unroll 2
        for (int half = 0; half < size; half++) {
            Vec keys[MOST_VECS];
#pragma GCC unroll 4
            for (int v = 0; v < n; v++)
                keys[v] = half_of(kind, tiles[v / TILE_VECS] + w * TILE + v % TILE_VECS * LANES, half);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const Vec factor = factor_of(kind, query + (r * words + w) * size + half);
#pragma GCC unroll 4
                for (int v = 0; v < n; v++)
                    sums[r][v] = multiply_add(kind, factor, keys[v], sums[r][v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < n; v++)
            store_floats(scores + r * TILES * TILE + v * LANES, sums[r][v]);
}

/* output[row] = output[row] * keep[row] + weights[row] * values, for `n` vectors of its dimensions; `tail` if the only one is partial. The
 * second half of the tiles ahead is prefetched here; the first half was while scores became weights. */
INLINE void mix(Kind kind, int rows, int n, const float *weights, const Word *const *tiles, const Word *const *ahead, int count, int64_t dim,
                const float *keep, float *output, int64_t stride, int64_t tail) {
    Vec sums[ROWS][MOST_VECS];
    const int size = factor_size(kind);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int d = 0; d < n; d++)
            sums[r][d] = mul(load_floats(output + r * stride + d * LANES), splat(keep[r]));
    int words = kind == BFLOAT16 ? TILE / 2 : TILE;
    for (int t = 0; t < count; t++) {
        const Word *row = (const Word *)weights + t * words * size;
        const Word *tile = tiles[t], *next = ahead ? ahead[t] : NULL;
        for (int w = 0; w < words; w++) {
            if (next && 2 * w >= words)
#pragma GCC unroll 4
                for (int d = 0; d < n; d += TILE_VECS)
                    ask(next + w * dim + d * LANES);
#pragma GCC unroll 2
            for (int half = 0; half < size; half++) {
                Vec values[MOST_VECS];
#pragma GCC unroll 4
                for (int d = 0; d < n; d++)
                    values[d] = n == 1 ? half_of_some(kind, tile + w * dim, tail, half) : half_of(kind, tile + w * dim + d * LANES, half);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    const Vec factor = factor_of(kind, row + r * TILES * TILE + w * size + half);
#pragma GCC unroll 4
                    for (int d = 0; d < n; d++)
                        sums[r][d] = multiply_add(kind, factor, values[d], sums[r][d]);
                }
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int d = 0; d < n; d++)
            store_floats(output + r * stride + d * LANES, sums[r][d]);
}

#define FEWER(n, call)                                                                                                                     \
    case n:                                                                                                                                \
        if (n < ROWS)                                                                                                                      \
            call(n);                                                                                                                       \
        break;
#define EACH_ROWS(rows, call)                                                                                                              \
    if (rows >= ROWS)                                                                                                                      \
        call(ROWS);                                                                                                                        \
    else                                                                                                                                   \
        switch (rows) {                                                                                                                    \
            FEWER(1, call)                                                                                                                 \
            FEWER(2, call)                                                                                                                 \
            FEWER(3, call)                                                                                                                 \
            FEWER(4, call)                                                                                                                 \
            FEWER(5, call)                                                                                                                 \
        }

/* All `rows` by all `count` tiles (1 to 8). `tiles` and `ahead` have a spare entry if the count is odd. */
INLINE void score_all(Kind kind, int64_t rows, const Word *query, int64_t words, const Word *const *tiles, const Word *const *ahead, int count,
                      float *scores) {
    for (int t = 0; t < count;) {
        const int n = count - t > 2 / TILE_VECS ? MOST_VECS : 2;
        for (int64_t r = 0; r < rows; r += ROWS) {
            const Word *q = query + r * words * factor_size(kind);
            const Word *const *asked = ahead && r == 0 ? ahead + t : NULL; /* once, for any number of rows */
            float *s = scores + r * TILES * TILE + t * TILE;
#define MOST(m) score(kind, m, MOST_VECS, q, words, tiles + t, asked, s)
#define TWO(m) score(kind, m, 2, q, words, tiles + t, asked, s)
            if (n == MOST_VECS) {
                EACH_ROWS(rows - r, MOST)
            } else {
                EACH_ROWS(rows - r, TWO)
            }
        }
        t += n / TILE_VECS;
    }
}

INLINE void mix_all(Kind kind, int64_t rows, const float *weights, const Word *const *tiles, const Word *const *ahead, int count, int64_t dim,
                    const float *keep, float *output, int64_t stride) {
    for (int64_t d = 0; d < dim;) {
        const int64_t tail = dim - d;
        const int n = tail >= MOST_VECS * LANES ? MOST_VECS : tail >= 2 * LANES ? 2 : 1;
        const Word *at[TILES], *to[TILES];
        for (int t = 0; t < count; t++)
            at[t] = tiles[t] + d, to[t] = ahead ? ahead[t] + d : NULL;
        for (int64_t r = 0; r < rows; r += ROWS) {
            const float *w = weights + r * TILES * TILE, *k = keep + r;
            const Word *const *asked = ahead && r == 0 ? to : NULL;
            float *o = output + r * stride + d;
#define MIXMOST(m) mix(kind, m, MOST_VECS, w, at, asked, count, dim, k, o, stride, tail)
#define MIX2(m) mix(kind, m, 2, w, at, asked, count, dim, k, o, stride, tail)
#define MIX1(m) mix(kind, m, 1, w, at, asked, count, dim, k, o, stride, tail)
            if (n == MOST_VECS) {
                EACH_ROWS(rows - r, MIXMOST)
            } else if (n == 2) {
                EACH_ROWS(rows - r, MIX2)
            } else {
                EACH_ROWS(rows - r, MIX1)
            }
        }
        d += n * LANES;
    }
}
#endif
