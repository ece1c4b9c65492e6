/* The decoder layers of a Llama-like model (Llama, Qwen2, Qwen3, Mistral), all of them in one call.
 *
 * Activations are floats; weights and cache are bfloat16 or float. Per layer: norm, q/k/v, rotation, cache write,
 * attention, o, norm, gate/up, SiLU, down, each with the adapters of its rows, as loops over rows or columns on the
 * pool. Nothing here knows of Python: it runs without the interpreter's lock.
 */
#include <sys/mman.h>

#include "attention.h"
#include "lora.h"

void *big_alloc(size_t bytes) {
    void *p = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}
void big_free(void *p, size_t bytes) {
    if (p) munmap(p, bytes ? bytes : 1);
}

enum { QKV, O, GATE_UP, DOWN, GEMMS };
enum { Q_PROJ, K_PROJ, V_PROJ, O_PROJ, GATE_PROJ, UP_PROJ, DOWN_PROJ, MODULES };

typedef struct {
    int32_t layers, hidden, heads, kv_heads, dim, inner, block_size, max_tokens, max_slots, is_bf16, threads;
    float eps, scale;
} Settings;

typedef struct {
    Packed gemm[GEMMS];
    Adapted adapted[MODULES];
    float *norm1, *norm2, *q_norm, *k_norm, *qkv_bias; /* the last three may be NULL */
    int window;
    void *k, *v;
} Layer;

typedef struct {
    Settings s;
    Pool *pool;
    Layer *layers;
    Adapted head;
    Packed head_weight;
    float *head_norm, head_eps;
    size_t cache_bytes; /* of K or V of one layer */
    void *x, *attended, *x2; /* inputs of gemms: [max_tokens] rows of hidden, heads x dim, inner */
    float *y;
    void **scratch;
    int scratch_len;
    size_t x_bytes, attended_bytes, x2_bytes, y_bytes;
} Model;

/* One forward. Rows of one sequence are consecutive and make a span; its block table begins at `table`. */
typedef struct {
    int32_t rows, fresh, items, rows_per_item, max_len;
    const Span *span;
    const int32_t *tables;
    const int32_t *item;      /* [items][3] */
    const int64_t *kv_slots;  /* [rows] */
    const int64_t *fresh_block; /* blocks that get their first token now */
    const int32_t *slots;     /* [rows], or NULL: no adapters */
    const float *cos, *sin;   /* [rows][dim] */
    float *hidden;            /* [rows][hidden], in and out */
    int32_t deep_layers, deep_count; /* what the first layers add to some rows, of images */
    const int32_t *deep_row;  /* [rows]: which of the deep_count a row gets, -1: none */
    const float *deep;        /* [deep_layers][deep_count][hidden] */
} Step;

static float *copy_floats(const float *from, int count) {
    if (!from) return NULL;
    float *to = malloc((size_t)count * sizeof *to);
    if (to) memcpy(to, from, (size_t)count * sizeof *to);
    return to;
}

void rh_free(Model *m);

/* NULL: no memory. */
Model *rh_new(const Settings *settings) {
    Model *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->s = *settings;
    m->layers = calloc((size_t)m->s.layers, sizeof *m->layers);
    use_amx = HAVE_AMX && amx_request();
    m->pool = pool_new(m->s.threads);
    m->scratch = calloc((size_t)m->s.threads, sizeof *m->scratch);
    size_t rows = ROUND_UP(m->s.max_tokens, ROWS) + ROWS, size = m->s.is_bf16 ? 2 : 4;
    int attended = m->s.heads * m->s.dim;
    int qkv = attended + 2 * m->s.kv_heads * m->s.dim;
    int widest = 2 * m->s.inner > qkv ? 2 * m->s.inner : qkv;
    if (widest < m->s.hidden) widest = m->s.hidden;
    m->x = big_alloc(m->x_bytes = rows * ROUND_UP(m->s.hidden, 32) * size);
    m->attended = big_alloc(m->attended_bytes = rows * ROUND_UP(attended, 32) * size);
    m->x2 = big_alloc(m->x2_bytes = rows * ROUND_UP(m->s.inner, 32) * size);
    m->y = big_alloc(m->y_bytes = rows * ROUND_UP(widest, 32) * 4);
    if (m->layers && m->pool && m->scratch && m->x && m->attended && m->x2 && m->y) return m;
    rh_free(m);
    return NULL;
}

