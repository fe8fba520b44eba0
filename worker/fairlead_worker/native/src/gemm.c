/* Linear layers. Weights are packed in panels of 32 outputs, [outputs / 32][steps][32] steps' weights, and read once, front to back, while
 * up to TILE_ROWS rows are multiplied by them. With more rows, a run of a panel stays in the second cache until all rows have used it. */
#include <stdlib.h>

#include "amx.h"
#include "native.h"
#include "simd.h"
#include "tile.h"

enum {
    ROWS = 96, /* of a block: their x stays in the second cache while panels pass */
    STEPS = LANES == 16 ? 2048 : 128, /* of a run: 256 KiB of weights, half of a small second cache; tiles of 3 rows need them in the first */
    FEW = 10, /* rows for which weights are converted to float in registers, see `run` */
    AHEAD = 6144, /* prefetch distance in bytes of weights for few rows */
    STEPS_INT8 = 256 /* 512 inputs: 512 * 127 * 32767 is the largest sum that always fits an int32 */
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Bytes of each row that a step takes. */
static int64_t x_bytes(int32_t kind) { return is_block(kind) ? (int64_t)sizeof(Group) * step_groups(kind) : 4 * factor_size(kind); }

/* The forms of x that panels are multiplied by: the caller's, converted to floats, rounded to int16 for INT8, or `Group`s for blocks. */
enum { GIVEN, FLOATS, INT16, GROUPS, FORMS };

static int form_of(int32_t weights, int32_t activations) {
    if (weights == INT8 || is_block(weights))
        return weights == INT8 ? INT16 : GROUPS;
    return weights == activations && (weights == FLOAT32 || PRODUCTS) ? GIVEN : FLOATS;
}

typedef struct {
    const char *x; /* rows `stride` bytes apart */
    int64_t stride;
    const float *scales; /* [rows][runs], INT16 only */
} Form;

typedef struct {
    const Linear *layer;
    Form forms[FORMS]; /* without a stride: no panel needs it */
    int32_t kind; /* of the panel at hand; the next three are the form of x for it */
    const char *x;
    int64_t x_stride;
    const float *x_scales;
    int64_t rows, block, runs;
    char *y;
    int64_t y_stride;
    int32_t y_kind, threads, adds;
    enum { PLAIN, ACTIVATED, GATED } form; /* of outputs */
    Activation activation;
    int64_t items; /* panels (of gates, if gated) for each block of rows */
} Job;

/* The output of a vector of sums: scaled, with the bias. */
typedef struct {
    Vec scale, bias;
} Finish;

static Finish finish_of(const Linear *layer, int64_t output) {
    return (Finish){
        layer->scales ? load(FLOAT32, layer->scales, output, layer->outputs) : splat(1),
        layer->bias ? load(layer->kind, layer->bias, output, layer->outputs) : splat(0),
    };
}

static Vec finished(Finish finish, const float *sums) { return fma_(load_floats(sums), finish.scale, finish.bias); }

/* Stores the sums of `rows` rows and one panel from `output` on, in the caller's format. */
static void put_panel(const Job *job, const float *sums, int64_t row, int64_t rows, int64_t output) {
    for (int64_t at = output; at < output + PANEL; at += LANES) {
        const int64_t outputs = job->layer->outputs - at;
        const Finish finish = finish_of(job->layer, at);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t to = (row + i) * job->y_stride + at;
            Vec value = finished(finish, sums + i * PANEL + at - output);
            if (job->form == ACTIVATED)
                value = activated(job->activation, value);
            put(job->y_kind, job->y, to, to + outputs, job->adds ? add(load(job->y_kind, job->y, to, to + outputs), value) : value);
        }
    }
}

/* The same for a panel of gates and the panel that they multiply. */
static void put_gated(const Job *job, const float *gates, const float *ups, int64_t row, int64_t rows, int64_t output) {
    for (int64_t at = output; at < output + PANEL; at += LANES) {
        const Finish gate = finish_of(job->layer, at), up = finish_of(job->layer, job->layer->outputs / 2 + at);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t of = i * PANEL + at - output;
            const int64_t to = (row + i) * job->y_stride + at;
            const Vec active = activated(job->activation, finished(gate, gates + of));
            put(job->y_kind, job->y, to, to + LANES, mul(active, finished(up, ups + of)));
        }
    }
}

/* A few rows consume a line of weights as fast as memory delivers it, so the next lines are prefetched: AHEAD bytes on, and near the run's
 * end the start of the next run, at `ahead`. 4 to 8 KiB were the best of 2 to 64 here, on one chiplet and on two. */
