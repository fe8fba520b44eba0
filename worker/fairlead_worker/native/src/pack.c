/* Packing of a plain weight into the panels of gemm.c. */
#include <math.h>
#include <string.h>

#include "native.h"
#include "tile.h"

EXPORT int64_t fairlead_packed_bytes(int32_t kind, int64_t outputs, int64_t inputs) {
    return panel_count(outputs) * step_count(kind, inputs) * step_bytes(kind);
}

/* A weight of `kind`, element (output, input) at output * output_stride + input * input_stride, so a transposed one packs as well. */
typedef struct {
    const char *weight;
    int64_t outputs, inputs, output_stride, input_stride;
    int32_t kind, packed_kind;
    char *packed;
    float *scales; /* [outputs], INT8 only */
} Source;

static float value(const Source *from, int64_t output, int64_t input) {
    int64_t at = output * from->output_stride + input * from->input_stride;
    if (from->kind == FLOAT32)
        return ((const float *)from->weight)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from->weight)[at] << 16;
    float answer;
    memcpy(&answer, &bits, 4);
    return answer;
}

/* Packs one output's group of INT4 weights from `input` on. Its largest weight becomes -8, as in ggml's Q4_0, which uses the lowest of the
 * 16 numbers too. After the group's scales [32] come words [4][32]: byte b of word w holds input 8 w + b in its lower nibble and 8 w + b +
 * 4 in its higher one. 8 stands for zero. */
static void pack_group(const Source *from, int64_t output, int64_t lane, int64_t input, char *to) {
    float largest = 0, finite = 0, values[GROUP] = {0}; /* x - x is 0, or NaN where x is not finite */
    for (int64_t i = 0; i < GROUP && input + i < from->inputs; i++) {
        values[i] = value(from, output, input + i);
        finite += values[i] - values[i];
        if (fabsf(values[i]) > fabsf(largest))
            largest = values[i];
    }
    float scale = finite == 0 ? largest / -8 : NAN;
    uint32_t bits, words[4] = {0};
    memcpy(&bits, &scale, 4);
    const uint16_t half = (uint16_t)(finite == 0 ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : bits >> 16);
    memcpy(to + 2 * lane, &half, 2);
    bits = (uint32_t)half << 16;
    memcpy(&scale, &bits, 4);
    for (int64_t i = 0; i < GROUP; i++) {
        const long whole = scale != 0 && finite == 0 ? lrintf(values[i] / scale) : 0;
        const uint32_t nibble = (uint32_t)((whole > 7 ? 7 : whole < -8 ? -8 : whole) + 8);
        words[i / 8] |= nibble << (8 * (i % 4) + i % 8 / 4 * 4);
    }
    for (int64_t w = 0; w < 4; w++)
        memcpy(to + 2 * PANEL + 4 * (PANEL * w + lane), &words[w], 4);
}

#define COPY(type, per)                                                                                                                    \
    for (int64_t input = 0; input < from->inputs; input++)                                                                                 \
        for (int64_t lane = 0; lane < lanes; lane++)                                                                                       \
            ((type *)to)[(input / per * PANEL + lane) * per + input % per] =                                                               \
                ((const type *)from->weight)[(first + lane) * from->output_stride + input * from->input_stride];

static void pack_panel(const void *args, int64_t panel) {
    const Source *from = args;
    int64_t first = panel * PANEL, lanes = from->outputs - first < PANEL ? from->outputs - first : PANEL;
    int64_t bytes = fairlead_packed_bytes(from->packed_kind, PANEL, from->inputs);
    char *to = from->packed + panel * bytes;
    memset(to, 0, bytes);
    if (from->packed_kind == FLOAT32) {
        COPY(uint32_t, 1)
    } else if (from->packed_kind == BFLOAT16) {
        COPY(uint16_t, 2)
    } else if (from->packed_kind == INT4) {
        for (int64_t lane = 0; lane < lanes; lane++)
            for (int64_t input = 0; input < from->inputs; input += GROUP)
                pack_group(from, first + lane, lane, input, to + input / GROUP * step_bytes(INT4));
    } else {
        for (int64_t lane = 0; lane < lanes; lane++) {
            float most = 0;
            for (int64_t input = 0; input < from->inputs; input++) {
                const float size = fabsf(value(from, first + lane, input));
                most = size > most ? size : most; /* fmaxf is the same, but GCC 12 for Arm fails on it */
            }
            float factor = most > 0 ? 127 / most : 0;
            from->scales[first + lane] = most / 127;
            for (int64_t input = 0; input < from->inputs; input++)
                ((int8_t *)to)[(input / 2 * PANEL + lane) * 2 + input % 2] = (int8_t)lrintf(value(from, first + lane, input) * factor);
        }
    }
}

static void pack(Member *member, const void *args) {
    const Source *from = args;
    share(member, (from->outputs + PANEL - 1) / PANEL, pack_panel, from);
}

/* Fills `packed`, of fairlead_packed_bytes(packed_kind, outputs, inputs) bytes; strides in elements. FLOAT32 and BFLOAT16 are not converted
 * (kind == packed_kind). INT8 and INT4 are rounded from either, each output or each group of an output by its own largest weight. */
EXPORT void fairlead_pack(int32_t threads, int32_t kind, int32_t packed_kind, const void *weight, int64_t outputs, int64_t inputs, int64_t output_stride, int64_t input_stride, void *packed, float *scales) {
    Source from = {
        .weight = weight, .outputs = outputs, .inputs = inputs, .output_stride = output_stride, .input_stride = input_stride,
        .kind = kind, .packed_kind = packed_kind, .packed = packed, .scales = scales,
    };
    region(threads, pack, &from);
}