int rh_uses_amx(void) { return use_amx; }

static int adapted_new(Adapted *a, int slots, int in, int out, int at, int step) {
    *a = (Adapted){calloc((size_t)slots, sizeof(Pair)), in, out, at, step};
    return a->pairs != NULL;
}

/* Weights row-major as in the checkpoint; norms and biases as floats. `qkv_bias` [heads x dim + 2 kv_heads x dim].
 * 0: no memory.
 */
int rh_set_layer(Model *m, int index, const void *q, const void *k, const void *v, const void *o, const void *gate,
                  const void *up, const void *down, const float *norm1, const float *norm2, const float *q_norm,
                  const float *k_norm, const float *qkv_bias, int window) {
    const Settings *s = &m->s;
    Layer *l = &m->layers[index];
    int q_out = s->heads * s->dim, kv_out = s->kv_heads * s->dim, slots = s->max_slots;
    if (!pack_new(&l->gemm[QKV], q_out + 2 * kv_out, s->hidden, s->is_bf16) ||
        !pack_new(&l->gemm[O], s->hidden, q_out, s->is_bf16) ||
        !pack_new(&l->gemm[GATE_UP], 2 * s->inner, s->hidden, s->is_bf16) ||
        !pack_new(&l->gemm[DOWN], s->hidden, s->inner, s->is_bf16))
        return 0;
    pack_rows(&l->gemm[QKV], 0, 16, q_out, q);
    pack_rows(&l->gemm[QKV], q_out, 16, kv_out, k);
    pack_rows(&l->gemm[QKV], q_out + kv_out, 16, kv_out, v);
    pack_rows(&l->gemm[O], 0, 16, s->hidden, o);
    pack_rows(&l->gemm[GATE_UP], 0, 32, s->inner, gate);
    pack_rows(&l->gemm[GATE_UP], 16, 32, s->inner, up);
    pack_rows(&l->gemm[DOWN], 0, 16, s->hidden, down);
    l->norm1 = copy_floats(norm1, s->hidden);
    l->norm2 = copy_floats(norm2, s->hidden);
    l->q_norm = copy_floats(q_norm, s->dim);
    l->k_norm = copy_floats(k_norm, s->dim);
    l->qkv_bias = copy_floats(qkv_bias, q_out + 2 * kv_out);
    l->window = window;
    return l->norm1 && l->norm2 && (l->q_norm || !q_norm) && (l->k_norm || !k_norm) && (l->qkv_bias || !qkv_bias) &&
           adapted_new(&l->adapted[Q_PROJ], slots, s->hidden, q_out, 0, 16) &&
           adapted_new(&l->adapted[K_PROJ], slots, s->hidden, kv_out, q_out, 16) &&
           adapted_new(&l->adapted[V_PROJ], slots, s->hidden, kv_out, q_out + kv_out, 16) &&
           adapted_new(&l->adapted[O_PROJ], slots, q_out, s->hidden, 0, 16) &&
           adapted_new(&l->adapted[GATE_PROJ], slots, s->hidden, s->inner, 0, 32) &&
           adapted_new(&l->adapted[UP_PROJ], slots, s->hidden, s->inner, 16, 32) &&
           adapted_new(&l->adapted[DOWN_PROJ], slots, s->inner, s->hidden, 0, 16);
}

/* 0: no memory. */
int rh_set_head(Model *m, int rows, const void *weight, const float *norm, float eps) {
    m->head_norm = copy_floats(norm, m->s.hidden);
    m->head_eps = eps;
    if (!m->head_norm || !pack_new(&m->head_weight, rows, m->s.hidden, m->s.is_bf16)) return 0;
    pack_rows(&m->head_weight, 0, 16, rows, weight);
    return adapted_new(&m->head, m->s.max_slots, m->s.hidden, rows, 0, 16);
}

