/* Sixteen floats at a time, of either kind of activation. */
#ifndef FAIRLEAD_LANES_H
#define FAIRLEAD_LANES_H
#include <immintrin.h>

#include "native.h"

enum { LANES = 16 };

/* The lanes that are left of `count` at `i`. */
static inline __mmask16 lanes(int64_t i, int64_t count) {
    return count - i >= LANES ? (__mmask16)0xffff : (__mmask16)((1u << (count - i)) - 1);
}

static inline __m512 load(int32_t kind, const void *from, int64_t i, __mmask16 mask) {
    if (kind == FLOAT32)
        return _mm512_maskz_loadu_ps(mask, (const float *)from + i);
    __m256i halves = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)from + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Rounds to nearest even. */
static inline void put(int32_t kind, void *to, int64_t i, __mmask16 mask, __m512 value) {
    if (kind == FLOAT32)
        _mm512_mask_storeu_ps((float *)to + i, mask, value);
    else
        _mm256_mask_storeu_epi16((uint16_t *)to + i, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

static inline int64_t bytes(int32_t kind) {
    return kind == FLOAT32 ? 4 : 2;
}

#endif
