/* The small operations of a decoder layer. Each row is computed alone and in one order, so its bits depend on nothing else. */
#include "decoder.h"
#include "simd.h"

/* What a norm does with a value: (x - mean) * factor * its weight, and + its bias. */
typedef struct {
    Vec mean, factor;
} Scaling;

static float mean_of(int32_t kind, const void *x, int64_t width) {
    Vec sum = splat(0);
    for (int64_t i = 0; i < width; i += LANES)
        sum = add(sum, load(kind, x, i, width));
    return total(sum) / (float)width;
}

static Scaling scaling_of(int32_t kind, const void *x, const Norm *norm) {
    if (norm->kind == UNCHANGED)
        return (Scaling){splat(0), splat(1)};
    const int64_t width = norm->width;
    const Vec mean = splat(norm->kind == AROUND_MEAN ? mean_of(kind, x, width) : 0);
    Vec sums[4] = {splat(0), splat(0), splat(0), splat(0)}; /* four chains: a single sum would wait for its own latency */
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            Vec v = sub(load(kind, x, i + part * LANES, width), mean);
            sums[part] = fma_(v, v, sums[part]);
        }
    for (; i < width; i += LANES) {
        Vec v = sub(between(0, width - i, load(kind, x, i, width), mean), mean);
        sums[0] = fma_(v, v, sums[0]);
    }
    const Vec sum = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
    return (Scaling){mean, splat(1.0f / sqrtf(total(sum) / (float)width + norm->eps))};
}

/* Values i to i + n of a norm's. */
INLINE Vec scaled(const Norm *norm, Scaling scaling, int64_t i, int64_t n, Vec x) {
    if (norm->kind == UNCHANGED)
        return x;
    x = mul(mul(sub(x, scaling.mean), scaling.factor), load_some(norm->weight + i, n));
    return norm->kind == AROUND_MEAN ? add(x, load_some(norm->bias + i, n)) : x;
}

typedef struct {
    float *residual;
    const float *update;
    Norm after, before;
    void *normed;
    int32_t kind;
    int64_t width;
} Normalise;

static void normalise_row(const void *args, int64_t row) {
    const Normalise *a = args;
    float *x = a->residual + row * a->width;
    if (a->update) {
        const float *update = a->update + row * a->width;
        const Scaling scaling = scaling_of(FLOAT32, update, &a->after);
        for (int64_t i = 0; i < a->width; i += LANES) {
            const int64_t n = a->width - i;
            store_some(x + i, n, add(load_some(x + i, n), scaled(&a->after, scaling, i, n, load_some(update + i, n))));
        }
    }
    if (!a->normed)
        return;
    void *normed = (char *)a->normed + row * a->width * bytes(a->kind);
    const Scaling scaling = scaling_of(FLOAT32, x, &a->before);
    for (int64_t i = 0; i < a->width; i += LANES) {
        const int64_t n = a->width - i;
        put(a->kind, normed, i, a->width, scaled(&a->before, scaling, i, n, load_some(x + i, n)));
    }
}

void normalise(
    Member *member, float *residual, const float *update, Norm after, Norm before, void *normed, int32_t kind, int64_t rows, int64_t width) {
    Normalise args = {residual, update, after, before, normed, kind, width};
    share(member, rows, normalise_row, &args);
}

typedef struct {
    const Attention *attention;
    Norm query, key;
    const Rope *rope;
    const int64_t *positions;
    int32_t kind;
    void *qkv;
    int64_t stride;
} Rotate;

/* x[dim] = rotated(norm(x)) * growth, of the head whose values begin at `at` of the norm's weight. */
static void rotate_head(int32_t kind, void *x, int64_t dim, const Norm *norm, Scaling scaling, int64_t at, const Rope *rope, int64_t position,
                        float growth) {
    const int64_t half = rope->half, table = position * half << rope->neighbours;
    const float *cosine = rope->cosine + table, *sine = rope->sine + table;
    const Vec grown = splat(growth);
    for (int64_t i = 0; i < half && !rope->neighbours; i += LANES) {
        const int64_t n = half - i;
        const Vec c = mul(load_some(cosine + i, n), grown), s = mul(load_some(sine + i, n), grown);
        const Vec low = scaled(norm, scaling, at + i, n, load(kind, x, i, half));
        const Vec high = scaled(norm, scaling, at + half + i, n, load(kind, x, half + i, 2 * half));
        put(kind, x, i, half, sub(mul(low, c), mul(high, s)));
        put(kind, x, half + i, 2 * half, add(mul(high, c), mul(low, s)));
    }
    for (int64_t i = 0; i < 2 * half && rope->neighbours; i += LANES) {
        const int64_t n = 2 * half - i;
        const Vec c = mul(load_some(cosine + i, n), grown), s = mul(load_some(sine + i, n), grown);
        const Vec v = scaled(norm, scaling, at + i, n, load(kind, x, i, 2 * half));
        put(kind, x, i, 2 * half, add(mul(v, c), mul(swapped(v), s)));
    }
    for (int64_t i = 2 * half; (norm->kind || growth != 1) && i < dim; i += LANES)
        put(kind, x, i, dim, mul(scaled(norm, scaling, at + i, dim - i, load(kind, x, i, dim)), grown));
}

static void normalise_head(int32_t kind, void *x, int64_t dim, const Norm *norm, Scaling scaling, int64_t at) {
    for (int64_t i = 0; i < dim; i += LANES)
        put(kind, x, i, dim, scaled(norm, scaling, at + i, dim - i, load(kind, x, i, dim)));
}