/* Make the cache of `blocks` blocks, or make it anew. Zero, and not in memory before it is written. 0: no memory. */
int rh_set_cache(Model *m, int blocks) {
    size_t old = m->cache_bytes;
    m->cache_bytes = (size_t)blocks * m->s.block_size * m->s.kv_heads * m->s.dim * (m->s.is_bf16 ? 2 : 4);
    int complete = 1;
    for (int i = 0; i < m->s.layers; i++) {
        big_free(m->layers[i].k, old);
        big_free(m->layers[i].v, old);
        m->layers[i].k = big_alloc(m->cache_bytes);
        m->layers[i].v = big_alloc(m->cache_bytes);
        complete &= m->layers[i].k && m->layers[i].v;
    }
    return complete;
}

/* layer -1 is the head. The memory of a and b must outlive the slot's use; a NULL empties it. */
void rh_set_pair(Model *m, int layer, int module, int slot, const void *a, const void *b, int rank, float scale) {
    Adapted *adapted = layer < 0 ? &m->head : &m->layers[layer].adapted[module];
    adapted->pairs[slot] = (Pair){a, b, scale, rank};
}

void rh_clear_slot(Model *m, int slot) {
    for (int i = 0; i < m->s.layers; i++)
        for (int j = 0; j < MODULES; j++) m->layers[i].adapted[j].pairs[slot] = (Pair){0};
    if (m->head.pairs) m->head.pairs[slot] = (Pair){0};
}

void rh_free(Model *m) {
    for (int i = 0; m->layers && i < m->s.layers; i++) {
        Layer *l = &m->layers[i];
        for (int j = 0; j < GEMMS; j++) big_free(l->gemm[j].data, packed_bytes(&l->gemm[j]));
        for (int j = 0; j < MODULES; j++) free(l->adapted[j].pairs);
        free(l->norm1);
        free(l->norm2);
        free(l->q_norm);
        free(l->k_norm);
        free(l->qkv_bias);
        big_free(l->k, m->cache_bytes);
        big_free(l->v, m->cache_bytes);
    }
    for (int i = 0; m->scratch && i < m->s.threads; i++) free(m->scratch[i]);
    big_free(m->head_weight.data, packed_bytes(&m->head_weight));
    free(m->head.pairs);
    free(m->head_norm);
    if (m->pool) pool_free(m->pool);
    big_free(m->x, m->x_bytes);
    big_free(m->attended, m->attended_bytes);
    big_free(m->x2, m->x2_bytes);
    big_free(m->y, m->y_bytes);
    free(m->scratch);
    free(m->layers);
    free(m);
}

typedef struct {
    Model *m;
    const Step *step;
    Layer *layer;
    Layer *next; /* its norm follows; NULL after the last layer */
    Attend attend;
} Run;

/* x[row] = norm(hidden[row]) * weight. hidden and dim are multiples of 16. */
static void norm_row(const Model *m, const float *hidden, const float *weight, float eps, int row) {
    int n = m->s.hidden, k_pad = ROUND_UP(n, 32);
    vf squares = vf_set(0);
    for (int i = 0; i < n; i += 16) {
        vf v = vf_load(hidden + i);
        squares = vf_fma(v, v, squares);
    }
    float factor = 1.0f / sqrtf(vf_sum(squares) / (float)n + eps);
    for (int i = 0; i < n; i += 16)
        store_x(m->x, m->s.is_bf16, row, i, k_pad, vf_load(hidden + i) * factor * vf_load(weight + i));
}

static void norm_head(float *head, const float *weight, int dim, float eps) {
    vf squares = vf_set(0);
    for (int i = 0; i < dim; i += 16) {
        vf v = vf_load(head + i);
        squares = vf_fma(v, v, squares);
    }
    float factor = 1.0f / sqrtf(vf_sum(squares) / (float)dim + eps);
    for (int i = 0; i < dim; i += 16) vf_store(head + i, vf_load(head + i) * factor * vf_load(weight + i));
}

/* x cos + rotate_half(x) sin, as in transformers */
static void rotate(float *head, const float *cosine, const float *sine, int dim) {
    int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
}

static int slot_of(const Step *step, int row) { return step->slots ? step->slots[row] : -1; }

