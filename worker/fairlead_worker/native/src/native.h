/* Shared declarations of the library. Activations and KV have one kind throughout a step; sums are always float.
 *
 * Each operation has two forms: `name(Member *, ...)`, which every thread of a region calls and which ends with a barrier, and an exported
 * `fairlead_name(int32_t threads, ...)`, which opens a region for the operation alone. */
#ifndef FAIRLEAD_NATIVE_H
#define FAIRLEAD_NATIVE_H
#include <stdint.h>

#include "team.h"

/* Sources with vector code are compiled once for each level, with -DLEVEL=avx2 and so on. Shared and exported names carry the level, so
 * that one library holds all of them. */
#ifdef LEVEL
#define JOIN_NAMES(name, level) name##_##level
#define JOIN_VALUES(name, level) JOIN_NAMES(name, level)
#define AT_LEVEL(name) JOIN_VALUES(name, LEVEL)
#define activate AT_LEVEL(activate)
#define add_linear AT_LEVEL(add_linear)
#define attend AT_LEVEL(attend)
#define decode AT_LEVEL(decode)
#define gather AT_LEVEL(gather)
#define linear AT_LEVEL(linear)
#define multiply_blocks AT_LEVEL(multiply_blocks)
#define multiply_tile AT_LEVEL(multiply_tile)
#define normalise AT_LEVEL(normalise)
#define rotate AT_LEVEL(rotate)
#define round_group AT_LEVEL(round_group)
#define widen AT_LEVEL(widen)
#define fairlead_activate AT_LEVEL(fairlead_activate)
#define fairlead_attention AT_LEVEL(fairlead_attention)
#define fairlead_decode AT_LEVEL(fairlead_decode)
#define fairlead_largest AT_LEVEL(fairlead_largest)
#define fairlead_linear AT_LEVEL(fairlead_linear)
#define fairlead_linears AT_LEVEL(fairlead_linears)
#define fairlead_normalise AT_LEVEL(fairlead_normalise)
#define fairlead_pack AT_LEVEL(fairlead_pack)
#define fairlead_rotate AT_LEVEL(fairlead_rotate)
#endif

#define EXPORT __attribute__((visibility("default")))

typedef enum {
    FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, Q4_0 = 3, Q4_1 = 4, Q5_0 = 5, Q5_1 = 6, Q8_0 = 7, Q4_K = 8, Q5_K = 9, Q6_K = 10
} Kind; /* from Q4_0 on: ggml's block types, see blocks.h */

/* 32 outputs, packed by pack.c. */
typedef struct {
    const void *weights;
    int64_t kind;
} Panel;

/* One linear layer. Its panels may be of several kinds. */
typedef struct {
    int64_t inputs, outputs;
    const Panel *panels; /* [outputs / 32, rounded up] */
    const float *scales; /* [outputs], or NULL: none */
    const void *bias;    /* [outputs] of the activations' kind, or NULL */
    int32_t kinds; /* bit k: a panel may be of kind k */
    int32_t kind; /* of the activations: FLOAT32 or BFLOAT16 */
} Linear;

EXPORT int64_t fairlead_packed_bytes(int32_t kind, int64_t outputs, int64_t inputs);

/* y[row * y_stride + o] = sum_i x[row * x_stride + i] * w[o][i] + bias[o]; strides in elements; y of `y_kind`. A row's bits do not depend
 * on the number of rows. */
void linear(Member *member, const Linear *layer, const void *x, int64_t x_stride, int64_t rows, void *y, int64_t y_stride, int32_t y_kind);

/* The same, added to y. */
void add_linear(Member *member, const Linear *layer, const void *x, int64_t x_stride, int64_t rows, float *y, int64_t y_stride);

/* XIELU (Huang and Schlag 2024) is slope * x + positive * x^2 to the right of 0, slope * x + negative * (e^x - 1 - x) to the left. */
typedef struct {
    enum { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, SQUARED_RELU = 4, XIELU = 5 } function;
    float positive, negative, slope;
} Activation;

/* The first half of an MLP: y[row * y_stride + o] = act(sum of output o), of the layer's kind. Gated: the outputs' first half is activated
 * and multiplied by the second, act(sum of output o) * (sum of output outputs / 2 + o); outputs / 2 is a multiple of 32. No sum is rounded
 * before the activation and the product. */
void activate(Member *member, const Linear *layer, Activation activation, int gated, const void *x, int64_t x_stride, int64_t rows, void *y,
              int64_t y_stride);

/* One layer's attention and its pages: keys [pages][kv_heads][...] in the layout of attention.c. */
typedef struct {
    void *keys, *values; /* values NULL: a key begins with its value, whose size is a multiple of 4 */
    int32_t heads, kv_heads, key_dim, value_dim;
    float scaling;
    float softcap;  /* 0: none */
    int64_t window; /* 0: none; else a query at p sees p - window + 1 .. p */
    int64_t chunk;  /* 0: none; else a query at p sees p / chunk * chunk .. p */
    const float *sinks; /* [heads] the score of one more key, without a value; NULL: none */
} Attention;

/* A packed step: R rows of consecutive tokens, as `PackedStep` of kernels/base.py. */
typedef struct {
    int64_t rows, tokens;
    const int32_t *starts;       /* [R] position of a row's first token */
    const int32_t *offsets; /* [R + 1] index of each row's first token among the step's tokens */
    const int32_t *page_indptr;  /* [R + 1] */
    const int32_t *page_indices; /* pages of row r: page_indices[page_indptr[r] .. page_indptr[r + 1]) */
    int32_t page_size;
    int32_t kind; /* of query, KV and output: FLOAT32 or BFLOAT16 */
    float *partials; /* `fairlead_partials` floats, the most of any layer; NULL if that is 0 */
} Step;

/* Stores the step's keys [T][kv_heads][key_dim] and values [T][kv_heads][value_dim] in their pages. Strides in elements between tokens. */
void store(Member *member, const Attention *layer, const Step *step, const void *key, int64_t key_stride, const void *value, int64_t value_stride);

/* Attends with query [T][heads][key_dim] over all KV of its row up to itself -> output [T][heads][value_dim]. Call it after `store`. */
void attend(Member *member, const Attention *layer, const Step *step, const void *query, int64_t query_stride, void *output, int64_t output_stride);
#endif
