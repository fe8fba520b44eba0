#include "decoder.h"

#include "blocks.h"
#include "simd.h"

static const Norm NONE = {.kind = UNCHANGED};

/* The addition of a linear layer to the residual. It is done directly, or, if a norm comes between, stored in `update`, which is then
 * returned. */
static float *project(Member *member, const Linear *layer, const void *x, int64_t rows, Norm after, float *residual, float *update) {
    if (!after.kind) {
        add_linear(member, layer, x, layer->inputs, rows, residual, layer->outputs);
        return NULL;
    }
    linear(member, layer, x, layer->inputs, rows, update, layer->outputs, FLOAT32);
    return update;
}

static float *mlp(Member *member, const Decoder *decoder, const Layer *layer, const Pass *pass, const char *states, float *residual, int64_t rows) {
    const int64_t hidden = decoder->hidden, width = layer->down->inputs;
    float *update = NULL;
    for (int64_t begin = 0; begin < rows; begin += MLP_ROWS) {
        const int64_t count = rows - begin < MLP_ROWS ? rows - begin : MLP_ROWS;
        const int64_t at = begin * hidden;
        activate(member, layer->gate_up, layer->activation, layer->gated, states + at * bytes(decoder->kind), hidden, count, pass->gated, width);
        update = project(member, layer->down, pass->gated, count, layer->after_mlp, residual + at, pass->update + at);
    }
    return update ? pass->update : NULL;
}

/* Outputs `begin` to `end` of a layer; `begin` is the start of a panel. */
static Linear part_of(const Linear *layer, int64_t begin, int64_t end) {
    Linear part = *layer;
    part.outputs = end - begin;
    part.panels += begin / PANEL;
    part.scales = layer->scales ? layer->scales + begin : NULL;
    part.bias = layer->bias ? (const char *)layer->bias + begin * bytes(layer->kind) : NULL;
    return part;
}

static int64_t keys_at(const Attention *attention) { return (int64_t)attention->heads * attention->key_dim; }
static int64_t values_at(const Attention *attention) { return keys_at(attention) + (int64_t)attention->kv_heads * attention->key_dim; }
static int64_t attended_width(const Attention *attention) { return (int64_t)attention->heads * attention->value_dim; }

static void attention_of_all(Member *member, const Decoder *decoder, const Layer *layer, const Pass *pass) {
    const Attention *attention = layer->attention;
    const Rope *rope = decoder->ropes + layer->rope;
    const Step *step = pass->steps + layer->group;
    const int64_t tokens = step->tokens, stride = layer->qkv->outputs;
    const int32_t kind = decoder->kind;
    const char *keys = (char *)pass->qkv + keys_at(attention) * bytes(kind), *values = (char *)pass->qkv + values_at(attention) * bytes(kind);
    linear(member, layer->qkv, pass->normed, decoder->hidden, tokens, pass->qkv, stride, kind);
    rotate(member, attention, layer->query, layer->key, rope, pass->positions, kind, tokens, pass->qkv, stride);
    store(member, attention, step, keys, stride, values, stride);
    attend(member, attention, step, pass->qkv, stride, pass->attended, attended_width(attention));
}

/* After the last layer's KV only the sampling tokens matter: stores the KV of all tokens, then attends with those alone -> `chosen`. */
static void attention_of_some(Member *member, const Decoder *decoder, const Layer *layer, const Pass *pass) {
    const Attention *attention = layer->attention;
    const Rope *rope = decoder->ropes + layer->rope;
    const Step *step = pass->steps + layer->group;
    const int64_t tokens = step->tokens, hidden = decoder->hidden, stride = layer->qkv->outputs;
    const int32_t kind = decoder->kind;
    const Linear queries = part_of(layer->qkv, 0, keys_at(attention)), others = part_of(layer->qkv, keys_at(attention), stride);
    Attention without_queries = *attention, without_keys = *attention;
    without_queries.heads = without_keys.kv_heads = 0;
    char *keys = (char *)pass->qkv + keys_at(attention) * bytes(kind), *values = (char *)pass->qkv + values_at(attention) * bytes(kind);
    linear(member, &others, pass->normed, hidden, tokens, keys, stride, kind);
    rotate(member, &without_queries, NONE, layer->key, rope, pass->positions, kind, tokens, keys, stride);
    store(member, attention, step, keys, stride, values, stride);
    if (pass->samples == 0)
        return;
    gather(member, pass->normed, pass->sampling, pass->samples, hidden * bytes(kind), pass->asking);
    linear(member, &queries, pass->asking, hidden, pass->samples, pass->qkv, stride, kind);
    rotate(member, &without_keys, layer->query, NONE, rope, pass->last_positions, kind, pass->samples, pass->qkv, stride);
    attend(member, attention, pass->last, pass->qkv, stride, pass->chosen, attended_width(attention));
}

void decode(Member *member, const Decoder *decoder, const Pass *pass) {
    const int64_t tokens = pass->steps->tokens, hidden = decoder->hidden;
    const int32_t kind = decoder->kind;
    widen(member, pass->embedded, kind, tokens, hidden, pass->residual);
    normalise(member, pass->residual, NULL, NONE, decoder->layers->before_attention, pass->normed, kind, tokens, hidden);
    for (const Layer *layer = decoder->layers, *end = layer + decoder->count; layer < end; layer++) {
        const int last = layer + 1 == end;
        if (last && pass->last)
            attention_of_some(member, decoder, layer, pass);
        else
            attention_of_all(member, decoder, layer, pass);
        if (last && pass->samples == 0)
            return;
        float *residual = pass->residual;
        const void *mixed = pass->attended, *states = pass->normed;
        const int shares = layer->parallel && !layer->before_mlp.kind; /* what attention reads */
        int64_t rows = tokens;
        if (last) {
            const int64_t width = attended_width(layer->attention) * bytes(kind);
            gather(member, pass->residual, pass->sampling, pass->samples, hidden * bytes(FLOAT32), pass->sampled);
            if (!pass->last)
                gather(member, pass->attended, pass->sampling, pass->samples, width, pass->chosen);
            if (!pass->last && shares)
                gather(member, pass->normed, pass->sampling, pass->samples, hidden * bytes(kind), pass->asking);
            residual = pass->sampled, mixed = pass->chosen, rows = pass->samples;
            states = shares ? pass->asking : pass->normed;
        }
        if (layer->parallel && !shares)
            normalise(member, residual, NULL, NONE, layer->before_mlp, pass->normed, kind, rows, hidden);
        float *update = project(member, layer->out, mixed, rows, layer->after_attention, residual, pass->update);
        if (!layer->parallel)
            normalise(member, residual, update, layer->after_attention, layer->before_mlp, pass->normed, kind, rows, hidden);
        update = mlp(member, decoder, layer, pass, states, residual, rows);
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
