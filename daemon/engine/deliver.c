/* deliver.c: see deliver.h. */
#include "deliver.h"
#include <stdlib.h>
#include <string.h>

int deliver_open(struct deliver *d, const struct tok *t, const struct generate_options *opt,
                 bool at_start, struct err *e)
{
    struct deliver fresh = {.tok = t, .opt = opt};
    fresh.cap = GENERATE_STOP_BYTES_MAX + 2 * (tok_piece_max(t) + 16);
    if ((fresh.buf = malloc(fresh.cap)) == NULL)
        return err_nomem(e, fresh.cap);
    detok_start(&fresh.detok, t, at_start);
    *d = fresh;
    return BC_OK;
}

void deliver_close(struct deliver *d)
{
    free(d->buf);
    *d = (struct deliver){0};
}

/* The earliest place in buf[0..n) where a whole stop string stands; n if none does. */
static size_t stop_find(const struct deliver *d)
{
    size_t at = d->n;
    for (uint32_t i = 0; i < d->opt->n_stop; i++) {
        const char *hit = memmem(d->buf, d->n, d->opt->stop[i].bytes, d->opt->stop[i].len);
        if (hit != NULL)
            at = BC_MIN(at, (size_t)(hit - d->buf));
    }
    return at;
}

/* Length of the longest end of buf[0..n) that is the beginning of a stop string. */
static size_t stop_begins(const struct deliver *d)
{
    size_t longest = 0;
    for (uint32_t i = 0; i < d->opt->n_stop; i++)
        for (size_t k = BC_MIN((size_t)d->opt->stop[i].len - 1, d->n); k > longest; k--)
            if (memcmp(d->buf + d->n - k, d->opt->stop[i].bytes, k) == 0)
                longest = k;
    return longest;
}

static void drop_shown(struct deliver *d)
{
    memmove(d->buf, d->buf + d->n_shown, d->n - d->n_shown);
    d->n -= d->n_shown;
    d->n_shown = 0;
}

bool deliver_push(struct deliver *d, int32_t id, const char **ret_text, size_t *ret_len)
{
    drop_shown(d);
    d->n += detok_push(&d->detok, d->tok, id, false, d->buf + d->n, d->cap - d->n);
    bc_assert(d->n <= d->cap);
    size_t at = stop_find(d);
    bool stopped = at < d->n;
    d->n_shown = stopped ? at : d->n - stop_begins(d);
    *ret_text = d->buf;
    *ret_len = d->n_shown;
    if (stopped)
        d->n = d->n_shown;
    return stopped;
}

void deliver_flush(struct deliver *d, const char **ret_text, size_t *ret_len)
{
    drop_shown(d);
    d->n += detok_flush(&d->detok, d->buf + d->n, d->cap - d->n);
    d->n_shown = d->n;
    *ret_text = d->buf;
    *ret_len = d->n;
}
