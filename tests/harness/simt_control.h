/* simt_control.h: tells the shim inside a backend ("simt", "simt-race") what tests want of it: the order of threads and
 * streams, failing calls. Names and values: tests/simt/control.cc. */
#ifndef BACKCAST_SIMT_CONTROL_H
#define BACKCAST_SIMT_CONTROL_H
#include <stdbool.h>
#include "kn.h"

bool simt_inside(const struct kn *kn); /* does kn run on the shim? */
/* Fails the test if the shim does not know the name. */
void simt_set(const struct kn *kn, const char *name, long value);
/* What the shim has counted under that name since it was opened. */
long simt_counted(const struct kn *kn, const char *name);
#endif
