/* The numbers that packed weights stand for, and rows of ggml's blocks: to panels and to floats. */
#include <string.h>

#include "native.h"
#include "tile.h"

EXPORT int64_t fairlead_packed_bytes(int32_t kind, int64_t outputs, int64_t inputs) {
    return panel_count(outputs) * step_count(kind, inputs) * step_bytes(kind);
}

/* Weight `input` of a panel's output `lane`, without the output's scale. */
static float weight_at(int32_t kind, const char *panel, int64_t lane, int64_t input) {
    if (kind == FLOAT32)
        return ((const float *)panel)[input * PANEL + lane];
    const int64_t at = (input / 2 * PANEL + lane) * 2 + input % 2;
    if (kind == INT8)
        return ((const int8_t *)panel)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)panel)[at] << 16;
    float answer;
    memcpy(&answer, &bits, 4);
    return answer;
}

/* Rows of one kind from output `first` on, in panels or as `floats` [rows][inputs]. */
typedef struct {
    const Linear *layer; /* the rows' own panels; NULL: rows as in a GGUF file at `blocks` */
    const uint8_t *blocks;
    int64_t first, rows, inputs;
    int32_t kind;
    char *panels;
    float *floats;
} Rows;

static void put_part(const Part *part, int32_t kind, int64_t count, float *to) {
    float all[GROUP];
    widen_part(kind, part, all);
    memcpy(to, all, (size_t)(count < GROUP ? count : GROUP) * sizeof *to);
}

static void unpack_row(const void *args, int64_t row) {
    const Rows *rows = args;
    const int64_t output = rows->first + row, inputs = rows->inputs, lane = output % PANEL;
    const Panel panel = rows->layer->panels[output / PANEL];
    const int32_t kind = (int32_t)panel.kind;
    float *to = rows->floats + row * inputs;
    for (int64_t at = 0; is_block(kind) && at < inputs; at += GROUP) {
        const Part part = read_panel(kind, panel.weights, lane, at / GROUP);
        put_part(&part, kind, inputs - at, to + at);
    }
    for (int64_t at = 0; !is_block(kind) && at < inputs; at++)
        to[at] = weight_at(kind, panel.weights, lane, at);
    for (int64_t at = 0; rows->layer->scales && at < inputs; at++)
        to[at] *= rows->layer->scales[output];
}

static void widen_row(const void *args, int64_t row) {
    const Rows *rows = args;
    const uint8_t *blocks = rows->blocks + row * fairlead_row_bytes(rows->kind, rows->inputs);
    for (int64_t at = 0; at < rows->inputs; at += GROUP) {
        const Part part = read_row(rows->kind, blocks, at / GROUP);
        put_part(&part, rows->kind, GROUP, rows->floats + row * rows->inputs + at);
    }
}

/* The rows of panel `i`, counted from the first row's panel. */
static void pack_panel(const void *args, int64_t i) {
    const Rows *rows = args;
    const int64_t begin = i * PANEL - rows->first % PANEL, size = fairlead_packed_bytes(rows->kind, PANEL, rows->inputs);
    for (int64_t row = begin < 0 ? 0 : begin; row < begin + PANEL && row < rows->rows; row++)
        for (int64_t group = 0; group < rows->inputs / GROUP; group++) {
            const Part part = read_row(rows->kind, rows->blocks + row * fairlead_row_bytes(rows->kind, rows->inputs), group);
            write_panel(rows->kind, rows->panels + i * size, (rows->first + row) % PANEL, group, &part);
        }
}

static void run(Member *member, const void *args) {
    const Rows *rows = args;
    if (rows->panels)
        share(member, panel_count(rows->first % PANEL + rows->rows), pack_panel, rows);
    else
        share(member, rows->rows, rows->layer ? unpack_row : widen_row, rows);
}

/* Fills `to` [end - begin][inputs] with the weights of outputs `begin` to `end`. */
EXPORT void fairlead_unpack(int32_t threads, const Linear *layer, int64_t begin, int64_t end, float *to) {
    const Rows rows = {.layer = layer, .first = begin, .rows = end - begin, .inputs = layer->inputs, .floats = to};
    region(threads, run, &rows);
}

/* Fills `to` [rows][inputs] from `rows` rows of blocks as in a GGUF file. */
EXPORT void fairlead_widen_blocks(int32_t threads, int32_t kind, const void *blocks, int64_t rows, int64_t inputs, float *to) {
    const Rows all = {.blocks = blocks, .rows = rows, .inputs = inputs, .kind = kind, .floats = to};
    region(threads, run, &all);
}

/* Packs such rows as the outputs from `lane` on of panels, which are zeros there. */
EXPORT void fairlead_pack_blocks(int32_t threads, int32_t kind, const void *blocks, int64_t rows, int64_t inputs, int64_t lane, void *panels) {
    const Rows all = {.blocks = blocks, .first = lane, .rows = rows, .inputs = inputs, .kind = kind, .panels = panels};
    region(threads, run, &all);
}
