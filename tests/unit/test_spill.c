/* A sequence as flat bytes and back: byte-equal through any pages; every flipped byte, every other
 * length and every crafted contradiction refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "crc32c.h"
#include "kn_kv_addr.h"
#include "spill.h"

#define PAGES 40
#define ROWS 300

static const struct spill_origin origin = {.model = 0x1122334455667788, .arithmetic = 42};

struct world {
    struct kn *kn;
    struct pool *pool;
    struct seqcache *s, *other;
    uint32_t random;
};

static uint32_t below(struct world *w, uint32_t n)
{
    w->random = w->random * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)w->random * n) >> 32);
}

static void world_open(struct world *w, enum kn_type type, uint32_t d_hidden)
{
    struct kn_options ko = {.backend = "ref", .threads = 1};
    struct kn_kv kv = {
        .n_layers = 2, .n_kv_heads = 2, .head_dim = 8, .d_hidden = d_hidden, .type = type};
    if (type == KN_Q8_0 || type == KN_Q8_Q4)
        kv.head_dim = 32;
    struct err e;
    *w = (struct world){.random = 7};
    kv.stride = (kn_kv_page_bytes(&kv) + 4095) / 4096 * 4096;
    assert_int_equal(kn_open(&w->kn, &ko, NULL, 0), KN_OK);
    assert_int_equal(pool_open(&w->pool, w->kn, &kv, PAGES, &e), BC_OK);
    assert_int_equal(seqcache_open(&w->s, w->pool, &e), BC_OK);
    assert_int_equal(seqcache_open(&w->other, w->pool, &e), BC_OK);
}

static void world_close(struct world *w)
{
    seqcache_close(&w->s);
    seqcache_close(&w->other);
    assert_int_equal(pool_pages_out(w->pool), 0);
    pool_close(&w->pool);
    kn_close(&w->kn);
}

static void append(struct world *w, struct seqcache *s, uint64_t *stream, uint32_t n)
{
    struct err e;
    const struct kn_kv *kv = pool_kv(w->pool);
    for (uint32_t i = 0; i < n; i++, ++*stream) {
        int32_t id = (int32_t)below(w, 1000);
        assert_int_equal(seqcache_reserve(s, 1, &e), BC_OK);
        seqcache_append(s, 1, &id, (int32_t)*stream, *stream);
        uint8_t *page = (uint8_t *)kv->base +
                        seqcache_slots(s)[seqcache_count(s) - 1] / KN_PAGE_ROWS * kv->stride;
        if (below(w, 8) == 0) /* most rows would do, but pages must be full of something */
            for (size_t k = 0; k < kn_kv_page_bytes(kv); k++)
                page[k] = (uint8_t)below(w, 256);
    }
}

static void evict(struct world *w, struct seqcache *s, uint32_t percent)
{
    uint32_t keep[PAGES * KN_PAGE_ROWS], n = 0;
    for (uint32_t i = 0; i < seqcache_count(s); i++)
        if (below(w, 100) < percent)
            keep[n++] = i;
    seqcache_evict(s, keep, n);
}

/* Appended, pruned and refilled, so that slots are in no order; the rows of both sequences mix. */
static void fill(struct world *w)
{
    uint64_t a = 0, b = 0;
    for (int i = 0; i < 6; i++) {
        append(w, w->s, &a, ROWS / 4);
        append(w, w->other, &b, ROWS / 6);
        evict(w, w->s, 70);
        evict(w, w->other, 50);
    }
    append(w, w->s, &a, 5);
}

/* The whole of it as one flat buffer, as the host tier keeps it. */
static uint8_t *flat(const struct seqcache *s, const char *state, size_t *ret_n)
{
    struct spill *sp;
    struct err e;
    assert_int_equal(spill_make(&sp, s, &origin, state, strlen(state), &e), BC_OK);
    uint8_t *bytes = malloc(spill_bytes(sp));
    assert_non_null(bytes);
    for (uint32_t i = 0; i < spill_blocks(sp); i++) {
        uint8_t *at = bytes + spill_block_at(sp, i);
        spill_block_copy(sp, i, s, at);
        spill_block_seal(sp, i, at);
    }
    memcpy(bytes, spill_head(sp), spill_head_bytes(sp));
    *ret_n = spill_bytes(sp);
    spill_free(&sp);
    return bytes;
}

