/* Attention over the paged KV cache, for any mix of one-token rows and prefill chunks.
 *
 * Each query attends over its own tokens in blocks of 16, in the order of their positions, whatever else is in the
 * batch and however the prompt was cut: the bits of its result depend on its sequence alone.
 *
 * Layout of the cache, for each block and KV head (16 tokens): K by pairs of dimensions, [dim / 2][token][2], V by
 * pairs of tokens, [token / 2][dim][2], both bfloat16; in float K is [dim][token] and V [token][dim]. So a score vector
 * holds 16 tokens and an output vector 16 dimensions, without a horizontal sum. Blocks of the pool may hold more than
 * 16 tokens; they consist of such sub-blocks.
 */
#pragma once
#include "gemm.h"

#define SUB 16
#define QUERIES 16 /* at most, that share each load of K and V: heads x rows of one KV head */
#define VECTOR_QUERIES 8 /* the same without AMX: there are 32 registers */

typedef struct {
    int heads, kv_heads, dim;
    int block_size; /* tokens per block of the pool */
    int window;     /* 0: none */
    float scale;
    int is_bf16;
} Shape;

typedef struct {
    int start, length, kv_len, table; /* first row; rows; tokens once these are there; offset of the block table */
} Span;

typedef struct {
    const Shape *shape;
    const void *k, *v;   /* the layer's part of the pool */
    const float *q;      /* [rows, q_stride], heads x dim, rotated */
    int q_stride;
    const Span *spans;
    const int32_t *tables;
    const int32_t *items; /* [count][3]: span, KV head, first row within the span */
    int rows_per_item;
    void *out;           /* X of the next Gemm, heads x dim wide */
    int out_pad;
    void **scratch; /* per thread, see Tile */
    int max_len;
} Attend;

static inline size_t kv_elements(const Shape *s) { return (size_t)SUB * s->dim; } /* of one sub-block and KV head */

/* Where sub-block `sub` of a sequence lies in the pool, in elements. */
static inline size_t sub_at(const Attend *a, const Span *span, int sub, int kv_head) {
    const Shape *s = a->shape;
    int per_block = s->block_size / SUB;
    size_t block = (size_t)a->tables[span->table + sub / per_block] * per_block + sub % per_block;
    return (block * s->kv_heads + kv_head) * kv_elements(s);
}

static size_t attend_scratch_bytes(int max_len, int dim) {
    size_t padded = ROUND_UP(max_len, 2 * SUB);
    return QUERIES * (padded * 4 + padded * 2 + (size_t)dim * 4) + 256;
}

/* scores[i][0 … end) of n queries; query i sees positions [from[i], to[i]) */
static inline __attribute__((always_inline)) void scores_of(const int n, const Attend *a, const Span *span, int kv_head,
                                                            const void *queries, float *scores, int stride, int first,
                                                            int end) {
    const Shape *s = a->shape;
    const int dim = s->dim;
    for (int sub = first / SUB; sub * SUB < end; sub++) {
        vf acc[VECTOR_QUERIES];
        for (int i = 0; i < n; i++) acc[i] = vf_set(0);
        if (s->is_bf16) {
            const bf16 *k = (const bf16 *)a->k + sub_at(a, span, sub, kv_head);
            const uint32_t *q = queries;
            for (int d = 0; d < dim / 2; d++) {
                vu pairs = vu_load(k + d * 32);
                for (int i = 0; i < n; i++) acc[i] = vf_dot_pair(acc[i], pairs, q[i * (dim / 2) + d]);
            }
        } else {
            const float *k = (const float *)a->k + sub_at(a, span, sub, kv_head);
            const float *q = queries;
            for (int d = 0; d < dim; d++) {
                vf values = vf_load(k + d * 16);
                for (int i = 0; i < n; i++) acc[i] = vf_fma(vf_set(q[i * dim + d]), values, acc[i]);
            }
        }
        for (int i = 0; i < n; i++) vf_store(scores + (size_t)i * stride + sub * SUB, acc[i]);
    }
}

