/* Attention over paged KV, in place. Online softmax (Milakov and Gimelshein 2018) by blocks of keys, as FlashAttention. Few queries over
 * many keys are split along the keys and merged, as FlashDecoding.
 *
 * Blocks and segments of keys begin at fixed positions, and segments are merged in order. So a query's bits depend on its own KV and
 * position alone, not on the batch, the number of threads, the page size, or the chunks of its prompt.
 *
 * A KV head's part of a page is [page_size / 16] tiles as in page_tiles.h, if that divides (and bfloat16 keys have an even size). Other
 * pages are plain, [page_size][dim], and are converted to tiles block by block, within the cache. */
#include "attention.h"

/* ---- one block of queries over one segment ---- */

/* Queries of neighbouring tokens for neighbouring heads of one KV head: row i is token i / heads, head i % heads. */
typedef struct {
    const Job *job;
    int64_t row, kv_head, head, heads, token, tokens; /* the first head and token (of the row), and how many */
    int64_t position, first;                          /* of the first token, and the first key that it sees */
    int64_t keys;                                     /* of the whole row */
    const Word *query;                                /* [tokens * heads][key_words] factors */
    Word *key_tiles, *value_tiles; /* scratch for keys and values that are not stored as tiles */
} Queries;

/* Builds a tile from plain pages: keys `from` to `to`, zeros for the others, which may belong to other requests. */
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

/* Copies the keys `from` to `to` of a tile of values, with zeros for the others: zero times stale memory might be NaN. */
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

typedef Word Four __attribute__((vector_size(16), aligned(4), may_alias));

INLINE void transpose(Four *a) {
    const Four ab = __builtin_shufflevector(a[0], a[1], 0, 4, 1, 5), ab2 = __builtin_shufflevector(a[0], a[1], 2, 6, 3, 7);
    const Four cd = __builtin_shufflevector(a[2], a[3], 0, 4, 1, 5), cd2 = __builtin_shufflevector(a[2], a[3], 2, 6, 3, 7);
    a[0] = __builtin_shufflevector(ab, cd, 0, 1, 4, 5), a[1] = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    a[2] = __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5), a[3] = __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7);
}

/* Makes a tile of values of the first dimensions (a multiple of 4) of a tile of keys, for keys that contain their values; zeros for others
 * than `from` to `to`. */
static const Word *take_values(const Queries *q, const Word *keys, int64_t from, int64_t to, Word *out) {
    const int64_t dim = q->job->layer->value_dim;
    const int wide = q->job->step->kind == FLOAT32;
    const Four low = {0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF};
    for (int64_t d = 0; d < dim; d += 4)
        for (int64_t k = 0; k < TILE; k += wide ? 4 : 8) {
            Four part[4];
            const Word *words = keys + (wide ? d : d / 2) * TILE + k;
            for (int i = 0; wide && i < 4; i++)
                part[i] = *(const Four *)(words + i * TILE);
            for (int i = 0; !wide && i < 4; i += 2, words += TILE) {
                const Four a = *(const Four *)words, b = *(const Four *)(words + 4);
                const Four even = __builtin_shufflevector(a, b, 0, 2, 4, 6), odd = __builtin_shufflevector(a, b, 1, 3, 5, 7);
                part[i] = (even & low) | odd << 16, part[i + 1] = even >> 16 | (odd & ~low);
            }
            transpose(part);
            for (int i = 0; i < 4; i++)
                *(Four *)(out + ((wide ? k : k / 2) + i) * dim + d) = part[i];
        }
    if (from > 0 || to < TILE)
        copy_values(q, out, from, to, out);
    return out;
}

/* The tiles of one block of keys that some of the queries see, as token slots of the KV head, for pages of whole tiles. */
typedef struct {
    int64_t first;
    int count;
    int64_t slots[TILES];
} Block;

static Block block_of(const Queries *q, int64_t block) {
    const Step *step = q->job->step;
    Block found = {.first = most(block, q->first) / TILE};
    found.count = (int)(up(least(block + BLOCK, q->position + q->tokens), TILE) - found.first);
    if (!q->job->tiled_values)
        return found;
    const int32_t *pages = step->page_indices + step->page_indptr[q->row];
    int32_t in_page = step->page_size / TILE, page = (int32_t)found.first / in_page, part = (int32_t)found.first % in_page;
    for (int t = 0; t < found.count; t++) {
        found.slots[t] = (pages[page] * (int64_t)q->job->layer->kv_heads + q->kv_head) * step->page_size + part * TILE;
        if (++part == in_page)
            part = 0, page++;
    }
    return found;
}

