/* Y = X W^T for weights that were packed once: W [n, k] row-major in, Y [m, n] float out.
 *
 * The bits of a row of Y depend on that row of X alone, whatever the number of rows: every element is summed over k in
 * one order. bfloat16 weights run on AMX tiles where there are any, else on pairs (see vec.h); float weights on vectors.
 *
 * Layout of packed bfloat16: for each 32 columns, for each 32 of k, two tiles (16 columns each) of 16 lines; a line
 * holds two consecutive k of 16 columns, pair by pair. That is the tile layout of AMX, and a line is a vector of pairs.
 * Layout of packed float: for each 16 columns, for each k, the 16 values.
 */
#pragma once
#include "pool.h"
#include "vec.h"

#define COLUMNS 32
#define ROWS 16 /* of a tile; buffers of X and Y are padded to a multiple of it */
#define CACHED_ROWS 512
#define ROUND_UP(x, to) (((x) + (to)-1) / (to) * (to))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

typedef struct {
    int n, k;           /* as given */
    int n_pad, k_pad;   /* multiples of 32 */
    int is_bf16;
    void *data;
} Packed;

void *big_alloc(size_t bytes);
void big_free(void *p, size_t bytes);

static size_t packed_bytes(const Packed *w) { return (size_t)w->n_pad * w->k_pad * (w->is_bf16 ? 2 : 4); }

/* 0: no memory. */
static int pack_new(Packed *w, int n, int k, int is_bf16) {
    *w = (Packed){n, k, ROUND_UP(n, COLUMNS), ROUND_UP(k, 32), is_bf16, NULL};
    w->data = big_alloc(packed_bytes(w)); /* zeroed: padding stays zero */
    return w->data != NULL;
}

/* Copy `rows` rows of a row-major matrix into W: 16 of them to rows `at` …, the next 16 `step` rows further on. */
static void pack_rows(Packed *w, int at, int step, int rows, const void *source) {
    for (int r = 0; r < rows; r++) {
        int column = at + r / 16 * step + r % 16;
        if (w->is_bf16) {
            const bf16 *from = (const bf16 *)source + (size_t)r * w->k;
            bf16 *block = (bf16 *)w->data + (size_t)(column / COLUMNS) * COLUMNS * w->k_pad;
            int tile = column % COLUMNS / 16, lane = column % 16;
            for (int k = 0; k < w->k; k++)
                block[(size_t)(k / 32) * 1024 + tile * 512 + (k % 32) / 2 * 32 + lane * 2 + k % 2] = from[k];
        } else {
            const float *from = (const float *)source + (size_t)r * w->k;
            float *block = (float *)w->data + (size_t)(column / 16) * 16 * w->k_pad;
            for (int k = 0; k < w->k; k++) block[(size_t)k * 16 + column % 16] = from[k];
        }
    }
}

/* Where row r, column k of a bfloat16 X lies: 32 consecutive k of a row are together, 16 rows make a tile. */
static inline size_t x_at(int r, int k, int k_pad) {
    return (size_t)(r / ROWS) * ROWS * k_pad + (size_t)(k / 32) * (ROWS * 32) + (size_t)(r % ROWS) * 32 + k % 32;
}

typedef struct {
    const Packed *w;
    const void *x; /* [m, k_pad] float, or bfloat16 in tiles of ROWS x 32 (see x_at); m padded to ROWS */
    float *y;      /* [m, n_pad] */
    void *gated;   /* instead of y: X of the next Gemm */
    int gated_pad;
    int m;
    int m_block; /* rows per work item, a multiple of ROWS unless it is m */
    int m_items;
} Gemm;

#if defined(__AMX_BF16__)
#define HAVE_AMX 1
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

enum { TILES_NONE, TILES_GEMM, TILES_ATTENTION };

/* The calling thread also runs oneDNN, which lays the tiles out its own way and releases them: it must call
 * amx_release before it returns. The pool's own threads keep their layout.
 */
static _Thread_local int tiles_layout;

