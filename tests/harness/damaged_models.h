/* damaged_models.h: damaged model files named to a running daemon. Each is refused by an error that says what is wrong, or
 * opens, and then answers a prompt with something; meanwhile an answer of a good session goes on and is what it is
 * without them.
 *
 *     damaged_models(100, 1000);     files cut short; files with one wrong byte in their header
 *
 * The daemon is the call's own, and holds nothing more at its end. Failures are cmocka's. */
#ifndef BACKCAST_DAMAGED_MODELS_H
#define BACKCAST_DAMAGED_MODELS_H

void damaged_models(unsigned n_cut, unsigned n_changed);
#endif