/* The tiles of a block in `storage`, whose tokens take `bytes` each. */
static void stored(const void *storage, int64_t bytes, const Block *block, const Word **tiles) {
    for (int t = 0; t < block->count; t++)
        tiles[t] = (const Word *)((const char *)storage + block->slots[t] * bytes);
}

/* The tiles to prefetch while `tiles` are used (page_tiles.h): each tile of `next` together with its counterpart. Tiles without a
 * counterpart are prefetched here. If `next` has fewer, the rest are tiles that are already loaded, up to the spare one of an odd count
 * (`score_all`). */
static const Word *const *ahead_of(const void *storage, int64_t bytes, const Block *next, const Word *const *tiles, int count, const Word **ahead) {
    if (next->count == 0)
        return NULL;
    stored(storage, bytes, next, ahead);
    for (int t = next->count; t <= count; t++)
        ahead[t] = tiles[0];
    for (int t = count; t < next->count; t++)
        for (int64_t byte = 0; byte < bytes * TILE; byte += 64)
            ask((const char *)ahead[t] + byte);
    return ahead;
}

static void find_tiles(const Queries *q, const Block *block, const Word **keys, const Word **values) {
    const Job *job = q->job;
    const Attention *layer = job->layer;
    int64_t size = size_of(job->step);
    Word *key_tile = q->key_tiles, *value_tile = q->value_tiles;
    const Word *found[TILES];
    if (job->tiled_keys)
        stored(layer->keys, layer->key_dim * size, block, keys);
    if (job->tiled_values && layer->values)
        stored(layer->values, layer->value_dim * size, block, found);
    for (int t = 0; t < block->count; t++) {
        int64_t tile = block->first + t;
        int64_t from = most(0, q->first - tile * TILE), to = least(TILE, q->keys - tile * TILE);
        if (!job->tiled_keys) {
            gather(q, layer->keys, layer->key_dim, 1, tile, from, to, key_tile);
            keys[t] = key_tile;
            key_tile += job->key_words * TILE;
        }
        if (!layer->values) {
            values[t] = take_values(q, keys[t], from, to, value_tile);
            value_tile += layer->value_dim * TILE;
            continue;
        }
        const Word *at = job->tiled_values ? found[t] : NULL;
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
    keys[block->count] = keys[block->count - 1];
}

/* Turns scores [rows][BLOCK] of keys from `base` into weights, as factors of the values in the same place. Meanwhile it prefetches the
 * first half of each tile of values at `ahead` (NULL: none), a share for each row. */
INLINE void soften(Kind kind, const Queries *q, int64_t base, int count, float *scores, float *max, float *sum, float *keep, const Word *const *ahead) {
    const Attention *layer = q->job->layer;
    int64_t rows = q->tokens * q->heads, lines = layer->value_dim * TILE * (kind == BFLOAT16 ? 2 : 4) / 2 / 64;
    Vec scaling = splat(layer->scaling), cap = splat(layer->softcap), hidden = splat(-INFINITY);
    const int vecs = count * TILE_VECS;
    float sums[BLOCK_ROWS];
    for (int64_t r = 0; r < rows; r++) {
        float *row = scores + r * BLOCK;
        int64_t position = q->position + r / q->heads;
        int64_t end = position + 1 - base, begin = first_key(layer, position) - base;
        int all = begin <= 0 && end >= count * TILE;
        Vec s[TILES * TILE_VECS], top = hidden;
        for (int v = 0; v < vecs; v++) {
            s[v] = mul(load_floats(row + v * LANES), scaling);
            if (layer->softcap != 0)
                s[v] = mul(tanh_(divide(s[v], cap)), cap);
            if (!all)
                s[v] = between(begin - v * LANES, end - v * LANES, s[v], hidden);
            top = larger(top, s[v]);
        }
        const int64_t from = ahead ? lines * r / rows : 0, to = ahead ? lines * (r + 1) / rows : 0;
        float now = fmaxf(max[r], highest(top));
        /* No key seen so far: any finite number works, because all weights are 0. */
        Vec reference = splat(now == -INFINITY ? 0 : now), all_weights = splat(0);
        for (int v = 0; v < vecs; v++) {
            for (int64_t line = from; v % TILE_VECS == 0 && line < to; line++)
                ask((const char *)ahead[v / TILE_VECS] + 64 * line);
            Vec weight = exp_(sub(s[v], reference));
            all_weights = add(all_weights, weight);
            if (kind == BFLOAT16 && PRODUCTS)
                store_bfloat16((uint16_t *)row + v * LANES, LANES, weight);
            else
                store_floats(row + v * LANES, weight);
        }
        sums[r] = total(all_weights);
        keep[r] = now == -INFINITY ? 0 : max[r] - now;
        max[r] = now;
    }
    for (int64_t r = 0; r < rows; r += LANES)
        store_floats(keep + r, exp_(load_floats(keep + r)));
    for (int64_t r = 0; r < rows; r++)
        sum[r] = sum[r] * keep[r] + sums[r];
}

/* Converts tiles of `rows` times `width` words of bfloat16 to floats, [2 * rows][width] each, consecutively from `to` on. */
static void widen_tiles(const Word **tiles, int count, int64_t rows, int64_t width, float *to) {
    for (int t = 0; t < count; t++) {
        const Word *from = tiles[t];
        tiles[t] = (const Word *)to;
        for (int64_t row = 0; row < rows; row++, from += width)
            for (int half = 0; half < 2; half++, to += width)
                for (int64_t at = 0; at < width; at += LANES)
                    store_some(to + at, width - at, half_of_some(BFLOAT16, from + at, width - at, half));
    }
}

static int64_t first_block(const Queries *q, int64_t segment) { return most(segment * SEGMENT, q->first / BLOCK * BLOCK); }

/* Computes max, sum [rows] and output [rows][stride] over the keys of one segment; rows that see none of them get -inf, 0 and zeros. The
 * next block's keys and values are prefetched while a block is computed; after the last block, those of `then` (NULL: none) in its block at
 * `then_block`. */
INLINE void attend_segment(Kind kind, const Queries *q, int64_t segment, const Queries *then, int64_t then_block, float *max, float *sum,
                           float *output, int64_t stride) {
    _Alignas(64) float scores[BLOCK_ROWS * BLOCK], keep[BLOCK_ROWS] = {0};
    const Job *job = q->job;
    const Attention *layer = job->layer;
    int64_t rows = q->tokens * q->heads, end = least(q->position + q->tokens, (segment + 1) * SEGMENT), size = size_of(job->step);
    const int widens = WIDENS && kind == BFLOAT16 && rows > ROWS;
    float wide[widens ? BLOCK * most(2 * job->key_words, layer->value_dim) : 1];
    for (int64_t r = 0; r < rows; r++)
        max[r] = -INFINITY, sum[r] = 0;
    memset(output, 0, rows * stride * sizeof(float));
    int64_t at = first_block(q, segment);
    for (Block block = block_of(q, at), next; at < end; at += BLOCK, block = next) {
        next = at + BLOCK < end ? block_of(q, at + BLOCK) : then ? block_of(then, then_block) : (Block){0};
        const Word *keys[TILES + 1], *values[TILES + 1], *next_keys[TILES + 1], *next_values[TILES + 1];
        find_tiles(q, &block, keys, values);
        const int count = block.count;
        const Word *const *ahead = job->tiled_keys ? ahead_of(layer->keys, layer->key_dim * size, &next, keys, count, next_keys) : NULL;
        if (widens) {
            widen_tiles(keys, count, job->key_words, TILE, wide);
            keys[count] = keys[count - 1];
            score_all(FLOAT32, rows, q->query, 2 * job->key_words, keys, NULL, count, scores);
        } else {
            score_all(kind, rows, q->query, job->key_words, keys, ahead, count, scores);
        }
        ahead = job->tiled_values && layer->values ? ahead_of(layer->values, layer->value_dim * size, &next, values, count, next_values) : NULL;
        soften(kind, q, block.first * TILE, count, scores, max, sum, keep, ahead);
        if (widens) {
            widen_tiles(values, count, TILE / 2, layer->value_dim, wide);
            mix_all(FLOAT32, rows, scores, values, NULL, count, layer->value_dim, keep, output, stride);
        } else {
            mix_all(kind, rows, scores, values, ahead, count, layer->value_dim, keep, output, stride);
        }
    }
}

/* The same for the step's kind. It is compiled once, because it is called in three places. */
static __attribute__((noinline)) void attend_keys(const Queries *q, int64_t segment, const Queries *then, int64_t then_block, float *max, float *sum,
                                                  float *output, int64_t stride) {
    if (q->job->step->kind == BFLOAT16)
        attend_segment(BFLOAT16, q, segment, then, then_block, max, sum, output, stride);
    else
        attend_segment(FLOAT32, q, segment, then, then_block, max, sum, output, stride);
}

/* Merges a later segment's result into the current one. */
static void merge(float *max, float *sum, float *output, float other_max, float other_sum, const float *other, int64_t stride) {
    float now = fmaxf(*max, other_max);
    if (now == -INFINITY)
        return;
    float mine = exp1(*max - now), its = exp1(other_max - now);
    *sum = *sum * mine + other_sum * its;
    *max = now;
    Vec a = splat(mine), b = splat(its);
    for (int64_t d = 0; d < stride; d += LANES)
        store_floats(output + d, fma_(load_floats(output + d), a, mul(load_floats(other + d), b)));
}

static void write_row(const Job *job, int64_t token, int64_t head, const float *output, float max, float sum) {
    int64_t dim = job->layer->value_dim, at = token * job->output_stride + head * dim;
    float kept = 1;
    if (job->layer->sinks) {
        float sink = job->layer->sinks[head], now = fmaxf(max, sink);
        kept = exp1(max - now);
        sum = sum * kept + exp1(sink - now);
    }
    Vec factor = splat(kept / sum);
    for (int64_t d = 0; d < dim; d += LANES)
        put(job->step->kind, job->output, at + d, at + dim, mul(load_floats(output + d), factor));
}

/* ---- items ---- */

static void copy_queries(const Queries *q, Word *out) {
    const Job *job = q->job;
    int64_t dim = job->layer->key_dim, token = job->step->offsets[q->row] + q->token, width = job->key_words * factor_size(job->step->kind);
    for (int64_t r = 0; r < q->tokens * q->heads; r++, out += width) {
        int64_t head = q->kv_head * job->group + q->head + r % q->heads, at = (token + r / q->heads) * job->query_stride + head * dim;
        out[width - 1] = 0; /* bfloat16 may have an odd size: the last word is half a word, or the last float is absent */
        if (factor_size(job->step->kind) == 1)
            memcpy(out, (const char *)job->query + at * (int64_t)size_of(job->step), dim * size_of(job->step));
        else
            for (int64_t d = 0; d < dim; d += LANES)
                store_some((float *)out + d, dim - d, load(BFLOAT16, job->query, at + d, at + dim));
    }
}

/* The queries of an item, and the index of its segment if the row's segments are split. */
static Queries queries_of(const Job *job, int64_t item, int64_t *segment) {
    const Step *step = job->step;
    int64_t row = row_of(job->items, step->rows, item), local = item - job->items[row];
    int64_t count = step->offsets[row + 1] - step->offsets[row], start = step->starts[row];
    Queries q = {.job = job, .row = row, .keys = start + count};
    q.kv_head = local % job->layer->kv_heads, local /= job->layer->kv_heads;
    q.head = local % job->head_blocks * job->block_heads, local /= job->head_blocks;
    int64_t blocks = up(count, job->block_tokens);
    q.token = (blocks - 1 - local % blocks) * job->block_tokens, local /= blocks; /* those with the most keys come first */
    q.heads = least(job->block_heads, job->group - q.head), q.tokens = least(job->block_tokens, count - q.token);
    q.position = start + q.token, q.first = first_key(job->layer, q.position);
    *segment = is_split(job->layer, step, row) ? first_key(job->layer, start) / SEGMENT + local : q.first / SEGMENT;
    return q;
}

static void attend_item(const void *args, int64_t item) {
    const Job *job = args;
    const Attention *layer = job->layer;
    const Step *step = job->step;
    int64_t segment, then_segment = 0;
    Queries q = queries_of(job, item, &segment), then;
    int64_t row = q.row, count = step->offsets[row + 1] - step->offsets[row], start = step->starts[row];
    int split = is_split(layer, step, row), more = run_ends(job->items[step->rows], item, job->threads) < 0;
    if (more)
        then = queries_of(job, item + 1, &then_segment);
    int64_t then_block = more ? first_block(&then, then_segment) : 0;

    int64_t rows = q.heads * q.tokens, stride = up(layer->value_dim, 16) * 16;
    Word query[rows * job->key_words * factor_size(step->kind)];
    Word key_tiles[job->tiled_keys ? 1 : job->key_words * BLOCK], value_tiles[(job->tiled_values && layer->values ? 2 * TILE : BLOCK) * layer->value_dim];
    float output[rows * stride], max[BLOCK_ROWS], sum[BLOCK_ROWS];
    copy_queries(&q, query);
    q.query = query, q.key_tiles = key_tiles, q.value_tiles = value_tiles;
    int64_t token = step->offsets[row] + q.token, head = q.kv_head * job->group + q.head;

    if (split) {
        int64_t size = partial_size(layer);
        attend_keys(&q, segment, more ? &then : NULL, then_block, max, sum, output, stride);
        int64_t local = segment - first_key(layer, start) / SEGMENT;
        for (int64_t r = 0; r < rows; r++) {
            int64_t slot = job->slots[row] + local * count + q.token + r / q.heads;
            float *partial = step->partials + (slot * layer->heads + head + r % q.heads) * size;
            partial[0] = max[r], partial[1] = sum[r];
            memcpy(partial + 16, output + r * stride, stride * sizeof(float));
        }
        return;
    }
    int64_t last = (q.position + q.tokens - 1) / SEGMENT;
    const Queries *following = segment < last ? &q : more ? &then : NULL;
    attend_keys(&q, segment, following, segment < last ? (segment + 1) * SEGMENT : then_block, max, sum, output, stride);
    if (segment < last) {
        float other[rows * stride], other_max[BLOCK_ROWS], other_sum[BLOCK_ROWS];
        while (++segment <= last) {
            following = segment < last ? &q : more ? &then : NULL;
            attend_keys(&q, segment, following, segment < last ? (segment + 1) * SEGMENT : then_block, other_max, other_sum, other, stride);
            for (int64_t r = 0; r < rows; r++)
                merge(max + r, sum + r, output + r * stride, other_max[r], other_sum[r], other + r * stride, stride);
        }
    }
    for (int64_t r = 0; r < rows; r++)
        write_row(job, token + r / q.heads, head + r % q.heads, output + r * stride, max[r], sum[r]);
}

/* Merges the segments of one row's tokens for the heads of one KV head. */
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
            write_row(job, first + token, head, output, max, sum);
        }
}