static const vi LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static inline __attribute__((always_inline)) void values_of(const int n, const Attend *a, const Span *span, int kv_head,
                                                            const void *weights, int stride, int first, int end,
                                                            int c, vf *acc) {
    const Shape *s = a->shape;
    for (int i = 0; i < n; i++) acc[i] = vf_set(0);
    for (int sub = first / SUB; sub * SUB < end; sub++) {
        if (s->is_bf16) {
            const bf16 *v = (const bf16 *)a->v + sub_at(a, span, sub, kv_head) + c * 32;
            const uint32_t *w = (const uint32_t *)weights + sub * SUB / 2;
            for (int t = 0; t < SUB / 2; t++) {
                vu pairs = vu_load(v + (size_t)t * s->dim * 2);
                for (int i = 0; i < n; i++) acc[i] = vf_dot_pair(acc[i], pairs, w[(size_t)i * stride / 2 + t]);
            }
        } else {
            const float *v = (const float *)a->v + sub_at(a, span, sub, kv_head) + c * 16;
            const float *w = (const float *)weights + sub * SUB;
            for (int t = 0; t < SUB; t++) {
                vf values = vf_load(v + (size_t)t * s->dim);
                for (int i = 0; i < n; i++) acc[i] = vf_fma(vf_set(w[(size_t)i * stride + t]), values, acc[i]);
            }
        }
    }
}

/* A tile of queries, ready to attend: query i is row rows[i], head heads[i], and sees positions [from[i], to[i]). */
typedef struct {
    int n, first, end, stride;
    int rows[QUERIES], heads[QUERIES], from[QUERIES], to[QUERIES];
    float *scores;    /* [QUERIES][stride] */
    uint32_t *pairs;  /* the weights, [QUERIES][stride / 2] pairs */
    void *queries;    /* [QUERIES][dim] in the cache's type */
    float inverse[QUERIES];
} Tile;

/* Queries i = 0 … n-1 are row `row + (first_query + i) / group`, head (first_query + i) % group of the KV head. */
static void tile_begin(Tile *t, const Attend *a, const Span *span, int kv_head, int first_query, int n, int row,
                       void *scratch) {
    const Shape *s = a->shape;
    int group = s->heads / s->kv_heads, dim = s->dim;
    t->n = n;
    t->stride = ROUND_UP(a->max_len, 2 * SUB);
    t->scores = scratch;
    t->pairs = (uint32_t *)(t->scores + (size_t)QUERIES * t->stride);
    t->queries = t->pairs + (size_t)QUERIES * t->stride / 2;
    t->first = INT32_MAX;
    t->end = 0;
    for (int i = 0; i < n; i++) {
        t->rows[i] = row + (first_query + i) / group;
        t->heads[i] = kv_head * group + (first_query + i) % group;
        t->to[i] = span->kv_len - span->length + (t->rows[i] - span->start) + 1;
        t->from[i] = s->window && t->to[i] > s->window ? t->to[i] - s->window : 0;
        t->first = MIN(t->first, t->from[i]);
        t->end = t->to[i] > t->end ? t->to[i] : t->end;
        const float *q = a->q + (size_t)t->rows[i] * a->q_stride + t->heads[i] * dim;
        if (s->is_bf16)
            for (int d = 0; d < dim; d += 16) vf_store_bf16((bf16 *)t->queries + i * dim + d, vf_load(q + d));
        else
            memcpy((float *)t->queries + i * dim, q, (size_t)dim * 4);
    }
    t->first = t->first / SUB * SUB;
}

