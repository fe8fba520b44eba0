/* Rounding of weights to 4 bits: 16 equal steps from a minimum on, for each 32 inputs of an output, as ggml's Q4_1. */
#include "blocks.h"
#include "simd.h"

enum { VECS = GROUP / LANES, TRIES = 24 };

typedef struct {
    float scale, minimum, error;
} Grid;

INLINE Vec code_of(Vec weight, Vec inverse, Vec minimum) {
    return lesser(larger(nearest(mul(sub(weight, minimum), inverse)), splat(0)), splat(15));
}

static float error_of(const Vec *weights, const Vec *codes, float scale, float minimum) {
    Vec sum = splat(0);
    for (int i = 0; i < VECS; i++) {
        const Vec off = sub(sub(weights[i], splat(minimum)), mul(codes[i], splat(scale)));
        sum = fma_(off, off, sum);
    }
    return total(sum);
}

/* The grid with the least squares for the codes that weights have on the grid of `inverse` and `minimum`. */
static Grid fitted(const Vec *weights, float inverse, float minimum) {
    Vec codes[VECS], ones = splat(0), squares = splat(0), products = splat(0), all = splat(0);
    for (int i = 0; i < VECS; i++) {
        codes[i] = code_of(weights[i], splat(inverse), splat(minimum));
        ones = add(ones, codes[i]);
        squares = fma_(codes[i], codes[i], squares);
        products = fma_(codes[i], weights[i], products);
        all = add(all, weights[i]);
    }
    const float c = total(ones), w = total(all), spread = GROUP * total(squares) - c * c;
    if (!(spread > 0))
        return (Grid){0, w / GROUP, INFINITY};
    const float scale = (GROUP * total(products) - c * w) / spread, start = (w - scale * c) / GROUP;
    return (Grid){scale, start, error_of(weights, codes, scale, start)};
}

/* Rounds 32 weights of at most 2^14 in size. Candidates are grids from a fifth narrower than the weights' range to some percent wider, each
 * moved by least squares: the search of llama.cpp's make_qkx2_quants. The best is then refined with the codes that it gives. */
void round_group(const float *values, Part *part) {
    Vec weights[VECS], highest_ = splat(-INFINITY), lowest = splat(INFINITY);
    for (int i = 0; i < VECS; i++) {
        weights[i] = load_floats(values + LANES * i);
        highest_ = larger(weights[i], highest_);
        lowest = lesser(weights[i], lowest);
    }
    const float most = highest(highest_), least = -highest(sub(splat(0), lowest)), range = most - least;
    *part = (Part){.minimum = to_float16(least), .factors = {1, 1}, .minimum_factor = 1};
    if (!(range > 0))
        return;
    Grid best = fitted(weights, 15 / range, least); /* first: two levels fit any grid, and 15 steps lose least by rounding to float16 */
    for (int i = 0; i < TRIES; i++) {
        const Grid grid = fitted(weights, (14.2f + 0.2f * (float)i) / range, least);
        if (grid.error < best.error)
            best = grid;
    }
    for (int i = 0; i < 3 && best.scale > 0; i++) {
        const Grid grid = fitted(weights, 1 / best.scale, best.minimum);
        if (grid.error < best.error)
            best = grid;
    }
    part->scale = to_float16(best.scale), part->minimum = to_float16(best.minimum);
    const float scale = from_float16(part->scale), minimum = from_float16(part->minimum);
    for (int i = 0; scale > 0 && i < VECS; i++) {
        int8_t codes[GROUP];
        store_int8(codes, code_of(weights[i], splat(1 / scale), splat(minimum)));
        memcpy(part->codes + LANES * i, codes, LANES);
    }
}
