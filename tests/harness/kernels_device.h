/* kernels_device.h: every way to run the GPU backend on this machine, for tests of what is its own:
 *
 *      simt        threads forward, streams as late as they may      simt-race   every access looked at
 *      simt        threads backward, streams as early as they may    cuda        if there is a GPU
 *      simt        both drawn at random
 *
 * Under sanitizers the first two of simt. Failures name the way. */
#ifndef BACKCAST_KERNELS_DEVICE_H
#define BACKCAST_KERNELS_DEVICE_H
#include "kernels_compare.h"

/* Runs f once on each way, on a fresh handle, which must come back empty. */
void kd_each(void (*f)(struct kn *kn));
/* The label of the way that runs now. */
const char *kd_label(void);
/* A fresh handle on the way that runs now, with an injected failure ("CALL:NTH[:ERROR]") or NULL: what kn_open says. */
int kd_open(struct kn **ret, const char *inject);
/* Is this the shim? */
bool kd_is_simt(const struct kn *kn);
#endif
