/* ledger_test.h: whether what the ledger of an engine says is what there is. */
#ifndef BACKCAST_LEDGER_TEST_H
#define BACKCAST_LEDGER_TEST_H
#include "engine_harness.h"

/* Between two steps: its sums are those of the pools, the backends and the sessions' caches; a session
 * at rest owes nothing but its cache and itself. Fails the test. Fits eh.on_step. */
void ledger_agrees(struct eh *h);
#endif
