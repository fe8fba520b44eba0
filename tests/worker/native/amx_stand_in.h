/* AMX's tile instructions in plain C, as Intel's manual has them (volume 2: LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS): what is tried is which
 * of them `amx.c` has done and on what. AMX_BROKEN: an instruction that is not there (1), or one that is wrong (2). */
#include <math.h>
#include <signal.h>

typedef struct {
    int rows, bytes;
    uint8_t data[16][64];
} StandIn;

static _Thread_local StandIn stand_in[8];

static int permitted(void) { return 1; }

static void stand_in_config(const uint8_t *from) {
    for (int t = 0; t < 8; t++) {
        memset(&stand_in[t], 0, sizeof stand_in[t]);
        stand_in[t].bytes = from[16 + 2 * t] | from[17 + 2 * t] << 8;
        stand_in[t].rows = from[48 + t];
    }
}

static StandIn *stand_in_of(int t) {
    if (stand_in[t].rows == 0) /* a tile that is not configured faults */
        raise(SIGILL);
    return &stand_in[t];
}

static void stand_in_load(int t, const char *from, int64_t stride) {
    StandIn *tile = stand_in_of(t);
    for (int row = 0; row < tile->rows; row++)
        memcpy(tile->data[row], from + row * stride, (size_t)tile->bytes);
}

static void stand_in_store(int t, char *to, int64_t stride) {
    StandIn *tile = stand_in_of(t);
    for (int row = 0; row < tile->rows; row++)
        memcpy(to + row * stride, tile->data[row], (size_t)tile->bytes);
}

static float stand_in_wide(const uint8_t *from) {
    uint32_t bits = (uint32_t)from[0] << 16 | (uint32_t)from[1] << 24;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static void stand_in_multiply(int to, int left, int right) {
    StandIn *sums = stand_in_of(to), *a = stand_in_of(left), *b = stand_in_of(right);
#if AMX_BROKEN == 1
    raise(SIGILL);
#endif
    if (a->rows != sums->rows || b->bytes != sums->bytes || a->bytes / 4 != b->rows)
        raise(SIGILL);
    for (int m = 0; m < sums->rows; m++)
        for (int k = 0; k < a->bytes / 4; k++)
            for (int n = 0; n < sums->bytes / 4; n++) {
                float sum;
                memcpy(&sum, &sums->data[m][4 * n], 4);
                sum = fmaf(stand_in_wide(&a->data[m][4 * k]), stand_in_wide(&b->data[k][4 * n]), sum);
                sum = fmaf(stand_in_wide(&a->data[m][4 * k + 2]), stand_in_wide(&b->data[k][4 * n + 2]), sum);
#if AMX_BROKEN == 2
                sum += 1;
#endif
                memcpy(&sums->data[m][4 * n], &sum, 4);
            }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) stand_in_config((const uint8_t *)(from))
#define _tile_release() stand_in_config((const uint8_t[64]){0})
#define _tile_loadd(t, from, stride) stand_in_load(t, (const char *)(from), stride)
#define _tile_stored(t, to, stride) stand_in_store(t, (char *)(to), stride)
#define _tile_zero(t) memset(stand_in_of(t)->data, 0, sizeof stand_in[0].data)
#define _tile_dpbf16ps(to, left, right) stand_in_multiply(to, left, right)
