/* Products of bfloat16 by AMX's tiles, on CPUs that have them (Sapphire Rapids and later): sixteen times as many per cycle as AVX512's. */
#ifndef FAIRLEAD_AMX_H
#define FAIRLEAD_AMX_H
#include <stdint.h>

enum { AMX_STEPS = 16 }; /* steps of weights in a tile: 32 inputs */

#ifndef __x86_64__
static inline int amx_ready(void) { return 0; }
static inline void multiply_amx(const char *x, int64_t x_stride, int64_t rows, const char *weights, int64_t blocks, const char *next, float *sums) {
    (void)x, (void)x_stride, (void)rows, (void)weights, (void)blocks, (void)next, (void)sums;
}
#else
/* Whether `multiply_amx` may be called: `fairlead_use_amx` was called and succeeded. */
int amx_ready(void);

/* sums[rows][32] = `rows` rows of x, x_stride bytes apart, times `blocks` * AMX_STEPS steps of one panel of bfloat16. The panel at `next`
 * will be needed afterwards. Each sum runs over the inputs in order, for any `rows`. */
void multiply_amx(const char *x, int64_t x_stride, int64_t rows, const char *weights, int64_t blocks, const char *next, float *sums);
#endif
#endif
