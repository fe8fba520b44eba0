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

TILES(tile_float, tile, FLOAT32)
TILES(tile_bfloat16, tile, BFLOAT16)
TILES(tile_int8, tile, INT8)

void multiply_tile(int32_t kind, const Tile *job, int64_t rows) {
    if (is_block(kind))
        multiply_blocks(kind, job, rows);
    else if (kind == FLOAT32)
        tile_float(job, rows);
    else if (kind == BFLOAT16)
        tile_bfloat16(job, rows);
    else
        tile_int8(job, rows);
}
