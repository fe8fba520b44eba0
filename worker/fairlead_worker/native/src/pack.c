/* From a plain weight to the panels of gemm.c. */
#include <math.h>
#include <string.h>

#include "native.h"
#include "tile.h"

/* A weight of `kind`, element (output, input) at output * output_stride + input * input_stride: a transposed one packs as well. */
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

static void pack_panel(const void *args, int64_t panel) {
    const Source *from = args;
    int64_t per = from->packed_kind == FLOAT32 ? 1 : 2, steps = (from->inputs + per - 1) / per;
    int64_t width = from->packed_kind == FLOAT32 ? 4 : from->packed_kind == BFLOAT16 ? 2 : 1;
    char *to = from->packed + panel * steps * per * PANEL * width;
    memset(to, 0, steps * per * PANEL * width);
    for (int64_t lane = 0; lane < PANEL && panel * PANEL + lane < from->outputs; lane++) {
        int64_t output = panel * PANEL + lane;
        float scale = 0;
        if (from->packed_kind == INT8) {
            for (int64_t input = 0; input < from->inputs; input++)
                scale = fmaxf(scale, fabsf(value(from, output, input)));
            from->scales[output] = scale / 127;
        }
        for (int64_t input = 0; input < from->inputs; input++) {
            char *at = to + (input / per * PANEL * per + lane * per + input % per) * width;
            if (from->packed_kind == INT8)
                *(int8_t *)at = scale > 0 ? (int8_t)lrintf(value(from, output, input) * (127 / scale)) : 0;
            else
                memcpy(at, from->weight + (output * from->output_stride + input * from->input_stride) * width, width);
        }
    }
}

static void pack(Member *member, const void *args) {
    const Source *from = args;
    share(member, (from->outputs + PANEL - 1) / PANEL, pack_panel, from);
}

/* Fills `packed`, of fairlead_packed_bytes(packed_kind, outputs, inputs) bytes; strides in elements. FLOAT32 and BFLOAT16 stay what they
 * are (kind == packed_kind); INT8 is rounded from either, each output by its own largest weight. */
EXPORT void fairlead_pack(int32_t threads, int32_t kind, int32_t packed_kind, const void *weight, int64_t outputs, int64_t inputs, int64_t output_stride, int64_t input_stride, void *packed, float *scales) {
    Source from = {
        .weight = weight, .outputs = outputs, .inputs = inputs, .output_stride = output_stride, .input_stride = input_stride,
        .kind = kind, .packed_kind = packed_kind, .packed = packed, .scales = scales,
    };
    region(threads, pack, &from);
}
