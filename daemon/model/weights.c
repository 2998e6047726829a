/* weights.c: from the names in a file to matrices and vectors on a backend. See weights.h.
 *
 * Tensors go over one by one: found, checked against the shape that the hparams demand, copied into
 * the backend's own layout, and the file's pages behind them are handed back to the system. So the
 * memory in use while loading never exceeds the finished model by more than the tensor in hand.
 */
#include "weights.h"
#include "arch.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define TENSOR_NAME_MAX 64
#define PER_LAYER_MAX 16 /* matrices, and vectors, of a layer: room in the lists */

static int kn_failed(const struct loader *ld, int code, const char *name, size_t bytes)
{
    switch (code) {
    case KN_ENOMEM:
        return err_nomem(ld->e, bytes);
    case KN_EUNSUPPORTED:
        return err_set(ld->e, BC_EUNSUPPORTED, name, "the backend cannot run tensor %s", name);
    case KN_EDEVICE:
        return err_set(ld->e, BC_EDEVICE, name, "device %s failed while tensor %s was loaded: %s",
                       ld->kn->name, name, ld->kn->failed);
    default:
        return err_set(ld->e, BC_EINTERNAL, name, "the backend refused tensor %s", name);
    }
}

static void name_make(char ret[TENSOR_NAME_MAX], uint32_t layer, const char *name)
{
    if (layer == LOAD_GLOBAL)
        snprintf(ret, TENSOR_NAME_MAX, "%s", name);
    else
        snprintf(ret, TENSOR_NAME_MAX, "blk.%u.%s", layer, name);
}

static int fail_missing(struct loader *ld, const char *name)
{
    return err_set(ld->e, BC_ECORRUPT, name, "tensor %s is missing", name);
}

/* Gives the file's pages that lie wholly inside a tensor back to the system; a mapped file reads
 * them again. */
static void drop_behind(const struct loader *ld, const struct gguf_tensor *t)
{
    if (gguf_path(ld->g)[0] == '\0') /* not a mapping: the bytes are somebody's memory */
        return;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = ((uintptr_t)t->data + page - 1) & ~(page - 1);
    uintptr_t to = ((uintptr_t)t->data + t->bytes) & ~(page - 1);
    if (from < to)
        madvise((void *)from, to - from, MADV_DONTNEED);
}

static void note_loaded(struct loader *ld, const struct gguf_tensor *t)
{
    uint64_t n = 1;

    for (uint32_t i = 0; i < t->n_dims; i++)
        n *= t->dims[i];
    ld->w->n_params += n;
    bc_assert(ld->n_used < ld->w->cap * 2);
    ld->used[ld->n_used++] = t;
    ld->done += t->bytes;
    drop_behind(ld, t);
    if (ld->progress->call)
        ld->progress->call(ld->progress->arg, ld->done, ld->total);
}

int load_matrix(struct loader *ld, uint32_t layer, const char *name, uint32_t rows, uint32_t cols,
                struct kn_weight **ret)
{
    char full[TENSOR_NAME_MAX];
    struct kn_weight *made;

    name_make(full, layer, name);
    const struct gguf_tensor *t = gguf_tensor_find(ld->g, full);
    if (!t)
        return fail_missing(ld, full);
    if (t->n_dims != 2 || t->dims[0] != cols || t->dims[1] != rows)
        return err_set(ld->e, BC_ECORRUPT, full,
                       "tensor %s has %u dimensions, %llu x %llu: the model's keys ask for %u x %u",
                       full, t->n_dims, (unsigned long long)t->dims[0],
                       (unsigned long long)t->dims[1], cols, rows);
    const struct kn_type_info *type = kn_type_find(t->type);
    if (!type || t->type == KN_I32 || cols % type->block)
        return err_set(ld->e, BC_EUNSUPPORTED, full, "tensor %s: rows of %u values in type %s",
                       full, cols, type ? type->name : "unknown");
    struct kn_tensor src = {
        .type = t->type, .rows = rows, .cols = cols, .data = t->data, .bytes = t->bytes};
    int rc = ld->kn->ops->weight_load(ld->kn, &src, &made);
    if (rc)
        return kn_failed(ld, rc, full, t->bytes);
    bc_assert(ld->w->n_matrices < ld->w->cap);
    ld->w->matrices[ld->w->n_matrices++] = made;
    note_loaded(ld, t);
    *ret = made;
    return BC_OK;
}

int load_floats(struct loader *ld, uint32_t layer, const char *name, uint32_t n, float *ret)
{
    char full[TENSOR_NAME_MAX];

    name_make(full, layer, name);
    const struct gguf_tensor *t = gguf_tensor_find(ld->g, full);
    if (!t)
        return BC_ENOTFOUND;
    if (t->n_dims != 1 || t->dims[0] != n)
        return err_set(
            ld->e, BC_ECORRUPT, full,
            "tensor %s has %u dimensions, the first of %llu: the model's keys ask for 1 of %u",
            full, t->n_dims, (unsigned long long)t->dims[0], n);
    if (t->type != KN_F32 && t->type != KN_F16 && t->type != KN_BF16)
        return err_set(ld->e, BC_EUNSUPPORTED, full,
                       "tensor %s has type %s: must be F32, F16 or BF16", full,
                       kn_type_find(t->type) ? kn_type_find(t->type)->name : "unknown");
    kn_dequant(t->type, t->data, n, ret);
    note_loaded(ld, t);
    return BC_OK;
}

