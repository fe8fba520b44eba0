/* The job of one call of `store` or `attend`, and the location of a row's KV. */
#ifndef FAIRLEAD_ATTENTION_H
#define FAIRLEAD_ATTENTION_H
#include "page_tiles.h"

enum { BLOCK = TILES * TILE, SEGMENT = 4 * BLOCK, BLOCK_ROWS = 48, SPLIT_TOKENS = 8 };

typedef struct {
    const Attention *layer;
    const Step *step;
    const void *query, *key, *value;
    void *output;
    int64_t query_stride, key_stride, value_stride, output_stride;
    int64_t key_words, group, block_heads, head_blocks, block_tokens;
    int8_t tiled_keys, tiled_values;
    int32_t threads;
    int64_t merges;
    int64_t *items; /* [rows + 1] where each row's items begin */
    int64_t *slots; /* [rows + 1] where each row's partial results begin, in tokens */
    int64_t *split; /* [merges] rows with partial results */
} Job;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline size_t size_of(const Step *step) { return step->kind == BFLOAT16 ? 2 : 4; }

static inline int64_t first_key(const Attention *layer, int64_t position) {
    if (layer->chunk)
        return position / layer->chunk * layer->chunk;
    return layer->window ? most(0, position - layer->window + 1) : 0;
}

/* Number of key segments that a row sees. */
static inline int64_t segments(const Attention *layer, const Step *step, int64_t row) {
    int64_t start = step->starts[row], end = start + step->offsets[row + 1] - step->offsets[row];
    return (end - 1) / SEGMENT - first_key(layer, start) / SEGMENT + 1;
}

static inline int is_split(const Attention *layer, const Step *step, int64_t row) {
    return step->offsets[row + 1] - step->offsets[row] <= SPLIT_TOKENS && segments(layer, step, row) > 1;
}

static inline int64_t partial_size(const Attention *layer) { return up(layer->value_dim, 16) * 16 + 16; }

static inline int64_t row_of(const int64_t *begins, int64_t rows, int64_t item) {
    int64_t low = 0;
    while (rows > 1) {
        int64_t half = rows / 2;
        low += begins[low + half] <= item ? half : 0;
        rows -= half;
    }
    return low;
}

static inline Job prepare(const Attention *layer, const Step *step) {
    Job job = {.layer = layer, .step = step};
    job.tiled_values = step->page_size % TILE == 0;
    job.tiled_keys = job.tiled_values && (step->kind == FLOAT32 || layer->key_dim % 2 == 0);
    job.key_words = step->kind == BFLOAT16 ? up(layer->key_dim, 2) : layer->key_dim;
    job.group = layer->heads / layer->kv_heads;
    job.block_heads = least(job.group, BLOCK_ROWS);
    job.head_blocks = up(job.group, job.block_heads);
    job.block_tokens = BLOCK_ROWS / job.block_heads;
    return job;
}

/* Address of a key: the first one of its tile, or itself in plain pages. */
static inline char *place(const Job *job, void *storage, int64_t dim, int64_t row, int64_t kv_head, int64_t position) {
    const Step *step = job->step;
    int64_t page = step->page_indices[step->page_indptr[row] + position / step->page_size];
    int64_t slot = (page * job->layer->kv_heads + kv_head) * step->page_size + position % step->page_size;
    return (char *)storage + slot * dim * (int64_t)size_of(step);
}
#endif
