/* Weights in ggml's block types, in panels of 32 outputs. The numbers are exactly those of the blocks; only their order is the panel's.
 *
 * A step is one block of 32 inputs, or a super-block of 256 (Q4_K, Q5_K, Q6_K), of each output. It begins with float16 [32] scales and, for
 * types with a minimum, [32] minima. For each 32 inputs follow the factors of a super-block's part, then the codes:
 *   factors  Q4_K, Q5_K: uint8 [32] of the scale, [32] of the minimum. Q6_K: int8 [2][32], one for each 16 inputs.
 *   low      words [4][32]. Byte b of word w: the lower 4 bits of inputs 8 w + b and, in its higher nibble, 8 w + b + 4.
 *            8 bits: words [8][32]. Byte b of word w: input 4 w + b, plus 128.
 *   high     5 bits: words [32]. Bit 8 b + w: bit 4 of input 4 w + b. 6 bits: words [2][32]. Bits 8 b + 2 (w % 4) of word w / 4: bits 4, 5. */
#ifndef FAIRLEAD_BLOCKS_H
#define FAIRLEAD_BLOCKS_H
#include "native.h"

enum { GROUP = 32, PANEL = 32 }; /* inputs that are multiplied as whole numbers; outputs that are packed together */

/* A group of a row's inputs for weights in blocks, rounded to 8 bits as ggml's Q8_0. */
typedef struct {
    int8_t x[GROUP];
    float scale;
    int16_t sums[2]; /* of each 16 x */
} Group;

static inline int is_block(int32_t kind) { return kind >= Q4_0; }
static inline int block_bits(int32_t kind) {
    return kind == Q8_0 ? 8 : kind == Q6_K ? 6 : kind == Q5_0 || kind == Q5_1 || kind == Q5_K ? 5 : 4;
}
static inline int has_minimum(int32_t kind) { return kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K; }
static inline int is_super(int32_t kind) { return kind == Q4_K || kind == Q5_K || kind == Q6_K; }
/* The code that stands for zero; 0 for types with a minimum. */
static inline int zero_code(int32_t kind) { return has_minimum(kind) ? 0 : 1 << (block_bits(kind) - 1); }
static inline int step_groups(int32_t kind) { return is_super(kind) ? 8 : 1; }
static inline int scales_of_group(int32_t kind) { return kind == Q6_K ? 2 : 1; }
/* Offsets within a step's data of a group: codes follow the factors, high bits follow the low ones. */
static inline int64_t low_at(int32_t kind) { return is_super(kind) ? 2 * PANEL : 0; }
static inline int64_t high_at(int32_t kind) { return low_at(kind) + (block_bits(kind) == 8 ? 32 : 16) * PANEL; }
static inline int64_t group_bytes(int32_t kind) { return high_at(kind) + (block_bits(kind) == 5 ? 4 : block_bits(kind) == 6 ? 8 : 0) * PANEL; }
static inline int64_t head_bytes(int32_t kind) { return (has_minimum(kind) ? 4 : 2) * PANEL; }
static inline int64_t block_step_bytes(int32_t kind) { return head_bytes(kind) + step_groups(kind) * group_bytes(kind); }

/* 32 inputs of one output, in no kind's order: what `read_row`, `read_panel` and `write_panel` exchange. */
typedef struct {
    uint8_t codes[GROUP];
    uint16_t scale, minimum; /* float16; of the super-block, if there is one */
    int8_t factors[2];       /* of the scale: for each 16 inputs */
    uint8_t minimum_factor;
} Part;

/* Group `group` of a row of blocks as in a GGUF file. */
Part read_row(int32_t kind, const uint8_t *row, int64_t group);
/* Bytes of a row of `inputs`; -1 if they are not whole blocks. */
EXPORT int64_t fairlead_row_bytes(int32_t kind, int64_t inputs);
/* The same of an output of a panel, `lane` below PANEL. */
Part read_panel(int32_t kind, const char *panel, int64_t lane, int64_t group);
void write_panel(int32_t kind, char *panel, int64_t lane, int64_t group, const Part *part);
/* The numbers that a part stands for, as ggml computes them in float. */
void widen_part(int32_t kind, const Part *part, float *to);
/* Rounds 32 weights to a part of Q4_1 (round.c). */
void round_group(const float *weights, Part *part);
uint16_t to_float16(float x); /* rounded to nearest even */
float from_float16(uint16_t half);
#endif
