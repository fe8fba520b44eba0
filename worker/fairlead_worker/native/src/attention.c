/* Attention over paged KV, in place. Online softmax (Milakov and Gimelshein 2018) by blocks of keys, as FlashAttention; few queries over
 * many keys are split along the keys and merged, as FlashDecoding.
 *
 * Blocks and segments of keys begin at fixed positions, and segments are merged in their order: a query's bits depend on its own KV and
 * position alone, not on the batch, the number of threads, the page size, or on how its prompt was cut into chunks.
 *
 * A KV head's part of a page is [page_size / 16] tiles as in page_tiles.h, where that divides (and bfloat16 keys are of an even size). Other
 * pages are plain, [page_size][dim], and made into tiles block by block, within the cache. */
#include <math.h>
#include <string.h>

#include "page_tiles.h"
#include "vector.h"

enum { BLOCK = TILES * TILE, SEGMENT = 4 * BLOCK, BLOCK_ROWS = 48, SPLIT_TOKENS = 8 };

typedef struct {
    const Attention *layer;
    const Step *step;
    const void *query, *key, *value;
    void *output;
    int64_t query_stride, key_stride, value_stride, output_stride;
    int64_t key_words, group, block_heads, head_blocks, block_tokens;
    int8_t tiled_keys, tiled_values;
    int64_t merges;
    int64_t *items; /* [rows + 1] where each row's items begin */
    int64_t *slots; /* [rows + 1] where each row's partial results begin, in tokens */
    int64_t *split; /* [merges] rows that have such */
} Job;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static size_t size_of(const Step *step) { return step->kind == BFLOAT16 ? 2 : 4; }

static int64_t first_key(const Attention *layer, int64_t position) { return layer->window ? most(0, position - layer->window + 1) : 0; }

/* Segments of keys that a row sees. */
static int64_t segments(const Attention *layer, const Step *step, int64_t row) {
    int64_t start = step->starts[row], end = start + step->offsets[row + 1] - step->offsets[row];
    return (end - 1) / SEGMENT - first_key(layer, start) / SEGMENT + 1;
}

static int is_split(const Attention *layer, const Step *step, int64_t row) {
    return step->offsets[row + 1] - step->offsets[row] <= SPLIT_TOKENS && segments(layer, step, row) > 1;
}

static int64_t partial_size(const Attention *layer) { return up(layer->value_dim, 16) * 16 + 16; }

static int64_t row_of(const int64_t *begins, int64_t rows, int64_t item) {
    int64_t low = 0;
    while (rows > 1) {
        int64_t half = rows / 2;
        low += begins[low + half] <= item ? half : 0;
        rows -= half;
    }
    return low;
}