void attend(Member *member, const Attention *layer, const Step *step, const void *query, int64_t query_stride, void *output, int64_t output_stride) {
    int64_t items[step->rows + 1], slots[step->rows + 1], split[step->rows + 1];
    Job job = prepare(layer, step);
    job.threads = member->team->threads;
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
    share(member, items[step->rows], attend_item, &job);
    if (job.merges)
        share(member, job.merges * layer->kv_heads, merge_item, &job);
}

/* ---- entry points ---- */

static void attention_body(Member *member, const void *args) {
    const Job *job = args;
    if (job->key) /* else another layer has stored what this one reads */
        store(member, job->layer, job->step, job->key, job->key_stride, job->value, job->value_stride);
    attend(member, job->layer, job->step, job->query, job->query_stride, job->output, job->output_stride);
}

EXPORT void fairlead_attention(int32_t threads, const Attention *layer, const Step *step, const void *query, int64_t query_stride, const void *key,
                               int64_t key_stride, const void *value, int64_t value_stride, void *output, int64_t output_stride) {
    Job job = {.layer = layer, .step = step, .query = query, .key = key, .value = value, .output = output};
    job.query_stride = query_stride, job.key_stride = key_stride, job.value_stride = value_stride, job.output_stride = output_stride;
    region(threads, attention_body, &job);
}
