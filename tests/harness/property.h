/* property.h: random operations on one engine, and after every step the facts that must hold.
 *
 *     op 0   open 17: h2o, 90 tokens        64 seats for sessions, each of a client of its own
 *     op 1   submit 17: 40 tokens, 12 new   between two operations: some steps, or none
 *     op 2   limits: 31 pages               every operation is made of (seed, its number) alone
 *
 * So any part of the operations is a run as well: when one fails, it is made again and again with ever
 * fewer of them (in processes of their own: an assertion of the engine's counts as a failure), and what
 * is left is printed with the seed. */
#ifndef BACKCAST_PROPERTY_H
#define BACKCAST_PROPERTY_H
#include <stdint.h>

/* main() of a test program. Arguments: none, or --seed N (and --ops N) to make a run again. seed 0: a
 * new one each time. */
int property_main(int argc, char **argv, uint64_t seed, uint32_t n_ops);
#endif
