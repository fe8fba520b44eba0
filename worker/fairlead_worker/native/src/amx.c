/* A panel's layout, [steps][32 outputs][2 inputs], equals two AMX weight tiles side by side, and rows of x are input tiles as they are, so
 * nothing is repacked. Two tiles of rows by two of outputs use all eight tiles, and load each one half as often as single tiles would. */
#define _GNU_SOURCE
#include "amx.h"

#include <immintrin.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "native.h"
#include "tile.h"

#ifdef FAIRLEAD_AMX_STAND_IN /* for tests: the instructions in plain C, for CPUs without them */
#include FAIRLEAD_AMX_STAND_IN
#else
static int permitted(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tiles */) == 0; }
#endif

enum {
    TILE_HIGH = 16,              /* rows of a tile */
    BLOCK_BYTES = 4 * PANEL * AMX_STEPS,
    AHEAD = 6144 /* prefetch distance in bytes of weights for few rows, as in gemm.c */
};

#define WITH_TILES __attribute__((target("amx-tile,amx-bf16")))

static int ready;

int amx_ready(void) { return ready; }

/* Tiles 0 to 3: sums of the first and of the second rows by the left and the right outputs; 4 and 5: rows; 6 and 7: weights. */
WITH_TILES static void configure(int64_t first, int64_t second) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } tiles = {.palette = 1};
    const int64_t rows[8] = {first, first, second, second, first, second, AMX_STEPS, AMX_STEPS};
    for (int t = 0; t < 8; t++)
        if (rows[t])
            tiles.rows[t] = (uint8_t)rows[t], tiles.bytes[t] = 64;
    __asm__ volatile("" ::"r"(&tiles) : "memory"); /* compilers' own headers name its first bytes only */
    _tile_loadconfig(&tiles);
}

/* Prefetches lines of weights. A single group of rows consumes them as fast as memory delivers, so it prefetches its own, AHEAD bytes on.
 * With several groups, each prefetches its share of the next panel. */
static void ask_ahead(const char *weights, int64_t blocks, const char *next, int64_t block, int64_t group, int64_t groups) {
    if (groups == 1) {
        const int64_t at = block * BLOCK_BYTES + AHEAD, size = blocks * BLOCK_BYTES;
        for (int64_t byte = at; byte < at + BLOCK_BYTES; byte += 64)
            _mm_prefetch(byte < size ? weights + byte : next + (byte - size), _MM_HINT_T1);
        return;
    }
    const int64_t lines = BLOCK_BYTES / 64, at = group * blocks + block;
    for (int64_t line = lines * at / groups; line < lines * (at + 1) / groups; line++)
        _mm_prefetch(next + 64 * line, _MM_HINT_T1);
}

WITH_TILES void multiply_amx(const char *x, int64_t x_stride, int64_t rows, const char *weights, int64_t blocks, const char *next, float *sums) {
    const int64_t groups = (rows + 2 * TILE_HIGH - 1) / (2 * TILE_HIGH);
    int64_t first = 0, second = 0;
    __asm__ volatile("" ::: "memory"); /* what tiles load has been written */
    for (int64_t group = 0; group < groups; group++) {
        const int64_t row = group * 2 * TILE_HIGH, left = rows - row, high = left < TILE_HIGH ? left : TILE_HIGH;
        const int64_t low = left - high < TILE_HIGH ? left - high : TILE_HIGH;
        if (high != first || low != second)
            configure(first = high, second = low);
        const char *upper = x + row * x_stride, *lower = upper + TILE_HIGH * x_stride, *panel = weights;
        _tile_zero(0);
        _tile_zero(1);
        if (low) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t block = 0; block < blocks; block++) {
            ask_ahead(weights, blocks, next, block, group, groups);
            _tile_loadd(6, panel, 4 * PANEL);
            _tile_loadd(7, panel + 64, 4 * PANEL);
            _tile_loadd(4, upper, x_stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (low) {
                _tile_loadd(5, lower, x_stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            panel += BLOCK_BYTES;
            upper += 64;
            lower += 64;
        }
        float *to = sums + row * PANEL;
        _tile_stored(0, to, 4 * PANEL);
        _tile_stored(1, to + 16, 4 * PANEL);
        if (low) {
            _tile_stored(2, to + TILE_HIGH * PANEL, 4 * PANEL);
            _tile_stored(3, to + TILE_HIGH * PANEL + 16, 4 * PANEL);
        }
    }
    _tile_release();
    __asm__ volatile("" ::: "memory");
}

/* Integers, whose sums are exact. */
static int works(void) {
    enum { ROWS = 2 * TILE_HIGH + 3, BLOCKS = 2, INPUTS = 2 * AMX_STEPS * BLOCKS };
    static const uint16_t number[4] = {0x0000, 0x3F80, 0x4000, 0xC040}; /* 0, 1, 2, -3 */
    static const int value[4] = {0, 1, 2, -3};
    uint16_t x[ROWS * INPUTS], weights[INPUTS * PANEL];
    float sums[ROWS * PANEL];
    for (int i = 0; i < ROWS * INPUTS; i++)
        x[i] = number[(i * 7 + i / 5) % 4];
    for (int i = 0; i < INPUTS * PANEL; i++)
        weights[i] = number[(i * 3 + i / 11) % 4];
    multiply_amx((const char *)x, 2 * INPUTS, ROWS, (const char *)weights, BLOCKS, (const char *)weights, sums);
    for (int row = 0; row < ROWS; row++)
        for (int output = 0; output < PANEL; output++) {
            int want = 0;
            for (int input = 0; input < INPUTS; input++) {
                const int at = row * INPUTS + input, of = (input / 2 * PANEL + output) * 2 + input % 2;
                want += value[(at * 7 + at / 5) % 4] * value[(of * 3 + of / 11) % 4];
            }
            if (sums[row * PANEL + output] != (float)want)
                return 0;
        }
    return 1;
}

/* Makes bfloat16 products use AMX from now on, if the kernel permits it and it works; returns whether it does. Only for CPUs with AMX. It
 * is tried in a child process first: a missing instruction would end this process. */
EXPORT int32_t fairlead_use_amx(void) {
    if (!permitted())
        return 0;
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGILL, SIG_DFL); /* crash reporters must not report the end of the trial process */
        signal(SIGSEGV, SIG_DFL);
        _exit(works() ? 0 : 1);
    }
    int status = 1;
    ready = child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    return ready;
}