/* n floats to the device, noted for weights_free. */
static int vector_upload(struct loader *ld, const char *name, const float *data, uint32_t n,
                         const float **ret)
{
    size_t bytes = n * sizeof *data;
    void *made;

    int rc = ld->kn->ops->buf_alloc(ld->kn, bytes, &made);
    if (rc)
        return kn_failed(ld, rc, name, bytes);
    ld->kn->ops->upload(ld->kn, made, data, bytes);
    bc_assert(ld->w->n_vectors < ld->w->cap);
    ld->w->vectors[ld->w->n_vectors++] = (struct device_buf){made, bytes};
    *ret = made;
    return BC_OK;
}

int load_vector(struct loader *ld, uint32_t layer, const char *name, uint32_t n, const float **ret)
{
    char full[TENSOR_NAME_MAX];

    name_make(full, layer, name);
    float *host = malloc(n * sizeof *host);
    if (!host)
        return err_nomem(ld->e, n * sizeof *host);
    int rc = load_floats(ld, layer, name, n, host);
    if (rc == BC_ENOTFOUND)
        rc = fail_missing(ld, full);
    else if (rc == BC_OK)
        rc = vector_upload(ld, full, host, n, ret);
    free(host);
    return rc;
}

/* The rotary frequencies, as the family wants them. */
static int load_frequencies(struct loader *ld, const struct arch *arch)
{
    uint32_t n = ld->hp->n_rot / 2;
    float inv[KN_HEAD_DIM_MAX / 2];

    bc_assert(n <= ARRAY_LEN(inv));
    hparams_frequencies(ld->hp, inv);
    if (arch->frequencies) {
        int rc = arch->frequencies(ld, inv);
        if (rc)
            return rc;
    }
    return vector_upload(ld, "rope", inv, n, &ld->w->inv_freq);
}

static int load_head(struct loader *ld)
{
    const struct hparams *hp = ld->hp;

    if (gguf_tensor_find(ld->g, "output.weight"))
        return load_matrix(ld, LOAD_GLOBAL, "output.weight", hp->n_vocab, hp->d_model,
                           &ld->w->head);
    ld->w->head = ld->w->embd; /* tied */
    return BC_OK;
}

/* Every tensor of the file must have found its use. */
static int check_all_used(struct loader *ld)
{
    size_t n = gguf_n_tensors(ld->g);

    if (n == ld->n_used)
        return BC_OK;
    for (size_t i = 0; i < n; i++) {
        const struct gguf_tensor *t = gguf_tensor_at(ld->g, i);
        uint32_t k = 0;
        while (k < ld->n_used && ld->used[k] != t)
            k++;
        if (k == ld->n_used) {
            char name[TENSOR_NAME_MAX];
            snprintf(name, sizeof name, "%.*s", (int)BC_MIN(t->name.len, sizeof name - 1),
                     t->name.s);
            return err_set(ld->e, BC_EUNSUPPORTED, name,
                           "tensor %s has no place in this family: its effect is not supported",
                           name);
        }
    }
    return BC_OK;
}

static int load_all(struct loader *ld, const struct arch *arch)
{
    const struct hparams *hp = ld->hp;
    struct weights *w = ld->w;
    int rc;

    rc = load_matrix(ld, LOAD_GLOBAL, "token_embd.weight", hp->n_vocab, hp->d_model, &w->embd);
    for (uint32_t l = 0; l < hp->n_layers && rc == BC_OK; l++)
        rc = arch->load(ld, &w->layers[l], l);
    if (rc == BC_OK)
        rc = load_vector(ld, LOAD_GLOBAL, "output_norm.weight", hp->d_model, &w->out_norm);
    if (rc == BC_OK)
        rc = load_head(ld);
    if (rc == BC_OK)
        rc = load_frequencies(ld, arch);
    if (rc == BC_OK)
        rc = check_all_used(ld);
    return rc;
}

int weights_load(struct weights *w, struct kn *kn, const struct gguf *g, const struct arch *arch,
                 const struct hparams *hp, const struct load_progress *progress, struct err *e)
{
    struct loader ld = {.kn = kn, .g = g, .hp = hp, .w = w, .progress = progress, .e = e};
    int rc;

    memset(w, 0, sizeof *w);
    w->cap = (hp->n_layers + 1) * PER_LAYER_MAX;
    w->layers = calloc(hp->n_layers, sizeof *w->layers);
    w->matrices = calloc(w->cap, sizeof *w->matrices);
    w->vectors = calloc(w->cap, sizeof *w->vectors);
    ld.used = calloc(w->cap * 2, sizeof *ld.used);
    if (!w->layers || !w->matrices || !w->vectors || !ld.used) {
        rc = err_nomem(e, w->cap * (sizeof *w->matrices + sizeof *w->vectors));
        goto fail;
    }
    for (size_t i = 0; i < gguf_n_tensors(g); i++)
        ld.total += gguf_tensor_at(g, i)->bytes;
    rc = load_all(&ld, arch);
    if (rc)
        goto fail;
    free(ld.used);
    return BC_OK;
fail:
    free(ld.used);
    weights_free(w, kn);
    return rc;
}

void weights_free(struct weights *w, struct kn *kn)
{
    while (w->n_matrices)
        kn->ops->weight_free(kn, &w->matrices[--w->n_matrices]);
    while (w->n_vectors) {
        struct device_buf *v = &w->vectors[--w->n_vectors];
        kn->ops->buf_free(kn, v->data, v->bytes);
    }
    free(w->matrices);
    free(w->vectors);
    free(w->layers);
    memset(w, 0, sizeof *w);
}
