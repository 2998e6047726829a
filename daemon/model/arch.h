/* arch.h: what a model family must provide; the list is in arch_list.c.
 *
 * A family is one file: its extra checks, its tensors' names, and one layer written out from top to
 * bottom. See docs/HOWTO-add-model.md. */
#ifndef BACKCAST_ARCH_H
#define BACKCAST_ARCH_H
#include "blocks.h"
#include "weights.h"

struct arch {
    const char *name;            /* general.architecture, and the prefix of the family's keys */
    enum kn_rope_style key_rope; /* as its layer rotates keys: model_renumber turns them again */
    /* optional: checks beyond hparams_read, and numbers it does not know */
    int (*hparams)(const struct gguf *g, struct hparams *hp, struct err *e);
    /* required: the tensors of layer l */
    int (*load)(struct loader *ld, struct layer *w, uint32_t l);
    /* optional: changes the rotary frequencies inv_freq [n_rot / 2] (host) */
    int (*frequencies)(struct loader *ld, float *inv_freq);
    /* required: one layer of a pass; parts: enum layer_part */
    void (*layer)(struct pass *p, const struct layer *w, uint32_t l, unsigned parts);
};

const struct arch *arch_find(struct gguf_str name); /* NULL: unknown */
const struct arch *arch_at(unsigned i);             /* NULL past the end */

extern const struct arch arch_llama, arch_qwen2, arch_qwen3;
#endif
