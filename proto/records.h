/* records.h: what the rings carry: records of one session's stream, in order, each with a sequence
 * number.
 *
 *   0        4      6      8               16
 *   | u32 len | type | flags | u64 seq       | payload (len bytes) ... | padding to a multiple of
 * 16 |
 *
 * All little-endian. len counts the payload without padding; header + payload + padding <= ring
 * size / 4. seq is per session, counts every record since it was opened (1, 2, ...) and goes on
 * over a re-attach. A record never wraps: a PAD record (len = the rest, seq 0) fills the end of the
 * data area. Payloads below start with a fixed struct; variable parts follow in the order of the
 * comment. The reader checks len against the fixed part and every count against len.
 */
#ifndef BACKCAST_RECORDS_H
#define BACKCAST_RECORDS_H
#include <stdint.h>

enum record_type {
    RECORD_PAD = 0,
    /* daemon to client */
    RECORD_TOKENS = 1,
    RECORD_LOGPROBS = 2,
    RECORD_PROGRESS = 3,
    RECORD_PRUNED = 4,
    RECORD_SCORES = 5,
    RECORD_LOST = 6,
    RECORD_END = 7,
    RECORD_REROTATED = 8,
    /* client to daemon */
    RECORD_PROMPT = 64,
    RECORD_CANCEL = 65,
};
#define RECORD_FLAG_MORE 1u /* PRUNED, SCORES: another record continues this one */
/* END: why tokens were dropped since the last END: bits 1 << (8 + enum record_prune_reason). */
#define RECORD_FLAG_WHY_SHIFT 8

struct record_head {
    uint32_t len;
    uint16_t type, flags;
    uint64_t seq;
};
_Static_assert(sizeof(struct record_head) == 16, "wire layout");

/* then: i32 ids[n_ids], bytes text[text_len]. Text is whole UTF-8 characters (bytes that can never
 * become one pass as they are), so a record may carry ids and no text yet. first_stream: stream
 * index of ids[0]. */
struct record_tokens {
    uint64_t first_stream;
    uint32_t n_ids, text_len;
};
/* One record a token, right before or with its TOKENS record. then: { i32 id; f32 logprob; }
 * top[n_top], descending. prompt: 1 for a prompt token. */
struct record_logprob {
    uint64_t stream;
    int32_t id;
    float logprob;
    uint32_t n_top, prompt;
};
struct record_progress { /* prompt tokens evaluated, of all of this request; at least once a second
                            in prefill */
    uint32_t done, total;
};
/* then: { u64 first; u64 count; } ranges[n_ranges] of stream indices, ascending; the first record
 * of a split one carries the numbers, the others repeat them. policy: NUL-padded. reason: enum
 * record_prune_reason. */
enum record_prune_reason {
    PRUNE_BUDGET = 0,
    PRUNE_PREFILL_END = 1,
    PRUNE_ASKED = 2,
    PRUNE_SHRUNK = 3,
    PRUNE_PRESSURE = 4
};
struct record_pruned {
    uint32_t tokens_before, tokens_after;
    uint64_t live_before, live_after, held_before, held_after; /* bytes */
    uint64_t micros;
    char policy[32];
    uint32_t reason, n_ranges;
};
/* then: struct record_score rows[n_rows]. offset: of the first row; total: rows of all. */
struct record_scores {
    uint32_t offset, total, n_rows, zero;
};
struct record_score {
    uint64_t stream;
    int32_t id, position; /* position -1: of a dropped token, in a session that was renumbered */
    float score;          /* the policy's value; -inf: always kept */
    uint32_t flags;       /* enum record_score_flag */
};
enum record_score_flag {
    SCORE_FROZEN = 1,
    SCORE_RECENT = 2,
    SCORE_DROPPED = 4, /* not cached any more: score 0; only where Scores.dropped asks for them */
};
/* The next position would have been the first one outside of the trained context (its number), so the
 * cached tokens were given positions 0 .. tokens - 1, which is where the next one goes on. stream: index of
 * the next token. */
struct record_rerotated {
    uint64_t stream;
    uint32_t tokens, position;
    uint64_t micros;
};
struct record_lost { /* records that were overwritten before an attach */
    uint64_t first_seq, count;
};
enum record_end_reason {
    END_STOP = 0,   /* an end token or a stop string */
    END_LENGTH = 1, /* max_tokens */
    END_CANCELLED = 2,
    END_STALLED = 3, /* the client did not read for 30 s */
    END_BUDGET = 4,  /* policy none: the budget is full; or the daemon's memory */
    END_CONTEXT = 5, /* trained context exhausted */
    END_ERROR = 6,   /* text follows */
    END_SCORES = 7,  /* all SCORES of a Scores request are out */
    END_RETRY = 8,   /* the daemon is stopping: ask again */
};
/* then: bytes text[text_len]: a sentence for END_ERROR and END_BUDGET; else empty. */
struct record_end {
    uint32_t reason, code;          /* code: errors.tbl for END_ERROR */
    uint32_t tokens_in, tokens_out; /* of this request */
    uint32_t tokens_cached;         /* in the cache now */
    uint32_t prunes;                /* since the last END */
    uint64_t tokens_dropped;        /* since the last END */
    uint64_t prefill_micros, decode_micros;
    uint32_t end_id; /* the sampled end token; UINT32_MAX: none */
    uint32_t text_len;
    uint32_t tokens_adopted; /* of tokens_in: not evaluated, another session's cache had them */
    uint32_t budget_tokens;  /* the session's now; 0: none, or an older daemon */
};
/* then: bytes text[len - 16]: part of the prompt announced by Generate.ring_bytes. */
struct record_prompt {
    uint64_t offset, total;
};
#endif