static int amx_request(void) {
    /* Linux grants the tile registers to a process that asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
/* All tiles are 16 lines of 64 bytes, but for the last two in attention: weights of 16 tokens, and their V. */
static void amx_configure(int layout) {
    if (tiles_layout == layout) return;
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = 16;
    }
    if (layout == TILES_ATTENTION) {
        config.bytes[6] = 32;
        config.rows[7] = 8;
    }
    _tile_loadconfig(&config);
    tiles_layout = layout;
}
static void amx_release(void) {
    if (tiles_layout != TILES_NONE) _tile_release();
    tiles_layout = TILES_NONE;
}

/* Two row blocks by two column tiles; with `rows16` one row block only. Each tile of X is one kilobyte in a row: with
 * the lines of a tile a whole row apart it was up to twice as slow.
 */
static void amx_block(const Gemm *g, const bf16 *w, int row, int rows16, float *y, size_t y_stride) {
    size_t k_pad = (size_t)g->w->k_pad;
    const bf16 *x = (const bf16 *)g->x + (size_t)row * k_pad;
    const bf16 *x2 = x + ROWS * k_pad;
    _tile_zero(0);
    _tile_zero(1);
    if (rows16) {
        for (size_t k = 0; k < k_pad; k += 32, w += 1024, x += 512) {
            _tile_loadd(4, x, 64);
            _tile_loadd(6, w, 64);
            _tile_loadd(7, w + 512, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        _tile_zero(2);
        _tile_zero(3);
        for (size_t k = 0; k < k_pad; k += 32, w += 1024, x += 512, x2 += 512) {
            _tile_loadd(4, x, 64);
            _tile_loadd(6, w, 64);
            _tile_loadd(7, w + 512, 64);
            _tile_loadd(5, x2, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, y + ROWS * y_stride, y_stride * 4);
        _tile_stored(3, y + ROWS * y_stride + 16, y_stride * 4);
    }
    _tile_stored(0, y, y_stride * 4);
    _tile_stored(1, y + 16, y_stride * 4);
}
#else
#define HAVE_AMX 0
static int amx_request(void) { return 0; }
static void amx_release(void) {}
#endif

static int use_amx;

/* `rows` rows of one tile of X, from `row` on */
static inline __attribute__((always_inline)) void pair_rows(const int rows, const Gemm *g, const bf16 *w, int row,
                                                            float *y, size_t y_stride) {
    int k_pad = g->w->k_pad;
    vf low[4], high[4];
    for (int r = 0; r < rows; r++) low[r] = high[r] = vf_set(0);
    const bf16 *x = (const bf16 *)g->x + x_at(row, 0, k_pad);
    for (int k = 0; k < k_pad; k += 32, w += 1024, x += ROWS * 32)
        for (int line = 0; line < 16; line++) {
            vu a = vu_load(w + line * 32), b = vu_load(w + 512 + line * 32);
            for (int r = 0; r < rows; r++) {
                uint32_t pair;
                memcpy(&pair, x + r * 32 + line * 2, 4);
                low[r] = vf_dot_pair(low[r], a, pair);
                high[r] = vf_dot_pair(high[r], b, pair);
            }
        }
    for (int r = 0; r < rows; r++) {
        vf_store(y + r * y_stride, low[r]);
        vf_store(y + r * y_stride + 16, high[r]);
    }
}

static inline __attribute__((always_inline)) void float_rows(const int rows, const Gemm *g, int row, int column,
                                                             float *y, size_t y_stride) {
    int k_pad = g->w->k_pad;
    const float *w0 = (const float *)g->w->data + (size_t)column * k_pad, *w1 = w0 + (size_t)16 * k_pad;
    const float *x = (const float *)g->x + (size_t)row * k_pad;
    vf low[6], high[6];
    for (int r = 0; r < rows; r++) low[r] = high[r] = vf_set(0);
    for (int k = 0; k < k_pad; k++) {
        vf a = vf_load(w0 + (size_t)k * 16), b = vf_load(w1 + (size_t)k * 16);
        for (int r = 0; r < rows; r++) {
            vf v = vf_set(x[(size_t)r * k_pad + k]);
            low[r] = vf_fma(v, a, low[r]);
            high[r] = vf_fma(v, b, high[r]);
        }
    }
    for (int r = 0; r < rows; r++) {
        vf_store(y + r * y_stride, low[r]);
        vf_store(y + r * y_stride + 16, high[r]);
    }
}

/* Up to 32 rows by 32 columns. On AMX the rows that fill a tile up are written too. */
static void gemm_block(const Gemm *g, int row, int rows, int column, float *y, size_t y_stride) {
    const bf16 *w = (const bf16 *)g->w->data + (size_t)column * g->w->k_pad;
    int r = 0;
    if (!g->w->is_bf16) {
        for (; r + 6 <= rows; r += 6) float_rows(6, g, row + r, column, y + r * y_stride, y_stride);
        for (; r < rows; r++) float_rows(1, g, row + r, column, y + r * y_stride, y_stride);
        return;
    }
#if HAVE_AMX
    if (use_amx) {
        amx_configure(TILES_GEMM);
        amx_block(g, w, row, rows <= ROWS, y, y_stride);
        return;
    }
#endif
    for (; r + 4 <= rows; r += 4) pair_rows(4, g, w, row + r, y + r * y_stride, y_stride);
    for (; r < rows; r++) pair_rows(1, g, w, row + r, y + r * y_stride, y_stride);
}

/* y = gate / (1 + exp(-gate)) * up of 32 columns, of which the first half are gates: see pack_rows. */
static inline vf silu_mul(const float *y) {
    vf gate = vf_load(y), up = vf_load(y + 16);
    return gate / (1.0f + vf_exp(-gate)) * up;
}

static void store_x(void *x, int is_bf16, int row, int column, int k_pad, vf v) {
    if (is_bf16)
        vf_store_bf16((bf16 *)x + x_at(row, column, k_pad), v);
    else
        vf_store((float *)x + (size_t)row * k_pad + column, v);
}

static void gemm_item(void *argument, int index, int thread) {
    (void)thread;
    const Gemm *g = argument;
    /* Rows outermost: a block of X stays in the cache while W streams past it. */
    int columns = g->w->n_pad / COLUMNS;
    int column = index % columns * COLUMNS, row = index / columns * g->m_block;
    int end = MIN(g->m, row + g->m_block);
    for (; row < end; row += 2 * ROWS) {
        int rows = MIN(2 * ROWS, end - row);
        if (!g->gated) {
            gemm_block(g, row, rows, column, g->y + (size_t)row * g->w->n_pad + column, (size_t)g->w->n_pad);
            continue;
        }
        /* The product is not written out: for long prompts that took longer than computing it. */
        float block[2 * ROWS * COLUMNS] __attribute__((aligned(64)));
        gemm_block(g, row, rows, column, block, COLUMNS);
        for (int r = 0; r < rows; r++)
            store_x(g->gated, g->w->is_bf16, row + r, column / 2, g->gated_pad, silu_mul(block + r * COLUMNS));
    }
}

static void gemm_run(Pool *pool, Gemm *g) {
    if (!g->m) return;
    int columns = g->w->n_pad / COLUMNS;
    g->m_block = g->m;
    if (columns < 4 * pool->threads) g->m_block = 64;
    if (g->m_block > CACHED_ROWS) g->m_block = CACHED_ROWS;
    g->m_items = (g->m + g->m_block - 1) / g->m_block;
    pool_run(pool, columns * g->m_items, gemm_item, g);
}

static void gemm(Pool *pool, const Packed *w, const void *x, float *y, int m) {
    Gemm g = {.w = w, .x = x, .y = y, .m = m};
    gemm_run(pool, &g);
}

/* X of the next Gemm, [m, n / 2], from the gates and values in the columns of W. */
static void gemm_gated(Pool *pool, const Packed *w, const void *x, void *gated, int gated_pad, int m) {
    Gemm g = {.w = w, .x = x, .gated = gated, .gated_pad = gated_pad, .m = m};
    gemm_run(pool, &g);
}
