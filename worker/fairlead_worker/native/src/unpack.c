/* The numbers that packed weights stand for: the reverse of pack.c. */
#include <string.h>

#include "native.h"
#include "tile.h"

static float from_bfloat16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float answer;
    memcpy(&answer, &bits, 4);
    return answer;
}

/* Weight `input` of a panel's output `lane`, without the output's scale. */
static float weight_at(int32_t kind, const char *panel, int64_t lane, int64_t input) {
    if (kind == FLOAT32)
        return ((const float *)panel)[input * PANEL + lane];
    const int64_t at = (input / 2 * PANEL + lane) * 2 + input % 2;
    if (kind == BFLOAT16)
        return from_bfloat16(((const uint16_t *)panel)[at]);
    if (kind == INT8)
        return ((const int8_t *)panel)[at];
    const char *group = panel + input / GROUP * step_bytes(INT4);
    const int64_t i = input % GROUP;
    const uint8_t pair = (uint8_t)group[2 * PANEL + 4 * (i / 8 * PANEL + lane) + i % 4];
    return from_bfloat16(((const uint16_t *)group)[lane]) * (float)((i % 8 < 4 ? pair & 15 : pair >> 4) - 8);
}

typedef struct {
    const Linear *layer;
    int64_t begin;
    float *to;
} Target;

static void unpack_output(const void *args, int64_t i) {
    const Target *target = args;
    const Linear *layer = target->layer;
    const int64_t output = target->begin + i;
    const char *panel = (const char *)layer->weights + output / PANEL * fairlead_packed_bytes(layer->weight_kind, PANEL, layer->inputs);
    const float scale = layer->scales ? layer->scales[output] : 1;
    for (int64_t input = 0; input < layer->inputs; input++)
        target->to[i * layer->inputs + input] = weight_at(layer->weight_kind, panel, output % PANEL, input) * scale;
}

typedef struct {
    Target target;
    int64_t count;
} Unpack;

static void unpack(Member *member, const void *args) {
    const Unpack *a = args;
    share(member, a->count, unpack_output, &a->target);
}

/* Fills `to` [end - begin][inputs] with the weights of outputs `begin` to `end`. */
EXPORT void fairlead_unpack(int32_t threads, const Linear *layer, int64_t begin, int64_t end, float *to) {
    const Unpack args = {{layer, begin, to}, end - begin};
    region(threads, unpack, &args);
}
