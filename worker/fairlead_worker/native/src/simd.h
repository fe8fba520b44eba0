/* Vectors of floats at the level that a source is compiled for, and their products with words. A `Vec` holds `LANES` floats.
 *
 * The compiler's flags choose a level: AVX512 with bfloat16 products (PRODUCTS), AVX512 without them, AVX2 with FMA, or Arm's NEON with and
 * without products. Without products bfloat16 is converted to float in registers, as in ggml and oneDNN. All other code is the same at
 * every level. */
#ifndef FAIRLEAD_SIMD_H
#define FAIRLEAD_SIMD_H
#include <float.h>
#include <math.h>
#include <string.h>

#include "native.h"

#define INLINE static inline __attribute__((always_inline))
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
enum { PRODUCTS = 1 };
#else
enum { PRODUCTS = 0 };
#endif

typedef uint32_t __attribute__((may_alias)) Word;

#ifdef __aarch64__
#include "simd_neon.h"
#else
#include <immintrin.h>
#ifdef __AVX512F__
enum { LANES = 16 };
typedef __m512 Vec;
typedef __m512i Words; /* LANES words of 32 bits */

INLINE __mmask16 below(int64_t n) { return n >= LANES ? 0xFFFF : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

INLINE Vec splat(float x) { return _mm512_set1_ps(x); }
INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
INLINE Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
INLINE Vec fma_(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }    /* a * b + c */
INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }   /* c - a * b */
INLINE Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); } /* b if one is NaN */
INLINE Vec lesser(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE Vec magnitude(Vec a) { return _mm512_abs_ps(a); }
INLINE Vec nearest(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); } /* a * 2^n, for an integer n */
INLINE Vec swapped(Vec a) { return _mm512_permute_ps(a, 0xB1); } /* each with its neighbour: lanes 1, 0, 3, 2 and so on */
INLINE float total(Vec a) { return _mm512_reduce_add_ps(a); }
INLINE float highest(Vec a) { return _mm512_reduce_max_ps(a); }
INLINE float first(Vec a) { return _mm512_cvtss_f32(a); }
/* Lanes of `a` where x < y, and of b elsewhere, also if one is NaN. */
INLINE Vec where_less(Vec x, Vec y, Vec a, Vec b) { return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), a); }
/* Lanes `begin` to `end` of a, and b elsewhere. */
INLINE Vec between(int64_t begin, int64_t end, Vec a, Vec b) { return _mm512_mask_mov_ps(b, below(end) & ~below(begin), a); }
/* A bit for each of the first n lanes in which a equals b. */
INLINE uint32_t equal(int64_t n, Vec a, Vec b) { return _mm512_mask_cmp_ps_mask(below(n), a, b, _CMP_EQ_OQ); }

INLINE Vec load_floats(const float *from) { return _mm512_loadu_ps(from); }
INLINE void store_floats(float *to, Vec a) { _mm512_storeu_ps(to, a); }
INLINE Vec load_some(const float *from, int64_t n) { return _mm512_maskz_loadu_ps(below(n), from); } /* the first n; zeros elsewhere */
INLINE void store_some(float *to, int64_t n, Vec a) { _mm512_mask_storeu_ps(to, below(n), a); }
INLINE Words load_words(const void *from) { return _mm512_loadu_si512(from); }
INLINE void store_words(void *to, Words a) { _mm512_storeu_si512(to, a); }
INLINE Words load_some_words(const void *from, int64_t n) { return _mm512_maskz_loadu_epi32(below(n), from); }
INLINE Words splat_word(uint32_t x) { return _mm512_set1_epi32((int32_t)x); }
INLINE Vec as_floats(Words a) { return _mm512_castsi512_ps(a); }
INLINE Words as_words(Vec a) { return _mm512_castps_si512(a); }
INLINE Vec whole_to_float(Words a) { return _mm512_cvtepi32_ps(a); }
/* The first and the second of two neighbouring bfloat16 of each word, as floats. */
INLINE Vec first_half(Words a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
INLINE Vec second_half(Words a) { return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32((int32_t)0xFFFF0000))); }