/* Everything is verified first; only then does `to` take pages. */
static int back(const uint8_t *bytes, size_t n, struct seqcache *to, struct spill **ret,
                struct err *e)
{
    struct spill *sp = NULL;
    size_t need = 0;
    int rc = spill_read(&sp, bytes, 0, n, &need, e);
    if (rc == BC_OK) {
        assert_int_equal(need, SPILL_FIXED_BYTES);
        rc = spill_read(&sp, bytes, need, n, &need, e);
    }
    if (rc == BC_OK) {
        assert_true(need > SPILL_FIXED_BYTES && need <= n);
        rc = spill_read(&sp, bytes, need, n, &need, e);
    }
    if (rc < 0)
        return rc;
    assert_int_equal(need, 0);
    for (uint32_t i = 0; rc == BC_OK && i < spill_blocks(sp); i++)
        rc = spill_block_check(sp, i, bytes + spill_block_at(sp, i), e);
    if (rc == BC_OK)
        rc = spill_fits(sp, pool_kv(seqcache_pool(to)), origin.model, e);
    if (rc == BC_OK)
        rc = spill_place(sp, to, e);
    for (uint32_t i = 0; rc == BC_OK && i < spill_blocks(sp); i++)
        spill_block_place(sp, i, to, bytes + spill_block_at(sp, i));
    if (ret != NULL && rc == BC_OK)
        *ret = sp;
    else
        spill_free(&sp);
    return rc;
}

static void row_equal(const struct kn_kv *kv, uint32_t a, uint32_t b)
{
    size_t key = kn_kv_line_bytes(kv, KN_KV_K), value = kn_kv_line_bytes(kv, KN_KV_V);
    for (uint32_t l = 0; l < kv->n_layers; l++)
        for (uint32_t h = 0; h < kv->n_kv_heads; h++) {
            assert_memory_equal(kn_kv_row(kv, a, l, KN_KV_K, h), kn_kv_row(kv, b, l, KN_KV_K, h),
                                key);
            assert_memory_equal(kn_kv_row(kv, a, l, KN_KV_V, h), kn_kv_row(kv, b, l, KN_KV_V, h),
                                value);
        }
    if (kv->d_hidden > 0)
        assert_memory_equal(kn_kv_hidden(kv, a), kn_kv_hidden(kv, b), kn_kv_hidden_bytes(kv));
    if (kv->d_hidden > 0 && kn_kv_hidden_scaled(kv))
        assert_memory_equal(kn_kv_hidden_scale(kv, a), kn_kv_hidden_scale(kv, b), 4);
}

static void seq_equal(const struct seqcache *a, const struct seqcache *b)
{
    uint32_t n = seqcache_count(a);
    assert_int_equal(seqcache_count(b), n);
    assert_int_equal(seqcache_pages(b), seqcache_pages(a));
    assert_memory_equal(seqcache_ids(a), seqcache_ids(b), n * 4);
    assert_memory_equal(seqcache_positions(a), seqcache_positions(b), n * 4);
    assert_memory_equal(seqcache_stream(a), seqcache_stream(b), n * 8);
    for (uint32_t i = 0; i < n; i++)
        row_equal(pool_kv(seqcache_pool(a)), seqcache_slots(a)[i], seqcache_slots(b)[i]);
}

static void comes_back_byte_equal(void **state)
{
    (void)state;
    static const struct {
        enum kn_type type;
        uint32_t d_hidden;
    } kinds[] = {{KN_F16, 0},   {KN_F16, 24}, {KN_F32, 0},   {KN_F32, 24},  {KN_BF16, 0},
                 {KN_BF16, 24}, {KN_Q8_0, 0}, {KN_Q8_0, 24}, {KN_Q8_Q4, 0}, {KN_Q8_Q4, 24}};
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
        struct world w;
        struct seqcache *twin;
        struct spill *sp;
        struct err e;
        size_t n, n_state;
        world_open(&w, kinds[k].type, kinds[k].d_hidden);
        fill(&w);
        assert_int_equal(seqcache_open(&twin, w.pool, &e), BC_OK);
        uint8_t *bytes = flat(w.s, "and what the owner says", &n);
        assert_int_equal(back(bytes, n, twin, &sp, &e), BC_OK);
        assert_memory_equal(spill_state(sp, &n_state), "and what the owner says", 23);
        assert_int_equal(n_state, 23);
        assert_int_equal(spill_rows(sp), seqcache_count(w.s));
        assert_memory_equal(spill_ids(sp), seqcache_ids(w.s), seqcache_count(w.s) * 4);
        assert_true(spill_origin(sp).arithmetic == 42);
        assert_true(spill_last_stream(sp) == seqcache_stream(w.s)[seqcache_count(w.s) - 1]);
        seq_equal(w.s, twin);
        /* what came back is a sequence like any other */
        uint64_t next = spill_last_stream(sp) + 1;
        append(&w, twin, &next, 100);
        evict(&w, twin, 30);
        seqcache_compact(twin);
        spill_free(&sp);
        free(bytes);
        seqcache_close(&twin);
        world_close(&w);
    }
}

