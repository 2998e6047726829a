/* request.h: one request of a session, from its acceptance to its END: one owner, the engine thread.
 *
 *            accepted           prompt in cache        stop, length, cancel, budget ...
 *   (intake) --------> PREFILL ----------------> DECODE ---------------------> END report
 *                         |                         |
 *                         '--> ENDING <-------------'    a prune that the request owes runs first
 *
 *   ids  | pending | prompt ...            |   lead = 1: the token that the last request sampled and
 *          0         1           done   n      never evaluated goes in first; no token is lost
 */
#ifndef BACKCAST_REQUEST_H
#define BACKCAST_REQUEST_H
#include "deliver.h"
#include "engine.h"
#include "records.h"

/* REPLAY: rows of a journal: nobody hears of it. */
enum request_kind { REQUEST_GENERATE, REQUEST_SCORES, REQUEST_REPLAY };
enum request_phase { REQUEST_PREFILL, REQUEST_DECODE, REQUEST_ENDING };

struct request {
    enum request_kind kind;
    enum request_phase phase;
    uint64_t conn;
    uint32_t request_id;
    enum prompt_kind prompt;
    struct generate_options opt;
    int32_t *ids; /* [n], malloced; kind SCORES: NULL, and n rows go out */
    uint32_t n, done, lead;
    uint32_t adopted; /* of the prompt: rows that were in the cache of others */
    uint32_t tokens_out, max_tokens;
    enum chat_state chat_before, chat_after;
    bool frozen_was_auto;  /* this request fixed frozen = auto */
    uint64_t stream_start; /* of the session when it was accepted */
    struct deliver out;
    uint64_t start_us, decode_us, progress_us;  /* clock; decode_us 0: still in prefill */
    uint64_t prefill_spent_us, decode_spent_us; /* by daemons before this one */
    enum record_end_reason end_reason;          /* why it will end, in phase ENDING */
    int32_t end_id;                             /* the sampled end token; -1 */
    bool stop_string; /* a stop string ended it: nothing held back is shown */
};
/* What its prompt, and its answer, have taken until now. */
static inline uint64_t request_prefill_us(const struct request *q, uint64_t now_us)
{
    return q->prefill_spent_us + (q->decode_us != 0 ? q->decode_us : now_us) - q->start_us;
}
static inline uint64_t request_decode_us(const struct request *q, uint64_t now_us)
{
    return q->decode_spent_us + (q->decode_us != 0 ? now_us - q->decode_us : 0);
}
#endif