static void run_tile(int32_t kind, Tile tile, int64_t rows) {
    const char *next = tile.ahead;
    const int64_t size = step_bytes(kind), last = smaller(AHEAD / size, tile.steps);
    tile.steps -= last;
    tile.ahead = tile.weights + last * size;
    tile.ahead_step = size;
    multiply_tile(kind, &tile, rows);
    tile.x += x_bytes(kind) * tile.steps;
    tile.weights += tile.steps * size;
    tile.steps = last;
    tile.ahead = next;
    multiply_tile(kind, &tile, rows);
}

/* Converts `steps` steps of bfloat16 to [2 * steps][PANEL] floats. */
static void widen_weights(const char *weights, int64_t steps, float *to) {
    for (int64_t step = 0; step < steps; step++, weights += 4 * PANEL)
        for (int half = 0; half < 2; half++, to += PANEL)
            for (int64_t at = 0; at < PANEL; at += LANES)
                store_floats(to + at, half_of(BFLOAT16, weights + 4 * at, half));
}

/* Tiles of one run: `rows` rows over `steps` steps of a panel. The run at `next` will be needed afterwards: while several tiles compute,
 * all of it is prefetched, a share for each. The same holds for the lines of `y` (NULL: none) that will be written.
 *
 * Weights that must be converted to float (AVX2): up to FEW rows convert them in registers, again for each tile of 2 rows; a third row
 * would leave no registers for it. That takes 0.66 of the time of converting them once, in memory, for 4 rows, and 0.83 for 8. */
static void run(const Job *job, int64_t row, int64_t rows, int64_t step, int64_t steps, const char *weights, const char *next, const char *y,
                void *sums) {
    _Alignas(64) float wide[WIDENS ? STEPS * PANEL : 1];
    int32_t kind = job->kind;
    const int widens = WIDENS && factor_size(kind) > 1;
    const int64_t most = widens && rows <= FEW ? 2 : TILE_ROWS, tiles = (rows + most - 1) / most;
    const int64_t share_of_next = steps * step_bytes(kind) / tiles;
    int64_t done = 0;
    if (widens && rows > FEW) {
        widen_weights(weights, steps, wide);
        kind = FLOAT32, weights = (const char *)wide, step *= 2, steps *= 2;
    }
    for (int64_t t = 0; t < tiles; t++) {
        int64_t now = (rows - done + tiles - t - 1) / (tiles - t);
        for (int64_t r = row + done; y && r < row + done + now; r++)
            for (int64_t byte = 0; byte < PANEL * bytes(job->y_kind); byte += 64)
                __builtin_prefetch(y + r * job->y_stride * bytes(job->y_kind) + byte, 1, 3);
        Tile tile = {
            .x = job->x + (row + done) * job->x_stride + x_bytes(kind) * step,
            .x_stride = job->x_stride,
            .weights = weights,
            .steps = steps,
            .ahead = next + share_of_next * t,
            .ahead_step = share_of_next / steps,
            .passing = tiles <= 2,
            .sums = (char *)sums + done * PANEL * 4,
        };
        if (tiles == 1)
            run_tile(kind, tile, now);
        else
            multiply_tile(kind, &tile, now);
        done += now;
    }
}

/* Multiplies float or bfloat16 weights by the same, or blocks by groups: sums over all inputs. Without products x is converted to float,
 * with a zero after an odd last input. */
static void multiply(const Job *job, int64_t row, int64_t rows, const char *weights, const char *next, const char *y, float *sums) {
    const Linear *layer = job->layer;
    const int paired = job->kind == BFLOAT16 && PRODUCTS;
    int64_t bytes = step_bytes(job->kind), begin = 0;
    int64_t whole = paired ? layer->inputs / 2 : step_count(job->kind, layer->inputs);
    if (paired && amx_ready()) { /* for any number of rows: their bits do not depend on it */
        begin = whole / AMX_STEPS * AMX_STEPS;
        if (begin)
            multiply_amx(job->x + row * job->x_stride, job->x_stride, rows, weights, begin / AMX_STEPS, next, sums);
    }
    const int64_t most = STEPS * 4 * PANEL / bytes / factor_size(job->kind);
    for (int64_t step = begin; step < whole; step += most) {
        int64_t steps = smaller(most, whole - step);
        const char *ahead = step + steps < whole ? weights + (step + steps) * bytes : next;
        run(job, row, rows, step, steps, weights + step * bytes, ahead, step + steps < whole ? NULL : y, sums);
    }
    if (whole == step_count(job->kind, layer->inputs))
        return;
    uint32_t last[ROWS]; /* an odd last input: its pair would reach beyond the row */
    for (int64_t r = 0; r < rows; r++)
        last[r] = *(const uint16_t *)(job->x + (row + r) * job->x_stride + 4 * whole);
    Job tail = {.layer = layer, .kind = BFLOAT16, .x = (const char *)last, .x_stride = 4};
    run(&tail, 0, rows, 0, 1, weights + whole * bytes, next, NULL, sums);
}