/* Scores of query i to weights, not yet divided by their sum, which is returned; zero where it does not look. */
static float tile_row_weights(Tile *t, const Shape *s, int i) {
    float *own = t->scores + (size_t)i * t->stride;
    bf16 *pairs = (bf16 *)(t->pairs + (size_t)i * t->stride / 2);
    int from = t->from[i], to = t->to[i];
    int begin = from / SUB * SUB, end = ROUND_UP(to, SUB);
    vf top = vf_set(-INFINITY);
    for (int at = begin; at < end; at += SUB) {
        vf v = vf_load(own + at);
        if (at < from || at + SUB > to) {
            vi position = LANES + at;
            v = vf_select((position >= from) & (position < to), v, vf_set(-INFINITY));
        }
        top = vf_maximum(v, top);
    }
    float shift = vf_max(top) * s->scale;
    vf sum = vf_set(0);
    for (int at = t->first; at < t->end; at += SUB) {
        vf w = vf_set(0);
        if (at >= begin && at < end) {
            w = vf_exp(vf_fma(vf_load(own + at), vf_set(s->scale), vf_set(-shift)));
            if (at < from || at + SUB > to) {
                vi position = LANES + at;
                w = vf_select((position >= from) & (position < to), w, vf_set(0));
            }
            sum += w;
        }
        if (s->is_bf16)
            vf_store_bf16(pairs + at, w);
        else
            vf_store(own + at, w);
    }
    return vf_sum(sum);
}

static void tile_weights(Tile *t, const Shape *s) {
    for (int i = 0; i < t->n; i++) t->inverse[i] = 1.0f / tile_row_weights(t, s, i);
}

static inline __attribute__((always_inline)) void attend_n(const int n, const Attend *a, const Span *span, int kv_head,
                                                           int first_query, int row, void *scratch) {
    const Shape *s = a->shape;
    Tile t;
    tile_begin(&t, a, span, kv_head, first_query, n, row, scratch);
    scores_of(n, a, span, kv_head, t.queries, t.scores, t.stride, t.first, t.end);
    tile_weights(&t, s);
    for (int c = 0; c < s->dim / 16; c++) {
        vf acc[VECTOR_QUERIES];
        const void *weights = s->is_bf16 ? (const void *)t.pairs : (const void *)t.scores;
        values_of(n, a, span, kv_head, weights, t.stride, t.first, t.end, c, acc);
        for (int i = 0; i < n; i++)
            store_x(a->out, s->is_bf16, t.rows[i], t.heads[i] * s->dim + c * 16, a->out_pad, acc[i] * t.inverse[i]);
    }
}

#if HAVE_AMX
/* A sub-block of K is a tile for each 32 dimensions, one of V a half tile for each 16. */
static void attend_amx(const Attend *a, const Span *span, int kv_head, int first_query, int n, int row, void *scratch) {
    const Shape *s = a->shape;
    const int dim = s->dim;
    Tile t;
    tile_begin(&t, a, span, kv_head, first_query, n, row, scratch);
    const bf16 *queries = t.queries;
    size_t stride = (size_t)t.stride;
    for (int at = t.first; at < t.end; at += SUB) {
        const bf16 *k = (const bf16 *)a->k + sub_at(a, span, at / SUB, kv_head);
        _tile_zero(0);
        for (int d = 0; d < dim; d += 32) {
            _tile_loadd(4, queries + d, (size_t)dim * 2);
            _tile_loadd(2, k + (size_t)d * SUB, 64);
            _tile_dpbf16ps(0, 4, 2);
        }
        _tile_stored(0, t.scores + at, stride * 4);
    }
    tile_weights(&t, s);
    float out[QUERIES * 64] __attribute__((aligned(64)));
    for (int c = 0; c < dim; c += 64) {
        int width = MIN(64, dim - c);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int at = t.first; at < t.end; at += SUB) {
            const bf16 *v = (const bf16 *)a->v + sub_at(a, span, at / SUB, kv_head) + c * 2;
            _tile_loadd(6, (const bf16 *)t.pairs + at, stride * 2);
            _tile_loadd(7, v, (size_t)dim * 4);
            _tile_dpbf16ps(0, 6, 7);
            if (width > 16) {
                _tile_loadd(7, v + 32, (size_t)dim * 4);
                _tile_dpbf16ps(1, 6, 7);
            }
            if (width > 32) {
                _tile_loadd(7, v + 64, (size_t)dim * 4);
                _tile_dpbf16ps(2, 6, 7);
            }
            if (width > 48) {
                _tile_loadd(7, v + 96, (size_t)dim * 4);
                _tile_dpbf16ps(3, 6, 7);
            }
        }
        _tile_stored(0, out, 256);
        _tile_stored(1, out + 16, 256);
        _tile_stored(2, out + 32, 256);
        _tile_stored(3, out + 48, 256);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < width; j += 16)
                store_x(a->out, 1, t.rows[i], t.heads[i] * dim + c + j, a->out_pad,
                        vf_load(out + i * 64 + j) * t.inverse[i]);
    }
}
#endif

