/* model.c: opening and closing a model: numbers, weights, then the scratch of a pass.
 *
 * The order matters for bad files: the keys are checked before a tensor is touched, and every
 * tensor has the shape that the keys state before scratch is sized by them, so a file cannot ask
 * for memory that it does not itself fill.
 */
#include "state.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROW_ARRAYS 10 /* of 4-byte values, in struct row_scratch */

static int find_family(const struct gguf *g, const struct arch **ret, struct err *e)
{
    static const char key[] = "general.architecture";
    struct gguf_str name;
    char known[64] = "";

    int rc = gguf_get_str(g, key, &name, e);
    if (rc == BC_ENOTFOUND)
        return err_set(e, BC_ECORRUPT, key, "key %s is missing", key);
    if (rc)
        return rc;
    const struct arch *arch = arch_find(name);
    if (arch) {
        *ret = arch;
        return BC_OK;
    }
    for (unsigned i = 0; arch_at(i); i++) {
        size_t n = strlen(known);
        snprintf(known + n, sizeof known - n, "%s%s", n ? ", " : "", arch_at(i)->name);
    }
    return err_set(e, BC_EUNSUPPORTED, key,
                   "model family \"%.*s\" is not supported (these are: %s)",
                   (int)BC_MIN(name.len, 32), name.s, known);
}

/* general.name, or the file's base name. */
static void name_model(const struct gguf *g, char *ret, size_t len)
{
    struct gguf_str s;
    const char *path = gguf_path(g), *base = strrchr(path, '/');

    if (gguf_get_str(g, "general.name", &s, NULL) == BC_OK && s.len > 0)
        snprintf(ret, len, "%.*s", (int)BC_MIN(s.len, len - 1), s.s);
    else
        snprintf(ret, len, "%s", base ? base + 1 : path);
}

static int scratch_open(struct model *m, struct err *e)
{
    const struct hparams *hp = &m->hp;
    size_t rows = m->info.max_rows, q = (size_t)hp->n_heads * hp->head_dim,
           kv = (size_t)hp->n_kv_heads * hp->head_dim;
    const size_t floats[SCRATCH_N] = {
        [SCRATCH_X] = rows * hp->d_model,
        [SCRATCH_H] = rows * hp->d_model,
        [SCRATCH_Q] = rows * q,
        [SCRATCH_ATT] = rows * q,
        [SCRATCH_K] = rows * kv,
        [SCRATCH_V] = rows * kv,
        [SCRATCH_GATE] = rows * hp->n_ff,
        [SCRATCH_UP] = rows * hp->n_ff,
        [SCRATCH_LOGITS] = (size_t)m->info.max_out * hp->n_vocab,
        [SCRATCH_REST] = (size_t)m->info.rest_rows * hp->d_model,
    };

    for (unsigned i = 0; i < SCRATCH_N; i++) {
        size_t bytes = floats[i] * sizeof(float);
        if (m->kn->ops->buf_alloc(m->kn, bytes, &m->scratch[i].data))
            return err_nomem(e, bytes);
        m->scratch[i].bytes = bytes;
        m->info.bytes_scratch += bytes;
    }
    m->row_bytes = rows * ROW_ARRAYS * sizeof(uint32_t);
    uint32_t *at = m->row_block = malloc(m->row_bytes);
    if (!at)
        return err_nomem(e, m->row_bytes);
    m->info.bytes_scratch += m->row_bytes;
    m->rows = (struct row_scratch){
        .ids = (int32_t *)at,
        .positions = (int32_t *)(at + rows),
        .seq = at + 2 * rows,
        .lo = at + 3 * rows,
        .hi = at + 4 * rows,
        .want = at + 5 * rows,
        .at = at + 6 * rows,
        .pick = at + 7 * rows,
        .score = (float *)(at + 8 * rows),
        .lse = (float *)(at + 9 * rows),
    };
    return BC_OK;
}

static void info_fill(struct model *m, const struct gguf *g)
{
    const struct hparams *hp = &m->hp;
    struct model_info *i = &m->info;

    i->family = m->arch->name;
    name_model(g, i->name, sizeof i->name);
    i->n_layers = hp->n_layers;
    i->d_model = hp->d_model;
    i->n_heads = hp->n_heads;
    i->n_kv_heads = hp->n_kv_heads;
    i->head_dim = hp->head_dim;
    i->n_ff = hp->n_ff;
    i->n_vocab = hp->n_vocab;
    i->context_train = hp->context_train;
    i->n_params = m->w.n_params;
    i->identity = gguf_identity(g);
    for (uint32_t k = 0; k < m->w.n_matrices; k++)
        i->bytes_weights += m->kn->ops->weight_bytes(m->w.matrices[k]);
    for (uint32_t k = 0; k < m->w.n_vectors; k++)
        i->bytes_weights += m->w.vectors[k].bytes;
}

