/* One tile: up to TILE_ROWS rows times one panel of 32 outputs over a run of inputs, with sums in registers. */
#ifndef FAIRLEAD_TILE_H
#define FAIRLEAD_TILE_H
#include <stdint.h>

#include "native.h"

enum { PANEL = 32 };
#ifdef __AVX512F__
enum { TILE_ROWS = 12 };
#else
enum { TILE_ROWS = 3 }; /* 12 of 16 registers hold sums; 6 rows by half a panel are half as fast, because they load a factor for two products */
#endif

enum { GROUP = 32 }; /* inputs that share a scale if weights are INT4, as in ggml's Q4_0 and Q8_0 */

/* A group of a row's inputs for INT4 weights. Weights are multiplied as 0 to 15 instead of -8 to 7; `start` compensates for it. */
typedef struct {
    int8_t x[GROUP];
    float scale;
    int32_t start; /* -8 times the sum of x */
} Group;

/* The data of a tile. A step is 4 bytes of each row: one float, two bfloat16 or two int16. Without bfloat16 products it is two floats. For
 * INT4 a step is a group of inputs: a `Group` of each row, and for the weights 32 scales, then [4][32] words with the inputs 8 by 8, see
 * pack.c. */
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

static inline int64_t step_inputs(int32_t kind) { return kind == FLOAT32 ? 1 : kind == INT4 ? GROUP : 2; }
static inline int64_t step_count(int32_t kind, int64_t inputs) { return (inputs + step_inputs(kind) - 1) / step_inputs(kind); }
static inline int64_t step_bytes(int32_t kind) { return kind == INT4 ? (2 + GROUP / 2) * PANEL : kind == INT8 ? 2 * PANEL : 4 * PANEL; }
static inline int64_t panel_count(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* `rows` is 1 to TILE_ROWS; weights are of `kind`. */
void multiply_tile(int32_t kind, const Tile *job, int64_t rows);
#endif