static Job prepare(const Attention *layer, const Step *step) {
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

/* Where the first of a tile's (or, in plain pages, one) key is kept. */
static char *place(const Job *job, void *storage, int64_t dim, int64_t row, int64_t kv_head, int64_t position) {
    const Step *step = job->step;
    int64_t page = step->page_indices[step->page_indptr[row] + position / step->page_size];
    int64_t slot = (page * job->layer->kv_heads + kv_head) * step->page_size + position % step->page_size;
    return (char *)storage + slot * dim * (int64_t)size_of(step);
}

/* ---- store ---- */

static void store_key(const Job *job, char *tile, int64_t lane, const void *from) {
    if (!job->tiled_keys)
        memcpy(tile, from, job->layer->key_dim * size_of(job->step));
    else
        for (int64_t w = 0; w < job->key_words; w++)
            memcpy((Word *)tile + w * TILE + lane, (const char *)from + w * sizeof(Word), sizeof(Word)); /* perhaps at half a word */
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

/* One row's tokens of 16 positions: whoever shares a word is written by one thread. */
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

/* ---- one block of queries over one segment ---- */

/* Queries of neighbouring tokens for neighbouring heads of one KV head: row i is token i / heads, head i % heads. */
typedef struct {
    const Job *job;
    int64_t row, kv_head, head, heads, token, tokens; /* the first head and token (of the row), and how many */
    int64_t position, first;                          /* of the first token, and the first key that it sees */
    int64_t keys;                                     /* of the whole row */
    const Word *query;                                /* [tokens * heads][key_words] */
    Word *key_tiles, *value_tiles;                    /* room for what is not in tiles as it stands */
} Queries;

/* A tile from plain pages: keys from `from` to `to` of it, zeros for the others, which may be anybody's. */
static void gather(const Queries *q, void *storage, int64_t dim, int is_key, int64_t tile, int64_t from, int64_t to, Word *out) {
    int wide = q->job->step->kind == FLOAT32;
    int64_t words = wide ? dim : up(dim, 2);
    memset(out, 0, (is_key ? words * TILE : dim * TILE / (wide ? 1 : 2)) * sizeof(Word));
    for (int64_t k = from; k < to; k++) {
        const char *source = place(q->job, storage, dim, q->row, q->kv_head, tile * TILE + k);
        if (wide)
            for (int64_t d = 0; d < dim; d++)
                out[is_key ? d * TILE + k : k * dim + d] = ((const Word *)source)[d];
        else
            for (int64_t d = 0; d < dim; d++) {
                Word half = ((const uint16_t *)source)[d];
                if (is_key)
                    out[d / 2 * TILE + k] |= half << (d % 2 * 16);
                else
                    out[k / 2 * dim + d] |= half << (k % 2 * 16);
            }
    }
}

/* The keys `from` to `to` of a tile of values, zeros for the others: zero times what another left there might be NaN. */
static void copy_values(const Queries *q, const Word *tile, int64_t from, int64_t to, Word *out) {
    int64_t dim = q->job->layer->value_dim;
    int wide = q->job->step->kind == FLOAT32;
    for (int64_t w = 0; w < (wide ? TILE : TILE / 2); w++) {
        int64_t low = wide ? w : 2 * w;
        Word mask = wide ? (low >= from && low < to ? ~0u : 0) : (low >= from && low < to ? 0xFFFFu : 0) | (low + 1 >= from && low + 1 < to ? 0xFFFF0000u : 0);
        for (int64_t d = 0; d < dim; d++)
            out[w * dim + d] = tile[w * dim + d] & mask;
    }
}

/* Where `count` tiles from `first` lie, as token slots of the KV head; only for pages that are whole tiles. */
static void locate(const Queries *q, int64_t first, int count, int64_t *slots) {
    const Step *step = q->job->step;
    const int32_t *pages = step->page_indices + step->page_indptr[q->row];
    int32_t in_page = step->page_size / TILE, page = (int32_t)first / in_page, part = (int32_t)first % in_page;
    for (int t = 0; t < count; t++) {
        slots[t] = (pages[page] * (int64_t)q->job->layer->kv_heads + q->kv_head) * step->page_size + part * TILE;
        if (++part == in_page)
            part = 0, page++;
    }
}

/* Tiles lie anywhere, which no prefetcher in hardware foresees: asks for them while other work is done. */
static void fetch(const void *storage, int64_t bytes, const int64_t *slots, int count) {
    for (int t = 0; t < count; t++)
        for (int64_t byte = 0; byte < bytes * TILE; byte += 64)
            _mm_prefetch((const char *)storage + slots[t] * bytes + byte, _MM_HINT_T0);
}

static void find_tiles(const Queries *q, int64_t first, int count, const int64_t *slots, const Word **keys, const Word **values) {
    const Job *job = q->job;
    const Attention *layer = job->layer;
    int64_t size = size_of(job->step);
    Word *key_tile = q->key_tiles, *value_tile = q->value_tiles;
    for (int t = 0; t < count; t++) {
        int64_t tile = first + t;
        int64_t from = most(0, q->first - tile * TILE), to = least(TILE, q->keys - tile * TILE);
        if (job->tiled_keys)
            keys[t] = (const Word *)((const char *)layer->keys + slots[t] * layer->key_dim * size);
        else {
            gather(q, layer->keys, layer->key_dim, 1, tile, from, to, key_tile);
            keys[t] = key_tile;
            key_tile += job->key_words * TILE;
        }
        const Word *at = job->tiled_values ? (const Word *)((const char *)layer->values + slots[t] * layer->value_dim * size) : NULL;
        int whole = at && from == 0 && to == TILE;
        values[t] = whole ? at : value_tile;
        if (whole)
            continue;
        if (at)
            copy_values(q, at, from, to, value_tile);
        else
            gather(q, layer->values, layer->value_dim, 0, tile, from, to, value_tile);
        value_tile += layer->value_dim * TILE;
    }
    keys[count] = keys[count - 1];
}

static __mmask16 below(int64_t n) { return n >= 16 ? 0xFFFF : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

/* Scores [rows][BLOCK] of keys from `base` become weights, as floats or pairs of bfloat16 in the same place. */
INLINE void soften(Kind kind, const Queries *q, int64_t base, int count, float *scores, float *max, float *sum, float *keep) {
    const Attention *layer = q->job->layer;
    int64_t rows = q->tokens * q->heads;
    __m512 scaling = _mm512_set1_ps(layer->scaling), cap = _mm512_set1_ps(layer->softcap), hidden = _mm512_set1_ps(-INFINITY);
    float sums[BLOCK_ROWS];
    for (int64_t r = 0; r < rows; r++) {
        float *row = scores + r * BLOCK;
        int64_t position = q->position + r / q->heads;
        int64_t end = position + 1 - base, begin = first_key(layer, position) - base;
        int all = begin <= 0 && end >= count * TILE;
        __m512 s[TILES], highest = hidden;
        for (int t = 0; t < count; t++) {
            s[t] = _mm512_mul_ps(_mm512_loadu_ps(row + t * TILE), scaling);
            if (layer->softcap != 0)
                s[t] = _mm512_mul_ps(tanh16(_mm512_div_ps(s[t], cap)), cap);
            if (!all)
                s[t] = _mm512_mask_mov_ps(hidden, below(end - t * TILE) & ~below(begin - t * TILE), s[t]);
            highest = _mm512_max_ps(highest, s[t]);
        }
        float now = fmaxf(max[r], _mm512_reduce_max_ps(highest));
        /* Nothing seen so far: any finite number will do, as all the weights are 0. */
        __m512 reference = _mm512_set1_ps(now == -INFINITY ? 0 : now), total = _mm512_setzero_ps();
        for (int t = 0; t < count; t++) {
            __m512 weight = exp16(_mm512_sub_ps(s[t], reference));
            total = _mm512_add_ps(total, weight);
            if (kind == BFLOAT16)
                _mm256_storeu_si256((__m256i *)(row + t * TILE / 2), (__m256i)_mm512_cvtneps_pbh(weight));
            else
                _mm512_storeu_ps(row + t * TILE, weight);
        }
        sums[r] = _mm512_reduce_add_ps(total);
        keep[r] = now == -INFINITY ? 0 : max[r] - now;
        max[r] = now;
    }
    for (int64_t r = 0; r < rows; r += 16)
        _mm512_storeu_ps(keep + r, exp16(_mm512_loadu_ps(keep + r)));
    for (int64_t r = 0; r < rows; r++)
        sum[r] = sum[r] * keep[r] + sums[r];
}

/* max, sum [rows] and output [rows][stride] of the keys of one segment; rows that see none of them get -inf, 0 and zeros. */
INLINE void attend_segment(Kind kind, const Queries *q, int64_t segment, float *max, float *sum, float *output, int64_t stride) {
    _Alignas(64) float scores[BLOCK_ROWS * BLOCK], keep[BLOCK_ROWS] = {0};
    const Attention *layer = q->job->layer;
    int64_t rows = q->tokens * q->heads, dim = layer->value_dim;
    int64_t end = least(q->position + q->tokens, (segment + 1) * SEGMENT);
    for (int64_t r = 0; r < rows; r++)
        max[r] = -INFINITY, sum[r] = 0;
    memset(output, 0, rows * stride * sizeof(float));
    int64_t slots[2 * TILES], size = (int64_t)size_of(q->job->step);
    for (int64_t block = most(segment * SEGMENT, q->first / BLOCK * BLOCK); block < end; block += BLOCK) {
        int64_t first = most(block, q->first) / TILE, last = up(least(block + BLOCK, end), TILE), next = up(least(block + 2 * BLOCK, end), TILE);
        int count = (int)(last - first), ahead = (int)(next - last);
        const Word *keys[TILES + 1], *values[TILES + 1];
        if (q->job->tiled_values)
            locate(q, first, count + ahead, slots);
        find_tiles(q, first, count, slots, keys, values);
        if (q->job->tiled_values)
            fetch(layer->values, layer->value_dim * size, slots, count);
        score_all(kind, rows, q->query, q->job->key_words, keys, count, scores);
        if (q->job->tiled_keys)
            fetch(layer->keys, layer->key_dim * size, slots + count, ahead);
        soften(kind, q, first * TILE, count, scores, max, sum, keep);
        mix_all(kind, rows, scores, values, count, dim, keep, output, stride);
    }
}

/* Adds a later segment's result to what there is. */
static void merge(float *max, float *sum, float *output, float other_max, float other_sum, const float *other, int64_t stride) {
    float now = fmaxf(*max, other_max);
    if (now == -INFINITY)
        return;
    float mine = exp1(*max - now), its = exp1(other_max - now);
    *sum = *sum * mine + other_sum * its;
    *max = now;
    __m512 a = _mm512_set1_ps(mine), b = _mm512_set1_ps(its);
    for (int64_t d = 0; d < stride; d += 16)
        _mm512_storeu_ps(output + d, _mm512_fmadd_ps(_mm512_loadu_ps(output + d), a, _mm512_mul_ps(_mm512_loadu_ps(other + d), b)));
}

static void write_row(const Job *job, int64_t token, int64_t head, const float *output, float sum) {
    int64_t dim = job->layer->value_dim, at = token * job->output_stride + head * dim;
    __m512 factor = _mm512_set1_ps(1.0f / sum);
    for (int64_t d = 0; d < dim; d += 16) {
        __mmask16 some = below(dim - d);
        __m512 result = _mm512_mul_ps(_mm512_loadu_ps(output + d), factor);
        if (job->step->kind == BFLOAT16)
            _mm256_mask_storeu_epi16((uint16_t *)job->output + at + d, some, (__m256i)_mm512_cvtneps_pbh(result));
        else
            _mm512_mask_storeu_ps((float *)job->output + at + d, some, result);
    }
}

/* ---- items ---- */

static void copy_queries(const Queries *q, Word *out) {
    const Job *job = q->job;
    int64_t dim = job->layer->key_dim, token = job->step->offsets[q->row] + q->token;
    size_t size = size_of(job->step);
    for (int64_t r = 0; r < q->tokens * q->heads; r++) {
        int64_t head = q->kv_head * job->group + q->head + r % q->heads;
        const char *from = (const char *)job->query + ((token + r / q->heads) * job->query_stride + head * dim) * (int64_t)size;
        out[(r + 1) * job->key_words - 1] = 0; /* the last word is half a word where bfloat16 comes in an odd size */
        memcpy(out + r * job->key_words, from, dim * size);
    }
}

INLINE void attend_item(Kind kind, const Job *job, int64_t item) {
    const Attention *layer = job->layer;
    const Step *step = job->step;
    int64_t row = row_of(job->items, step->rows, item), local = item - job->items[row];
    int64_t count = step->offsets[row + 1] - step->offsets[row], start = step->starts[row];
    int split = is_split(layer, step, row);
    Queries q = {.job = job, .row = row, .keys = start + count};
    q.kv_head = local % layer->kv_heads, local /= layer->kv_heads;
    q.head = local % job->head_blocks * job->block_heads, local /= job->head_blocks;
    int64_t blocks = up(count, job->block_tokens);
    q.token = (blocks - 1 - local % blocks) * job->block_tokens, local /= blocks; /* those with the most keys come first */
    q.heads = least(job->block_heads, job->group - q.head), q.tokens = least(job->block_tokens, count - q.token);
    q.position = start + q.token, q.first = first_key(layer, q.position);

    int64_t rows = q.heads * q.tokens, stride = up(layer->value_dim, 16) * 16;
    Word query[rows * job->key_words];
    Word key_tiles[job->tiled_keys ? 1 : job->key_words * BLOCK], value_tiles[(job->tiled_values ? 2 * TILE : BLOCK) * layer->value_dim];
    float output[rows * stride], max[BLOCK_ROWS], sum[BLOCK_ROWS];
    copy_queries(&q, query);
    q.query = query, q.key_tiles = key_tiles, q.value_tiles = value_tiles;
    int64_t token = step->offsets[row] + q.token, head = q.kv_head * job->group + q.head;

    if (split) {
        int64_t size = partial_size(layer);
        attend_segment(kind, &q, first_key(layer, start) / SEGMENT + local, max, sum, output, stride);
        for (int64_t r = 0; r < rows; r++) {
            int64_t slot = job->slots[row] + local * count + q.token + r / q.heads;
            float *partial = step->partials + (slot * layer->heads + head + r % q.heads) * size;
            partial[0] = max[r], partial[1] = sum[r];
            memcpy(partial + 16, output + r * stride, stride * sizeof(float));
        }
        return;
    }
    int64_t segment = q.first / SEGMENT, last = (q.position + q.tokens - 1) / SEGMENT;
    attend_segment(kind, &q, segment, max, sum, output, stride);
    if (segment < last) {
        float other[rows * stride], other_max[BLOCK_ROWS], other_sum[BLOCK_ROWS];
        while (++segment <= last) {
            attend_segment(kind, &q, segment, other_max, other_sum, other, stride);
            for (int64_t r = 0; r < rows; r++)
                merge(max + r, sum + r, output + r * stride, other_max[r], other_sum[r], other + r * stride, stride);
        }
    }
    for (int64_t r = 0; r < rows; r++)
        write_row(job, token + r / q.heads, head + r % q.heads, output + r * stride, sum[r]);
}

static void attend_float32(const void *job, int64_t item) { attend_item(FLOAT32, job, item); }
static void attend_bfloat16(const void *job, int64_t item) { attend_item(BFLOAT16, job, item); }

/* The segments of one row's tokens for the heads of one KV head. */
static void merge_item(const void *args, int64_t item) {
    const Job *job = args;
    const Attention *layer = job->layer;
    int64_t row = job->split[item / layer->kv_heads], kv_head = item % layer->kv_heads;
    int64_t first = job->step->offsets[row], count = job->step->offsets[row + 1] - first;
    int64_t size = partial_size(layer), stride = size - 16, parts = segments(layer, job->step, row);
    float output[stride];
    for (int64_t token = 0; token < count; token++)
        for (int64_t head = kv_head * job->group; head < (kv_head + 1) * job->group; head++) {
            const float *partial = job->step->partials + ((job->slots[row] + token) * layer->heads + head) * size;
            float max = partial[0], sum = partial[1];
            memcpy(output, partial + 16, stride * sizeof(float));
            for (int64_t part = 1; part < parts; part++) {
                partial += count * layer->heads * size;
                merge(&max, &sum, output, partial[0], partial[1], partial + 16, stride);
            }
            write_row(job, first + token, head, output, sum);
        }
}

void attend(Member *member, const Attention *layer, const Step *step, const void *query, int64_t query_stride, void *output, int64_t output_stride) {
    int64_t items[step->rows + 1], slots[step->rows + 1], split[step->rows + 1];
    Job job = prepare(layer, step);
    job.query = query, job.query_stride = query_stride, job.output = output, job.output_stride = output_stride;
    job.items = items, job.slots = slots, job.split = split;
    items[0] = slots[0] = 0;
    for (int64_t r = 0; r < step->rows; r++) {
        int64_t count = step->offsets[r + 1] - step->offsets[r], parts = is_split(layer, step, r) ? segments(layer, step, r) : 0;
        items[r + 1] = items[r] + layer->kv_heads * job.head_blocks * up(count, job.block_tokens) * most(1, parts);
        slots[r + 1] = slots[r] + parts * count;
        if (parts)
            split[job.merges++] = r;
    }
    share(member, items[step->rows], step->kind == BFLOAT16 ? attend_bfloat16 : attend_float32, &job);
    if (job.merges)
        share(member, job.merges * layer->kv_heads, merge_item, &job);
}

/* ---- entry points ---- */

/* Floats that `step->partials` needs for this layer. */
EXPORT int64_t fairlead_partials(const Attention *layer, const Step *step) {
    int64_t tokens = 0;
    for (int64_t r = 0; r < step->rows; r++)
        if (is_split(layer, step, r))
            tokens += segments(layer, step, r) * (step->offsets[r + 1] - step->offsets[r]);
    return tokens * layer->heads * partial_size(layer);
}

static void attention_body(Member *member, const void *args) {
    const Job *job = args;
    store(member, job->layer, job->step, job->key, job->key_stride, job->value, job->value_stride);
    attend(member, job->layer, job->step, job->query, job->query_stride, job->output, job->output_stride);
}

EXPORT void fairlead_attention(int32_t threads, const Attention *layer, const Step *step, const void *query, int64_t query_stride, const void *key,
                               int64_t key_stride, const void *value, int64_t value_stride, void *output, int64_t output_stride) {
    Job job = {.layer = layer, .step = step, .query = query, .key = key, .value = value, .output = output};
    job.query_stride = query_stride, job.key_stride = key_stride, job.value_stride = value_stride, job.output_stride = output_stride;
    region(threads, attention_body, &job);
}
