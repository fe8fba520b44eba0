/* Stores a step's keys and values in their pages, in the layout of attention.c. */
#include "attention.h"

static void store_key(const Job *job, char *tile, int64_t lane, const void *from) {
    if (!job->tiled_keys)
        memcpy(tile, from, job->layer->key_dim * size_of(job->step));
    else
        for (int64_t w = 0; w < job->key_words; w++)
            memcpy((Word *)tile + w * TILE + lane, (const char *)from + w * sizeof(Word), sizeof(Word)); /* possibly unaligned to a word */
}

static void store_value(const Job *job, char *tile, int64_t lane, const void *from) {
    int64_t dim = job->layer->value_dim;
    if (!job->tiled_values)
        memcpy(tile, from, dim * size_of(job->step));
    else if (job->step->kind == FLOAT32)
        memcpy(tile + lane * dim * 4, from, dim * 4);
    else {
        uint16_t *words = (uint16_t *)tile + lane / 2 * dim * 2 + lane % 2;
        for (int64_t d = 0; d < dim; d++)
            words[d * 2] = ((const uint16_t *)from)[d];
    }
}

/* One row's tokens of 16 positions: a single thread writes all tokens that share a word. */
static void store_item(const void *args, int64_t item) {
    const Job *job = args;
    const Step *step = job->step;
    const Attention *layer = job->layer;
    size_t size = size_of(step);
    int64_t row = row_of(job->items, step->rows, item);
    int64_t start = step->starts[row], first = step->offsets[row], end = start + step->offsets[row + 1] - first;
    int64_t tile = start / TILE + item - job->items[row];
    for (int64_t p = most(start, tile * TILE); p < least(end, (tile + 1) * TILE); p++) {
        const char *key = (const char *)job->key + (first + p - start) * job->key_stride * size;
        const char *value = (const char *)job->value + (first + p - start) * job->value_stride * size;
        for (int64_t h = 0; h < layer->kv_heads; h++) {
            store_key(job, place(job, layer->keys, layer->key_dim, row, h, job->tiled_keys ? tile * TILE : p), p % TILE, key + h * layer->key_dim * size);
            if (layer->values)
                store_value(job, place(job, layer->values, layer->value_dim, row, h, job->tiled_values ? tile * TILE : p), p % TILE,
                            value + h * layer->value_dim * size);
        }
    }
}

void store(Member *member, const Attention *layer, const Step *step, const void *key, int64_t key_stride, const void *value, int64_t value_stride) {
    int64_t items[step->rows + 1];
    Job job = prepare(layer, step);
    job.key = key, job.key_stride = key_stride, job.value = value, job.value_stride = value_stride, job.items = items;
    items[0] = 0;
    for (int64_t r = 0; r < step->rows; r++) {
        int64_t start = step->starts[r], end = start + step->offsets[r + 1] - step->offsets[r];
        items[r + 1] = items[r] + (end > start ? (end - 1) / TILE - start / TILE + 1 : 0);
    }
    share(member, items[step->rows], store_item, &job);
}

/* Number of floats that `step->partials` needs for this layer. */
EXPORT int64_t fairlead_partials(const Attention *layer, const Step *step) {
    int64_t tokens = 0;
    for (int64_t r = 0; r < step->rows; r++)
        if (is_split(layer, step, r))
            tokens += segments(layer, step, r) * (step->offsets[r + 1] - step->offsets[r]);
    return tokens * layer->heads * partial_size(layer);
}
