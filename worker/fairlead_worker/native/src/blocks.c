/* ggml's block types: reading rows of a GGUF file, and the panels of blocks.h. The layouts are those of ggml-common.h and ggml-quants.c. */
#include "blocks.h"

#include <string.h>

float from_float16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;
    float answer;
    if (exponent == 31)
        bits = sign | 0x7F800000 | fraction << 13;
    if (exponent == 0) { /* subnormal: a multiple of 2^-24 */
        answer = (float)fraction * 0x1p-24f;
        return sign ? -answer : answer;
    }
    memcpy(&answer, &bits, 4);
    return answer;
}

uint16_t to_float16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t sign = bits >> 16 & 0x8000;
    const uint32_t size = bits & 0x7FFFFFFF;
    if (size > 0x7F800000)
        return sign | 0x7E00;
    if (size >= 0x477FF000) /* 65520 and more */
        return sign | 0x7C00;
    if (size < 0x38800000) { /* below 2^-14: a multiple of 2^-24. Adding 0.5 leaves just these bits, rounded. */
        float sum;
        memcpy(&sum, &size, 4);
        sum += 0.5f;
        memcpy(&bits, &sum, 4);
        return (uint16_t)(sign | (bits - 0x3F000000));
    }
    return (uint16_t)(sign | ((size - (112u << 23) + 0xFFF + (size >> 13 & 1)) >> 13));
}

