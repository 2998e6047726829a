/* stream.h: inside the shim: streams, events and graphs (stream.cc, graph.cc).
 *
 * An operation has a point: (stream, number). It may run when all earlier ones of its stream and all its `after` points
 * are done. That is all the order there is; stream.cc chooses the rest, and chooses badly on purpose. */
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>
#include "simt.h"

namespace simt
{

struct point {
    unsigned stream; /* its id */
    uint64_t number; /* 1, 2, ...; 0: before everything */
};

/* What is known to have happened before: a number per stream id. */
typedef std::vector<uint64_t> vclock;
void clock_join(vclock *c, const vclock &other);

struct host_range {
    const char *p;
    size_t bytes;
};

struct stamp {
    bool set;
    double seconds;
};

struct op {
    const char *name;
    std::function<void()> run; /* empty: only order */
    std::vector<point> after;
    host_range host_reads, host_writes; /* pinned memory that a copy uses */
    bool on_device;                     /* needs device memory open */
    std::shared_ptr<simt::stamp> stamp; /* takes the time of this point */
    simt::vclock seen;                  /* the caller may set what it knows beside `after` */
    uint64_t number;
};

struct graph_node {
    op what;                   /* after and number unused */
    std::vector<size_t> after; /* nodes before it */
    unsigned lane;             /* one per captured stream */
};

struct capture {
    std::vector<graph_node> nodes;
    std::vector<CUstream_st *> streams; /* [0] is the one that began */
    cudaStreamCaptureMode mode;
    bool broken;
};

} // namespace simt

struct CUstream_st {
    unsigned magic;
    unsigned id;
    bool blocking; /* ordered with the default stream */
    int priority;
    bool internal; /* a graph's */
    std::deque<simt::op> ops;
    uint64_t pushed, done;
    simt::vclock seen; /* of the newest operation */
    std::shared_ptr<simt::capture> capturing;
    std::vector<size_t> capture_after; /* nodes that the next captured one follows */
    unsigned capture_lane;
};

struct CUevent_st {
    unsigned magic;
    bool timing;
    bool recorded;
    simt::point at;
    simt::vclock seen;
    std::shared_ptr<simt::stamp> stamp;
    std::weak_ptr<simt::capture> captured; /* recorded in a capture: after these nodes */
    std::vector<size_t> captured_after;
};

struct CUgraph_st {
    unsigned magic;
    std::vector<simt::graph_node> nodes;
    unsigned n_lanes;
    std::vector<size_t> last; /* nodes that nothing follows */
};

struct CUgraphExec_st {
    unsigned magic;
    CUgraph_st graph;
    std::vector<CUstream_st *> lanes; /* of its own, for all lanes but the first */
    simt::point last;                 /* end of the newest launch */
    simt::vclock seen;
};

namespace simt
{

constexpr unsigned STREAM_MAGIC = 0x73747265u, EVENT_MAGIC = 0x65766e74u, GRAPH_MAGIC = 0x67726170u,
                   EXEC_MAGIC = 0x67657865u;

struct queues {
    std::recursive_mutex mutex;
    std::map<unsigned, CUstream_st *> streams; /* by id; 0 is the default stream */
    unsigned next_id;
    simt::vclock host; /* what the host knows to be done */
    uint64_t random;
    const op *running; /* and its stream */
    CUstream_st *running_on;
    unsigned n_captures; /* under way */
    unsigned n_events, n_graphs, n_execs;

    std::map<const void *, int> smem_limits; /* of kernels: cudaFuncSetAttribute */

    /* what the host has had of the device so far: simt_counted */
    uint64_t copies_out, bytes_out, waits;

    /* errors: runtime.cc */
    cudaError_t last_error, sticky;
    const char *inject_name;
    unsigned inject_at, inject_seen;
    cudaError_t inject_error;
};

queues *queues_get();
CUstream_st *stream_of(cudaStream_t s); /* NULL: no such stream; s NULL is the default stream */
CUstream_st *stream_make(bool blocking, int priority, bool internal);
void stream_drop(CUstream_st *s);
/* Puts o on s, or into the capture that s takes part in. */
cudaError_t stream_push(CUstream_st *s, op o);
/* The same past any capture: what a graph's launch does. */
point stream_append(CUstream_st *s, op o);
bool point_done(point p);
void run_until(point p);
void run_all();
void run_some(); /* one operation, if there is one that can run: a query's share */

void capture_push(CUstream_st *s, op o);
/* cudaErrorStreamCaptureUnsupported and a broken capture if one is under way that forbids such calls. */
cudaError_t capture_forbids();

} // namespace simt
