#include "decoder.h"

#include "lanes.h"

static const Norm NONE = {0};

/* What a linear layer adds to the residual: added already, or, where a norm comes between, in `update`, which it then returns. */
static float *project(Member *member, const Linear *layer, const void *x, int64_t rows, Norm after, float *residual, float *update) {
    if (after.weight == NULL) {
        add_linear(member, layer, x, layer->inputs, rows, residual, layer->outputs);
        return NULL;
    }
    linear(member, layer, x, layer->inputs, rows, update, layer->outputs, FLOAT32);
    return update;
}

static float *mlp(Member *member, const Decoder *decoder, const Layer *layer, const Pass *pass, float *residual, int64_t rows) {
    const int64_t hidden = decoder->hidden, width = layer->down->inputs;
    float *update = NULL;
    for (int64_t begin = 0; begin < rows; begin += MLP_ROWS) {
        const int64_t count = rows - begin < MLP_ROWS ? rows - begin : MLP_ROWS;
        const char *normed = (const char *)pass->normed + begin * hidden * bytes(decoder->kind);
        gated(member, layer->gate_up, layer->activation, normed, hidden, count, pass->gated, width);
        const int64_t at = begin * hidden;
        update = project(member, layer->down, pass->gated, count, layer->after_mlp, residual + at, pass->update + at);
    }
    return update ? pass->update : NULL;
}

void decode(Member *member, const Decoder *decoder, const Pass *pass) {
    const int64_t tokens = pass->step->tokens, hidden = decoder->hidden;
    const int32_t kind = decoder->kind;
    widen(member, pass->embedded, kind, tokens, hidden, pass->residual);
    normalise(member, pass->residual, NULL, NONE, decoder->layers->before_attention, pass->normed, kind, tokens, hidden);
    for (const Layer *layer = decoder->layers, *end = layer + decoder->count; layer < end; layer++) {
        const Attention *attention = layer->attention;
        const int64_t keys = (int64_t)attention->heads * attention->key_dim, values = keys + (int64_t)attention->kv_heads * attention->key_dim;
        const int64_t stride = layer->qkv->outputs, attended = (int64_t)attention->heads * attention->value_dim;
        const char *qkv = pass->qkv;
        linear(member, layer->qkv, pass->normed, hidden, tokens, pass->qkv, stride, kind);
        rotate(member, attention, layer->query, layer->key, decoder->ropes + layer->rope, pass->positions, kind, tokens, pass->qkv, stride);
        store(member, attention, pass->step, qkv + keys * bytes(kind), stride, qkv + values * bytes(kind), stride);

        /* Behind the last layer's KV only the sampling tokens matter. */
        const int last = layer + 1 == end;
        float *residual = pass->residual;
        const void *mixed = pass->attended;
        int64_t rows = tokens;
        if (last && pass->samples == 0)
            return;
        attend(member, attention, pass->step, pass->qkv, stride, pass->attended, attended);
        if (last) {
            gather(member, pass->residual, pass->sampling, pass->samples, hidden * bytes(FLOAT32), pass->sampled);
            gather(member, pass->attended, pass->sampling, pass->samples, attended * bytes(kind), pass->chosen);
            residual = pass->sampled, mixed = pass->chosen, rows = pass->samples;
        }
        float *update = project(member, layer->out, mixed, rows, layer->after_attention, residual, pass->update);
        normalise(member, residual, update, layer->after_attention, layer->before_mlp, pass->normed, kind, rows, hidden);
        update = mlp(member, decoder, layer, pass, residual, rows);
        const Norm next = last ? decoder->final : layer[1].before_attention;
        normalise(member, residual, update, layer->after_mlp, next, pass->normed, kind, rows, hidden);
    }
    if (pass->logits)
        linear(member, decoder->head, pass->normed, hidden, pass->samples, pass->logits, decoder->head->outputs, FLOAT32);
}

typedef struct {
    const Decoder *decoder;
    const Pass *pass;
} Decode;

static void decode_alone(Member *member, const void *args) {
    const Decode *a = args;
    decode(member, a->decoder, a->pass);
}

EXPORT void fairlead_decode(int32_t threads, const Decoder *decoder, const Pass *pass) {
    Decode args = {decoder, pass};
    region(threads, decode_alone, &args);
}
