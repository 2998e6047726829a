/* exec.h: inside the shim: fibers, warps and the block that runs now (exec.cc, fiber.cc, warp.cc, report.cc). */
#pragma once
#include <vector>
#include "simt.h"

#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#endif

namespace simt
{

constexpr int LANES = 32;
constexpr unsigned BLOCK_THREADS_MAX = 1024;
#ifdef SIMT_ASAN
constexpr size_t STACK_BYTES = 256u << 10;
#else
constexpr size_t STACK_BYTES = 64u << 10;
#endif

enum thread_state { THREAD_RUNS, THREAD_IN_WARP, THREAD_IN_BLOCK, THREAD_DONE };

/* A copy that was issued and has not been waited for: carried out by cpa_wait. src NULL: zeros. */
struct async_copy {
    void *dst;
    const void *src;
    int group;
    unsigned bytes;
};

struct warp;

struct context { /* where a fiber, or the scheduler, stopped */
    void *sp;    /* its stack pointer, or a ucontext_t on machines without a switch of our own */
    void *fake;  /* ASan's */
};

struct thread {
    context ctx;
    char *stack; /* STACK_BYTES, above a page without rights */
    warp *wp;
    dim3 tid;
    unsigned index; /* in the block */
    int lane;
    enum thread_state state;
    place at;    /* the last collective or barrier */
    void *arg;   /* operands of the collective that it waits in: on its own stack */
    int group;   /* cp.async groups committed */
    bool waited; /* early_wait was called, or need not be */
    std::vector<async_copy> copies;
};

/* One kind of collective. finish sees the operands of the lanes in mask and writes results into them. */
struct collective {
    const char *name;
    void (*finish)(void **args, uint32_t mask);
};

/* A collective under way. Disjoint parts of a warp can be in different ones. */
struct gathering {
    const collective *op;
    uint32_t mask, arrived;
    place at;
};

struct warp {
    thread *lanes[LANES];
    uint32_t ready; /* lanes that can run */
    gathering gatherings[LANES];
    int n_gatherings;
    unsigned turn; /* SCHEDULE_RANDOM: which lane comes first */
};

struct exec {
    std::vector<thread> threads;
    std::vector<warp> warps;
    unsigned n_threads, n_warps, n_live;
    context scheduler;
    const void *host_stack; /* ASan wants to know */
    size_t host_stack_bytes;
    char *stacks; /* one mapping for all fibers */

    /* the barrier of the block */
    unsigned n_waiting;
    int count, count_next; /* predicates that held: of the last barrier, of the next */
    unsigned n_voted;
    place barrier_at;

    /* shared memory: right-aligned against a page without rights */
    char *smem_map;
    size_t smem_map_bytes, smem_open_bytes;

    /* the launch */
    const launch_shape *shape;
    const std::function<void()> *body;
    uint64_t random; /* state of the draws */
    bool fenced;     /* the kernel called __threadfence: blocks may talk */
    bool trapped;    /* a thread stopped the kernel */

    /* totals, for tests and rates */
    uint64_t switches, collectives, barriers, blocks;
};

/* exec.cc */
exec *exec_get();
void exec_run(const launch_shape &shape, const std::function<void()> &body);
void collect(const collective &op, uint32_t mask, void *arg, place at);
uint64_t exec_draw(exec *ex); /* the next number of the schedule's stream */

/* fiber.cc */
void fiber_stacks_open(exec *ex);
void fiber_prepare(thread *t, void (*entry)());
void fiber_switch(exec *ex, thread *from, thread *to); /* NULL: the scheduler */
void fiber_entered(exec *ex);                          /* first thing in a fiber */

/* report.cc: say it and end the process. */
[[noreturn]] void report(const char *kind, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void report_signals_on();
void report_signals_off();

} // namespace simt
