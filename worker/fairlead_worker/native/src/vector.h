/* Functions of 16 floats at a time, within about 1e-7 of the exact value. NaN gives NaN. */
#ifndef FAIRLEAD_VECTOR_H
#define FAIRLEAD_VECTOR_H
#include <immintrin.h>

#include "native.h"

/* e^x; exactly 1 at 0 and exactly 0 at -infinity. Cephes' expf: x = n ln 2 + r, a polynomial in r, times 2^n. */
static inline __m512 exp16(__m512 x) {
    /* In this order max keeps NaN. Far below the smallest float, yet finite: -infinity less a multiple of ln 2 would be NaN. */
    x = _mm512_min_ps(_mm512_set1_ps(90.0f), _mm512_max_ps(_mm512_set1_ps(-120.0f), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r);
    return _mm512_scalef_ps(_mm512_add_ps(p, _mm512_set1_ps(1.0f)), n);
}

static inline float exp1(float x) { return _mm512_cvtss_f32(exp16(_mm512_set1_ps(x))); }

/* Cephes' tanhf: a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel. */
static inline __m512 tanh16(__m512 x) {
    __m512 z = _mm512_mul_ps(x, x);
    __m512 p = _mm512_set1_ps(-5.70498872745e-3f);
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(2.06390887954e-2f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-5.37397155531e-2f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(1.33314422036e-1f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-3.33332819422e-1f));
    __m512 near = _mm512_fmadd_ps(_mm512_mul_ps(p, z), x, x);
    __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
    __m512 far = _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(exp16(_mm512_mul_ps(two, _mm512_abs_ps(x))), one)));
    far = _mm512_mask_sub_ps(far, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps(), far);
    return _mm512_mask_mov_ps(near, _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0.625f), _CMP_GE_OQ), far);
}

/* A gate's x / (1 + e^-u): u = x for SiLU; GELU's x / 2 * (1 + tanh(u / 2)) is the same of another u. */
static inline __m512 activated(Activation activation, __m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 u = x;
    if (activation == GELU_TANH) {
        __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
        u = _mm512_mul_ps(_mm512_set1_ps(2 * 0.7978845608028654f), _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, x));
    }
    return _mm512_div_ps(x, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), u))));
}
#endif
