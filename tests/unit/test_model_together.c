/* Scores of several sequences in one pass: each row's is the one that it gets alone, to the bit on ref and on cpu, whatever is asked
 * for at a time, whoever leaves half way and comes back, and whoever joins late; and small sequences do share passes. */
#include "model_rig.h"

#define N_SEQS MODEL_PARTS_MAX
#define MAX_ROWS 30 /* of a pass: fewer than there are rows */
#define DEVICE_DIFF 2e-3

static const uint32_t lengths[N_SEQS] = {5, 16, 40, 27, 9, 12, 20, 8};
static const char *const models[] = {"tiny-llama.gguf", "tiny-llama-q4_0.gguf", "tiny-qwen3.gguf"};

struct crowd {
    const struct kn_options *ko;
    struct rig rig;
    struct rseq s[N_SEQS];
    struct model_rest rest[N_SEQS];
    struct model_part part[N_SEQS];
    float *want[N_SEQS], *got[N_SEQS];
    uint32_t random;
};

static uint32_t draw(struct crowd *c, uint32_t below)
{
    c->random = c->random * 1664525u + 1013904223u;
    return (c->random >> 8) % below;
}

static void crowd_open(struct crowd *c, const struct kn_options *ko, const char *model)
{
    *c = (struct crowd){.ko = ko, .random = 7};
    struct rig_options o = {.model = model,
                            .backend = ko->backend,
                            .isa = ko->isa,
                            .threads = 1,
                            .max_rows = MAX_ROWS,
                            .max_out = 1,
                            .kv_type = KN_F32,
                            .hidden = true,
                            .n_pages = 6};
    rig_open(&c->rig, &o);
    float *logits = malloc(c->rig.info->n_vocab * sizeof *logits);
    for (uint32_t k = 0; k < N_SEQS; k++) {
        uint32_t n = lengths[k];
        int32_t ids[40];
        for (uint32_t i = 0; i < n; i++)
            ids[i] = (int32_t)(3 + draw(c, 280));
        rseq_open(&c->s[k], &c->rig, n);
        rseq_extend(&c->s[k], ids, n, 0, 30, logits, true);
        c->rest[k].x =
            malloc(BC_MIN(c->rig.info->rest_rows, n) * c->rig.info->d_model * sizeof(float));
        c->want[k] = malloc(n * sizeof(float));
        c->got[k] = malloc(n * sizeof(float));
    }
    free(logits);
}

static void crowd_close(struct crowd *c)
{
    for (uint32_t k = 0; k < N_SEQS; k++) {
        rseq_close(&c->s[k]);
        free(c->rest[k].x);
        free(c->want[k]);
        free(c->got[k]);
    }
    rig_close(&c->rig);
}

/* All rows of sequence k are due, from the first on. */
static void part_begin(struct crowd *c, uint32_t k, bool fast, bool logprob)
{
    const struct rseq *s = &c->s[k];
    model_rest_close(&c->rest[k]);
    c->part[k] = (struct model_part){.job = {.seq = rseq_view(s),
                                             .ids = s->ids,
                                             .positions = s->positions,
                                             .min_gap = k % 3,
                                             .fast = fast,
                                             .logprob = logprob},
                                     .rest = &c->rest[k],
                                     .end = s->n,
                                     .scores = c->got[k]};
    for (uint32_t i = 0; i < s->n; i++)
        c->got[k][i] = NAN;
}

static void all_begin(struct crowd *c, bool fast, bool logprob)
{
    for (uint32_t k = 0; k < N_SEQS; k++) {
        part_begin(c, k, fast, logprob);
        rseq_score(&c->s[k], k % 3, fast, logprob, c->want[k]);
    }
}

/* One call for those that are not done and not in `away`. Returns how many those were. */
static uint32_t go_on(struct crowd *c, uint32_t max_rows, uint32_t away)
{
    struct model_part parts[N_SEQS];
    uint32_t of[N_SEQS], n = 0;
    struct err e = {0};
    double spent = 0;

    for (uint32_t k = 0; k < N_SEQS; k++)
        if (c->part[k].next < c->part[k].end && !(away >> k & 1)) {
            of[n] = k;
            parts[n++] = c->part[k];
        }
    if (n == 0)
        return 0;
    assert_int_equal(model_score_some(c->rig.m, parts, n, max_rows, &e), BC_OK);
    for (uint32_t i = 0; i < n; i++) {
        spent += parts[i].spent;
        c->part[of[i]] = parts[i];
    }
    assert_true(spent > 0 || parts[0].next == parts[0].end);
    return n;
}

static void all_equal(const struct crowd *c, const char *what)
{
    for (uint32_t k = 0; k < N_SEQS; k++)
        for (uint32_t i = 0; i < lengths[k]; i++) {
            float got = c->got[k][i], want = c->want[k][i];
            bool same = memcmp(&got, &want, sizeof got) == 0;
            if (!same && !(rig_is_device(c->ko) && fabsf(got - want) <= DEVICE_DIFF))
                fail_msg("%s, %s: row %u of sequence %u is %.9g, alone %.9g", c->rig.kn->name, what,
                         i, k, (double)got, (double)want);
        }
}