/* Multiplies int8 weights by int16 inputs: each run is exact, and is converted to float by its row's scale. */
static void multiply_int8(const Job *job, int64_t row, int64_t rows, const char *weights, const char *next, const char *y, float *sums) {
    int64_t bytes = step_bytes(INT8), whole = step_count(INT8, job->layer->inputs), at = 0;
    int32_t exact[ROWS * PANEL];
    for (int64_t step = 0; step < whole; step += STEPS_INT8, at++) {
        int64_t steps = smaller(STEPS_INT8, whole - step);
        memset(exact, 0, rows * PANEL * 4);
        const char *ahead = step + steps < whole ? weights + (step + steps) * bytes : next;
        run(job, row, rows, step, steps, weights + step * bytes, ahead, step + steps < whole ? NULL : y, exact);
        for (int64_t i = 0; i < rows * PANEL; i += LANES) {
            Vec scale = splat(job->x_scales[(row + i / PANEL) * job->runs + at]);
            store_floats(sums + i, fma_(whole_to_float(load_words(exact + i)), scale, load_floats(sums + i)));
        }
    }
}

/* [rows][PANEL] sums of one panel. The panel at `next` will be needed afterwards, and the outputs from `output` on (-1: none) written. */
static void sum_panel(const Job *job, int64_t panel, int64_t row, int64_t rows, int64_t next, int64_t output, float *sums) {
    const Panel *now = job->layer->panels + panel;
    const Form *form = &job->forms[form_of((int32_t)now->kind, job->layer->kind)];
    Job own = *job;
    own.kind = (int32_t)now->kind, own.x = form->x, own.x_stride = form->stride, own.x_scales = form->scales;
    memset(sums, 0, rows * PANEL * 4);
    const char *y = output < 0 ? NULL : job->y + output * bytes(job->y_kind);
    (own.kind == INT8 ? multiply_int8 : multiply)(&own, row, rows, now->weights, job->layer->panels[next].weights, y, sums);
}

/* The panel that a thread will probably need after item `i`, which is its `panel`. */
static int64_t panel_after(const Job *job, int64_t i, int64_t panel, int64_t panels) {
    return run_ends(job->items, i, job->threads) >= 0 ? panel : (i + 1) % panels;
}

/* Prefetches a share of the next block of rows for each panel of this one: other cores have written them. */
static void fetch_rows(const Job *job, int64_t i, int64_t panel, int64_t panels) {
    const int64_t row = (i / panels + 1) * job->block, rows = smaller(job->block, job->rows - row);
    for (const Form *form = job->forms; rows > 0 && form < job->forms + FORMS; form++) {
        const int64_t size = rows * form->stride;
        for (int64_t byte = size * panel / panels; byte < size * (panel + 1) / panels; byte += 64)
            __builtin_prefetch(form->x + row * form->stride + byte, 0, 2);
    }
}

/* One panel, one block of rows. */
static void item(const void *args, int64_t i) {
    const Job *job = args;
    const int64_t panels = panel_count(job->layer->outputs), panel = i % panels, row = i / panels * job->block;
    const int64_t rows = smaller(job->block, job->rows - row);
    float sums[ROWS * PANEL];
    fetch_rows(job, i, panel, panels);
    sum_panel(job, panel, row, rows, panel_after(job, i, panel, panels), panel * PANEL, sums);
    put_panel(job, sums, row, rows, panel * PANEL);
}

/* One panel of gates and its panel of the other half, one block of rows. */
static void gated_item(const void *args, int64_t i) {
    const Job *job = args;
    const int64_t panels = panel_count(job->layer->outputs) / 2, panel = i % panels, row = i / panels * job->block;
    const int64_t rows = smaller(job->block, job->rows - row);
    float gates[ROWS * PANEL], ups[ROWS * PANEL];
    fetch_rows(job, i, panel, panels);
    sum_panel(job, panel, row, rows, panels + panel, -1, gates);
    sum_panel(job, panels + panel, row, rows, panel_after(job, i, panel, panels), panel * PANEL, ups);
    put_gated(job, gates, ups, row, rows, panel * PANEL);
}