static uint16_t half_at(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

static int64_t block_bytes(int32_t kind) {
    static const int64_t sizes[] = {[Q4_0] = 18, [Q4_1] = 20, [Q5_0] = 22, [Q5_1] = 24, [Q8_0] = 34, [Q4_K] = 144, [Q5_K] = 176, [Q6_K] = 210};
    return sizes[kind];
}

EXPORT int64_t fairlead_row_bytes(int32_t kind, int64_t inputs) {
    const int64_t block = GROUP * step_groups(kind);
    return inputs % block ? -1 : inputs / block * block_bytes(kind);
}

/* Q4_0, Q4_1, Q5_0, Q5_1: the scale, the minimum, 32 high bits, then nibbles: input i beside input i + 16. */
static Part read_nibbles(int32_t kind, const uint8_t *block) {
    Part part = {.scale = half_at(block), .factors = {1, 1}, .minimum_factor = 1};
    const uint8_t *at = block + 2;
    uint32_t high = 0;
    if (has_minimum(kind)) {
        part.minimum = half_at(at);
        at += 2;
    }
    if (block_bits(kind) == 5) {
        high = half_at(at) | (uint32_t)half_at(at + 2) << 16;
        at += 4;
    }
    for (int i = 0; i < GROUP; i++)
        part.codes[i] = (uint8_t)((i < 16 ? at[i] & 15 : at[i - 16] >> 4) | (high >> i & 1) << 4);
    return part;
}

static Part read_q8_0(const uint8_t *block) {
    Part part = {.scale = half_at(block), .factors = {1, 1}};
    for (int i = 0; i < GROUP; i++)
        part.codes[i] = block[2 + i] ^ 0x80;
    return part;
}

/* Q4_K, Q5_K: both scales, 8 scale and 8 minimum factors of 6 bits in 12 bytes, high bits [32] with a bit for each group, nibbles. */
static Part read_k(int32_t kind, const uint8_t *block, int64_t g) {
    const uint8_t *six = block + 4, *high = block + 16, *low = high + (kind == Q5_K ? 32 : 0) + g / 2 * 32;
    const uint8_t scale = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
    Part part = {
        .scale = half_at(block), .minimum = half_at(block + 2), .factors = {(int8_t)scale, (int8_t)scale},
        .minimum_factor = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4,
    };
    for (int i = 0; i < GROUP; i++)
        part.codes[i] = (uint8_t)((g % 2 ? low[i] >> 4 : low[i] & 15) | (kind == Q5_K ? (high[i] >> g & 1) << 4 : 0));
    return part;
}

/* Lower nibbles [128], pairs of higher bits [64], factors [16], the scale. */
static Part read_q6_k(const uint8_t *block, int64_t g) {
    const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *high = block + 128 + g / 4 * 32, *factors = block + 192 + 2 * g;
    Part part = {.scale = half_at(block + 208), .factors = {(int8_t)factors[0], (int8_t)factors[1]}};
    for (int i = 0; i < GROUP; i++)
        part.codes[i] = (uint8_t)((g % 4 < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> (2 * (g % 4)) & 3) << 4);
    return part;
}

Part read_row(int32_t kind, const uint8_t *row, int64_t group) {
    const uint8_t *block = row + group / step_groups(kind) * block_bytes(kind);
    if (kind == Q8_0)
        return read_q8_0(block);
    if (kind == Q6_K)
        return read_q6_k(block, group % 8);
    return is_super(kind) ? read_k(kind, block, group % 8) : read_nibbles(kind, block);
}

/* Product and sum are rounded one after the other, as by ggml's reference and the package gguf. */
void widen_part(int32_t kind, const Part *part, float *to) {
    const float minimum = from_float16(part->minimum) * (float)part->minimum_factor, sign = is_super(kind) ? -1 : 1;
    for (int i = 0; i < GROUP; i++) {
        const float scale = from_float16(part->scale) * (float)part->factors[i / 16];
        const float product = scale * (float)(part->codes[i] - zero_code(kind));
        to[i] = has_minimum(kind) ? product + sign * minimum : product;
    }
}

static char *group_of(int32_t kind, char *panel, int64_t group) {
    const int64_t groups = step_groups(kind);
    return panel + group / groups * block_step_bytes(kind) + head_bytes(kind) + group % groups * group_bytes(kind);
}

static uint16_t *head_of(int32_t kind, char *panel, int64_t group) {
    return (uint16_t *)(panel + group / step_groups(kind) * block_step_bytes(kind));
}

/* Byte with the low bits of an input, within its panel's group. */
static int64_t low_byte(int bits, int64_t lane, int64_t i) {
    return bits == 8 ? 4 * (i / 4 * PANEL + lane) + i % 4 : 4 * (i / 8 * PANEL + lane) + i % 4;
}

/* Byte with the high bits of an input, and their place in it. */
static int64_t high_byte(int bits, int64_t lane, int64_t i) { return 4 * ((bits == 6 ? i / 16 * PANEL : 0) + lane) + i % 4; }
static int high_place(int bits, int64_t i) { return (int)(bits == 6 ? i / 4 % 4 * 2 : i / 4); }

void write_panel(int32_t kind, char *panel, int64_t lane, int64_t group, const Part *part) {
    const int bits = block_bits(kind);
    uint16_t *head = head_of(kind, panel, group);
    uint8_t *at = (uint8_t *)group_of(kind, panel, group), *low = at + low_at(kind), *high = at + high_at(kind);
    head[lane] = part->scale;
    if (has_minimum(kind))
        head[PANEL + lane] = part->minimum;
    if (is_super(kind)) {
        at[lane] = (uint8_t)part->factors[0];
        at[PANEL + lane] = kind == Q6_K ? (uint8_t)part->factors[1] : part->minimum_factor;
    }
    for (int64_t i = 0; i < GROUP; i++) { /* into zeros */
        const uint8_t code = part->codes[i];
        low[low_byte(bits, lane, i)] |= (uint8_t)(bits == 8 ? code : (code & 15) << (i % 8 < 4 ? 0 : 4));
        if (bits == 5 || bits == 6)
            high[high_byte(bits, lane, i)] |= (uint8_t)(code >> 4 << high_place(bits, i));
    }
}

Part read_panel(int32_t kind, const char *panel, int64_t lane, int64_t group) {
    const int bits = block_bits(kind);
    const uint16_t *head = head_of(kind, (char *)panel, group);
    const uint8_t *at = (const uint8_t *)group_of(kind, (char *)panel, group), *low = at + low_at(kind), *high = at + high_at(kind);
    Part part = {.scale = head[lane], .minimum = has_minimum(kind) ? head[PANEL + lane] : 0, .factors = {1, 1}, .minimum_factor = 1};
    if (is_super(kind)) {
        part.factors[0] = (int8_t)at[lane];
        part.factors[1] = (int8_t)at[kind == Q6_K ? PANEL + lane : lane];
        part.minimum_factor = at[PANEL + lane];
    }
    for (int64_t i = 0; i < GROUP; i++) {
        const uint8_t byte = low[low_byte(bits, lane, i)];
        part.codes[i] = bits == 8 ? byte : (uint8_t)(i % 8 < 4 ? byte & 15 : byte >> 4);
        if (bits == 5 || bits == 6)
            part.codes[i] |= (uint8_t)((high[high_byte(bits, lane, i)] >> high_place(bits, i) & (bits == 6 ? 3 : 1)) << 4);
    }
    return part;
}
