/* Vectors of Arm's NEON, two registers for each `Vec`: simd.h's operations for AArch64. Eight lanes keep tiles as with AVX2, and 24 of the
 * 32 registers hold sums. SVE is not used: cloud CPUs that have it (Graviton 3, Axion, Grace) have it at 128 or 256 bits, and have BFDOT
 * and the products below in NEON's encoding too. */
#ifndef FAIRLEAD_SIMD_NEON_H
#define FAIRLEAD_SIMD_NEON_H
#include <arm_neon.h>

enum { LANES = 8 };
typedef struct {
    float32x4_t low, high;
} Vec;
typedef struct {
    uint32x4_t low, high;
} Words;

INLINE Words as_words(Vec a) { return (Words){vreinterpretq_u32_f32(a.low), vreinterpretq_u32_f32(a.high)}; }
INLINE Vec as_floats(Words a) { return (Vec){vreinterpretq_f32_u32(a.low), vreinterpretq_f32_u32(a.high)}; }

/* All bits of the first n lanes. */
INLINE Words below(int64_t n) {
    static const int32_t lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7};
    const int32x4_t count = vdupq_n_s32(n > LANES ? LANES : n < 0 ? 0 : (int32_t)n);
    return (Words){vcltq_s32(vld1q_s32(lanes), count), vcltq_s32(vld1q_s32(lanes + 4), count)};
}
/* Bits of a where the mask is set, and of b elsewhere. */
INLINE Vec choose(Words mask, Vec a, Vec b) { return (Vec){vbslq_f32(mask.low, a.low, b.low), vbslq_f32(mask.high, a.high, b.high)}; }
INLINE Words is_less(Vec a, Vec b) { return (Words){vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)}; }