static void share_panels(Member *member, Job *job) {
    const int gated = job->form == GATED;
    int64_t panels = panel_count(job->layer->outputs) >> gated, blocks = (job->rows + ROWS - 1) / ROWS;
    while (panels * blocks < 4 * job->threads && blocks * TILE_ROWS < job->rows) /* few outputs: rows are shared as well */
        blocks *= 2;
    job->block = blocks ? (job->rows + blocks - 1) / blocks : 1;
    job->items = panels * ((job->rows + job->block - 1) / job->block);
    share(member, job->items, gated ? gated_item : item, job);
}

/* Quantizes one row to int16, each run by its own largest value: 15 bits, while bfloat16 has 8. NaN and infinity make the row NaN. */
static void quantize(int32_t kind, const char *x, int64_t inputs, int16_t *to, float *scales) {
    for (int64_t start = 0; start < inputs; start += 2 * STEPS_INT8) {
        int64_t end = smaller(start + 2 * STEPS_INT8, inputs);
        Vec largest = splat(0), finite = splat(0); /* x - x is 0, or NaN where x is not finite; so is their sum */
        for (int64_t at = start; at < end; at += LANES) {
            Vec value = load(kind, x, at, end);
            largest = larger(largest, magnitude(value));
            finite = add(finite, sub(value, value));
        }
        const int wrong = total(finite) != 0;
        float most = highest(largest);
        *scales++ = wrong ? NAN : most / 32767;
        Vec factor = splat(most > FLT_MIN * 32767 && !wrong ? 32767 / most : 0);
        for (int64_t at = start; at < end + end % 2; at += LANES)
            store_int16(to + at, end + end % 2 - at, mul(load(kind, x, at, end), factor));
    }
}

/* Quantizes one row to int8 in groups, each by its own largest value, as ggml's Q8_0. NaN and infinity make the row NaN. */
static void group_row(int32_t kind, const char *x, int64_t inputs, Group *to) {
    for (int64_t start = 0; start < inputs; start += GROUP, to++) {
        Vec largest = splat(0), finite = splat(0); /* x - x is 0, or NaN where x is not finite; so is their sum */
        for (int64_t at = 0; at < GROUP; at += LANES) {
            const Vec value = load(kind, x, start + at, inputs);
            largest = larger(largest, magnitude(value));
            finite = add(finite, sub(value, value));
        }
        const int wrong = total(finite) != 0;
        const float most = highest(largest);
        const Vec factor = splat(most > FLT_MIN * 127 && !wrong ? 127 / most : 0); /* finite */
        float sums[2] = {0, 0}; /* exact */
        for (int64_t at = 0; at < GROUP; at += LANES) {
            const Vec whole = wrong ? splat(0) : nearest(mul(load(kind, x, start + at, inputs), factor));
            store_int8(to->x + at, whole);
            sums[at / 16] += total(whole);
        }
        to->scale = wrong ? NAN : most / 127;
        to->sums[0] = (int16_t)sums[0], to->sums[1] = (int16_t)sums[1];
    }
}

/* Converts one row to `width` floats: zero after an odd last input. */
static void widen_row(int32_t kind, const char *x, int64_t inputs, int64_t width, float *to) {
    for (int64_t at = 0; at < width; at += LANES)
        store_some(to + at, width - at, load(kind, x, at, inputs));
}

/* Bytes of a row in a form that is made. */
static int64_t form_bytes(int form, int64_t inputs) {
    return form == GROUPS ? (inputs + GROUP - 1) / GROUP * (int64_t)sizeof(Group) : step_count(INT8, inputs) * (form == FLOATS ? 8 : 4);
}

/* Makes a form of all rows, in memory that the caller frees. */
static Form made(const Job *job, int form) {
    const Linear *layer = job->layer;
    const Form given = job->forms[GIVEN];
    const int64_t stride = form_bytes(form, layer->inputs), runs = form == INT16 ? job->runs : 0;
    char *to = malloc((size_t)(job->rows * (stride + runs * 4) + 1));
    if (!to)
        abort();
    float *scales = (float *)(to + job->rows * stride);
    for (int64_t row = 0; row < job->rows; row++) {
        const char *x = given.x + row * given.stride;
        if (form == GROUPS)
            group_row(layer->kind, x, layer->inputs, (Group *)(to + row * stride));
        else if (form == INT16)
            quantize(layer->kind, x, layer->inputs, (int16_t *)(to + row * stride), scales + row * runs);
        else
            widen_row(layer->kind, x, layer->inputs, stride / 4, (float *)(to + row * stride));
    }
    return (Form){to, stride, scales};
}