INLINE Vec load_bfloat16(const uint16_t *from, int64_t n) {
    return first_half(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(below(n), from)));
}
/* Rounds to nearest even. NaN stays NaN. */
INLINE void store_bfloat16(uint16_t *to, int64_t n, Vec a) {
#ifdef __AVX512BF16__
    _mm256_mask_storeu_epi16(to, below(n), (__m256i)_mm512_cvtneps_pbh(a));
#else
    const __m512i bits = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_or_si512(bits, _mm512_set1_epi32(0x400000)));
    _mm256_mask_storeu_epi16(to, below(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}
/* Rounds to 16-bit integers. */
INLINE void store_int16(int16_t *to, int64_t n, Vec a) { _mm256_mask_storeu_epi16(to, below(n), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a))); }

INLINE Words load_int8(const char *from) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from)); }
INLINE Vec load_float16(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
INLINE Vec load_uint8(const char *from) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from))); }
INLINE Vec load_signed(const char *from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from))); }
INLINE void store_int8(int8_t *to, Vec a) { _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a))); }
INLINE Words both(Words a, Words b) { return _mm512_and_si512(a, b); }
INLINE Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
INLINE Words differ(Words a, Words b) { return _mm512_xor_si512(a, b); }
/* Moves the bits of each word by n, a constant: up, or down if n is negative. */
INLINE Words shifted(Words a, int n) { return n < 0 ? _mm512_srli_epi32(a, (unsigned)-n) : _mm512_slli_epi32(a, (unsigned)n); }
#ifdef __AVX512VNNI__
enum { UNSIGNED_BYTES = 1 };
INLINE Words multiply_bytes(int bits, Words a, Words b, Words sum) {
    (void)bits;
    return _mm512_dpbusd_epi32(sum, a, b);
}
INLINE Words byte_sum(int bits, Words sum, Words start) {
    (void)bits;
    return _mm512_add_epi32(sum, start);
}
#else
enum { UNSIGNED_BYTES = 0 };
INLINE Words multiply_bytes(int bits, Words a, Words b, Words sum) {
    if (bits == 8) {
        b = _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b);
        a = _mm512_abs_epi8(a);
    }
    const Words pairs = _mm512_maddubs_epi16(a, b);
    return bits == 4 ? _mm512_add_epi16(sum, pairs) : _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
