/* kills.h: a daemon that is killed (SIGKILL) again and again at random moments, under one client with a
 * durable session of every policy: opens, answers, closes are cut anywhere; the next daemon must know
 * everything that was acknowledged, and every answer must be, token for token, the one of a run that
 * nothing disturbed. */
#ifndef BACKCAST_KILLS_H
#define BACKCAST_KILLS_H
#include <stdint.h>

/* main() of a test program. Arguments: --seed N; seed 0: a new one each time. It is printed. */
int kills_main(int argc, char **argv, uint64_t seed, uint32_t n_kills);
#endif