static void an_empty_one_too(void **state)
{
    (void)state;
    struct world w;
    struct spill *sp;
    struct err e;
    size_t n;
    world_open(&w, KN_F16, 0);
    uint8_t *bytes = flat(w.s, "", &n);
    assert_int_equal(back(bytes, n, w.other, &sp, &e), BC_OK);
    assert_int_equal(seqcache_count(w.other), 0);
    assert_true(spill_last_stream(sp) == 0);
    spill_free(&sp);
    free(bytes);
    world_close(&w);
}

static void every_flipped_byte_is_refused(void **state)
{
    (void)state;
    struct world w;
    struct err e;
    uint64_t at = 0;
    size_t n;
    world_open(&w, KN_F16, 4);
    append(&w, w.s, &at, 100);
    evict(&w, w.s, 60);
    uint8_t *bytes = flat(w.s, "state", &n);
    assert_true(n > 10000 && n < 200000);
    for (size_t i = 0; i < n; i++) {
        uint8_t was = bytes[i];
        bytes[i] ^= (uint8_t)(1 + below(&w, 255));
        int rc = back(bytes, n, w.other, NULL, &e);
        assert_true(rc == BC_ECORRUPT || rc == BC_EVERSION);
        assert_int_equal(seqcache_pages(w.other), 0);
        bytes[i] = was;
    }
    for (size_t i = 0; i < n; i += 1 + i / 20) /* cut, and with something behind it */
        assert_int_equal(back(bytes, i, w.other, NULL, &e), BC_ECORRUPT);
    uint8_t *longer = realloc(bytes, n + 1);
    assert_non_null(longer);
    longer[n] = 0;
    assert_int_equal(back(longer, n + 1, w.other, NULL, &e), BC_ECORRUPT);
    assert_int_equal(back(longer, n, w.other, NULL, &e), BC_OK);
    seq_equal(w.s, w.other);
    free(longer);
    world_close(&w);
}

/* Offsets of the fixed part's fields, from the drawing in docs/DURABILITY.md. */
enum {
    AT_VERSION = 8,
    AT_ROWS = 40,
    AT_PAGES = 44,
    AT_STATE = 64,
    AT_REST_SUM = 120,
    AT_SUM = 124
};

