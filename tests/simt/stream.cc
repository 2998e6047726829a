/* stream.cc: streams and events: nothing runs before something waits for it, and then in a bad order.
 *
 *      LAZY    the waiter's stream runs, and of the others only what events demand. Data that should have been awaited
 *              is not there yet.
 *      EAGER   all other streams run first, as far as they can. Data that should have been protected is overwritten.
 *      RANDOM  one operation after the other, drawn among those that may run.
 *
 * A program with all the events it needs computes the same in all three. */
#include "stream.h"
#include "exec.h"
#include "memory.h"
#include "race.h"
#include "runtime.h"
#include <time.h>

namespace simt
{

void clock_join(vclock *c, const vclock &other)
{
    if (c->size() < other.size())
        c->resize(other.size(), 0);
    for (size_t i = 0; i < other.size(); i++)
        if ((*c)[i] < other[i])
            (*c)[i] = other[i];
}

queues *queues_get()
{
    if (!w.q) {
        queues *q = new queues();
        w.q = q;
        stream_make(true, 0, false); /* id 0 */
    }
    return w.q;
}

CUstream_st *stream_of(cudaStream_t s)
{
    if (!s)
        return queues_get()->streams[0];
    return s->magic == STREAM_MAGIC ? s : nullptr;
}

CUstream_st *stream_make(bool blocking, int priority, bool internal)
{
    queues *q = w.q;
    CUstream_st *s = new CUstream_st();
    s->magic = STREAM_MAGIC;
    s->id = q->next_id++;
    s->blocking = blocking;
    s->priority = priority;
    s->internal = internal;
    s->seen = q->host;
    q->streams[s->id] = s;
    return s;
}

void stream_drop(CUstream_st *s)
{
    run_until(point{s->id, s->pushed});
    w.q->streams.erase(s->id);
    s->magic = 0;
    delete s;
}

/* ---- putting work on ---- */

static void order_after(op *o, CUstream_st *other)
{
    o->after.push_back(point{other->id, other->pushed});
    clock_join(&o->seen, other->seen);
}

/* The default stream waits for all blocking streams, and they for it. */
static void default_order(CUstream_st *s, op *o)
{
    queues *q = w.q;
    if (s->id == 0) {
        for (auto &other : q->streams)
            if (other.second->blocking && other.first != 0 && other.second->pushed)
                order_after(o, other.second);
    } else if (s->blocking && q->streams[0]->pushed) {
        order_after(o, q->streams[0]);
    }
}

static bool overlap(host_range a, host_range b)
{
    return a.bytes && b.bytes && a.p < b.p + b.bytes && b.p < a.p + a.bytes;
}

/* A copy to pinned memory may arrive at any time from now on: unless work before it still needs the old bytes, they
 * are gone at once. */
static void host_poison(const op &o)
{
    if (!o.host_writes.bytes)
        return;
    for (auto &s : w.q->streams)
        for (const op &other : s.second->ops)
            if (overlap(other.host_reads, o.host_writes) ||
                overlap(other.host_writes, o.host_writes))
                return;
    memset((void *)o.host_writes.p, 0xff, o.host_writes.bytes);
}

/* Operation p, and what it saw if it is still to run (who names an older one knows what it saw). */
static void clock_join_point(vclock *c, point p)
{
    auto it = w.q->streams.find(p.stream);
    if (it != w.q->streams.end()) {
        const std::deque<op> &ops = it->second->ops;
        if (!ops.empty() && p.number >= ops.front().number && p.number <= ops.back().number)
            clock_join(c, ops[p.number - ops.front().number].seen);
    }
    if (c->size() <= p.stream)
        c->resize(p.stream + 1, 0);
    if ((*c)[p.stream] < p.number)
        (*c)[p.stream] = p.number;
}

point stream_append(CUstream_st *s, op o)
{
    queues *q = w.q;
    default_order(s, &o);
    o.number = ++s->pushed;
    clock_join(&o.seen, s->seen);
    clock_join(&o.seen, q->host);
    for (point p : o.after)
        clock_join_point(&o.seen, p);
    clock_join_point(&o.seen, point{s->id, o.number});
    s->seen = o.seen;
    host_poison(o);
    s->ops.push_back(std::move(o));
    return point{s->id, s->pushed};
}

cudaError_t stream_push(CUstream_st *s, op o)
{
    if (s->capturing) {
        capture_push(s, std::move(o));
        return cudaSuccess;
    }
    if (s->id == 0 && w.q->n_captures && capture_forbids() != cudaSuccess)
        return cudaErrorStreamCaptureImplicit;
    stream_append(s, std::move(o));
    return cudaSuccess;
}

/* ---- running it ---- */

bool point_done(point p)
{
    auto it = w.q->streams.find(p.stream);
    return it == w.q->streams.end() || it->second->done >= p.number;
}

static bool can_run(const CUstream_st *s)
{
    if (s->ops.empty())
        return false;
    for (point p : s->ops.front().after)
        if (!point_done(p))
            return false;
    return true;
}

static double now_seconds()
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* After a sticky error nothing runs any more, but all of it counts as done. */
static void run_one(CUstream_st *s)
{
    queues *q = w.q;
    op o = std::move(s->ops.front());
    s->ops.pop_front();
    if (o.run && q->sticky == cudaSuccess) {
        if (o.on_device)
            heap_open();
        else
            heap_close();
        q->running = &o;
        q->running_on = s;
        o.run();
        q->running = nullptr;
        q->running_on = nullptr;
    }
    if (o.stamp) {
        o.stamp->set = true;
        o.stamp->seconds = now_seconds();
    }
    s->done = o.number;
}

/* The k-th of the streams that can run, or with k < 0 their number in *n. */
static CUstream_st *runnable(const CUstream_st *but, unsigned k, unsigned *n)
{
    unsigned found = 0;
    for (auto &at : w.q->streams) {
        if (at.second == but || !can_run(at.second))
            continue;
        if (found++ == k)
            return at.second;
    }
    if (n)
        *n = found;
    return nullptr;
}

static CUstream_st *runnable_random()
{
    unsigned n = 0;
    runnable(nullptr, ~0u, &n);
    if (!n)
        return nullptr;
    return runnable(nullptr, (unsigned)(exec_draw(exec_get()) % n), nullptr);
}

static void run_lazy(point p)
{
    CUstream_st *s = w.q->streams[p.stream];
    while (s->done < p.number) {
        std::vector<point> after = s->ops.front().after;
        for (point before : after)
            if (!point_done(before))
                run_lazy(before);
        run_one(s);
    }
}

static void run_eager(point p)
{
    CUstream_st *s = w.q->streams[p.stream];
    while (s->done < p.number) {
        CUstream_st *other = runnable(s, 0, nullptr);
        if (other)
            run_one(other);
        else if (can_run(s))
            run_one(s);
        else
            report("shim", "no stream can run");
    }
}

static void run_random(point p)
{
    while (!point_done(p)) {
        CUstream_st *s = runnable_random();
        if (!s)
            report("shim", "no stream can run");
        run_one(s);
    }
}

void run_until(point p)
{
    queues *q = w.q;
    if (q->running)
        report("shim", "a host function waits for the device");
    if (!point_done(p)) {
        q->waits++;
        if (w.opt.streams == STREAMS_LAZY)
            run_lazy(p);
        else if (w.opt.streams == STREAMS_EAGER)
            run_eager(p);
        else
            run_random(p);
    }
    heap_close();
    clock_join_point(&q->host, p);
    auto it = q->streams.find(p.stream);
    if (it != q->streams.end() && it->second->done >= it->second->pushed)
        clock_join(&q->host, it->second->seen);
}

void run_all()
{
    std::vector<point> ends;
    for (auto &at : queues_get()->streams)
        ends.push_back(point{at.first, at.second->pushed});
    if (w.opt.streams ==
        STREAMS_LAZY) /* newest stream first: the other way round than it was written */
        std::vector<point>(ends.rbegin(), ends.rend()).swap(ends);
    for (point p : ends)
        run_until(p);
}

void run_some()
{
    CUstream_st *s = runnable_random();
    if (s)
        run_one(s);
    heap_close();
}

} // namespace simt