INLINE Words byte_sum(int bits, Words sum, Words start) {
    return _mm512_add_epi32(bits == 4 ? _mm512_madd_epi16(sum, _mm512_set1_epi16(1)) : sum, start);
}
#endif
/* sum + the products of both int16 of each word */
INLINE Words multiply_int16(Words a, Words b, Words sum) {
#ifdef __AVX512BF16__
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
#else
enum { LANES = 8 };
typedef __m256 Vec;
typedef __m256i Words;

/* All bits of the first n lanes. */
INLINE __m256i below(int64_t n) {
    const int32_t count = n > LANES ? LANES : n < 0 ? 0 : (int32_t)n;
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE Vec splat(float x) { return _mm256_set1_ps(x); }
INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
INLINE Vec divide(Vec a, Vec b) { return _mm256_div_ps(a, b); }
INLINE Vec fma_(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec lesser(Vec a, Vec b) { return _mm256_min_ps(a, b); }
INLINE Vec magnitude(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE Vec nearest(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* In two halves, because 2^n alone may be too small or too large for a float. */
INLINE Vec scale_by_power(Vec a, Vec n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
    const __m256i one = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i other = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return mul(mul(a, _mm256_castsi256_ps(one)), _mm256_castsi256_ps(other));
}
INLINE Vec swapped(Vec a) { return _mm256_permute_ps(a, 0xB1); }
INLINE float total(Vec a) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
INLINE float highest(Vec a) {
    __m128 top = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    top = _mm_max_ps(top, _mm_movehl_ps(top, top));
    return _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)));
}
INLINE float first(Vec a) { return _mm256_cvtss_f32(a); }
INLINE Vec where_less(Vec x, Vec y, Vec a, Vec b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ)); }
INLINE Vec between(int64_t begin, int64_t end, Vec a, Vec b) {
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_andnot_si256(below(begin), below(end))));
}
INLINE uint32_t equal(int64_t n, Vec a, Vec b) {
    return (uint32_t)_mm256_movemask_ps(_mm256_and_ps(_mm256_castsi256_ps(below(n)), _mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
}

INLINE Vec load_floats(const float *from) { return _mm256_loadu_ps(from); }
INLINE void store_floats(float *to, Vec a) { _mm256_storeu_ps(to, a); }
INLINE Vec load_some(const float *from, int64_t n) { return n >= LANES ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, below(n)); }
INLINE void store_some(float *to, int64_t n, Vec a) {
    if (n >= LANES)
        _mm256_storeu_ps(to, a);
    else
        _mm256_maskstore_ps(to, below(n), a);
}
INLINE Words load_words(const void *from) { return _mm256_loadu_si256(from); }
INLINE void store_words(void *to, Words a) { _mm256_storeu_si256(to, a); }
INLINE Words load_some_words(const void *from, int64_t n) { return n >= LANES ? load_words(from) : _mm256_maskload_epi32(from, below(n)); }
INLINE Words splat_word(uint32_t x) { return _mm256_set1_epi32((int32_t)x); }
INLINE Vec as_floats(Words a) { return _mm256_castsi256_ps(a); }
INLINE Words as_words(Vec a) { return _mm256_castps_si256(a); }
INLINE Vec whole_to_float(Words a) { return _mm256_cvtepi32_ps(a); }
INLINE Vec first_half(Words a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
INLINE Vec second_half(Words a) { return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32((int32_t)0xFFFF0000))); }

INLINE Vec load_bfloat16(const uint16_t *from, int64_t n) {
    __m128i halves = _mm_setzero_si128();
    if (n >= LANES)
        halves = _mm_loadu_si128((const __m128i *)from);
    else if (n > 0)
        memcpy(&halves, from, (size_t)n * 2);
    return first_half(_mm256_cvtepu16_epi32(halves));
}
INLINE void store_halves(void *to, int64_t n, __m128i halves) {
    if (n >= LANES)
        _mm_storeu_si128(to, halves);
    else if (n > 0)
        memcpy(to, &halves, (size_t)n * 2);
}
INLINE void store_bfloat16(uint16_t *to, int64_t n, Vec a) {
    const __m256i bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const Vec is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    const __m256i kept = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan));
    const __m256i halves = _mm256_srli_epi32(kept, 16);
    store_halves(to, n, _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
INLINE void store_int16(int16_t *to, int64_t n, Vec a) {
    const __m256i whole = _mm256_cvtps_epi32(a);
    store_halves(to, n, _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
}

INLINE Words load_int8(const char *from) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)); }
INLINE Vec load_float16(const uint16_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
INLINE Vec load_uint8(const char *from) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from))); }
INLINE Vec load_signed(const char *from) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from))); }
INLINE void store_int8(int8_t *to, Vec a) {
    const __m256i whole = _mm256_cvtps_epi32(a);
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(halves, halves));
}
INLINE Words both(Words a, Words b) { return _mm256_and_si256(a, b); }
INLINE Words either(Words a, Words b) { return _mm256_or_si256(a, b); }
INLINE Words differ(Words a, Words b) { return _mm256_xor_si256(a, b); }
INLINE Words shifted(Words a, int n) { return n < 0 ? _mm256_srli_epi32(a, -n) : _mm256_slli_epi32(a, n); }
enum { UNSIGNED_BYTES = 0 };
INLINE Words multiply_bytes(int bits, Words a, Words b, Words sum) {
    if (bits == 8) {
        b = _mm256_sign_epi8(b, a);
        a = _mm256_abs_epi8(a);
    }
    const Words pairs = _mm256_maddubs_epi16(a, b);
    return bits == 4 ? _mm256_add_epi16(sum, pairs) : _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE Words byte_sum(int bits, Words sum, Words start) {
    return _mm256_add_epi32(bits == 4 ? _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) : sum, start);
}
INLINE Words multiply_int16(Words a, Words b, Words sum) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
#endif
#endif

