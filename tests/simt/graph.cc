/* graph.cc: capture of streams into graphs, and their launch.
 *
 * While a stream is captured its operations become nodes; an event recorded in a capture stands for the nodes before it,
 * and a stream that waits for such an event joins the capture. A launch puts the nodes on streams again: the first lane
 * on the stream of the launch, each other lane on a stream that belongs to the executable graph, with an operation for
 * every edge between lanes. So nodes run in the same bad orders as everything else, and only edges protect them. */
#include "exec.h"
#include "runtime.h"
#include "stream.h"

namespace simt
{

void capture_push(CUstream_st *s, op o)
{
    graph_node node;
    o.after.clear();
    node.what = std::move(o);
    node.after = s->capture_after;
    node.lane = s->capture_lane;
    s->capturing->nodes.push_back(std::move(node));
    s->capture_after.assign(1, s->capturing->nodes.size() - 1);
}

cudaError_t capture_forbids()
{
    cudaError_t e = cudaSuccess;
    if (!w.q || !w.q->n_captures)
        return e;
    for (auto &at : w.q->streams) {
        capture *c = at.second->capturing.get();
        if (c && c->mode != cudaStreamCaptureModeRelaxed) {
            c->broken = true;
            e = cudaErrorStreamCaptureUnsupported;
        }
    }
    return e;
}

static void capture_join(CUstream_st *s, const std::shared_ptr<capture> &c)
{
    if (!s->capturing) {
        s->capturing = c;
        s->capture_lane = (unsigned)c->streams.size();
        s->capture_after.clear();
        c->streams.push_back(s);
    }
}

/* s waits for a captured event: it becomes part of the capture. */
static cudaError_t capture_wait(CUstream_st *s, CUevent_st *e, const std::shared_ptr<capture> &c)
{
    if (s->capturing && s->capturing != c)
        return cudaErrorStreamCaptureMerge;
    capture_join(s, c);
    for (size_t node : e->captured_after) {
        bool known = false;
        for (size_t have : s->capture_after)
            known |= have == node;
        if (!known)
            s->capture_after.push_back(node);
    }
    return cudaSuccess;
}

static void capture_leave(const std::shared_ptr<capture> &c)
{
    for (CUstream_st *s : c->streams) {
        s->capturing.reset();
        s->capture_after.clear();
    }
    w.q->n_captures--;
}

/* Every node must lead to one that the first stream has seen. */
static bool capture_joined(const capture &c, const std::vector<size_t> &last)
{
    std::vector<bool> reached(c.nodes.size(), false);
    for (size_t i : last)
        reached[i] = true;
    for (size_t i = c.nodes.size(); i-- > 0;)
        if (reached[i])
            for (size_t before : c.nodes[i].after)
                reached[before] = true;
    for (bool r : reached)
        if (!r)
            return false;
    return true;
}

} // namespace simt