static void first_item(void *argument, int index, int thread) {
    (void)thread;
    Run *run = argument;
    const Settings *s = &run->m->s;
    if (index < run->step->rows) {
        norm_row(run->m, run->step->hidden + (size_t)index * s->hidden, run->layer->norm1, s->eps, index);
        return;
    }
    /* A block that is taken into use may hold values of its last owner, and 0 times infinity is no 0. */
    int64_t block = run->step->fresh_block[(index - run->step->rows) / s->layers];
    Layer *l = &run->m->layers[(index - run->step->rows) % s->layers];
    size_t block_bytes = (size_t)s->block_size * s->kv_heads * s->dim * (s->is_bf16 ? 2 : 4);
    memset((char *)l->v + (size_t)block * block_bytes, 0, block_bytes);
}

static void qkv_item(void *argument, int row, int thread) {
    (void)thread;
    Run *run = argument;
    Model *m = run->m;
    const Settings *s = &m->s;
    Layer *l = run->layer;
    const Packed *w = &l->gemm[QKV];
    float *y = m->y + (size_t)row * w->n_pad;
    for (int j = Q_PROJ; j <= V_PROJ; j++)
        adapt_row(&l->adapted[j], slot_of(run->step, row), s->is_bf16, m->x, row, w->k_pad, y);
    if (l->qkv_bias)
        for (int i = 0; i < w->n; i++) y[i] += l->qkv_bias[i];
    const float *cosine = run->step->cos + (size_t)row * s->dim, *sine = run->step->sin + (size_t)row * s->dim;
    for (int h = 0; h < s->heads + s->kv_heads; h++) {
        float *head = y + h * s->dim;
        const float *weight = h < s->heads ? l->q_norm : l->k_norm;
        if (weight) norm_head(head, weight, s->dim, s->eps);
        rotate(head, cosine, sine, s->dim);
    }
    const float *k = y + s->heads * s->dim;
    cache_row(run->attend.shape, l->k, l->v, run->step->kv_slots[row], k, k + s->kv_heads * s->dim);
}

static void o_item(void *argument, int row, int thread) {
    (void)thread;
    Run *run = argument;
    Model *m = run->m;
    Layer *l = run->layer;
    const Packed *w = &l->gemm[O];
    float *y = m->y + (size_t)row * w->n_pad, *hidden = run->step->hidden + (size_t)row * m->s.hidden;
    adapt_row(&l->adapted[O_PROJ], slot_of(run->step, row), m->s.is_bf16, m->attended, row, w->k_pad, y);
    for (int i = 0; i < m->s.hidden; i += 16) vf_store(hidden + i, vf_load(hidden + i) + vf_load(y + i));
    norm_row(m, hidden, l->norm2, m->s.eps, row);
}

static void gate_item(void *argument, int row, int thread) {
    (void)thread;
    Run *run = argument;
    Model *m = run->m;
    Layer *l = run->layer;
    const Packed *w = &l->gemm[GATE_UP];
    int inner = m->s.inner, k_pad = l->gemm[DOWN].k_pad;
    float *y = m->y + (size_t)row * w->n_pad;
    for (int j = GATE_PROJ; j <= UP_PROJ; j++)
        adapt_row(&l->adapted[j], slot_of(run->step, row), m->s.is_bf16, m->x, row, w->k_pad, y);
    for (int i = 0; i < inner; i += 16) store_x(m->x2, m->s.is_bf16, row, i, k_pad, silu_mul(y + i * 2));
}

static void add_deep(const Run *run, int row, float *hidden) {
    const Step *step = run->step;
    int layer = (int)(run->layer - run->m->layers), n = run->m->s.hidden;
    if (layer >= step->deep_layers || step->deep_row[row] < 0) return;
    const float *more = step->deep + ((size_t)layer * step->deep_count + step->deep_row[row]) * n;
    for (int i = 0; i < n; i += 16) vf_store(hidden + i, vf_load(hidden + i) + vf_load(more + i));
}