INLINE Vec splat(float x) { return (Vec){vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE Vec add(Vec a, Vec b) { return (Vec){vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
INLINE Vec sub(Vec a, Vec b) { return (Vec){vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
INLINE Vec mul(Vec a, Vec b) { return (Vec){vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
INLINE Vec divide(Vec a, Vec b) { return (Vec){vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
INLINE Vec fma_(Vec a, Vec b, Vec c) { return (Vec){vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
INLINE Vec fnma(Vec a, Vec b, Vec c) { return (Vec){vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)}; }
INLINE Vec larger(Vec a, Vec b) { return choose(is_less(b, a), a, b); } /* not vmaxq: the result is b if one is NaN */
INLINE Vec lesser(Vec a, Vec b) { return choose(is_less(a, b), a, b); }
INLINE Vec magnitude(Vec a) { return (Vec){vabsq_f32(a.low), vabsq_f32(a.high)}; }
INLINE Vec nearest(Vec a) { return (Vec){vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
INLINE float32x4_t power_of_two(int32x4_t n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }
INLINE float32x4_t scaled_by_power(float32x4_t a, float32x4_t n) {
    const int32x4_t whole = vcvtnq_s32_f32(n), half = vshrq_n_s32(whole, 1);
    return vmulq_f32(vmulq_f32(a, power_of_two(half)), power_of_two(vsubq_s32(whole, half)));
}
/* In two halves, because 2^n alone may be too small or too large for a float. */
INLINE Vec scale_by_power(Vec a, Vec n) { return (Vec){scaled_by_power(a.low, n.low), scaled_by_power(a.high, n.high)}; }
INLINE Vec swapped(Vec a) { return (Vec){vrev64q_f32(a.low), vrev64q_f32(a.high)}; }
INLINE float total(Vec a) { return vaddvq_f32(vaddq_f32(a.low, a.high)); }
INLINE float highest(Vec a) { return vmaxvq_f32(vmaxq_f32(a.low, a.high)); }
INLINE float first(Vec a) { return vgetq_lane_f32(a.low, 0); }
INLINE Vec where_less(Vec x, Vec y, Vec a, Vec b) { return choose(is_less(x, y), a, b); }
INLINE Vec between(int64_t begin, int64_t end, Vec a, Vec b) {
    const Words from = below(begin), to = below(end);
    return choose((Words){vbicq_u32(to.low, from.low), vbicq_u32(to.high, from.high)}, a, b);
}
INLINE uint32_t equal(int64_t n, Vec a, Vec b) {
    static const uint32_t bits[LANES] = {1, 2, 4, 8, 16, 32, 64, 128};
    const Words some = below(n);
    const uint32x4_t low = vandq_u32(vandq_u32(vceqq_f32(a.low, b.low), some.low), vld1q_u32(bits));
    const uint32x4_t high = vandq_u32(vandq_u32(vceqq_f32(a.high, b.high), some.high), vld1q_u32(bits + 4));
    return vaddvq_u32(vaddq_u32(low, high));
}

INLINE Vec load_floats(const float *from) { return (Vec){vld1q_f32(from), vld1q_f32(from + 4)}; }
INLINE void store_floats(float *to, Vec a) { vst1q_f32(to, a.low), vst1q_f32(to + 4, a.high); }
INLINE void store_some(float *to, int64_t n, Vec a) {
    float all[LANES];
    if (n >= LANES) {
        store_floats(to, a);
        return;
    }
    store_floats(all, a);
    if (n > 0)
        memcpy(to, all, (size_t)n * 4);
}
INLINE Words load_words(const void *from) {
    const uint8_t *at = from; /* as bytes: the memory may have any type */
    return (Words){vreinterpretq_u32_u8(vld1q_u8(at)), vreinterpretq_u32_u8(vld1q_u8(at + 16))};
}
INLINE void store_words(void *to, Words a) {
    uint8_t *at = to;
    vst1q_u8(at, vreinterpretq_u8_u32(a.low)), vst1q_u8(at + 16, vreinterpretq_u8_u32(a.high));
}
INLINE Words load_some_words(const void *from, int64_t n) {
    uint32_t some[LANES] = {0};
    if (n >= LANES)
        return load_words(from);
    if (n > 0)
        memcpy(some, from, (size_t)n * 4);
    return load_words(some);
}
INLINE Vec load_some(const float *from, int64_t n) { return as_floats(load_some_words(from, n)); }
INLINE Words splat_word(uint32_t x) { return (Words){vdupq_n_u32(x), vdupq_n_u32(x)}; }
INLINE Vec whole_to_float(Words a) {
    return (Vec){vcvtq_f32_s32(vreinterpretq_s32_u32(a.low)), vcvtq_f32_s32(vreinterpretq_s32_u32(a.high))};
}
INLINE Vec first_half(Words a) { return as_floats((Words){vshlq_n_u32(a.low, 16), vshlq_n_u32(a.high, 16)}); }
INLINE Vec second_half(Words a) {
    const uint32x4_t kept = vdupq_n_u32(0xFFFF0000);
    return as_floats((Words){vandq_u32(a.low, kept), vandq_u32(a.high, kept)});
}

INLINE Vec load_bfloat16(const uint16_t *from, int64_t n) {
    uint16_t some[LANES] = {0};
    if (n < LANES) {
        if (n > 0)
            memcpy(some, from, (size_t)n * 2);
        from = some;
    }
    const uint16x8_t halves = vld1q_u16(from);
    return as_floats((Words){vshll_n_u16(vget_low_u16(halves), 16), vshll_high_n_u16(halves, 16)});
}
INLINE void store_halves(void *to, int64_t n, uint16x8_t halves) {
    uint16_t all[LANES];
    if (n >= LANES) {
        vst1q_u8(to, vreinterpretq_u8_u16(halves));
        return;
    }
    vst1q_u16(all, halves);
    if (n > 0)
        memcpy(to, all, (size_t)n * 2);
}
INLINE uint16x4_t rounded_to_bfloat16(float32x4_t a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7FFF));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000))), 16);
}
INLINE void store_bfloat16(uint16_t *to, int64_t n, Vec a) {
    store_halves(to, n, vcombine_u16(rounded_to_bfloat16(a.low), rounded_to_bfloat16(a.high)));
}
INLINE void store_int16(int16_t *to, int64_t n, Vec a) {
    const int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(a.low)), high = vqmovn_s32(vcvtnq_s32_f32(a.high));
    store_halves(to, n, vreinterpretq_u16_s16(vcombine_s16(low, high)));
}

INLINE Words load_int8(const char *from) {
    const int8x16_t all = vld1q_s8((const int8_t *)from);
    return (Words){vreinterpretq_u32_s16(vmovl_s8(vget_low_s8(all))), vreinterpretq_u32_s16(vmovl_high_s8(all))};
}
INLINE Vec load_float16(const uint16_t *from) {
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(from));
    return (Vec){vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
INLINE Vec load_uint8(const char *from) {
    const uint16x8_t all = vmovl_u8(vld1_u8((const uint8_t *)from));
    return whole_to_float((Words){vmovl_u16(vget_low_u16(all)), vmovl_high_u16(all)});
}
INLINE Vec load_signed(const char *from) {
    const int16x8_t all = vmovl_s8(vld1_s8((const int8_t *)from));
    return (Vec){vcvtq_f32_s32(vmovl_s16(vget_low_s16(all))), vcvtq_f32_s32(vmovl_high_s16(all))};
}
INLINE void store_int8(int8_t *to, Vec a) {
    const int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(a.low)), high = vqmovn_s32(vcvtnq_s32_f32(a.high));
    vst1_s8(to, vqmovn_s16(vcombine_s16(low, high)));
}
INLINE Words both(Words a, Words b) { return (Words){vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)}; }
INLINE Words either(Words a, Words b) { return (Words){vorrq_u32(a.low, b.low), vorrq_u32(a.high, b.high)}; }
INLINE Words differ(Words a, Words b) { return (Words){veorq_u32(a.low, b.low), veorq_u32(a.high, b.high)}; }
INLINE Words shifted(Words a, int n) {
    const int32x4_t by = vdupq_n_s32(n);
    return (Words){vshlq_u32(a.low, by), vshlq_u32(a.high, by)};
}
enum { UNSIGNED_BYTES = 0 };
INLINE uint32x4_t multiplied_bytes(int bits, uint32x4_t a, uint32x4_t b, uint32x4_t sum) {
    const int8x16_t x = vreinterpretq_s8_u32(a), y = vreinterpretq_s8_u32(b);
#ifdef __ARM_FEATURE_DOTPROD
    (void)bits;
    return vreinterpretq_u32_s32(vdotq_s32(vreinterpretq_s32_u32(sum), x, y));
#else
    const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y));
    if (bits == 4)
        return vreinterpretq_u32_s16(vaddq_s16(vreinterpretq_s16_u32(sum), pairs));
    return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(sum), pairs));
#endif
}
INLINE Words multiply_bytes(int bits, Words a, Words b, Words sum) {
    return (Words){multiplied_bytes(bits, a.low, b.low, sum.low), multiplied_bytes(bits, a.high, b.high, sum.high)};
}
INLINE Words byte_sum(int bits, Words sum, Words start) {
    (void)bits;
#ifndef __ARM_FEATURE_DOTPROD
    if (bits == 4) {
        sum.low = vreinterpretq_u32_s32(vpaddlq_s16(vreinterpretq_s16_u32(sum.low)));
        sum.high = vreinterpretq_u32_s32(vpaddlq_s16(vreinterpretq_s16_u32(sum.high)));
    }
#endif
    return (Words){vaddq_u32(sum.low, start.low), vaddq_u32(sum.high, start.high)};
}
INLINE uint32x4_t multiplied_int16(uint32x4_t a, uint32x4_t b, uint32x4_t sum) {
    const int16x8_t x = vreinterpretq_s16_u32(a), y = vreinterpretq_s16_u32(b);
    const int32x4_t both = vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
    return vaddq_u32(sum, vreinterpretq_u32_s32(both));
}
INLINE Words multiply_int16(Words a, Words b, Words sum) {
    return (Words){multiplied_int16(a.low, b.low, sum.low), multiplied_int16(a.high, b.high, sum.high)};
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
/* sum + each lane's two bfloat16 of a times those of b */
INLINE Vec multiply_bfloat16(Vec a, Vec b, Vec sum) {
    return (Vec){
        vbfdotq_f32(sum.low, vreinterpretq_bf16_f32(a.low), vreinterpretq_bf16_f32(b.low)),
        vbfdotq_f32(sum.high, vreinterpretq_bf16_f32(a.high), vreinterpretq_bf16_f32(b.high)),
    };
}
#endif
#endif