/* Each thread makes the forms of all rows itself: that costs little beside the products, and saves a barrier. */
static void compute(Member *member, Job job) {
    int forms = 0;
    for (int32_t kind = FLOAT32; kind <= Q6_K; kind++)
        if (job.layer->kinds >> kind & 1)
            forms |= 1 << form_of(kind, job.layer->kind);
    job.threads = member->team->threads;
    job.runs = (step_count(INT8, job.layer->inputs) + STEPS_INT8 - 1) / STEPS_INT8;
    for (int form = FLOATS; form < FORMS; form++)
        if (forms >> form & 1)
            job.forms[form] = made(&job, form);
    if (!(forms >> GIVEN & 1))
        job.forms[GIVEN].stride = 0;
    share_panels(member, &job);
    for (int form = FLOATS; form < FORMS; form++)
        free((char *)job.forms[form].x);
}

static Job job_of(const Linear *layer, const void *x, int64_t x_stride, int64_t rows, void *y, int64_t y_stride, int32_t y_kind) {
    return (Job){
        .layer = layer, .forms[GIVEN] = {x, x_stride * bytes(layer->kind), NULL}, .rows = rows,
        .y = y, .y_stride = y_stride, .y_kind = y_kind,
    };
}

void linear(Member *member, const Linear *layer, const void *x, int64_t x_stride, int64_t rows, void *y, int64_t y_stride, int32_t y_kind) {
    compute(member, job_of(layer, x, x_stride, rows, y, y_stride, y_kind));
}

void add_linear(Member *member, const Linear *layer, const void *x, int64_t x_stride, int64_t rows, float *y, int64_t y_stride) {
    Job job = job_of(layer, x, x_stride, rows, y, y_stride, FLOAT32);
    job.adds = 1;
    compute(member, job);
}

static Job activation_of(const Linear *layer, Activation activation, int gated, const void *x, int64_t x_stride, int64_t rows, void *y, int64_t y_stride) {
    Job job = job_of(layer, x, x_stride, rows, y, y_stride, layer->kind);
    job.form = gated ? GATED : ACTIVATED, job.activation = activation;
    return job;
}

void activate(Member *member, const Linear *layer, Activation activation, int gated, const void *x, int64_t x_stride, int64_t rows, void *y,
              int64_t y_stride) {
    compute(member, activation_of(layer, activation, gated, x, x_stride, rows, y, y_stride));
}

static void call(Member *member, const void *args) { compute(member, *(const Job *)args); }

EXPORT void fairlead_linear(int32_t threads, const Linear *layer, const void *x, int64_t x_stride, int64_t rows, void *y, int64_t y_stride, int32_t y_kind) {
    Job job = job_of(layer, x, x_stride, rows, y, y_stride, y_kind);
    region(threads, call, &job);
}

typedef struct {
    const Linear *layers;
    int64_t count, x_step, y_step; /* bytes */
    Job first;
} Several;

static void call_each(Member *member, const void *args) {
    const Several *all = args;
    Job job = all->first;
    for (int64_t i = 0; i < all->count; i++) {
        job.layer = all->layers + i;
        compute(member, job);
        job.forms[GIVEN].x += all->x_step, job.y = (char *)job.y + all->y_step;
    }
}

/* As many layers of one size, each with rows and outputs of its own: those of layer i are i steps (in elements) behind those of layer 0. */
EXPORT void fairlead_linears(int32_t threads, const Linear *layers, int64_t count, const void *x, int64_t x_stride, int64_t x_step, int64_t rows, void *y,
                             int64_t y_stride, int64_t y_step) {
    const int64_t size = bytes(layers->kind);
    Several all = {layers, count, x_step * size, y_step * size, job_of(layers, x, x_stride, rows, y, y_stride, layers->kind)};
    region(threads, call_each, &all);
}

EXPORT void fairlead_activate(int32_t threads, const Linear *layer, const Activation *activation, int32_t gated, const void *x, int64_t x_stride, int64_t rows,
                              void *y, int64_t y_stride) {
    Job job = activation_of(layer, *activation, gated, x, x_stride, rows, y, y_stride);
    region(threads, call, &job);
}
