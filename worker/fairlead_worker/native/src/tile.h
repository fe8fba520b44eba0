/* One tile: up to TILE_ROWS rows times one panel of 32 outputs over a run of inputs, with sums in registers. */
#ifndef FAIRLEAD_TILE_H
#define FAIRLEAD_TILE_H
#include <stdint.h>

#include "blocks.h"

#ifdef __AVX512F__
enum { TILE_ROWS = 12 };
#else
enum { TILE_ROWS = 3 }; /* 12 of 16 registers hold sums; 6 rows by half a panel are half as fast, because they load a factor for two products */
#endif

/* The data of a tile. A step is 4 bytes of each row: one float, two bfloat16 or two int16. Without bfloat16 products it is two floats. For
 * blocks a step is that of blocks.h, and a `Group` of each row for each 32 inputs. */
typedef struct {
    const char *x; /* first row; rows are x_stride bytes apart */
    int64_t x_stride;
    const char *weights; /* [steps][32] steps' weights */
    int64_t steps;
    const char *ahead; /* prefetched meanwhile, `ahead_step` bytes at each step */
    int64_t ahead_step;
    int32_t passing; /* prefetch into the second cache only: a fifth faster if one or two tiles use the weights, some percent slower for more */
    void *sums; /* [rows][32] floats, or int32 for INT8; added to */
} Tile;

static inline int64_t step_inputs(int32_t kind) { return kind == FLOAT32 ? 1 : is_block(kind) ? GROUP * step_groups(kind) : 2; }
static inline int64_t step_count(int32_t kind, int64_t inputs) { return (inputs + step_inputs(kind) - 1) / step_inputs(kind); }
static inline int64_t step_bytes(int32_t kind) { return is_block(kind) ? block_step_bytes(kind) : kind == INT8 ? 2 * PANEL : 4 * PANEL; }
static inline int64_t panel_count(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* `rows` is 1 to TILE_ROWS; weights are of `kind`. */
void multiply_tile(int32_t kind, const Tile *job, int64_t rows);
void multiply_blocks(int32_t kind, const Tile *job, int64_t rows);

/* Calls `tile(kind, job, count)` with `rows` as a constant `count`. */
#define CASE(tile, kind, count)                                                                                                            \
    case count:                                                                                                                            \
        if (count <= TILE_ROWS)                                                                                                            \
            tile(kind, job, count);                                                                                                        \
        break;
#define TILES(name, tile, kind)                                                                                                            \
    static void name(const Tile *job, int64_t rows) {                                                                                      \
        switch (rows) {                                                                                                                    \
            CASE(tile, kind, 1)                                                                                                            \
            CASE(tile, kind, 2)                                                                                                            \
            CASE(tile, kind, 3)                                                                                                            \
            CASE(tile, kind, 4)                                                                                                            \
            CASE(tile, kind, 5)                                                                                                            \
            CASE(tile, kind, 6)                                                                                                            \
            CASE(tile, kind, 7)                                                                                                            \
            CASE(tile, kind, 8)                                                                                                            \
            CASE(tile, kind, 9)                                                                                                            \
            CASE(tile, kind, 10)                                                                                                           \
            CASE(tile, kind, 11)                                                                                                           \
            CASE(tile, kind, 12)                                                                                                           \
        }                                                                                                                                  \
    }
#endif
