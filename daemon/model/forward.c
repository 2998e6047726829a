/* forward.c: model_forward: embed -> layers -> head, for one batch of rows of any mix of sequences.
 *
 * The last layer is cut in two. Its K and V (and before it the hidden rows) are stored for every
 * row; from there on only rows whose logits or query somebody wants go on, because nobody reads the
 * others (here row 2 is wanted):
 *
 *     row   embed   layers 0..L-2   last: K, V   last: Q, attention, MLP   norm, head
 *      0     ###     ##########       #####
 *      1     ###     ##########       #####
 *      2     ###     ##########       #####       ##################       ########
 *
 * A row's result does not depend on its neighbours, so leaving rows out changes nothing for the
 * rest.
 */
#include "state.h"

#define LAYER_ALL (LAYER_KV | LAYER_Q | LAYER_MLP)

static void check_batch(const struct model *m, const struct kn_batch *b)
{
    bc_assert(b->n_rows >= 1 && b->n_rows <= m->info.max_rows);
    bc_assert(b->slots);
    for (uint32_t s = 0; s < b->n_seqs; s++) {
        const struct kn_kv *kv = b->seqs[s].kv;
        bc_assert(kv->n_layers == m->hp.n_layers && kv->n_kv_heads == m->hp.n_kv_heads);
        bc_assert(kv->head_dim == m->hp.head_dim);
        bc_assert(kv->d_hidden == 0 || kv->d_hidden == m->hp.d_model);
    }
    for (uint32_t r = 0; r < b->n_rows; r++) {
        bc_assert(b->ids[r] >= 0 && (uint32_t)b->ids[r] < m->hp.n_vocab);
        bc_assert(b->seq[r] < b->n_seqs);
        bc_assert(b->lo[r] <= b->hi[r] && b->hi[r] <= b->seqs[b->seq[r]].n);
    }
}

/* Lists the wanted rows, ascending, in rows.want, and in rows.at where each one stands there.
 * Returns how many. */
static uint32_t rows_wanted(struct model *m, uint32_t n_rows, const struct model_out *out)
{
    struct row_scratch *s = &m->rows;
    uint32_t n = 0;

    for (uint32_t r = 0; r < n_rows; r++)
        s->at[r] = ROW_NONE;
    for (uint32_t i = 0; i < out->n; i++) {
        bc_assert(out->rows[i] < n_rows && (i == 0 || out->rows[i - 1] < out->rows[i]));
        s->at[out->rows[i]] = 0;
    }
    for (uint32_t i = 0; i < out->n_query; i++) {
        bc_assert(out->query_rows[i] < n_rows);
        s->at[out->query_rows[i]] = 0;
    }
    for (uint32_t r = 0; r < n_rows; r++)
        if (s->at[r] != ROW_NONE) {
            s->at[r] = n;
            s->want[n++] = r;
        }
    return n;
}

/* The batch of the wanted rows: it stores nothing, so it has no slots. */
static struct kn_batch batch_of_wanted(struct model *m, const struct kn_batch *b, uint32_t n)
{
    struct row_scratch *s = &m->rows;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t r = s->want[i];
        s->ids[i] = b->ids[r];
        s->positions[i] = b->positions[r];
        s->seq[i] = b->seq[r];
        s->lo[i] = b->lo[r];
        s->hi[i] = b->hi[r];
    }
    return (struct kn_batch){
        .n_rows = n,
        .n_seqs = b->n_seqs,
        .ids = s->ids,
        .positions = s->positions,
        .seq = s->seq,
        .lo = s->lo,
        .hi = s->hi,
        .seqs = b->seqs,
    };
}

/* The last layer's queries of the rows that asked for them; att is free by now and carries them. */
static void give_queries(struct model *m, struct pass *p, const struct model_out *out)
{
    uint32_t width = m->hp.n_heads * m->hp.head_dim;

    if (out->n_query == 0)
        return;
    for (uint32_t i = 0; i < out->n_query; i++)
        m->rows.pick[i] = m->rows.at[out->query_rows[i]];
    m->kn->ops->gather_rows(m->kn, p->att, p->q, m->rows.pick, out->n_query, width);
    m->kn->ops->download(m->kn, out->queries, p->att,
                         (size_t)out->n_query * width * sizeof *out->queries);
}

static void give_logits(struct model *m, struct pass *p, const struct model_out *out)
{
    const struct kn_weight *head[] = {m->w.head};
    float *logits[] = {m->scratch[SCRATCH_LOGITS].data};
    float *x = p->h;

    if (out->n == 0)
        return;
    for (uint32_t i = 0; i < out->n; i++)
        m->rows.pick[i] = m->rows.at[out->rows[i]];
    m->kn->ops->gather_rows(m->kn, x, p->x, m->rows.pick, out->n, m->hp.d_model);
    m->kn->ops->rmsnorm(m->kn, x, x, m->w.out_norm, out->n, m->hp.d_model, m->hp.norm_eps);
    m->kn->ops->linear(m->kn, 1, head, NULL, x, out->n, logits, false);
    if (out->how != NULL)
        m->kn->ops->sample(m->kn, logits[0], out->n, m->hp.n_vocab, out->how, out->tokens);
    if (out->logits != NULL)
        m->kn->ops->download(m->kn, out->logits, logits[0],
                             (size_t)out->n * m->hp.n_vocab * sizeof *out->logits);
}

/* What a device picked comes over a wire and from memory that nobody here can vouch for: a number outside the vocabulary is
 * the device's failure, before it becomes somebody's token. */
static int check_picked(const struct model *m, const struct model_out *out, struct err *e)
{
    for (uint32_t i = 0; out->how != NULL && i < out->n; i++)
        if (out->tokens[i] < 0 || (uint32_t)out->tokens[i] >= m->hp.n_vocab)
            return err_set(
                e, BC_EDEVICE, "",
                "device %s failed during a pass: it picked token %d of a vocabulary of %u",
                m->kn->name, out->tokens[i], m->hp.n_vocab);
    return BC_OK;
}

int model_forward(struct model *m, const struct kn_batch *b, const struct model_out *out,
                  struct err *e)
{
    MAGIC_OK(m, MODEL_MAGIC);
    check_batch(m, b);
    bc_assert(out->n <= m->info.max_out && out->n_query <= m->info.max_rows);

    uint32_t last = m->hp.n_layers - 1;
    uint32_t n_want = rows_wanted(m, b->n_rows, out);
    struct kn_batch wanted = batch_of_wanted(m, b, n_want);
    struct pass p = model_pass(m, b);

    m->kn->ops->batch_begin(m->kn, b);
    m->kn->ops->embed(m->kn, m->w.embd, b, p.x);
    for (uint32_t l = 0; l < last; l++)
        m->arch->layer(&p, &m->w.layers[l], l, LAYER_ALL);
    m->kn->ops->hidden_write(m->kn, b, p.x);
    if (n_want == b->n_rows) {
        m->arch->layer(&p, &m->w.layers[last], last, LAYER_ALL);
    } else {
        m->arch->layer(&p, &m->w.layers[last], last, LAYER_KV);
        if (n_want > 0) {
            block_narrow(&p, m->rows.want, &wanted);
            m->arch->layer(&p, &m->w.layers[last], last, LAYER_Q | LAYER_MLP);
        }
    }
    give_queries(m, &p, out);
    give_logits(m, &p, out);
    int rc = model_pass_end(m, &p, e);
    return rc == BC_OK ? check_picked(m, out, e) : rc;
}
