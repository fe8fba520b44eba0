/* A whole step of a decoder-only model of the common structure, in one region. The caller describes the model; no code depends on a family.
 *
 * A layer is: x += after(out(attend(rope(norm(qkv(before(x))))))), then x += after(down(act(gate) * up of before(x))); or both are added to
 * the same x. Each norm may be missing. Factors of what is added are part of the linear layers and norms. The residual stream x is float for
 * any kind of activations, which is more exact than transformers' own. */
#ifndef FAIRLEAD_DECODER_H
#define FAIRLEAD_DECODER_H
#include "native.h"

/* UNCHANGED: y = x. ROOT_MEAN_SQUARE: y = x / sqrt(mean(x^2) + eps) * weight. AROUND_MEAN, the layer norm: the same of x - mean(x), + bias. */
typedef enum { UNCHANGED = 0, ROOT_MEAN_SQUARE = 1, AROUND_MEAN = 2 } NormKind;

typedef struct {
    const float *weight, *bias; /* bias: of AROUND_MEAN alone */
    int64_t width; /* values with one mean: of heads one head's, or those of all heads */
    float eps;
    int32_t kind;
} Norm;

/* The tables of one rotary embedding, which rotates the first 2 * half dimensions of a head. Pairs are d and half + d, with tables
 * [positions][half], or neighbours, with tables [positions][2 * half]: each cosine twice, and each sine negated and as it is. */
typedef struct {
    const float *cosine, *sine;
    const float *growth; /* [positions] factor of a query; NULL: none */
    int64_t half;
    int32_t neighbours;
    int32_t before_norms; /* heads are rotated before their norms, not after */
} Rope;

typedef struct {
    Norm before_attention, query, key, after_attention, before_mlp, after_mlp;
    const Linear *qkv, *out, *gate_up, *down; /* gate_up: up alone in an MLP without gates */
    const Attention *attention;
    Activation activation;
    int32_t rope; /* index of its tables */
    int32_t gated;
    int32_t parallel; /* the MLP reads the residual that attention reads: by its own norm, or what attention reads if it has none */
    int32_t group; /* index of its step */
} Layer;

typedef struct {
    const Layer *layers;
    int64_t count, hidden;
    const Rope *ropes;
    const Linear *head;
    Norm final;
    int32_t kind; /* of activations, embeddings and KV */
} Decoder;

/* The data of a step. Q = (heads + kv_heads) * key_dim + kv_heads * value_dim, A = heads * value_dim, I = the MLP's width: the largest of
 * any layer. B = MLP_ROWS or fewer. */
typedef struct {
    const Step *steps;        /* one for each group of layers: the same rows, in pages of their own */
    const int64_t *positions; /* [T] */
    const int64_t *sampling; /* [S] tokens whose logits are wanted, in any order */
    int64_t samples;
    const Step *last;              /* the sampling tokens, each a row by itself, for the last layer's attention; NULL: all tokens attend there */
    const int64_t *last_positions; /* [S] positions of these tokens; NULL as well */
    const void *embedded; /* [T][hidden] */
    float *logits;        /* [S][vocabulary]; NULL: no head, its inputs stay in `normed` */
    float *residual; /* [T][hidden]; this and the following fields are scratch memory */
    float *update; /* [T][hidden] output of the last linear layer, if a norm follows before the sum */
    void *normed;         /* [T][hidden] */
    void *qkv;            /* [T][Q] */
    void *attended;       /* [T][A] */
    void *gated;          /* [B][I] */
    float *sampled;       /* [S][hidden]: the residual of the sampling tokens */
    void *chosen;         /* [S][A] */
    void *asking; /* [S][hidden]: the input of their queries, and of their MLP if that is parallel */
} Pass;

enum { MLP_ROWS = 512 }; /* rows whose gated inner values are held together: bounds scratch memory, and keeps it in the cache */

void decode(Member *member, const Decoder *decoder, const Pass *pass);

/* The small operations, each a phase of its own. */

/* residual[row] += after(update[row]); normed[row] = before(residual[row]), of `kind`. A NULL update or normed skips that part. */
void normalise(
    Member *member, float *residual, const float *update, Norm after, Norm before, void *normed, int32_t kind, int64_t rows, int64_t width);

/* Query and key heads, side by side at qkv + token * stride: norm, then rotation by the token's position. In place. */
void rotate(Member *member, const Attention *attention, Norm query, Norm key, const Rope *rope, const int64_t *positions, int32_t kind,
            int64_t tokens, void *qkv, int64_t stride);

/* to[i] = from[index[i]] for rows of `width` bytes. */
void gather(Member *member, const void *from, const int64_t *index, int64_t rows, int64_t width, void *to);

/* to[row] = from[row] as float. */
void widen(Member *member, const void *from, int32_t kind, int64_t rows, int64_t width, float *to);
#endif
