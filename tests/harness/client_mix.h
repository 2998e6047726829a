/* client_mix.h: eight clients that do at random what clients do - sessions of every policy, prompts of every kind, cancels,
 * other budgets, prunes, scores, listings, connections dropped in the middle - and a ninth whose answers must be what they
 * are alone. Only errors that say what the client did wrong may come. At the end everything is back: sessions, pages, rings,
 * descriptors, every line of the ledger.
 *
 *     client_mix(5, 1);      seconds, seed
 *
 * The daemon is the call's own: under a sanitizer a leak at its end fails. Failures are cmocka's. */
#ifndef BACKCAST_CLIENT_MIX_H
#define BACKCAST_CLIENT_MIX_H
#include <stdint.h>

void client_mix(unsigned seconds, uint32_t seed);
#endif
