/* exec.cc: runs a launch: blocks one after the other, the threads of a block as fibers.
 *
 * The schedule is a strict priority, redrawn at every barrier and collective: of all threads that can run, the first
 * lane of the first warp runs, until it must wait. FORWARD counts from the lowest, REVERSE from the highest. So of any
 * two threads between two barriers one order comes up in FORWARD and the other in REVERSE, and whatever depends on the
 * order shows in one of them. */
#include "exec.h"
#include "memory.h"
#include "race.h"
#include "runtime.h"
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef SIMT_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace simt
{

world w = {nullptr,         {},      {},      {},      {},     nullptr, 0,
           options_initial, nullptr, nullptr, nullptr, nullptr};

constexpr size_t SMEM_MAX = 256u << 10;
constexpr size_t SMEM_ALIGN = 128;
constexpr unsigned char POISON = 0xff; /* NaN as half, bfloat16 and float; -1 as an integer */
constexpr unsigned char CANARY = 0xfc;
constexpr size_t CANARY_BYTES = 256; /* before shared memory; behind it up to SMEM_ALIGN */

static void smem_open(exec *ex)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *map = mmap(nullptr, SMEM_MAX + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        report("out of memory", "no memory for a block's shared memory");
    ex->smem_map = (char *)map;
    ex->smem_map_bytes = SMEM_MAX;
    ex->smem_open_bytes = 0;
}

exec *exec_get()
{
    if (!w.ex) {
        w.ex = new exec();
        fiber_stacks_open(w.ex);
        smem_open(w.ex);
        w.ex->warps.resize(BLOCK_THREADS_MAX / LANES);
    }
    return w.ex;
}

uint64_t exec_draw(exec *ex)
{
    uint64_t z = ex->random += 0x9e3779b97f4a7c15u; /* a counter through a mixer */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* ---- shared memory ---- */

/* | no rights ... | canary | shared memory | canary < 128 | page without rights | */
static void smem_place(exec *ex, size_t bytes)
{
    char *end = ex->smem_map + ex->smem_map_bytes;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t body = (bytes + SMEM_ALIGN - 1) / SMEM_ALIGN * SMEM_ALIGN;
    size_t open = (body + CANARY_BYTES + page - 1) / page * page;
    if (open != ex->smem_open_bytes) {
        mprotect(ex->smem_map, ex->smem_map_bytes, PROT_NONE);
        if (mprotect(end - open, open, PROT_READ | PROT_WRITE) != 0)
            report("out of memory", "shared memory of %zu bytes", bytes);
        ex->smem_open_bytes = open;
    }
    w.smem = (unsigned char *)(end - body);
    w.smem_bytes = bytes;
#ifdef SIMT_ASAN
    __asan_unpoison_memory_region(end - open, open);
#endif
    memset(end - open, CANARY, open);
#ifdef SIMT_ASAN
    __asan_poison_memory_region(end - open, open);
    __asan_unpoison_memory_region(w.smem, bytes);
#endif
}

static void smem_check(exec *ex)
{
    unsigned char *end = (unsigned char *)ex->smem_map + ex->smem_map_bytes;
    unsigned char *first = w.smem - CANARY_BYTES, *behind = w.smem + w.smem_bytes;
#ifdef SIMT_ASAN
    __asan_unpoison_memory_region(first, CANARY_BYTES);
    __asan_unpoison_memory_region(behind, (size_t)(end - behind));
#endif
    for (unsigned char *p = first; p < w.smem; p++)
        if (*p != CANARY)
            report("out of bounds", "shared memory was written %td bytes before its start",
                   w.smem - p);
    for (unsigned char *p = behind; p < end; p++)
        if (*p != CANARY)
            report("out of bounds", "shared memory of %zu bytes was written at byte %zu",
                   w.smem_bytes, (size_t)(p - w.smem));
#ifdef SIMT_ASAN
    __asan_poison_memory_region(first, CANARY_BYTES);
    __asan_poison_memory_region(behind, (size_t)(end - behind));
#endif
}

/* ---- the schedule ---- */

static thread *lane_pick(warp *wp)
{
    uint32_t r = wp->ready;
    if (!r)
        return nullptr;
    int lane;
    if (w.opt.schedule == SCHEDULE_FORWARD) {
        lane = __builtin_ctz(r);
    } else if (w.opt.schedule == SCHEDULE_REVERSE) {
        lane = 31 - __builtin_clz(r);
    } else {
        unsigned k = wp->turn & 31u;
        uint32_t turned = k ? r >> k | r << (32u - k) : r;
        lane = (int)((wp->turn & 32u ? 31u - (unsigned)__builtin_clz(turned)
                                     : (unsigned)__builtin_ctz(turned)) +
                     k) &
               31;
    }
    return wp->lanes[lane];
}

/* The running thread cannot go on (or lets others go first): the next lane of its warp, or the scheduler. */
static void thread_pause(exec *ex, thread *t)
{
    thread *next = lane_pick(t->wp);
    if (next == t)
        return;
    fiber_switch(ex, t, next);
}

static void thread_wait(exec *ex, thread *t, enum thread_state state)
{
    t->state = state;
    t->wp->ready &= ~(1u << t->lane);
    thread_pause(ex, t);
}

static void thread_entry()
{
    exec *ex = w.ex;
    fiber_entered(ex);
    (*ex->body)();
    thread *t = w.cur;
    for (const async_copy &c : t->copies)
        if (c.group >= 0)
            report("cp.async in flight",
                   "the thread ended with a copy to shared byte %td that nothing waited for",
                   (unsigned char *)c.dst - w.smem);
    if (!t->waited)
        report("early launch", "the thread ended and has not called early_wait");
    ex->n_live--;
    if (ex->n_waiting)
        report("exit before a barrier", "%u threads wait for it at %s:%d", ex->n_waiting,
               ex->barrier_at.file, ex->barrier_at.line);
    thread_wait(ex, t, THREAD_DONE);
    report("shim", "a finished thread was resumed");
}

static void block_prepare(exec *ex)
{
    dim3 b = w.block;
    ex->n_live = ex->n_threads;
    ex->n_waiting = ex->n_voted = 0;
    ex->count_next = 0;
    for (unsigned i = 0; i < ex->n_threads; i++) {
        thread &t = ex->threads[i];
        t.index = i;
        t.tid = dim3(i % b.x, i / b.x % b.y, i / b.x / b.y);
        t.wp = &ex->warps[i / LANES];
        t.lane = (int)(i % LANES);
        t.state = THREAD_RUNS;
        t.at = place{nullptr, 0};
        t.group = 0;
        t.waited = !ex->shape->early;
        t.copies.clear();
        t.wp->lanes[t.lane] = &t;
        fiber_prepare(&t, thread_entry);
    }
    for (unsigned i = 0; i < ex->n_warps; i++) {
        warp &wp = ex->warps[i];
        wp.ready = 0xffffffffu;
        wp.n_gatherings = 0;
        wp.turn = w.opt.schedule == SCHEDULE_RANDOM ? (unsigned)exec_draw(ex) : 0;
    }
}

/* Nobody can run: say who waits for whom. */
[[noreturn]] static void deadlock(exec *ex)
{
    unsigned in_block = 0;
    for (unsigned i = 0; i < ex->n_threads; i++)
        in_block += ex->threads[i].state == THREAD_IN_BLOCK;
    for (unsigned i = 0; i < ex->n_warps; i++) {
        warp *wp = &ex->warps[i];
        if (wp->n_gatherings == 0)
            continue;
        gathering *g = &wp->gatherings[0];
        w.cur = wp->lanes[__builtin_ctz(g->arrived)];
        if (wp->n_gatherings > 1)
            report("divergent collective",
                   "%s waits for lanes %08x of mask %08x, and others of the warp wait in %s with "
                   "mask %08x at %s:%d",
                   g->op->name, g->mask & ~g->arrived, g->mask, g[1].op->name, g[1].mask,
                   g[1].at.file, g[1].at.line);
        report("lane missing from a collective",
               "%s waits for lanes %08x of mask %08x, which have left or wait at a barrier (%u of "
               "%u threads of the block have left, %u wait at a barrier)",
               g->op->name, g->mask & ~g->arrived, g->mask, ex->n_threads - ex->n_live,
               ex->n_threads, in_block);
    }
    report("missing thread at a barrier", "%u of %u threads wait at %s:%d", in_block, ex->n_threads,
           ex->barrier_at.file, ex->barrier_at.line);
}

static void block_run(exec *ex)
{
    while (ex->n_live && !ex->trapped) {
        unsigned turn = 0;
        if (w.opt.schedule == SCHEDULE_RANDOM)
            turn = (unsigned)(exec_draw(ex) % ex->n_warps);
        thread *next = nullptr;
        for (unsigned k = 0; k < ex->n_warps && !next; k++) {
            unsigned i =
                w.opt.schedule == SCHEDULE_REVERSE ? ex->n_warps - 1 - k : (k + turn) % ex->n_warps;
            next = lane_pick(&ex->warps[i]);
        }
        if (!next)
            deadlock(ex);
        fiber_switch(ex, nullptr, next);
    }
    w.cur = nullptr;
}

/* The k-th block to run. */
static uint64_t block_order(exec *ex, uint64_t k, uint64_t n, uint64_t first)
{
    (void)ex;
    if (w.opt.schedule == SCHEDULE_FORWARD)
        return k;
    if (w.opt.schedule == SCHEDULE_REVERSE)
        return n - 1 - k;
    return (k + first) % n;
}

void exec_run(const launch_shape &shape, const std::function<void()> &body)
{
    exec *ex = exec_get();
    ex->shape = &shape;
    ex->body = &body;
    ex->random = w.opt.seed + ex->blocks;
    ex->n_threads = shape.block.x * shape.block.y * shape.block.z;
    ex->n_warps = ex->n_threads / LANES;
    ex->fenced = ex->trapped = false;
    ex->host_stack = nullptr; /* perhaps another OS thread's than last time */
    w.grid = shape.grid;
    w.block = shape.block;
    smem_place(ex, shape.smem);
    race_launch();
    report_signals_on();
    uint64_t n = (uint64_t)shape.grid.x * shape.grid.y * shape.grid.z;
    uint64_t first = w.opt.schedule == SCHEDULE_RANDOM ? exec_draw(ex) % n : 0;
    for (uint64_t k = 0; k < n && !ex->trapped; k++) {
        uint64_t i = block_order(ex, k, n, first);
        w.bid = dim3((unsigned)(i % shape.grid.x), (unsigned)(i / shape.grid.x % shape.grid.y),
                     (unsigned)(i / shape.grid.x / shape.grid.y));
        memset(w.smem, POISON, w.smem_bytes);
        race_block(i);
        block_prepare(ex);
        block_run(ex);
        smem_check(ex);
        ex->blocks++;
    }
    heap_check();
    report_signals_off();
    ex->shape = nullptr;
    if (ex->trapped)
        stick(cudaErrorLaunchFailure);
}

/* With trap_is_error the launch is abandoned where it stands: its fibers are simply never resumed. */
void trap(place at)
{
    w.cur->at = at;
    if (!w.opt.trap_is_error)
        report("trap", "the kernel stopped itself");
    w.ex->trapped = true;
    thread *t = w.cur;
    t->state = THREAD_DONE;
    fiber_switch(w.ex, t, nullptr);
    __builtin_unreachable();
}

void early_wait()
{
    w.cur->waited = true;
}

/* ---- waiting for one another ---- */

/* Everyone who waited can run again, the caller too: whoever comes first in the schedule goes on. */
static void block_release(exec *ex)
{
    for (unsigned i = 0; i < ex->n_threads; i++)
        ex->threads[i].state = THREAD_RUNS;
    for (unsigned i = 0; i < ex->n_warps; i++)
        ex->warps[i].ready = 0xffffffffu;
    ex->n_waiting = 0;
    ex->barriers++;
    race_barrier();
}

void barrier(place at)
{
    exec *ex = w.ex;
    thread *t = w.cur;
    t->at = at;
    if (ex->n_live != ex->n_threads)
        report("exit before a barrier", "%u of %u threads have left the kernel",
               ex->n_threads - ex->n_live, ex->n_threads);
    if (ex->n_waiting == 0)
        ex->barrier_at = at;
    else if (at.line != ex->barrier_at.line)
        report("divergent barrier", "other threads of the block wait at %s:%d", ex->barrier_at.file,
               ex->barrier_at.line);
    if (++ex->n_waiting < ex->n_threads) {
        thread_wait(ex, t, THREAD_IN_BLOCK);
        return;
    }
    block_release(ex);
    fiber_switch(ex, t, nullptr);
}

int barrier_reduce(enum barrier_vote vote, int predicate, place at)
{
    exec *ex = w.ex;
    ex->count_next += predicate != 0;
    if (++ex->n_voted == ex->n_threads) { /* the last one: the count is complete */
        ex->count = ex->count_next;
        ex->count_next = 0;
        ex->n_voted = 0;
    }
    barrier(at);
    if (vote == VOTE_COUNT)
        return ex->count;
    return vote == VOTE_AND ? ex->count == (int)ex->n_threads : ex->count != 0;
}

/* The gathering that the lane's call belongs to: the one with its mask, or a new one. Gatherings with other masks may be
 * under way, and wait for this lane to come later; if they wait for one another, deadlock() finds out. */
static gathering *gather(warp *wp, int lane, const collective &op, uint32_t mask, place at)
{
    for (int i = 0; i < wp->n_gatherings; i++) {
        gathering *g = &wp->gatherings[i];
        if (g->mask != mask)
            continue;
        if (g->op == &op && g->at.line == at.line)
            return g;
        report("divergent collective",
               "lane %d calls %s with mask %08x while others of its warp wait in %s with mask %08x "
               "at %s:%d",
               lane, op.name, mask, g->op->name, g->mask, g->at.file, g->at.line);
    }
    gathering *g = &wp->gatherings[wp->n_gatherings++];
    *g = gathering{&op, mask, 0, at};
    return g;
}

/* The last lane to come finishes the collective for all. */
void collect(const collective &op, uint32_t mask, void *arg, place at)
{
    exec *ex = w.ex;
    thread *t = w.cur;
    warp *wp = t->wp;
    ex->collectives++;
    t->at = at;
    t->arg = arg;
    if (!(mask >> t->lane & 1u))
        report("lane missing from a mask", "lane %d calls %s with mask %08x", t->lane, op.name,
               mask);
    gathering *g = gather(wp, t->lane, op, mask, at);
    g->arrived |= 1u << t->lane;
    if (g->arrived != mask) {
        thread_wait(ex, t, THREAD_IN_WARP);
        return;
    }
    void *args[LANES];
    for (int i = 0; i < LANES; i++)
        args[i] = mask >> i & 1u ? wp->lanes[i]->arg : nullptr;
    op.finish(args, mask);
    *g = wp->gatherings[--wp->n_gatherings];
    wp->ready |= mask;
    for (int i = 0; i < LANES; i++)
        if (mask >> i & 1u)
            wp->lanes[i]->state = THREAD_RUNS;
    thread_pause(ex, t);
}

} // namespace simt
