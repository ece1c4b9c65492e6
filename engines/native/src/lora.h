/* Low-rank adapters, row by row: y += scale * B (A x), each row with the adapter of its own slot, whatever its rank.
 *
 * A is kept as it is, [rank, in], B as [rank / 2][out][2] (pairs of ranks) in bfloat16 and [rank][out] in float; an odd
 * rank is padded by a zero. Nothing is padded to the largest rank of the batch (Punica and S-LoRA gather the same way).
 */
#pragma once
#include "gemm.h"

#define MAX_RANK 512

typedef struct {
    const void *a, *b;
    float scale;
    int32_t rank; /* even for bfloat16 */
} Pair;

/* One adapted matrix: `pairs` by slot (a == NULL: this adapter leaves it alone). Its first 16 columns are at `at` in Y,
 * the next ones `step` further on.
 */
typedef struct {
    Pair *pairs;
    int in, out, at, step;
} Adapted;

static float dot_bf16(const bf16 *a, const bf16 *x, int r, int in, int k_pad) {
    vf acc = vf_set(0);
    int k = 0;
    for (; k + 32 <= in; k += 32) {
        vu left = vu_load(a + k), right = vu_load(x + x_at(r, k, k_pad));
#if defined(__AVX512BF16__)
        acc = (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)left, (__m512bh)right);
#else
        acc = vf_fma((vf)(left << 16), (vf)(right << 16), acc);
        acc = vf_fma((vf)(left & 0xffff0000u), (vf)(right & 0xffff0000u), acc);
#endif
    }
    float sum = vf_sum(acc);
    for (; k < in; k++) sum += from_bf16(a[k]) * from_bf16(x[x_at(r, k, k_pad)]);
    return sum;
}

static float dot_float(const float *a, const float *x, int in) {
    vf acc = vf_set(0);
    int k = 0;
    for (; k + 16 <= in; k += 16) acc = vf_fma(vf_load(a + k), vf_load(x + k), acc);
    float sum = vf_sum(acc);
    for (; k < in; k++) sum += a[k] * x[k];
    return sum;
}

/* x: row `row` of a Gemm's X; y: the same row of its Y. */
static void adapt_row(const Adapted *m, int slot, int is_bf16, const void *x, int row, int k_pad, float *y) {
    if (slot < 0) return;
    const Pair *pair = &m->pairs[slot];
    if (!pair->a) return;
    float h[MAX_RANK];
    y += m->at;
    int n = 0;
    if (is_bf16) {
        for (int r = 0; r < pair->rank; r++)
            h[r] = pair->scale * dot_bf16((const bf16 *)pair->a + (size_t)r * m->in, x, row, m->in, k_pad);
        const bf16 *b = pair->b;
        uint32_t pairs[MAX_RANK / 2];
        for (int r = 0; r < pair->rank; r += 2) pairs[r / 2] = bf16_pair(h[r], h[r + 1]);
        for (; n + 16 <= m->out; n += 16, y += m->step) {
            vf acc = vf_load(y);
            for (int r = 0; r < pair->rank / 2; r++)
                acc = vf_dot_pair(acc, vu_load(b + ((size_t)r * m->out + n) * 2), pairs[r]);
            vf_store(y, acc);
        }
        for (int i = 0; n < m->out; n++, i++)
            for (int r = 0; r < pair->rank; r++)
                y[i] += from_bf16(to_bf16(h[r])) * from_bf16(b[((size_t)r / 2 * m->out + n) * 2 + r % 2]);
        return;
    }
    const float *own = (const float *)x + (size_t)row * k_pad, *b = pair->b;
    for (int r = 0; r < pair->rank; r++)
        h[r] = pair->scale * dot_float((const float *)pair->a + (size_t)r * m->in, own, m->in);
    for (; n + 16 <= m->out; n += 16, y += m->step) {
        vf acc = vf_load(y);
        for (int r = 0; r < pair->rank; r++) acc = vf_fma(vf_set(h[r]), vf_load(b + (size_t)r * m->out + n), acc);
        vf_store(y, acc);
    }
    for (int i = 0; n < m->out; n++, i++)
        for (int r = 0; r < pair->rank; r++) y[i] += h[r] * b[(size_t)r * m->out + n];
}