int model_open(struct model **ret, struct kn *kn, const struct gguf *g,
               const struct model_options *opt,
               void (*progress)(void *arg, uint64_t done, uint64_t total), void *arg, struct err *e)
{
    struct load_progress bar = {progress, arg};
    uint32_t max_rows = opt && opt->max_rows ? opt->max_rows : 512;
    uint32_t max_out = opt && opt->max_out ? opt->max_out : BC_MIN(64, max_rows);
    const struct arch *arch = NULL;
    struct hparams hp;

    MAGIC_OK(kn, KN_MAGIC);
    if (max_rows > MODEL_ROWS_MAX)
        return err_set(e, BC_EINVALID, "max_rows", "max_rows is %u: at most %u", max_rows,
                       MODEL_ROWS_MAX);
    if (max_out > max_rows)
        return err_set(e, BC_EINVALID, "max_out", "max_out is %u: at most max_rows, %u", max_out,
                       max_rows);
    int rc = find_family(g, &arch, e);
    if (rc == BC_OK)
        rc = hparams_read(g, arch->name, &hp, e);
    if (rc == BC_OK && arch->hparams)
        rc = arch->hparams(g, &hp, e);
    if (rc)
        return rc;
    struct model *m = calloc(1, sizeof *m);
    if (!m)
        return err_nomem(e, sizeof *m);
    m->magic = MODEL_MAGIC;
    m->kn = kn;
    m->arch = arch;
    m->hp = hp;
    m->info.max_rows = max_rows;
    m->info.max_out = max_out;
    /* so many that reading the weights is no more than half of the work */
    m->info.rest_rows = BC_MIN(BC_MAX(MODEL_REST_ROWS, 2 * kn->rows_read), max_rows);
    rc = weights_load(&m->w, kn, g, arch, &m->hp, &bar, e);
    if (gguf_intact(g, NULL) != BC_OK)
        rc = gguf_intact(g, e); /* the true reason, whatever failed first */
    if (rc)
        goto fail;
    info_fill(m, g);
    rc = scratch_open(m, e);
    if (rc)
        goto fail;
    *ret = m;
    return BC_OK;
fail:
    model_close(&m);
    return rc;
}

void model_close(struct model **pm)
{
    struct model *m = *pm;

    if (!m)
        return;
    MAGIC_OK(m, MODEL_MAGIC);
    *pm = NULL;
    for (unsigned i = 0; i < SCRATCH_N; i++)
        if (m->scratch[i].data)
            m->kn->ops->buf_free(m->kn, m->scratch[i].data, m->scratch[i].bytes);
    free(m->row_block);
    weights_free(&m->w, m->kn);
    m->magic = 0;
    free(m);
}

const struct model_info *model_info(const struct model *m)
{
    MAGIC_OK(m, MODEL_MAGIC);
    return &m->info;
}

struct kn *model_kn(const struct model *m)
{
    MAGIC_OK(m, MODEL_MAGIC);
    return m->kn;
}

void model_kv_shape(const struct model *m, enum kn_type kv_type, bool hidden, struct kn_kv *ret)
{
    MAGIC_OK(m, MODEL_MAGIC);
    bc_assert(kn_kv_check(m->kn, kv_type, m->hp.head_dim, NULL, 0) == KN_OK);
    struct kn_kv kv = {
        .n_layers = m->hp.n_layers,
        .n_kv_heads = m->hp.n_kv_heads,
        .head_dim = m->hp.head_dim,
        .d_hidden = hidden ? m->hp.d_model : 0,
        .type = kv_type,
    };
    kv.stride = (kn_kv_page_bytes(&kv) + 4095) & ~(size_t)4095;
    *ret = kv;
}

struct pass model_pass(struct model *m, const struct kn_batch *b)
{
    return (struct pass){
        .kn = m->kn,
        .hp = &m->hp,
        .w = &m->w,
        .b = b,
        .x = m->scratch[SCRATCH_X].data,
        .h = m->scratch[SCRATCH_H].data,
        .q = m->scratch[SCRATCH_Q].data,
        .k = m->scratch[SCRATCH_K].data,
        .v = m->scratch[SCRATCH_V].data,
        .att = m->scratch[SCRATCH_ATT].data,
        .gate = m->scratch[SCRATCH_GATE].data,
        .up = m->scratch[SCRATCH_UP].data,
    };
}

int model_pass_end(struct model *m, struct pass *p, struct err *e)
{
    m->kn->ops->batch_end(m->kn, p->b);
    if (m->kn->ops->status(m->kn) != KN_OK)
        return err_set(e, BC_EDEVICE, "", "device %s failed during a pass: %s", m->kn->name,
                       m->kn->failed);
    return BC_OK;
}

int model_renumber(struct model *m, const struct kn_seq *seq, const int32_t *positions,
                   struct err *e)
{
    MAGIC_OK(m, MODEL_MAGIC);
    const struct kn_rope r = {
        .style = m->arch->key_rope,
        .n_heads = m->hp.n_kv_heads,
        .head_dim = m->hp.head_dim,
        .n_rot = m->hp.n_rot,
        .inv_freq = m->w.inv_freq,
    };

    m->kn->ops->kv_rotate(m->kn, seq, &r, positions);
    if (m->kn->ops->status(m->kn) != KN_OK)
        return err_set(e, BC_EDEVICE, "", "device %s failed while keys were turned: %s",
                       m->kn->name, m->kn->failed);
    return BC_OK;
}
