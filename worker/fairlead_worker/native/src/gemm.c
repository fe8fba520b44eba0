/* Linear layers. Weights are packed in panels of 32 outputs, [outputs / 32][steps][32] steps' weights, read once, front to back, while up to
 * 12 rows are multiplied by them; with more rows a run of a panel stays in the second cache until every row has met it. */
#include <immintrin.h>
#include <string.h>

#include "native.h"
#include "tile.h"

enum {
    ROWS = 96,      /* of a block: their x stays in the second cache while panels pass by */
    STEPS = 2048,   /* of a run: 256 KiB of weights, half of a small second cache */
    STEPS_INT8 = 256 /* 512 inputs: 512 * 127 * 32767 is the largest sum that an int32 holds for certain */
};

static int64_t step_count(int32_t kind, int64_t inputs) { return kind == FLOAT32 ? inputs : (inputs + 1) / 2; }
static int64_t step_bytes(int32_t kind) { return kind == INT8 ? 2 * PANEL : 4 * PANEL; }
static int64_t panel_count(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

EXPORT int64_t fairlead_packed_bytes(int32_t kind, int64_t outputs, int64_t inputs) {
    return panel_count(outputs) * step_count(kind, inputs) * step_bytes(kind);
}

typedef struct {
    const Linear *layer;
    const char *x; /* rows x_stride bytes apart; int16 for INT8 */
    int64_t x_stride;
    const float *x_scales; /* [rows][runs], INT8 only */
    int64_t rows, block, runs;
    char *y;
    int64_t y_stride;
    int32_t y_kind, threads;
} Job;

static void put(const Job *job, const float *sums, int64_t row, int64_t rows, int64_t output) {
    const Linear *layer = job->layer;
    __m512 bias[2];
    __mmask16 mask[2];
    for (int half = 0; half < 2; half++) {
        int64_t left = layer->outputs - output - 16 * half;
        mask[half] = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
        bias[half] = _mm512_setzero_ps();
        if (!layer->bias)
            continue;
        int64_t at = output + 16 * half;
        if (layer->kind == FLOAT32)
            bias[half] = _mm512_maskz_loadu_ps(mask[half], (const float *)layer->bias + at);
        else
            bias[half] = _mm512_castsi512_ps(
                _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask[half], (const uint16_t *)layer->bias + at)), 16));
    }
    for (int64_t i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++) {
            __m512 value = _mm512_loadu_ps(sums + i * PANEL + 16 * half);
            if (layer->bias)
                value = _mm512_add_ps(value, bias[half]);
            int64_t at = (row + i) * job->y_stride + output + 16 * half;
            if (job->y_kind == FLOAT32)
                _mm512_mask_storeu_ps((float *)job->y + at, mask[half], value);
            else
                _mm256_mask_storeu_epi16((uint16_t *)job->y + at, mask[half], (__m256i)_mm512_cvtneps_pbh(value));
        }
}

/* Tiles of one run: `rows` rows over `steps` steps of a panel. While they compute, all of `ahead` is fetched, a share for each tile. */
static void run(const Job *job, int64_t row, int64_t rows, int64_t step, int64_t steps, const char *weights, const char *ahead, void *sums) {
    int32_t kind = job->layer->weight_kind;
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, done = 0, bytes = step_bytes(kind);
    for (int64_t t = 0; t < tiles; t++) {
        int64_t now = (rows - done + tiles - t - 1) / (tiles - t);
        Tile tile = {
            .x = job->x + (row + done) * job->x_stride + 4 * step,
            .x_stride = job->x_stride,
            .weights = weights,
            .steps = steps,
            .ahead = ahead + steps * bytes / tiles * t,
            .ahead_step = bytes / tiles,
            .sums = (char *)sums + done * PANEL * 4,
        };
        multiply_tile(kind, &tile, now);
        done += now;
    }
}

/* One panel, one block of rows. */
static void item(const void *args, int64_t i) {
    const Job *job = args;
    const Linear *layer = job->layer;
    int64_t panels = panel_count(layer->outputs), panel = i % panels, row = i / panels * job->block, rows = smaller(job->block, job->rows - row);
    int64_t steps = step_count(layer->weight_kind, layer->inputs), bytes = step_bytes(layer->weight_kind);
    const char *weights = (const char *)layer->weights + panel * steps * bytes;
    const char *next = panel + job->threads < panels ? weights + job->threads * steps * bytes : weights;
    float sums[ROWS * PANEL];
    memset(sums, 0, rows * PANEL * 4);
    int64_t whole = layer->weight_kind == BFLOAT16 ? layer->inputs / 2 : steps;
    for (int64_t step = 0; step < whole; step += STEPS) {
        int64_t now = smaller(STEPS, whole - step);
        const char *ahead = step + now < whole ? weights + (step + now) * bytes : next;
        run(job, row, rows, step, now, weights + step * bytes, ahead, sums);
    }
    if (whole < steps) { /* an odd last input: its pair would end beyond the row */
        uint32_t last[ROWS];
        for (int64_t r = 0; r < rows; r++)
            last[r] = *(const uint16_t *)(job->x + (row + r) * job->x_stride + 4 * whole);
        Job tail = *job;
        tail.x = (const char *)(last - row);
        tail.x_stride = 4;
        run(&tail, row, rows, 0, 1, weights + whole * bytes, next, sums);
    }
    put(job, sums, row, rows, panel * PANEL);
}

void linear(Member *member, const Linear *layer, const void *x, int64_t x_stride, int64_t rows, void *y, int64_t y_stride, int32_t y_kind) {
    int64_t panels = panel_count(layer->outputs), threads = member->team->threads, blocks = (rows + ROWS - 1) / ROWS;
    while (panels * blocks < 4 * threads && blocks * TILE_ROWS < rows) /* fewer outputs than threads could share */
        blocks *= 2;
    Job job = {
        .layer = layer, .x = x, .x_stride = x_stride * (layer->kind == FLOAT32 ? 4 : 2), .rows = rows,
        .y = y, .y_stride = y_stride, .y_kind = y_kind, .threads = threads,
    };
    job.block = blocks ? (rows + blocks - 1) / blocks : 1;
    share(member, panels * ((rows + job.block - 1) / job.block), item, &job);
}

typedef struct {
    const Linear *layer;
    const void *x;
    void *y;
    int64_t x_stride, rows, y_stride;
    int32_t y_kind;
} Call;

static void call(Member *member, const void *args) {
    const Call *c = args;
    linear(member, c->layer, c->x, c->x_stride, c->rows, c->y, c->y_stride, c->y_kind);
}

EXPORT void fairlead_linear(int32_t threads, const Linear *layer, const void *x, int64_t x_stride, int64_t rows, void *y, int64_t y_stride, int32_t y_kind) {
    Call c = {.layer = layer, .x = x, .x_stride = x_stride, .rows = rows, .y = y, .y_stride = y_stride, .y_kind = y_kind};
    region(threads, call, &c);
}