/* What is asked for at a time: less than a block, a few blocks, all of it. */
static void in_pieces(struct crowd *c, bool fast, bool logprob)
{
    static const uint32_t sizes[] = {2, 21, UINT32_MAX};
    for (uint32_t p = 0; p < ARRAY_LEN(sizes); p++) {
        uint32_t calls = 0;
        all_begin(c, fast, logprob);
        while (go_on(c, sizes[p], 0) > 0)
            calls++;
        assert_true(p < ARRAY_LEN(sizes) - 1 || calls == 1);
        all_equal(c, "in pieces");
    }
}

/* Somebody stays away for a while, joins late, or is given up half way and begins again. */
static void with_absences(struct crowd *c, bool fast, bool logprob)
{
    uint32_t away = 0x94; /* these come late */
    all_begin(c, fast, logprob);
    for (uint32_t round = 0; go_on(c, 1 + draw(c, 40), away) > 0 || away != 0; round++) {
        uint32_t k = draw(c, N_SEQS);
        if (round % 3 == 0)
            away = round < 24 ? away ^ 1u << k : 0;
        else if (round % 5 == 1 && round < 24)
            part_begin(c, k, fast, logprob);
    }
    all_equal(c, "with absences");
    assert_true(c->rest[0].m == NULL && c->rest[N_SEQS - 1].m == NULL);
}

static void each(void (*f)(struct crowd *c, bool fast, bool logprob))
{
    struct kn_options ko;
    for (unsigned i = 0; rig_backend(i, &ko); i++)
        for (unsigned m = 0; m < ARRAY_LEN(models); m++) {
            struct crowd c;
            if (m > 0 && (ko.isa != NULL || strcmp(ko.backend, "cpu") != 0))
                break; /* slow */
            crowd_open(&c, &ko, models[m]);
            for (int kind = 0; kind < 4; kind++)
                f(&c, kind & 1, kind & 2);
            crowd_close(&c);
        }
}

static void a_row_scores_the_same_alone_and_together(void **state)
{
    (void)state;
    each(in_pieces);
}

static void whoever_leaves_or_joins_changes_nothing_for_the_others(void **state)
{
    (void)state;
    each(with_absences);
}

/* ---- passes ---- */

static struct counted {
    const struct kn_ops *real;
    struct kn_ops ops;
    uint32_t passes, rows, most_seqs,
        refuse_over; /* sequences of a pass that there is no room for */
} counted;

static void count_batch(struct kn *kn, const struct kn_batch *b)
{
    counted.passes++;
    counted.rows += b->n_rows;
    counted.most_seqs = BC_MAX(counted.most_seqs, b->n_seqs);
    counted.real->batch_begin(kn, b);
}

static int count_reserve(struct kn *kn, uint32_t n_rows, uint32_t n_seqs, uint64_t n_slots)
{
    (void)kn;
    assert_int_equal(n_rows, MAX_ROWS);
    assert_true(n_slots > n_seqs);
    return n_seqs > counted.refuse_over ? KN_ENOMEM : KN_OK;
}

static void count_from(struct crowd *c, uint32_t refuse_over)
{
    struct kn *kn = c->rig.kn;
    counted = (struct counted){.real = kn->ops, .ops = *kn->ops, .refuse_over = refuse_over};
    counted.ops.batch_begin = count_batch;
    counted.ops.batch_reserve = count_reserve;
    kn->ops = &counted.ops;
}

/* Rows that see something go in full passes. A device without room for all slot lists takes one sequence at a time. */
static void small_sequences_share_passes(void **state)
{
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        struct kn_options ko = {.backend = "cpu"};
        struct crowd c;
        uint32_t rows = 0, alone = 0, cap;
        crowd_open(&c, &ko, models[0]);
        cap = BC_MIN(c.rig.info->rest_rows, MAX_ROWS);
        for (uint32_t k = 0; k < N_SEQS; k++) {
            rows += lengths[k] - k % 3 - 1;
            alone += (lengths[k] - k % 3 - 1 + cap - 1) / cap;
        }
        for (uint32_t refuse_over = 1; refuse_over <= N_SEQS; refuse_over += N_SEQS - 1) {
            uint32_t passes = refuse_over == 1 ? alone : (rows + cap - 1) / cap;
            all_begin(&c, kind & 1, kind & 2);
            count_from(&c, refuse_over);
            while (go_on(&c, UINT32_MAX, 0) > 0)
                ;
            c.rig.kn->ops = counted.real;
            all_equal(&c, "counted");
            bool whole =
                kind & 1; /* one pass a block; else one for the layers and one for the head */
            assert_int_equal(counted.rows, whole ? rows : 2 * rows);
            assert_int_equal(counted.passes, whole ? passes : 2 * passes);
            assert_true(refuse_over == 1 ? counted.most_seqs == 1 : counted.most_seqs > 1);
        }
        crowd_close(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_row_scores_the_same_alone_and_together),
        cmocka_unit_test(whoever_leaves_or_joins_changes_nothing_for_the_others),
        cmocka_unit_test(small_sequences_share_passes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
