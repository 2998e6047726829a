/* race.cc: who touched which byte last, and was that ordered before now?
 *
 *      shared memory   per byte: the last writer, and readers since; ordered by barriers, and inside a warp by __syncwarp
 *      device memory   per 4 bytes: the same, with block and stream operation; ordered by the same inside a block, not at
 *                      all between the blocks of a launch, and between operations by streams and events
 *
 * Two accesses to a byte of which one writes (both atomic: no) must be ordered, or else that is a report: missing barrier,
 * missing __syncwarp, race between blocks, missing event. It does not matter in which order they came this time. Bytes
 * that nobody wrote must not be read, and bytes outside must not be touched at all.
 *
 * Order inside a warp is a vector clock: known[a][b] is how far lane a knows what lane b did; a lane's own number goes up
 * at every __syncwarp. Shuffles and votes exchange values and order nothing, as in PTX. */
#include "race.h"
#include "exec.h"
#include "memory.h"
#include "stream.h"
#include <stdio.h>
#include <sys/mman.h>

namespace simt
{

/* ---- records ---- */

/* A thread's access to shared memory. epoch counts barriers (and blocks) of the launch; 0: no access. */
struct mark {
    uint32_t epoch;
    uint16_t thread, atomic;
    uint32_t clock; /* the lane's own number */
};

constexpr unsigned READERS = 3;

struct shared_cell {
    mark write;
    mark reads
        [READERS]; /* the last; the last of another warp; the last of the same warp, another lane */
};

/* An access to device memory. */
struct trace {
    uint32_t op;    /* index in detector::ops; 0: no access */
    uint32_t block; /* WHOLE: a copy or cuBLAS */
    uint32_t epoch, clock;
    uint16_t thread;
    uint8_t mask, atomic; /* of the four bytes */
};
constexpr uint32_t WHOLE = 0xffffffffu;

struct device_cell {
    trace writes[2];  /* the last, and the last that wrote other bytes of the four */
    trace reads[2];   /* the last, and the last of another operation, block or warp */
    uint32_t written; /* a bit a byte */
};

struct op_record { /* an operation that ran */
    const char *name;
    point at;
};

struct detector {
    bool active, in_atomic;
    uint32_t epoch, block_epoch; /* now; at the start of the block */
    uint32_t block;
    uint32_t op;
    uint32_t known[BLOCK_THREADS_MAX][LANES];
    std::vector<shared_cell> shared; /* per byte */
    std::vector<op_record> ops;
    device_cell *device; /* per 4 bytes of the first DEVICE_SPAN of device address space */
};

constexpr size_t DEVICE_SPAN = (size_t)64 << 30;

static detector *det()
{
    if (!w.race) {
        w.race = new detector();
        w.race->ops.push_back(op_record{"nothing", {0, 0}});
    }
    return w.race;
}

bool race_active()
{
    return w.race && w.race->active;
}

void race_activate()
{
    detector *d = det();
    if (d->active)
        return;
    d->active = true;
    void *map = mmap(nullptr, DEVICE_SPAN / 4 * sizeof(device_cell), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    d->device = map == MAP_FAILED ? nullptr : (device_cell *)map;
}

/* ---- time ---- */

/* The record of the operation that runs. */
static void op_note(detector *d)
{
    queues *q = w.q;
    if (!q || !q->running)
        return;
    const point &last = d->ops.back().at;
    if (last.stream == q->running_on->id && last.number == q->running->number)
        return;
    d->op = (uint32_t)d->ops.size();
    d->ops.push_back(op_record{q->running->name, {q->running_on->id, q->running->number}});
}

void race_launch()
{
    if (!race_active())
        return;
    detector *d = det();
    op_note(d);
    d->shared.assign(w.smem_bytes, shared_cell{});
    d->epoch = 0;
}

void race_block(uint64_t index)
{
    if (!race_active())
        return;
    detector *d = det();
    d->block = (uint32_t)index;
    d->block_epoch = ++d->epoch;
    d->in_atomic = false;
    for (unsigned t = 0; t < w.ex->n_threads; t++) {
        memset(d->known[t], 0, sizeof d->known[t]);
        d->known[t][t % LANES] = 1;
    }
}

void race_barrier()
{
    if (race_active())
        det()->epoch++;
}

void race_warp_sync(uint32_t mask)
{
    if (!race_active())
        return;
    detector *d = det();
    unsigned first = w.cur->index / LANES * LANES;
    uint32_t joined[LANES] = {};
    for (unsigned i = 0; i < LANES; i++)
        if (mask >> i & 1u)
            for (unsigned j = 0; j < LANES; j++)
                if (joined[j] < d->known[first + i][j])
                    joined[j] = d->known[first + i][j];
    for (unsigned i = 0; i < LANES; i++)
        if (mask >> i & 1u) {
            memcpy(d->known[first + i], joined, sizeof joined);
            d->known[first + i][i]++;
        }
}

/* ---- shared memory ---- */

static void thread_print(char *text, size_t bytes, unsigned thread)
{
    dim3 b = w.block;
    snprintf(text, bytes, "(%u,%u,%u)", thread % b.x, thread / b.x % b.y, thread / b.x / b.y);
}

static bool ordered(const detector *d, const mark &m, unsigned thread)
{
    if (m.epoch < d->epoch || m.thread == thread)
        return true; /* no access at all is epoch 0 */
    return m.thread / LANES == thread / LANES && d->known[thread][m.thread % LANES] >= m.clock;
}

[[noreturn]] static void shared_report(const mark &m, unsigned thread, size_t byte, const char *now,
                                       const char *before)
{
    char other[64];
    thread_print(other, sizeof other, m.thread);
    bool same = m.thread / LANES == thread / LANES;
    report(same ? "missing __syncwarp" : "missing barrier",
           "the thread %s shared byte %zu, which thread %s %s, and no %s lies between", now, byte,
           other, before, same ? "__syncwarp or barrier" : "barrier");
}

static void shared_read(detector *d, shared_cell *c, const mark &me, size_t byte)
{
    if (c->write.epoch < d->block_epoch)
        report("uninitialised shared memory",
               "the thread reads shared byte %zu, which nobody has written, or not yet: missing "
               "barrier, missing __syncwarp?",
               byte);
    if (!(c->write.atomic && me.atomic) && !ordered(d, c->write, me.thread))
        shared_report(c->write, me.thread, byte, "reads", "wrote");
    mark *r = c->reads;
    if (r[0].thread != me.thread && r[0].epoch)
        r[r[0].thread / LANES == me.thread / LANES ? 2 : 1] = r[0];
    r[0] = me;
}

static void shared_write(detector *d, shared_cell *c, const mark &me, size_t byte)
{
    if (!(c->write.atomic && me.atomic) && !ordered(d, c->write, me.thread))
        shared_report(c->write, me.thread, byte, "writes", "wrote");
    for (const mark &r : c->reads)
        if (!(r.atomic && me.atomic) && !ordered(d, r, me.thread))
            shared_report(r, me.thread, byte, "writes", "read");
    c->write = me;
}

static void shared_access(detector *d, const unsigned char *p, size_t bytes, enum access kind)
{
    unsigned t = w.cur->index;
    mark me = {d->epoch, (uint16_t)t, kind == ACCESS_ATOMIC, d->known[t][t % LANES]};
    size_t first = (size_t)(p - w.smem);
    if (first + bytes > w.smem_bytes || p < w.smem)
        report("out of bounds", "an access of %zu bytes at byte %td of %zu bytes of shared memory",
               bytes, p - w.smem, w.smem_bytes);
    for (size_t i = first; i < first + bytes; i++) {
        if (kind != ACCESS_WRITE)
            shared_read(d, &d->shared[i], me, i);
        if (kind != ACCESS_READ)
            shared_write(d, &d->shared[i], me, i);
    }
}

/* ---- device memory ---- */

/* Is the access t ordered before what runs now, in the thread `thread` of this block (WHOLE: an operation)? */
static bool device_ordered(const detector *d, const trace &t, const trace &me)
{
    if (!t.op || !(t.mask & me.mask) || (t.atomic && me.atomic))
        return true;
    if (t.op == d->op) {
        if (t.block != me.block)
            return w.ex->fenced; /* blocks that signal each other: not followed any further */
        if (t.block == WHOLE || t.thread == me.thread || t.epoch < me.epoch)
            return true;
        return t.thread / LANES == me.thread / LANES &&
               d->known[me.thread][t.thread % LANES] >= t.clock;
    }
    const point &at = d->ops[t.op].at;
    const vclock &seen = w.q->running->seen;
    return at.stream < seen.size() && seen[at.stream] >= at.number;
}

[[noreturn]] static void device_report(const detector *d, const trace &t, const trace &me,
                                       const char *p, const char *now, const char *before)
{
    char where[160], other[64];
    heap_tell(p, where, sizeof where);
    if (t.op != d->op) {
        const op_record &o = d->ops[t.op];
        report("missing event",
               "%s (stream %u) %s %s; %s (stream %u) %s it, and no event orders the two",
               w.q->running->name, w.q->running_on->id, now, where, o.name, o.at.stream, before);
    }
    thread_print(other, sizeof other, t.thread);
    if (t.block != me.block)
        report("race between blocks", "the thread %s %s, which thread %s of block %u %s", now,
               where, other, t.block, before);
    bool same = t.thread / LANES == me.thread / LANES;
    report(same ? "missing __syncwarp" : "missing barrier",
           "the thread %s %s, which thread %s %s, and no %s lies between", now, where, other,
           before, same ? "__syncwarp or barrier" : "barrier");
}

/* Bytes that nobody wrote: outside of everything, or not to be read. */
static void device_fresh(const device_cell *c, const char *p, const trace &me, enum access kind)
{
    char where[160];
    for (int i = 0; i < 4; i++) {
        if (!(me.mask >> i & 1u) || (c->written >> i & 1u))
            continue;
        bool inside = heap_room(p + i) > 0;
        if (inside && kind == ACCESS_WRITE)
            continue;
        heap_tell(p + i, where, sizeof where);
        if (!inside)
            report("out of bounds", "an access at %p, %s", (const void *)(p + i), where);
        report("uninitialised device memory",
               "%s reads %s, which nobody has written, or not yet: missing barrier, missing event?",
               me.block == WHOLE ? w.q->running->name : "the thread", where);
    }
}

static void device_cell_access(detector *d, device_cell *c, const char *p, const trace &me,
                               enum access kind)
{
    if ((c->written & me.mask) != me.mask)
        device_fresh(c, p, me, kind);
    const char *now = kind == ACCESS_READ ? "reads" : "writes";
    for (const trace &t : c->writes)
        if (!device_ordered(d, t, me))
            device_report(d, t, me, p, now, "wrote");
    if (kind != ACCESS_WRITE) {
        trace *r = c->reads;
        if (r[0].op != me.op || r[0].block != me.block || r[0].thread / LANES != me.thread / LANES)
            r[1] = r[0];
        r[0] = me;
    }
    if (kind == ACCESS_READ)
        return;
    for (const trace &t : c->reads)
        if (!device_ordered(d, t, me))
            device_report(d, t, me, p, now, "read");
    if (c->writes[0].mask & ~me.mask)
        c->writes[1] = c->writes[0];
    c->writes[0] = me;
    c->written |= me.mask;
}

static void device_access(detector *d, const char *p, size_t bytes, trace me, enum access kind)
{
    me.op = d->op;
    me.atomic = kind == ACCESS_ATOMIC;
    size_t at = (size_t)(p - w.mem->space);
    if (!d->device || at + bytes > DEVICE_SPAN)
        return;
    for (const char *end = p + bytes; p < end;) {
        unsigned skip = (unsigned)((uintptr_t)p & 3u);
        size_t n = 4 - skip < (size_t)(end - p) ? 4 - skip : (size_t)(end - p);
        me.mask = (uint8_t)(((1u << n) - 1) << skip);
        size_t cell = (size_t)(p - skip - w.mem->space) / 4;
        device_cell_access(d, &d->device[cell], p - skip, me, kind);
        p += n;
    }
}

/* ---- what comes in ---- */

void race_access(const void *p, size_t bytes, enum access kind)
{
    if (!race_active() || !w.cur || det()->in_atomic)
        return;
    detector *d = det();
    const char *c = (const char *)p, *smem = w.ex->smem_map;
    if (c >= smem && c < smem + w.ex->smem_map_bytes) {
        shared_access(d, (const unsigned char *)p, bytes, kind);
    } else if (w.mem && c >= w.mem->space && c < w.mem->next) {
        if (kind != ACCESS_READ && !w.cur->waited) /* the launch before may still read it */
            report("early launch", "device memory %p is written before early_wait", p);
        trace me = {};
        me.block = d->block;
        me.epoch = d->epoch;
        me.thread = (uint16_t)w.cur->index;
        me.clock = d->known[me.thread][me.thread % LANES];
        device_access(d, c, bytes, me, kind);
    }
}

void race_range(const void *p, size_t bytes, enum access kind)
{
    const char *c = (const char *)p;
    if (!race_active() || c < w.mem->space || c >= w.mem->next)
        return;
    op_note(det());
    trace me = {};
    me.block = WHOLE;
    device_access(det(), c, bytes, me, kind);
}

void race_forget(const void *p, size_t bytes)
{
    if (!race_active() || !det()->device)
        return;
    size_t at = (size_t)((const char *)p - w.mem->space);
    if (at + bytes > DEVICE_SPAN)
        return;
    /* whole pages only: the piece is of granules */
    madvise((char *)det()->device + at / 4 * sizeof(device_cell), bytes / 4 * sizeof(device_cell),
            MADV_DONTNEED);
}

/* ---- atomics and fences ---- */

void atomic_begin(const void *p, size_t bytes)
{
    check_access(p, bytes, bytes, "atomic");
    race_access(p, bytes, ACCESS_ATOMIC);
    if (race_active())
        det()->in_atomic = true; /* the plain accesses that it is made of */
}

void atomic_end()
{
    if (race_active())
        det()->in_atomic = false;
}

void fence()
{
    w.ex->fenced = true;
}

} // namespace simt