static uint32_t u32_at(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* Sums that are right over whatever stands there: what somebody with bad intentions would write. */
static void sums_mend(uint8_t *bytes)
{
    uint32_t head = u32_at(bytes + 12);
    uint32_t sum = crc32c(0, bytes + SPILL_FIXED_BYTES, head - SPILL_FIXED_BYTES);
    memcpy(bytes + AT_REST_SUM, &sum, 4);
    sum = crc32c(0, bytes, AT_SUM);
    memcpy(bytes + AT_SUM, &sum, 4);
}

static void crafted_files_are_refused(void **state)
{
    (void)state;
    struct world w;
    struct err e;
    uint64_t at = 0;
    size_t n;
    world_open(&w, KN_F16, 0);
    append(&w, w.s, &at, 130);
    evict(&w, w.s, 80);
    uint32_t rows = seqcache_count(w.s);
    uint8_t *good = flat(w.s, "state678", &n), *bytes = malloc(n);
    assert_non_null(bytes);
    size_t stream = SPILL_FIXED_BYTES + 8, positions = stream + 12ull * rows,
           slots = positions + 4ull * rows;
    memcpy(bytes, good, n);
    sums_mend(bytes);
    assert_memory_equal(bytes, good, n); /* the offsets are right */

    /* every u32 of the fixed part as nothing, as one more and as the largest */
    for (size_t i = 8; i < AT_REST_SUM; i += 4)
        for (int k = 0; k < 3; k++) {
            uint32_t v = k == 0 ? 0 : k == 1 ? u32_at(good + i) + 1 : UINT32_MAX;
            bool identity = i >= 24 && i < 40; /* model and arithmetic: any value is one */
            bool spare = i >= 92;
            memcpy(bytes, good, n);
            if (u32_at(bytes + i) == v || identity || spare)
                continue;
            memcpy(bytes + i, &v, 4);
            uint32_t sum = crc32c(0, bytes, AT_SUM);
            memcpy(bytes + AT_SUM, &sum, 4);
            int rc = back(bytes, n, w.other, NULL, &e);
            assert_true(rc == BC_ECORRUPT || rc == BC_EVERSION);
        }
    static const uint32_t nonsense[] = {UINT32_MAX, 1u << 31};
    for (size_t k = 0; k < ARRAY_LEN(nonsense); k++) {
        memcpy(bytes, good, n);
        memcpy(bytes + slots + 8, &nonsense[k], 4); /* a slot outside */
        sums_mend(bytes);
        assert_int_equal(back(bytes, n, w.other, NULL, &e), BC_ECORRUPT);
        memcpy(bytes, good, n);
        memcpy(bytes + positions + 8, &nonsense[k], 4); /* a position below 0 */
        sums_mend(bytes);
        assert_int_equal(back(bytes, n, w.other, NULL, &e), BC_ECORRUPT);
    }
    memcpy(bytes, good, n);
    memcpy(bytes + slots + 8, bytes + slots, 4); /* one slot twice */
    sums_mend(bytes);
    assert_int_equal(back(bytes, n, w.other, NULL, &e), BC_ECORRUPT);
    memcpy(bytes, good, n);
    memcpy(bytes + stream + 8, bytes + stream, 8); /* out of order */
    sums_mend(bytes);
    assert_int_equal(back(bytes, n, w.other, NULL, &e), BC_ECORRUPT);
    assert_int_equal(seqcache_pages(w.other), 0);
    free(bytes);
    free(good);
    world_close(&w);
}

static void other_models_and_types_are_refused(void **state)
{
    (void)state;
    struct world w;
    struct spill *sp;
    struct err e;
    uint64_t at = 0;
    size_t n;
    world_open(&w, KN_F16, 4);
    append(&w, w.s, &at, 10);
    uint8_t *bytes = flat(w.s, "", &n);
    assert_int_equal(back(bytes, n, w.other, &sp, &e), BC_OK);
    struct kn_kv kv = *pool_kv(w.pool);
    assert_int_equal(spill_fits(sp, &kv, origin.model, &e), BC_OK);
    assert_int_equal(spill_fits(sp, &kv, origin.model + 1, &e), BC_ESTATE);
    assert_string_equal(e.field, "model");
    kv.type = KN_F32;
    assert_int_equal(spill_fits(sp, &kv, origin.model, &e), BC_ESTATE);
    assert_string_equal(e.field, "kv_type");
    kv = *pool_kv(w.pool);
    kv.n_layers++;
    assert_int_equal(spill_fits(sp, &kv, origin.model, &e), BC_ESTATE);
    kv = *pool_kv(w.pool);
    kv.d_hidden = 0;
    assert_int_equal(spill_fits(sp, &kv, origin.model, &e), BC_ESTATE);
    spill_free(&sp);
    free(bytes);
    world_close(&w);
}

static void without_room_nothing_changes(void **state)
{
    (void)state;
    struct world w;
    struct err e;
    uint64_t a = 0, b = 0;
    size_t n;
    world_open(&w, KN_F16, 0);
    append(&w, w.s, &a, 20 * KN_PAGE_ROWS);
    append(&w, w.other, &b, 15 * KN_PAGE_ROWS);
    uint8_t *bytes = flat(w.s, "", &n);
    struct seqcache *third;
    assert_int_equal(seqcache_open(&third, w.pool, &e), BC_OK);
    assert_int_equal(back(bytes, n, third, NULL, &e), BC_EBUDGET);
    assert_int_equal(pool_pages_out(w.pool), 35);
    assert_int_equal(seqcache_pages(third), 0);
    seqcache_clear(w.other);
    assert_int_equal(pool_pages_out(w.pool), 20);
    assert_int_equal(back(bytes, n, third, NULL, &e), BC_OK);
    seq_equal(w.s, third);
    seqcache_close(&third);
    free(bytes);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(comes_back_byte_equal),
        cmocka_unit_test(an_empty_one_too),
        cmocka_unit_test(every_flipped_byte_is_refused),
        cmocka_unit_test(crafted_files_are_refused),
        cmocka_unit_test(other_models_and_types_are_refused),
        cmocka_unit_test(without_room_nothing_changes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