static void attend_item(void *argument, int index, int thread) {
    const Attend *a = argument;
    const int32_t *item = a->items + (size_t)index * 3;
    const Span *span = a->spans + item[0];
    int group = a->shape->heads / a->shape->kv_heads;
    int rows = MIN(a->rows_per_item, span->length - item[2]);
    int row = span->start + item[2], total = rows * group;
    void *scratch = a->scratch[thread];
#if HAVE_AMX
    if (use_amx && a->shape->is_bf16 && a->shape->dim % 32 == 0) {
        amx_configure(TILES_ATTENTION);
        for (int at = 0; at < total; at += QUERIES)
            attend_amx(a, span, item[1], at, MIN(QUERIES, total - at), row, scratch);
        return;
    }
#endif
    for (int at = 0; at < total; at += VECTOR_QUERIES) {
        switch (MIN(VECTOR_QUERIES, total - at)) {
        case 1: attend_n(1, a, span, item[1], at, row, scratch); break;
        case 2: attend_n(2, a, span, item[1], at, row, scratch); break;
        case 3: attend_n(3, a, span, item[1], at, row, scratch); break;
        case 4: attend_n(4, a, span, item[1], at, row, scratch); break;
        case 5: attend_n(5, a, span, item[1], at, row, scratch); break;
        case 6: attend_n(6, a, span, item[1], at, row, scratch); break;
        case 7: attend_n(7, a, span, item[1], at, row, scratch); break;
        default: attend_n(8, a, span, item[1], at, row, scratch);
        }
    }
}

/* Write one rotated K row and one V row (floats, kv_heads x dim) to token slot `slot` of the pool. */
static void cache_row(const Shape *s, void *k_pool, void *v_pool, int64_t slot, const float *k, const float *v) {
    for (int h = 0; h < s->kv_heads; h++) {
        size_t at = ((size_t)(slot / SUB) * s->kv_heads + h) * kv_elements(s);
        int token = (int)(slot % SUB), dim = s->dim;
        const float *from_k = k + h * dim, *from_v = v + h * dim;
        if (s->is_bf16) {
            bf16 *to_k = (bf16 *)k_pool + at, *to_v = (bf16 *)v_pool + at;
            /* Not wider: the other token of a pair may be written by another thread at this moment. */
            for (int d = 0; d < dim; d += 2) {
                uint32_t pair = bf16_pair(from_k[d], from_k[d + 1]);
                memcpy(to_k + d * 16 + token * 2, &pair, 4);
            }
            for (int d = 0; d < dim; d++) to_v[(size_t)(token / 2) * dim * 2 + d * 2 + token % 2] = to_bf16(from_v[d]);
        } else {
            float *to_k = (float *)k_pool + at, *to_v = (float *)v_pool + at;
            for (int d = 0; d < dim; d++) to_k[d * 16 + token] = from_k[d];
            memcpy(to_v + (size_t)token * dim, from_v, (size_t)dim * 4);
        }
    }
}
