/* Sixteen floats at a time, on whatever instruction set the compiler was told of.
 *
 * bfloat16 values that are multiplied come in pairs, one pair in each 32-bit lane, the first in the low half: the order
 * of AVX512-BF16 and AMX. Without those instructions the same layout is computed with float arithmetic.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float vf __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t bf16;

static inline vf vf_load(const float *p) {
    vf v;
    memcpy(&v, p, 64);
    return v;
}
static inline void vf_store(float *p, vf v) { memcpy(p, &v, 64); }
static inline vu vu_load(const void *p) {
    vu v;
    memcpy(&v, p, 64);
    return v;
}
static inline vf vf_set(float x) { return (vf){0} + x; }

static inline float vf_sum(vf v) {
    /* A fixed tree, so that the bits do not depend on the compiler's mood. */
    float a[16];
    vf_store(a, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
}
static inline float vf_max(vf v) {
    float a[16];
    vf_store(a, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
    return a[0];
}
static inline vf vf_select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
static inline vf vf_maximum(vf a, vf b) { return vf_select(a > b, a, b); }

/* acc + x * y */
static inline vf vf_fma(vf x, vf y, vf acc) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)acc);
#else
    return acc + x * y;
#endif
}

/* acc + the dot product of each lane's pair in `v` with `pair` */
static inline vf vf_dot_pair(vf acc, vu v, uint32_t pair) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)v, (__m512bh)_mm512_set1_epi32((int)pair));
#else
    union {
        uint32_t u;
        float f;
    } low = {pair << 16}, high = {pair & 0xffff0000u};
    acc = vf_fma((vf)(v << 16), vf_set(low.f), acc);
    return vf_fma((vf)(v & 0xffff0000u), vf_set(high.f), acc);
#endif
}

static inline bf16 to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (bf16)((u >> 16) | 0x40); /* NaN stays NaN */
    return (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline float from_bf16(bf16 x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t bf16_pair(float low, float high) { return (uint32_t)to_bf16(low) | (uint32_t)to_bf16(high) << 16; }

/* 16 floats to 16 bfloat16, rounded to nearest even */
static inline void vf_store_bf16(bf16 *p, vf v) {
#if defined(__AVX512BF16__)
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &h, 32);
#else
    for (int i = 0; i < 16; i++) p[i] = to_bf16(v[i]);
#endif
}
static inline vf exp_polynomial(vf f) {
    vf p = vf_set(1.9875691500e-4f);
    p = vf_fma(p, f, vf_set(1.3981999507e-3f));
    p = vf_fma(p, f, vf_set(8.3334519073e-3f));
    p = vf_fma(p, f, vf_set(4.1665795894e-2f));
    p = vf_fma(p, f, vf_set(1.6666665459e-1f));
    p = vf_fma(p, f, vf_set(5.0000001201e-1f));
    return vf_fma(p, f * f, f + 1.0f);
}

/* exp, relative error below 2e-7 (Cephes' expf polynomial). What would be less than 2^-126 may be 0; NaN stays NaN. */
static inline vf vf_exp(vf x) {
#if defined(__AVX512F__)
    /* Of two operands one of which is NaN, these give the second. */
    __m512 clipped = _mm512_min_ps(_mm512_set1_ps(88.72f), _mm512_max_ps(_mm512_set1_ps(-104.0f), (__m512)x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clipped, _mm512_set1_ps(1.44269504088896341f)), 8);
    vf f = vf_fma((vf)n, vf_set(-0.693359375f), (vf)clipped);
    f = vf_fma((vf)n, vf_set(2.12194440e-4f), f);
    return (vf)_mm512_scalef_ps((__m512)exp_polynomial(f), n);
#else
    vi tiny = x < -87.0f;
    vf clipped = vf_select(x > 88.0f, vf_set(88.0f), vf_select(tiny, vf_set(-87.0f), x));
    vf n = (clipped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    vf f = vf_fma(n, vf_set(-0.693359375f), clipped);
    f = vf_fma(n, vf_set(2.12194440e-4f), f);
    vf scale = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
    return vf_select(x == x, vf_select(tiny, vf_set(0.0f), exp_polynomial(f) * scale), x);
#endif
}
