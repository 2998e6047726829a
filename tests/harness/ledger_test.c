/* ledger_test.c: see ledger_test.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "core.h"
#include "ledger_test.h"

static void models_agree(const struct eh *h)
{
    for (const struct model_ref *m = h->en->models; m != NULL; m = m->next) {
        if (m->state != MODEL_READY)
            continue;
        uint64_t tables = 0, pages = 0;
        for (int i = 0; i < MODEL_POOLS; i++) {
            const struct pool *p = m->pools[i];
            if (p == NULL)
                continue;
            tables += pool_table_bytes(p);
            pages += pool_pages_out(p) * pool_kv(p)->stride;
        }
        /* everything that the backend has given out, and what the engine has beside it */
        const struct model_info *mi = model_info(m->model);
        uint64_t host = m->batch.bytes + m->sampler.bytes + tables + mi->max_rows * 10 * 4;
        assert_int_equal(ledger_own(&m->owner, LEDGER_weights) +
                             ledger_own(&m->owner, LEDGER_scratch),
                         m->kn->bytes_weights + m->kn->bytes_buffers + m->kn->bytes_scratch + host);
        assert_int_equal(pages, m->kn->bytes_arena);
        assert_int_equal(ledger_own(&m->owner, LEDGER_text), tok_bytes(m->tok));
    }
}

void ledger_agrees(struct eh *h)
{
    struct ledger_owner *all = ledger_daemon(engine_ledger(h->en));
    struct engine_counts c;
    uint64_t kv = 0, outside = 0;
    engine_counts(h->en, &c);
    assert_int_equal(ledger_all(all, LEDGER_kv) + ledger_all(all, LEDGER_shared), c.kv_held);
    assert_int_equal(ledger_all(all, LEDGER_weights), c.bytes_weights);
    assert_int_equal(ledger_all(all, LEDGER_scratch), c.bytes_scratch);
    for (uint32_t i = 0; i < h->en->n_sessions; i++) {
        const struct session *s = h->en->list[i];
        kv += ledger_own(&s->owner, LEDGER_kv);
        assert_true(ledger_own(&s->owner, LEDGER_kv) <= seqcache_bytes_held(s->cache));
        if (s->prune.active || s->scoring.active || s->req != NULL)
            outside++;
        else
            assert_int_equal(ledger_own(&s->owner, LEDGER_refresh) +
                                 ledger_own(&s->owner, LEDGER_prompts),
                             0);
    }
    assert_int_equal(kv, ledger_all(all, LEDGER_kv));
    if (outside == 0)
        assert_int_equal(ledger_all(all, LEDGER_refresh) + ledger_all(all, LEDGER_prompts), 0);
    models_agree(h);
    uint64_t sum = 0;
    for (unsigned i = 0; i < N_LEDGER; i++)
        sum += ledger_all(all, (enum ledger_kind)i);
    assert_int_equal(sum, ledger_sum(all));
}
