/* A small thread pool for loops whose iterations take microseconds.
 *
 * The caller works too and never waits for a worker that has not started: on a machine with busy neighbours a worker
 * that wakes up late takes nothing, and the caller does the whole loop. Workers spin for a short while between loops,
 * then sleep on a futex, so an idle engine costs nothing.
 */
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 4000

typedef void (*Body)(void *argument, int index, int thread);

typedef struct {
    /* One word so that taking an item and checking that it is still the same loop is one atomic step:
     * the loop's generation above, the next index below. */
    _Atomic uint64_t next;
    _Atomic int finished;
    _Atomic uint32_t generation; /* the futex word */
    _Atomic int sleepers;
    _Atomic int stopping;
    Body body;
    void *argument;
    _Atomic int count;
    int threads;
    pthread_t *handles;
} Pool;

typedef struct {
    Pool *pool;
    int thread;
} Worker;

static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

static void futex(_Atomic uint32_t *word, int operation, uint32_t value) {
    syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

/* Take items of loop `generation` until there are none. */
static void pool_work(Pool *pool, uint32_t generation, int thread) {
    for (;;) {
        uint64_t at = atomic_load_explicit(&pool->next, memory_order_acquire);
        do {
            if ((uint32_t)(at >> 32) != generation || (int)(uint32_t)at >= pool->count) return;
        } while (!atomic_compare_exchange_weak_explicit(&pool->next, &at, at + 1, memory_order_acq_rel,
                                                        memory_order_acquire));
        pool->body(pool->argument, (int)(uint32_t)at, thread);
        atomic_fetch_add_explicit(&pool->finished, 1, memory_order_release);
    }
}

static void *pool_main(void *argument) {
    Worker worker = *(Worker *)argument;
    free(argument);
    Pool *pool = worker.pool;
    uint32_t seen = 0;
    while (!atomic_load(&pool->stopping)) {
        uint32_t now = atomic_load_explicit(&pool->generation, memory_order_acquire);
        for (int i = 0; now == seen && i < SPINS; i++) {
            cpu_relax();
            now = atomic_load_explicit(&pool->generation, memory_order_acquire);
        }
        if (now == seen) {
            atomic_fetch_add(&pool->sleepers, 1);
            futex(&pool->generation, FUTEX_WAIT, seen);
            atomic_fetch_sub(&pool->sleepers, 1);
            continue;
        }
        seen = now;
        pool_work(pool, seen, worker.thread);
    }
    return NULL;
}

static Pool *pool_new(int threads) {
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->threads = threads;
    pool->handles = calloc((size_t)threads, sizeof *pool->handles);
    if (!pool->handles) pool->threads = 1;
    for (int i = 1; i < pool->threads; i++) {
        Worker *worker = malloc(sizeof *worker);
        if (worker) *worker = (Worker){pool, i};
        if (!worker || pthread_create(&pool->handles[i], NULL, pool_main, worker)) {
            free(worker);
            pool->threads = i;
            break;
        }
    }
    return pool;
}

static void pool_free(Pool *pool) {
    atomic_store(&pool->stopping, 1);
    atomic_fetch_add(&pool->generation, 1);
    futex(&pool->generation, FUTEX_WAKE, INT32_MAX);
    for (int i = 1; i < pool->threads; i++) pthread_join(pool->handles[i], NULL);
    free(pool->handles);
    free(pool);
}

/* body(argument, i, thread) for i = 0 … count - 1, in any order, on any thread. Returns when all are done. */
static void pool_run(Pool *pool, int count, Body body, void *argument) {
    if (count <= 1 || pool->threads == 1) {
        for (int i = 0; i < count; i++) body(argument, i, 0);
        return;
    }
    /* A worker that is late for the previous loop finds another generation in `next` and touches nothing else. */
    uint32_t generation = atomic_load(&pool->generation) + 1;
    if (generation == UINT32_MAX) generation = 1; /* that one marks that there is no loop */
    atomic_store(&pool->next, UINT64_MAX);
    atomic_thread_fence(memory_order_seq_cst); /* nobody sees the new body before that mark */
    pool->body = body;
    pool->argument = argument;
    pool->count = count;
    atomic_store(&pool->finished, 0);
    atomic_store_explicit(&pool->next, (uint64_t)generation << 32, memory_order_release);
    atomic_store(&pool->generation, generation);
    if (atomic_load(&pool->sleepers)) futex(&pool->generation, FUTEX_WAKE, INT32_MAX);
    pool_work(pool, generation, 0);
    while (atomic_load_explicit(&pool->finished, memory_order_acquire) < count) cpu_relax();
}
