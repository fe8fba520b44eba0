/* The small operations of a decoder layer. Each row is computed alone and in one order, so its bits depend on nothing else. */
#include "decoder.h"
#include "simd.h"

/* 1 / sqrt(mean(x^2) + eps) */
static float scale(int32_t kind, const void *x, int64_t width, float eps) {
    Vec sums[4] = {splat(0), splat(0), splat(0), splat(0)}; /* four chains: a single sum would wait for its own latency */
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            Vec v = load(kind, x, i + part * LANES, width);
            sums[part] = fma_(v, v, sums[part]);
        }
    for (; i < width; i += LANES) {
        Vec v = load(kind, x, i, width);
        sums[0] = fma_(v, v, sums[0]);
    }
    const Vec sum = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
    return 1.0f / sqrtf(total(sum) / (float)width + eps);
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
        const Vec factor = splat(scale(FLOAT32, update, a->width, a->after.eps));
        for (int64_t i = 0; i < a->width; i += LANES) {
            const int64_t n = a->width - i;
            Vec v = mul(mul(load_some(update + i, n), factor), load_some(a->after.weight + i, n));
            store_some(x + i, n, add(load_some(x + i, n), v));
        }
    }
    if (!a->normed)
        return;
    void *normed = (char *)a->normed + row * a->width * bytes(a->kind);
    const Vec factor = splat(scale(FLOAT32, x, a->width, a->before.eps));
    for (int64_t i = 0; i < a->width; i += LANES) {
        const int64_t n = a->width - i;
        put(a->kind, normed, i, a->width, mul(mul(load_some(x + i, n), factor), load_some(a->before.weight + i, n)));
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

/* x[dim] = rotated(norm(x)) */
static void rotate_head(int32_t kind, void *x, int64_t dim, Norm norm, int64_t half, const float *cosine, const float *sine) {
    const Vec factor = splat(norm.weight ? scale(kind, x, dim, norm.eps) : 1);
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t n = half - i;
        Vec c = load_some(cosine + i, n), s = load_some(sine + i, n);
        Vec low = load(kind, x, i, half), high = load(kind, x, half + i, 2 * half);
        if (norm.weight) {
            low = mul(mul(low, factor), load_some(norm.weight + i, n));
            high = mul(mul(high, factor), load_some(norm.weight + half + i, n));
        }
        put(kind, x, i, half, sub(mul(low, c), mul(high, s)));
        put(kind, x, half + i, 2 * half, add(mul(high, c), mul(low, s)));
    }
    for (int64_t i = 2 * half; norm.weight && i < dim; i += LANES)
        put(kind, x, i, dim, mul(mul(load(kind, x, i, dim), factor), load_some(norm.weight + i, dim - i)));
}

static void rotate_token(const void *args, int64_t token) {
    const Rotate *a = args;
    const int64_t dim = a->attention->key_dim, half = a->rope->half, heads = a->attention->heads;
    const float *cosine = a->rope->cosine + a->positions[token] * half, *sine = a->rope->sine + a->positions[token] * half;
    char *x = (char *)a->qkv + token * a->stride * bytes(a->kind);
    for (int64_t head = 0; head < heads + a->attention->kv_heads; head++, x += dim * bytes(a->kind))
        rotate_head(a->kind, x, dim, head < heads ? a->query : a->key, half, cosine, sine);
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

EXPORT void fairlead_normalise(int32_t threads, float *residual, const float *update, const float *after, float after_eps,
                               const float *before, float before_eps, void *normed, int32_t kind, int64_t rows, int64_t width) {
    NormaliseAlone args = {{residual, update, {after, after_eps}, {before, before_eps}, normed, kind, width}, rows};
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

EXPORT void fairlead_rotate(int32_t threads, int32_t heads, int32_t kv_heads, int32_t dim, const float *query, const float *key, float eps,
                            const float *cosine, const float *sine, int64_t half, const int64_t *positions, int32_t kind, int64_t tokens,
                            void *qkv, int64_t stride) {
    Attention attention = {.heads = heads, .kv_heads = kv_heads, .key_dim = dim};
    Rope rope = {cosine, sine, half};
    RotateAlone args = {{&attention, {query, eps}, {key, eps}, &rope, positions, kind, qkv, stride}, tokens};
    region(threads, rotate_alone, &args);
}