static char *rotate_heads(const Rotate *a, char *x, int64_t heads, const Norm *norm, int64_t position, float growth) {
    const int64_t dim = a->attention->key_dim;
    const int later = norm->kind && a->rope->before_norms; /* each head has its own mean */
    const Norm first = {.kind = later ? UNCHANGED : norm->kind, .weight = norm->weight, .bias = norm->bias};
    Scaling scaling = {splat(0), splat(1)};
    for (int64_t at = 0; at < heads * dim; at += dim, x += dim * bytes(a->kind)) {
        if (first.kind && at % norm->width == 0)
            scaling = scaling_of(a->kind, x, norm);
        rotate_head(a->kind, x, dim, &first, scaling, at, a->rope, position, growth);
        if (later)
            normalise_head(a->kind, x, dim, norm, scaling_of(a->kind, x, norm), at);
    }
    return x;
}

static void rotate_token(const void *args, int64_t token) {
    const Rotate *a = args;
    const int64_t position = a->positions[token];
    const float growth = a->rope->growth ? a->rope->growth[position] : 1;
    char *queries = (char *)a->qkv + token * a->stride * bytes(a->kind);
    char *keys = rotate_heads(a, queries, a->attention->heads, &a->query, position, growth);
    rotate_heads(a, keys, a->attention->kv_heads, &a->key, position, 1);
}

void rotate(Member *member, const Attention *attention, Norm query, Norm key, const Rope *rope, const int64_t *positions, int32_t kind,
            int64_t tokens, void *qkv, int64_t stride) {
    Rotate args = {attention, query, key, rope, positions, kind, qkv, stride};
    share(member, tokens, rotate_token, &args);
}

typedef struct {
    const char *from;
    const int64_t *index;
    int64_t width;
    char *to;
} Gather;

static void gather_row(const void *args, int64_t row) {
    const Gather *a = args;
    memcpy(a->to + row * a->width, a->from + a->index[row] * a->width, (size_t)a->width);
}

void gather(Member *member, const void *from, const int64_t *index, int64_t rows, int64_t width, void *to) {
    Gather args = {from, index, width, to};
    share(member, rows, gather_row, &args);
}

typedef struct {
    const char *from;
    int32_t kind;
    int64_t width;
    float *to;
} Widen;

static void widen_row(const void *args, int64_t row) {
    const Widen *a = args;
    const char *from = a->from + row * a->width * bytes(a->kind);
    for (int64_t i = 0; i < a->width; i += LANES)
        store_some(a->to + row * a->width + i, a->width - i, load(a->kind, from, i, a->width));
}

void widen(Member *member, const void *from, int32_t kind, int64_t rows, int64_t width, float *to) {
    Widen args = {from, kind, width, to};
    share(member, rows, widen_row, &args);
}

typedef struct {
    const float *logits;
    int64_t rows, width, *to;
} Largest;

static void largest_of_row(const void *args, int64_t row) {
    const Largest *a = args;
    const float *x = a->logits + row * a->width;
    Vec most = splat(-INFINITY);
    for (int64_t i = 0; i < a->width; i += LANES)
        most = larger(most, between(0, a->width - i, load_some(x + i, a->width - i), most));
    const Vec top = splat(highest(most));
    a->to[row] = a->width - 1; /* unchanged only if some logit is NaN */
    for (int64_t i = 0; i < a->width; i += LANES) {
        const uint32_t found = equal(a->width - i, load_some(x + i, a->width - i), top);
        if (found) {
            a->to[row] = i + __builtin_ctz(found);
            return;
        }
    }
}

static void largest_of_all(Member *member, const void *args) {
    share(member, ((const Largest *)args)->rows, largest_of_row, args);
}

/* to[row] = the first of its largest logits [rows][width]; an arbitrary index of the row if one is NaN. */
EXPORT void fairlead_largest(int32_t threads, const float *logits, int64_t rows, int64_t width, int64_t *to) {
    Largest args = {logits, rows, width, to};
    region(threads, largest_of_all, &args);
}

/* Each operation alone, for the tests. */

typedef struct {
    Normalise normalise;
    int64_t rows;
} NormaliseAlone;

static void normalise_alone(Member *member, const void *args) {
    const NormaliseAlone *a = args;
    share(member, a->rows, normalise_row, &a->normalise);
}

EXPORT void fairlead_normalise(int32_t threads, float *residual, const float *update, const Norm *after, const Norm *before, void *normed,
                               int32_t kind, int64_t rows, int64_t width) {
    NormaliseAlone args = {{residual, update, *after, *before, normed, kind, width}, rows};
    region(threads, normalise_alone, &args);
}

typedef struct {
    Rotate rotate;
    int64_t tokens;
} RotateAlone;

static void rotate_alone(Member *member, const void *args) {
    const RotateAlone *a = args;
    share(member, a->tokens, rotate_token, &a->rotate);
}

EXPORT void fairlead_rotate(int32_t threads, int32_t heads, int32_t kv_heads, int32_t dim, const Norm *query, const Norm *key, const Rope *rope,
                            const int64_t *positions, int32_t kind, int64_t tokens, void *qkv, int64_t stride) {
    Attention attention = {.heads = heads, .kv_heads = kv_heads, .key_dim = dim};
    RotateAlone args = {{&attention, *query, *key, rope, positions, kind, qkv, stride}, tokens};
    region(threads, rotate_alone, &args);
}