/* ---- shared by all levels ----
 *
 * multiply_bytes(bits, a, b, sum): sum + the products of the four bytes of each word. a: codes of `bits` bits; of 8 bits they are unsigned if
 * UNSIGNED_BYTES, else signed. b: -127 to 127. After the 8 calls that a group takes `byte_sum` gives the int32, added to `start`. Without
 * dot products a sum of codes of 4 bits is two int16 meanwhile: 8 times two products of 15 and 127 fit. */

INLINE int64_t bytes(int32_t kind) { return kind == FLOAT32 ? 4 : 2; }

/* Elements i to i + LANES of `from`, and zeros from `count` on. */
INLINE Vec load(int32_t kind, const void *from, int64_t i, int64_t count) {
    return kind == FLOAT32 ? load_some((const float *)from + i, count - i) : load_bfloat16((const uint16_t *)from + i, count - i);
}

/* The inverse of `load`: stores the elements below `count` and leaves the rest unchanged. */
INLINE void put(int32_t kind, void *to, int64_t i, int64_t count, Vec value) {
    if (kind == FLOAT32)
        store_some((float *)to + i, count - i, value);
    else
        store_bfloat16((uint16_t *)to + i, count - i, value);
}

/* Number of floats that a word of `kind` is multiplied as: its two bfloat16 one after the other if there are no products. Its factor has as
 * many words of 4 bytes: the word itself, or the floats of its two bfloat16. */
INLINE int factor_size(int32_t kind) { return kind == BFLOAT16 && !PRODUCTS ? 2 : 1; }

/* Prefetches `size` bytes; passing: into the second cache only. */
INLINE void fetch(const char *ahead, int64_t size, int passing) {
    for (int64_t byte = 0; byte < size; byte += 64)
        if (passing)
            __builtin_prefetch(ahead + byte, 0, 2);
        else
            __builtin_prefetch(ahead + byte, 0, 3);
}

/* Words at `from` in the form of multiply_add; `half` is below factor_size. The second half is loaded again: if kept, it would be spilled.
 */
INLINE Vec half_of(int32_t kind, const void *from, int half) {
    if (factor_size(kind) == 1)
        return as_floats(load_words(from));
    __asm__ volatile("" : "+r"(from));
    return half ? second_half(load_words(from)) : first_half(load_words(from));
}

/* Whether work on many rows converts bfloat16 once for all of them: with 16 registers a tile has none to spare for it. */
enum { WIDENS = !PRODUCTS && LANES == 8 };

/* The same for the first n words only; zeros elsewhere. */
INLINE Vec half_of_some(int32_t kind, const void *from, int64_t n, int half) {
    const Words words = load_some_words(from, n);
    return factor_size(kind) == 1 ? as_floats(words) : half ? second_half(words) : first_half(words);
}

/* A factor in every lane. The two halves of bfloat16 are loaded one after the other: GCC would load all rows' factors first, and spill
 * sums. */
INLINE Vec factor_of(int32_t kind, const void *from) {
    (void)kind;
    Word word;
    memcpy(&word, from, 4);
    Vec factor = as_floats(splat_word(word));
#ifdef __x86_64__
    if (factor_size(kind) > 1)
        __asm__ volatile("" : "+v"(factor));
#endif
    return factor;
}

/* sum + factor * words: each lane's float, or its two bfloat16 times the factor's two. */
INLINE Vec multiply_add(int32_t kind, Vec factor, Vec words, Vec sum) {
#ifdef __AVX512BF16__
    if (kind == BFLOAT16)
        return _mm512_dpbf16_ps(sum, (__m512bh)factor, (__m512bh)words);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    if (kind == BFLOAT16)
        return multiply_bfloat16(factor, words, sum);
#endif
    (void)kind;
    return fma_(factor, words, sum);
}