static void down_item(void *argument, int row, int thread) {
    (void)thread;
    Run *run = argument;
    Model *m = run->m;
    Layer *l = run->layer;
    const Packed *w = &l->gemm[DOWN];
    float *y = m->y + (size_t)row * w->n_pad, *hidden = run->step->hidden + (size_t)row * m->s.hidden;
    adapt_row(&l->adapted[DOWN_PROJ], slot_of(run->step, row), m->s.is_bf16, m->x2, row, w->k_pad, y);
    for (int i = 0; i < m->s.hidden; i += 16) vf_store(hidden + i, vf_load(hidden + i) + vf_load(y + i));
    add_deep(run, row, hidden);
    if (run->next) norm_row(m, hidden, run->next->norm1, m->s.eps, row);
}

static int ensure_scratch(Model *m, int max_len) {
    if (max_len <= m->scratch_len) return 1;
    int len = ROUND_UP(max_len + max_len / 4, 256);
    for (int i = 0; i < m->s.threads; i++) {
        free(m->scratch[i]);
        m->scratch[i] = aligned_alloc(64, ROUND_UP(attend_scratch_bytes(len, m->s.dim), 64));
        if (!m->scratch[i]) {
            m->scratch_len = 0;
            return 0;
        }
    }
    m->scratch_len = len;
    return 1;
}

/* All layers over one batch; 0 when there is no memory for it. rows <= max_tokens. */
int rh_forward(Model *m, const Step *step) {
    if (step->rows > m->s.max_tokens || !ensure_scratch(m, step->max_len)) return 0;
    const Settings *s = &m->s;
    int rows = step->rows;
    for (int i = 0; i < s->layers; i++) {
        Layer *l = &m->layers[i];
        Shape shape = {s->heads, s->kv_heads, s->dim, s->block_size, l->window, s->scale, s->is_bf16};
        Attend attend = {&shape, l->k, l->v, m->y, l->gemm[QKV].n_pad, step->span, step->tables, step->item,
                         step->rows_per_item, m->attended, l->gemm[O].k_pad, m->scratch, step->max_len};
        Run run = {m, step, l, i + 1 < s->layers ? l + 1 : NULL, attend};
        if (!i) pool_run(m->pool, rows + step->fresh * s->layers, first_item, &run);
        gemm(m->pool, &l->gemm[QKV], m->x, m->y, rows);
        pool_run(m->pool, rows, qkv_item, &run);
        pool_run(m->pool, step->items, attend_item, &run.attend);
        gemm(m->pool, &l->gemm[O], m->attended, m->y, rows);
        pool_run(m->pool, rows, o_item, &run);
        if (step->slots) {
            gemm(m->pool, &l->gemm[GATE_UP], m->x, m->y, rows);
            pool_run(m->pool, rows, gate_item, &run);
        } else {
            gemm_gated(m->pool, &l->gemm[GATE_UP], m->x, m->x2, l->gemm[DOWN].k_pad, rows);
        }
        gemm(m->pool, &l->gemm[DOWN], m->x2, m->y, rows);
        pool_run(m->pool, rows, down_item, &run);
    }
    amx_release();
    return 1;
}

typedef struct {
    Model *m;
    const float *hidden;
    const int64_t *rows;
    const int32_t *slots;
    float *logits;
} Head;

static void head_input_item(void *argument, int index, int thread) {
    (void)thread;
    Head *head = argument;
    Model *m = head->m;
    norm_row(m, head->hidden + (size_t)head->rows[index] * m->s.hidden, m->head_norm, m->head_eps, index);
}

static void head_adapt_item(void *argument, int index, int thread) {
    (void)thread;
    Head *head = argument;
    const Packed *w = &head->m->head_weight;
    adapt_row(&head->m->head, head->slots[head->rows[index]], head->m->s.is_bf16, head->m->x, index, w->k_pad,
              head->logits + (size_t)index * w->n_pad);
}

/* The last norm and the output head: logits [count padded to 32][vocabulary padded to 32] of some rows of hidden.
 * `slots`: of all rows, or NULL. count <= max_tokens.
 */
void rh_head(Model *m, const float *hidden, const int64_t *rows, int count, const int32_t *slots, float *logits) {
    Head head = {m, hidden, rows, slots, logits};
    pool_run(m->pool, count, head_input_item, &head);
    gemm(m->pool, &m->head_weight, m->x, logits, count);
    if (slots) pool_run(m->pool, count, head_adapt_item, &head);
    amx_release();
}
