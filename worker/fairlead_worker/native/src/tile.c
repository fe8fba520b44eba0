#include "tile.h"

#include "simd.h"

enum { VECS = PANEL / LANES }; /* of a panel's outputs */

INLINE Words load_weights(int32_t kind, const char *weights, int vec, int half) {
    return kind == INT8 ? load_int8(weights + 2 * LANES * vec) : as_words(half_of(kind, weights + 4 * LANES * vec, half));
}

INLINE Words multiply(int32_t kind, Vec factor, Words weights, Words sum) {
    if (kind == INT8)
        return multiply_int16(as_words(factor), weights, sum);
    return as_words(multiply_add(kind, factor, as_floats(weights), as_floats(sum)));
}

INLINE void fetch(const char *ahead, int64_t size, int passing) {
    for (int64_t byte = 0; byte < size; byte += 64)
        if (passing)
            __builtin_prefetch(ahead + byte, 0, 2);
        else
            __builtin_prefetch(ahead + byte, 0, 3);
}

/* `rows` is a constant at each call, so that the loops over it unroll and `sums` lives in registers. Each sum runs over the inputs in
 * order, for any `rows`. That is why a row's bits do not depend on the batch. */
INLINE void tile(int32_t kind, const Tile *job, const int rows) {
    Words sums[TILE_ROWS][VECS];
    char *kept = job->sums;
    const char *weights = job->weights, *ahead = job->ahead;
    const int64_t stride = job->x_stride, ahead_step = job->ahead_step, size = 4 * factor_size(kind);
    const int passing = job->passing;
    /* Rows in groups of four: four rows need three address registers, [x], [x + stride], [x + 2 * stride] and [x + stride3]. */
    const char *x0 = job->x, *x4 = x0 + 4 * stride, *x8 = x0 + 8 * stride;
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int vec = 0; vec < VECS; vec++)
            sums[row][vec] = load_words(kept + 4 * (PANEL * row + LANES * vec));
    for (int64_t step = 0; step < job->steps; step++) {
        fetch(ahead, step_bytes(kind), passing);
#pragma GCC unroll 2
        for (int half = 0; half < factor_size(kind); half++) {
            Words now[VECS];
#pragma GCC unroll 4
            for (int vec = 0; vec < VECS; vec++)
                now[vec] = load_weights(kind, weights, vec, half);
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++) {
                const Vec factor = factor_of(kind, (row < 4 ? x0 : row < 8 ? x4 : x8) + row % 4 * stride + 4 * half);
#pragma GCC unroll 4
                for (int vec = 0; vec < VECS; vec++)
                    sums[row][vec] = multiply(kind, factor, now[vec], sums[row][vec]);
            }
        }
        weights += step_bytes(kind);
        ahead += ahead_step;
        x0 += size;
        x4 += size;
        x8 += size;
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int vec = 0; vec < VECS; vec++)
            store_words(kept + 4 * (PANEL * row + LANES * vec), sums[row][vec]);
}

/* Sums of a group are exact. They are then scaled, and added to floats in the first cache. */
INLINE void tile_of_groups(const Tile *job, const int rows) {
    float *kept = job->sums;
    const char *weights = job->weights, *ahead = job->ahead, *x = job->x;
    for (int64_t step = 0; step < job->steps; step++, x += sizeof(Group), weights += step_bytes(INT4), ahead += job->ahead_step) {
        Words sums[TILE_ROWS][VECS];
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
            for (int vec = 0; vec < VECS; vec++)
                sums[row][vec] = splat_word(0);
        fetch(ahead, step_bytes(INT4), job->passing);
        for (int word = 0; word < GROUP / 8; word++)
#pragma GCC unroll 2
            for (int higher = 0; higher < 2; higher++) {
                Words now[VECS];
#pragma GCC unroll 4
                for (int vec = 0; vec < VECS; vec++)
                    now[vec] = nibbles(load_words(weights + 2 * PANEL + 4 * (PANEL * word + LANES * vec)), higher);
#pragma GCC unroll 12
                for (int row = 0; row < rows; row++) {
                    const Words factor = as_words(factor_of(INT4, x + row * job->x_stride + 8 * word + 4 * higher));
#pragma GCC unroll 4
                    for (int vec = 0; vec < VECS; vec++)
                        sums[row][vec] = multiply_bytes(now[vec], factor, sums[row][vec]);
                }
            }
        Vec scales[VECS];
#pragma GCC unroll 4
        for (int vec = 0; vec < VECS; vec++)
            scales[vec] = load_bfloat16((const uint16_t *)weights + LANES * vec, LANES);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            const Group *group = (const Group *)(x + row * job->x_stride);
#pragma GCC unroll 4
            for (int vec = 0; vec < VECS; vec++) {
                float *sum = kept + PANEL * row + LANES * vec;
                const Vec whole = whole_to_float(byte_sum(sums[row][vec], splat_word((uint32_t)group->start)));
                store_floats(sum, fma_(whole, mul(scales[vec], splat(group->scale)), load_floats(sum)));
            }
        }
    }
}

#define CASE(kind, rows)                                                                                                                   \
    case rows:                                                                                                                             \
        if (rows <= TILE_ROWS)                                                                                                             \
            kind == INT4 ? tile_of_groups(job, rows) : tile(kind, job, rows);                                                              \
        break;
#define TILES(name, kind)                                                                                                                  \
    static void name(const Tile *job, int64_t rows) {                                                                                      \
        switch (rows) {                                                                                                                    \
            CASE(kind, 1)                                                                                                                  \
            CASE(kind, 2)                                                                                                                  \
            CASE(kind, 3)                                                                                                                  \
            CASE(kind, 4)                                                                                                                  \
            CASE(kind, 5)                                                                                                                  \
            CASE(kind, 6)                                                                                                                  \
            CASE(kind, 7)                                                                                                                  \
            CASE(kind, 8)                                                                                                                  \
            CASE(kind, 9)                                                                                                                  \
            CASE(kind, 10)                                                                                                                 \
            CASE(kind, 11)                                                                                                                 \
            CASE(kind, 12)                                                                                                                 \
        }                                                                                                                                  \
    }
TILES(tile_float, FLOAT32)
TILES(tile_bfloat16, BFLOAT16)
TILES(tile_int8, INT8)
TILES(tile_int4, INT4)

void multiply_tile(int32_t kind, const Tile *job, int64_t rows) {
    if (kind == FLOAT32)
        tile_float(job, rows);
    else if (kind == BFLOAT16)
        tile_bfloat16(job, rows);
    else if (kind == INT8)
        tile_int8(job, rows);
    else
        tile_int4(job, rows);
}
