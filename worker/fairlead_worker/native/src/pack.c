/* Packing of a plain weight into panels: of 32 outputs, [steps][32] steps' weights, see gemm.c; in blocks, see blocks.h. */
#include <math.h>
#include <string.h>

#include "native.h"
#include "tile.h"

/* A weight of `kind`, element (output, input) at output * output_stride + input * input_stride, so a transposed one packs as well. */
typedef struct {
    const char *weight;
    int64_t outputs, inputs, output_stride, input_stride;
    int32_t kind, packed_kind;
    char *packed;
    float *scales; /* [outputs], INT8 and Q4_1 only */
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

/* The size of the largest weight of an output; NaN if one is not finite. */
static float largest(const Source *from, int64_t output) {
    float most = 0, finite = 0; /* x - x is 0, or NaN where x is not finite */
    for (int64_t input = 0; input < from->inputs; input++) {
        const float weight = value(from, output, input), size = fabsf(weight);
        finite += weight - weight;
        most = size > most ? size : most; /* fmaxf is the same, but GCC 12 for Arm fails on it */
    }
    return most + finite;
}

static void round_int8(const Source *from, int64_t output, int64_t lane, int8_t *to) {
    const float most = largest(from, output), factor = most > 0 ? 127 / most : 0;
    from->scales[output] = most / 127;
    for (int64_t input = 0; input < from->inputs; input++)
        to[(input / 2 * PANEL + lane) * 2 + input % 2] = (int8_t)lrintf(value(from, output, input) * factor);
}

/* Rounds one output to blocks of Q4_1. A power of two, the output's scale, brings its largest weight to 2^13 .. 2^14: all of float16's range
 * below serves groups of smaller weights. */
static void round_blocks(const Source *from, int64_t output, int64_t lane, char *to) {
    const float most = largest(from, output);
    int exponent = 0;
    frexpf(most, &exponent); /* 0 for 0 */
    exponent = exponent < -111 ? -111 : exponent; /* its inverse must be a float as well */
    from->scales[output] = isfinite(most) ? ldexpf(1, exponent - 14) : NAN;
    for (int64_t input = 0; input < from->inputs; input += GROUP) {
        float weights[GROUP];
        Part part;
        for (int64_t i = 0; i < GROUP; i++) /* the first weight also fills up the last group */
            weights[i] = isfinite(most) ? ldexpf(value(from, output, input + i < from->inputs ? input + i : input), 14 - exponent) : 0;
        round_group(weights, &part);
        write_panel(Q4_1, to, lane, input / GROUP, &part);
    }
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
    } else if (from->packed_kind == INT8) {
        for (int64_t lane = 0; lane < lanes; lane++)
            round_int8(from, first + lane, lane, (int8_t *)to);
    } else {
        for (int64_t lane = 0; lane < lanes; lane++)
            round_blocks(from, first + lane, lane, to);
    }
}

static void pack(Member *member, const void *args) {
    const Source *from = args;
    share(member, panel_count(from->outputs), pack_panel, from);
}

/* Fills `packed`, of fairlead_packed_bytes(packed_kind, outputs, inputs) bytes; strides in elements. FLOAT32 and BFLOAT16 are not converted
 * (kind == packed_kind). INT8 and Q4_1 are rounded from either, each output or each group of an output by its own weights. */
EXPORT void fairlead_pack(int32_t threads, int32_t kind, int32_t packed_kind, const void *weight, int64_t outputs, int64_t inputs, int64_t output_stride, int64_t input_stride, void *packed, float *scales) {
    Source from = {
        .weight = weight, .outputs = outputs, .inputs = inputs, .output_stride = output_stride, .input_stride = input_stride,
        .kind = kind, .packed_kind = packed_kind, .packed = packed, .scales = scales,
    };
    region(threads, pack, &from);
}