using namespace simt;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
    ENTER("cudaStreamBeginCapture");
    CUstream_st *s = stream_of(stream);
    if (!s)
        return call_end(cudaErrorInvalidResourceHandle);
    if (s->id == 0)
        return call_end(cudaErrorStreamCaptureUnsupported);
    if (s->capturing)
        return call_end(cudaErrorIllegalState);
    auto c = std::make_shared<capture>();
    c->mode = mode;
    capture_join(s, c);
    w.q->n_captures++;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *ret)
{
    ENTER("cudaStreamEndCapture");
    CUstream_st *s = stream_of(stream);
    if (!s || !s->capturing)
        return call_end(cudaErrorIllegalState);
    if (s->capturing->streams[0] != s)
        return call_end(cudaErrorStreamCaptureUnmatched);
    std::shared_ptr<capture> c = s->capturing;
    std::vector<size_t> last = s->capture_after;
    bool joined = capture_joined(*c, last);
    capture_leave(c);
    *ret = nullptr;
    if (c->broken)
        return call_end(cudaErrorStreamCaptureInvalidated);
    if (!joined)
        return call_end(cudaErrorStreamCaptureUnjoined);
    CUgraph_st *g = new CUgraph_st();
    g->magic = GRAPH_MAGIC;
    g->nodes = std::move(c->nodes);
    g->n_lanes = (unsigned)c->streams.size();
    g->last = last;
    w.q->n_graphs++;
    *ret = g;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *ret)
{
    ENTER("cudaStreamIsCapturing");
    CUstream_st *s = stream_of(stream);
    if (!s)
        return call_end(cudaErrorInvalidResourceHandle);
    *ret = !s->capturing          ? cudaStreamCaptureStatusNone
           : s->capturing->broken ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n)
{
    ENTER("cudaGraphGetNodes");
    if (!g || g->magic != GRAPH_MAGIC || nodes) /* the number is all that anybody asks for */
        return call_end(cudaErrorInvalidValue);
    *n = g->nodes.size();
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret, cudaGraph_t g, unsigned long long)
{
    ENTER("cudaGraphInstantiate");
    if (!g || g->magic != GRAPH_MAGIC)
        return call_end(cudaErrorInvalidValue);
    CUgraphExec_st *x = new CUgraphExec_st();
    x->magic = EXEC_MAGIC;
    x->graph = *g;
    for (unsigned i = 1; i < g->n_lanes; i++)
        x->lanes.push_back(stream_make(false, 0, true));
    w.q->n_execs++;
    *ret = x;
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t g, cudaStream_t stream)
{
    ENTER("cudaGraphUpload");
    if (!g || g->magic != EXEC_MAGIC || !stream_of(stream))
        return call_end(cudaErrorInvalidValue);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t stream)
{
    ENTER("cudaGraphLaunch");
    CUstream_st *s = stream_of(stream);
    if (!g || g->magic != EXEC_MAGIC || !s)
        return call_end(cudaErrorInvalidValue);
    if (s->capturing)
        return call_end(cudaErrorStreamCaptureUnsupported);
    op begin = {};
    begin.name = "graph begin";
    begin.after.push_back(g->last); /* one graph never runs beside itself */
    begin.seen = g->seen;
    point from = stream_append(s, begin);
    std::vector<point> at;
    for (const graph_node &node : g->graph.nodes) {
        op o = node.what;
        o.after.assign(1, from);
        for (size_t before : node.after)
            o.after.push_back(at[before]);
        at.push_back(stream_append(node.lane ? g->lanes[node.lane - 1] : s, o));
    }
    op end = {};
    end.name = "graph end";
    for (size_t i : g->graph.last)
        end.after.push_back(at[i]);
    g->last = stream_append(s, end);
    g->seen = s->seen;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g)
{
    ENTER("cudaGraphExecDestroy");
    if (!g || g->magic != EXEC_MAGIC)
        return call_end(cudaErrorInvalidValue);
    for (CUstream_st *s : g->lanes)
        stream_drop(s);
    g->magic = 0;
    delete g;
    w.q->n_execs--;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    ENTER("cudaGraphDestroy");
    if (!g || g->magic != GRAPH_MAGIC)
        return call_end(cudaErrorInvalidValue);
    g->magic = 0;
    delete g;
    w.q->n_graphs--;
    return cudaSuccess;
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret, unsigned flags)
{
    ENTER("cudaEventCreate");
    CUevent_st *e = new CUevent_st();
    e->magic = EVENT_MAGIC;
    e->timing = !(flags & cudaEventDisableTiming);
    queues_get()->n_events++;
    *ret = e;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *ret)
{
    return cudaEventCreateWithFlags(ret, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    ENTER("cudaEventDestroy");
    if (!e || e->magic != EVENT_MAGIC)
        return call_end(cudaErrorInvalidResourceHandle);
    e->magic = 0;
    delete e;
    w.q->n_events--;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream)
{
    ENTER("cudaEventRecord");
    CUstream_st *s = stream_of(stream);
    if (!s || !e || e->magic != EVENT_MAGIC)
        return call_end(cudaErrorInvalidResourceHandle);
    e->captured.reset();
    e->captured_after.clear();
    if (s->capturing) {
        e->captured = s->capturing;
        e->captured_after = s->capture_after;
        e->recorded = false;
        return cudaSuccess;
    }
    op o = {};
    o.name = "event record";
    o.stamp = e->stamp = std::make_shared<stamp>();
    e->at = stream_append(s, o);
    e->seen = s->seen;
    e->recorded = true;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned flags)
{
    ENTER("cudaStreamWaitEvent");
    CUstream_st *s = stream_of(stream);
    if (!s || !e || e->magic != EVENT_MAGIC || flags)
        return call_end(cudaErrorInvalidResourceHandle);
    if (std::shared_ptr<capture> c = e->captured.lock())
        return call_end(capture_wait(s, e, c));
    if (s->capturing) /* an event from outside has no node to follow */
        return call_end(e->recorded ? cudaErrorStreamCaptureIsolation : cudaSuccess);
    if (!e->recorded)
        return cudaSuccess;
    op o = {};
    o.name = "wait for event";
    o.after.push_back(e->at);
    o.seen = e->seen;
    stream_append(s, o);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    ENTER("cudaEventSynchronize");
    if (!e || e->magic != EVENT_MAGIC)
        return call_end(cudaErrorInvalidResourceHandle);
    if (!e->captured.expired())
        return call_end(cudaErrorCapturedEvent);
    if (!e->recorded)
        return cudaSuccess;
    run_until(e->at);
    clock_join(&w.q->host, e->seen);
    return call_end(sticky_error());
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    ENTER("cudaEventQuery");
    if (!e || e->magic != EVENT_MAGIC)
        return call_end(cudaErrorInvalidResourceHandle);
    if (!e->captured.expired())
        return call_end(cudaErrorCapturedEvent);
    if (!e->recorded || point_done(e->at)) {
        clock_join(&w.q->host, e->seen);
        return call_end(sticky_error());
    }
    run_some(); /* time goes by */
    return call_end(cudaErrorNotReady);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    ENTER("cudaEventElapsedTime");
    if (!start || !end || start->magic != EVENT_MAGIC || end->magic != EVENT_MAGIC ||
        !start->recorded || !end->recorded || !start->timing || !end->timing)
        return call_end(cudaErrorInvalidResourceHandle);
    if (!start->stamp->set || !end->stamp->set)
        return call_end(cudaErrorNotReady);
    *ms = (float)((end->stamp->seconds - start->stamp->seconds) * 1e3);
    return cudaSuccess;
}

} // extern "C"