/* e^x within about 1e-7; exactly 1 at 0 and exactly 0 at -infinity. Cephes' expf: x = n ln 2 + r, a polynomial in r, times 2^n. */
INLINE Vec exp_(Vec x) {
    /* In this order the maximum keeps NaN. -120 is far below the smallest float and still finite: -infinity minus a multiple of ln 2 is
     * NaN. */
    x = lesser(splat(90.0f), larger(splat(-120.0f), x));
    Vec n = nearest(mul(x, splat(1.44269504088896341f)));
    Vec r = fnma(n, splat(0.693359375f), x);
    r = fnma(n, splat(-2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fma_(p, r, splat(1.3981999507e-3f));
    p = fma_(p, r, splat(8.3334519073e-3f));
    p = fma_(p, r, splat(4.1665795894e-2f));
    p = fma_(p, r, splat(1.6666665459e-1f));
    p = fma_(p, r, splat(5.0000001201e-1f));
    p = fma_(p, mul(r, r), r);
    return scale_by_power(add(p, splat(1.0f)), n);
}

static inline float exp1(float x) { return first(exp_(splat(x))); }

/* Cephes' tanhf: a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel. */
INLINE Vec tanh_(Vec x) {
    Vec z = mul(x, x), size = magnitude(x);
    Vec p = splat(-5.70498872745e-3f);
    p = fma_(p, z, splat(2.06390887954e-2f));
    p = fma_(p, z, splat(-5.37397155531e-2f));
    p = fma_(p, z, splat(1.33314422036e-1f));
    p = fma_(p, z, splat(-3.33332819422e-1f));
    Vec near = fma_(mul(p, z), x, x), one = splat(1.0f), two = splat(2.0f);
    Vec far = sub(one, divide(two, add(exp_(mul(two, size)), one)));
    far = where_less(x, splat(0.0f), sub(splat(0.0f), far), far);
    return where_less(splat(0.625f), size, far, near);
}

/* x times the normal distribution up to x, whose tail is a polynomial times e^(-x^2 / 2): 7.1.26 of Abramowitz and Stegun, within 1e-7. */
INLINE Vec gelu(Vec x) {
    const Vec one = splat(1.0f), t = divide(one, fma_(splat(0.3275911f * 0.70710678f), magnitude(x), one));
    Vec p = splat(0.5f * 1.061405429f);
    p = fma_(p, t, splat(0.5f * -1.453152027f));
    p = fma_(p, t, splat(0.5f * 1.421413741f));
    p = fma_(p, t, splat(0.5f * -0.284496736f));
    p = fma_(p, t, splat(0.5f * 0.254829592f));
    const Vec tail = mul(mul(p, t), exp_(mul(mul(x, x), splat(-0.5f))));
    return mul(x, where_less(x, splat(0.0f), tail, sub(one, tail)));
}

/* The others are x / (1 + e^-u): u = x for SiLU. GELU's x / 2 * (1 + tanh(u / 2)) is the same with another u. */
INLINE Vec activated(Activation activation, Vec x) {
    const Vec zero = splat(0.0f), one = splat(1.0f);
    if (activation.function == GELU)
        return gelu(x);
    if (activation.function == RELU || activation.function == SQUARED_RELU) {
        const Vec positive = larger(zero, x); /* in this order it keeps NaN */
        return activation.function == RELU ? positive : mul(positive, positive);
    }
    if (activation.function == XIELU) {
        const Vec left = mul(splat(activation.negative), sub(sub(exp_(lesser(zero, x)), one), x));
        const Vec right = mul(splat(activation.positive), mul(x, x));
        return fma_(splat(activation.slope), x, where_less(zero, x, right, left));
    }
    Vec u = x;
    if (activation.function == GELU_TANH) {
        Vec cube = mul(mul(x, x), x);
        u = mul(splat(2 * 0.7978845608028654f), fma_(splat(0.044715f), cube, x));
    }
    return divide(x, add(one, exp_(sub(zero, u))));
}
#endif
