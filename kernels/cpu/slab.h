/* slab.h: memory for weights: large mappings on huge pages, filled from the front.
 *
 * A model's weights are read from end to end for every token; with 4 KiB pages the walks through the page
 * tables take a quarter of that time (in a virtual machine, where they are nested). Weights come and go with their
 * model, so a slab is only ever filled, and unmapped when its last weight is dropped:
 *
 *    | weight | weight | weight .. | free (no memory behind it)  |     32 MiB, or one larger weight
 */
#ifndef BACKCAST_CPU_SLAB_H
#define BACKCAST_CPU_SLAB_H
#include <stddef.h>

struct slab;
struct slab_set {
    struct slab *current; /* takes the next weight; NULL: none */
};

/* bytes of zeros, 64-byte aligned. 0, or -1 with outputs untouched. */
int slab_take(struct slab_set *set, size_t bytes, void **ret, struct slab **ret_slab);
void slab_drop(struct slab_set *set, struct slab *slab, void *memory);
#endif
