/* durable_test.h: engines on a state folder, and whether two sessions are the same: one that lives and
 * one that was rebuilt of what the living one left. */
#ifndef BACKCAST_DURABLE_TEST_H
#define BACKCAST_DURABLE_TEST_H
#include "disk_io.h"
#include "engine_harness.h"

struct durable_setup {
    char *dir;                /* NULL: no state folder */
    const struct disk_io *io; /* NULL: the system's */
    uint64_t spill_after_us, stop_snapshots_us, host_tier, disk_tier;
    uint64_t kv_memory; /* 0: 64 MiB, to which it can be raised */
    const char *model;  /* NULL: tiny-llama; "": none */
};
struct eh *durable_engine(const struct durable_setup *d); /* stepped by hand */

/* Everything that a session is, both at rest: counters, parameters, what is cached, what the policy
 * has learnt. Fails the test with `what`. */
void sessions_equal(struct eh *a, uint64_t s, struct eh *b, uint64_t t, const char *what);
/* Asks both the same: the same tokens, prunes and log-probabilities, to the bit. */
void answers_equal(struct eh *a, uint64_t s, struct eh *b, uint64_t t, const int32_t *ids, size_t n,
                   uint32_t n_new, const char *what);
/* A pseudo-random prompt of the tiny models' vocabulary. */
void prompt_fill(int32_t *ids, size_t n, uint32_t seed);
#endif
