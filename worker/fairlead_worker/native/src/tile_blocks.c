/* Tiles of weights in ggml's blocks times rows rounded to 8 bits. As in llama.cpp the products of a group are summed as whole numbers. */
#include "simd.h"
#include "tile.h"

enum { VECS = PANEL / LANES }; /* of a panel's outputs */

/* The codes of inputs 4 * word to 4 * word + 3 of a group, a byte for each. */
INLINE Words codes_of(int32_t kind, const char *group, int vec, int word) {
    const int bits = block_bits(kind);
    const char *low = group + low_at(kind) + 4 * LANES * vec, *high = group + high_at(kind) + 4 * LANES * vec;
    if (bits == 8) {
        const Words all = load_words(low + 4 * PANEL * word);
        return UNSIGNED_BYTES ? all : differ(all, splat_word(0x80808080));
    }
    const Words pairs = load_words(low + 4 * PANEL * (word / 2)), codes = both(shifted(pairs, -4 * (word % 2)), splat_word(0x0F0F0F0F));
    if (bits == 5)
        return either(codes, both(shifted(load_words(high), 4 - word), splat_word(0x10101010)));
    if (bits == 6)
        return either(codes, both(shifted(load_words(high + 4 * PANEL * (word / 4)), 4 - 2 * (word % 4)), splat_word(0x30303030)));
    return codes;
}

/* The float that a code of a group's part counts. */
INLINE Vec scale_of(int32_t kind, const char *head, const char *group, int vec, int part) {
    const Vec scale = load_float16((const uint16_t *)head + LANES * vec);
    if (!is_super(kind))
        return scale;
    const char *factors = group + PANEL * part + LANES * vec;
    return mul(scale, kind == Q6_K ? load_signed(factors) : load_uint8(factors));
}

/* What is added for each unit of the inputs' sum. */
INLINE Vec minimum_of(int32_t kind, const char *head, const char *group, int vec) {
    const Vec minimum = load_float16((const uint16_t *)head + PANEL + LANES * vec);
    return is_super(kind) ? sub(splat(0), mul(minimum, load_uint8(group + PANEL + LANES * vec))) : minimum;
}

INLINE int start_of(int32_t kind, const Group *x, int part) {
    const int sum = scales_of_group(kind) == 2 ? x->sums[part] : x->sums[0] + x->sums[1];
    return has_minimum(kind) || (block_bits(kind) == 8 && !UNSIGNED_BYTES) ? 0 : -zero_code(kind) * sum;
}

/* 32 inputs: their products are exact. They are then scaled, and added to floats. `rows` is a constant, as in tile.c. */
INLINE void add_group(int32_t kind, const char *head, const char *group, const char *x, int64_t stride, const int rows, Vec (*sums)[VECS]) {
    const int parts = scales_of_group(kind), bits = block_bits(kind);
#pragma GCC unroll 2
    for (int part = 0; part < parts; part++) {
        Words whole[TILE_ROWS][VECS];
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
            for (int vec = 0; vec < VECS; vec++)
                whole[row][vec] = splat_word(0);
#pragma GCC unroll 8
        for (int word = 8 / parts * part; word < 8 / parts * (part + 1); word++) {
            Words codes[VECS];
#pragma GCC unroll 4
            for (int vec = 0; vec < VECS; vec++)
                codes[vec] = codes_of(kind, group, vec, word);
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++) {
                const Words factor = as_words(factor_of(kind, x + row * stride + 4 * word));
#pragma GCC unroll 4
                for (int vec = 0; vec < VECS; vec++)
                    whole[row][vec] = multiply_bytes(bits, codes[vec], factor, whole[row][vec]);
            }
        }
        Vec scales[VECS];
#pragma GCC unroll 4
        for (int vec = 0; vec < VECS; vec++)
            scales[vec] = scale_of(kind, head, group, vec, part);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            const Group *inputs = (const Group *)(x + row * stride);
            const Words start = splat_word((uint32_t)start_of(kind, inputs, part));
#pragma GCC unroll 4
            for (int vec = 0; vec < VECS; vec++) {
                const Vec exact = whole_to_float(byte_sum(bits, whole[row][vec], start));
                sums[row][vec] = fma_(exact, mul(scales[vec], splat(inputs->scale)), sums[row][vec]);
            }
        }
    }
    if (!has_minimum(kind))
        return;
    Vec minima[VECS];
#pragma GCC unroll 4
    for (int vec = 0; vec < VECS; vec++)
        minima[vec] = minimum_of(kind, head, group, vec);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        const Group *inputs = (const Group *)(x + row * stride);
        const Vec sum = splat(inputs->scale * (float)(inputs->sums[0] + inputs->sums[1]));
#pragma GCC unroll 4
        for (int vec = 0; vec < VECS; vec++)
            sums[row][vec] = fma_(minima[vec], sum, sums[row][vec]);
    }
}

INLINE void tile_of_blocks(int32_t kind, const Tile *job, const int rows) {
    const char *head = job->weights, *x = job->x, *ahead = job->ahead;
    const int64_t share = step_bytes(kind) / step_groups(kind);
    Vec sums[TILE_ROWS][VECS];
    float *kept = job->sums;
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int vec = 0; vec < VECS; vec++)
            sums[row][vec] = load_floats(kept + PANEL * row + LANES * vec);
    for (int64_t step = 0; step < job->steps; step++, head += step_bytes(kind), ahead += job->ahead_step)
        for (int64_t g = 0; g < step_groups(kind); g++, x += sizeof(Group)) {
            fetch(ahead + g * share, share, job->passing);
            add_group(kind, head, head + head_bytes(kind) + g * group_bytes(kind), x, job->x_stride, rows, sums);
        }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int vec = 0; vec < VECS; vec++)
            store_floats(kept + PANEL * row + LANES * vec, sums[row][vec]);
}

TILES(tile_q4_0, tile_of_blocks, Q4_0)
TILES(tile_q4_1, tile_of_blocks, Q4_1)
TILES(tile_q5_0, tile_of_blocks, Q5_0)
TILES(tile_q5_1, tile_of_blocks, Q5_1)
TILES(tile_q8_0, tile_of_blocks, Q8_0)
TILES(tile_q4_k, tile_of_blocks, Q4_K)
TILES(tile_q5_k, tile_of_blocks, Q5_K)
TILES(tile_q6_k, tile_of_blocks, Q6_K)

void multiply_blocks(int32_t kind, const Tile *job, int64_t rows) {
    static void (*const tiles[])(const Tile *, int64_t) = {
        [Q4_0] = tile_q4_0, [Q4_1] = tile_q4_1, [Q5_0] = tile_q5_0, [Q5_1] = tile_q5_1,
        [Q8_0] = tile_q8_0, [Q4_K] = tile_q4_k, [Q5_K] = tile_q5_k, [Q6_K] = tile_q6_k,
    };
    tiles[kind](job, rows);
}
