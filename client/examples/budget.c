/* budget.c: a session with a ceiling in bytes: what the daemon granted, every prune as it happens, and
 * at the end the policy's score of each token that is left.
 *
 *     budget [SOCKET [BYTES [POLICY]]]        text on standard input
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <backcast.h>

static char text[1 << 20];

static void pruned_print(const struct backcast_event *ev)
{
    printf("pruned by %s (%s): %" PRIu32 " -> %" PRIu32 " tokens, %" PRIu64 " -> %" PRIu64
           " bytes live, %" PRIu64 " us; dropped",
           ev->pruned.policy, ev->pruned.reason, ev->pruned.tokens_before, ev->pruned.tokens_after,
           ev->pruned.live_before, ev->pruned.live_after, ev->pruned.micros);
    for (size_t i = 0; i < ev->pruned.n_dropped; i++)
        printf(" %" PRIu64 "+%" PRIu64, ev->pruned.dropped[i].first, ev->pruned.dropped[i].count);
    putchar('\n');
}

static int scores_print(backcast_session *s)
{
    struct backcast_score *rows = NULL;
    static const char *const kinds[] = {"may be dropped", "frozen", "recent", "frozen and recent"};
    size_t n = 0, of_kind[4] = {0};

    if (backcast_session_scores(s, &rows, &n) < 0)
        return -1;
    for (size_t i = 0; i < n; i++)
        of_kind[rows[i].flags & 3]++;
    printf("%zu tokens are left, %zu of them protected; the first of each kind:\n", n,
           n - of_kind[0]);
    for (size_t i = 0; i < n; i++) {
        size_t *left = &of_kind[rows[i].flags & 3];
        if (*left == 0)
            continue; /* its kind has been shown */
        printf("  %s (%zu): stream %" PRIu64 " position %d id %d score %g\n",
               kinds[rows[i].flags & 3], *left, rows[i].stream, rows[i].position, rows[i].id,
               (double)rows[i].score);
        *left = 0;
    }
    free(rows);
    return 0;
}

static int follow(backcast *c, backcast_session *s)
{
    struct backcast_event ev;
    int rc;

    while ((rc = backcast_next(c, &ev, -1)) > 0) {
        if (ev.type == BACKCAST_PRUNED)
            pruned_print(&ev);
        if (ev.type != BACKCAST_END)
            continue;
        printf("end %s: %" PRIu32 " tokens in, %" PRIu32 " out, %" PRIu32 " cached, %" PRIu64
               " dropped by %" PRIu32 " prunes\n",
               ev.end.reason, ev.end.tokens_in, ev.end.tokens_out, ev.end.tokens_cached,
               ev.end.tokens_dropped, ev.end.prunes);
        return scores_print(s);
    }
    return rc;
}

int main(int argc, char **argv)
{
    struct backcast_session_options opt;
    struct backcast_session_info info;
    struct backcast_generate_options gen;
    backcast *c = NULL;
    backcast_session *s = NULL;
    size_t len = fread(text, 1, sizeof(text), stdin);

    backcast_session_options_init(&opt);
    opt.budget_bytes = argc > 2 ? strtoull(argv[2], NULL, 10) : 16u << 20;
    if (argc > 3)
        opt.policy = argv[3];
    backcast_generate_options_init(&gen);
    gen.max_tokens = 32;
    int rc = backcast_connect(&c, argc > 1 && argv[1][0] != '\0' ? argv[1] : NULL);
    if (rc == 0)
        rc = backcast_session_open(c, &opt, &s);
    if (rc == 0) {
        backcast_session_info(s, &info);
        printf("granted %" PRIu64 " bytes = %" PRIu32 " tokens of %" PRIu32 " bytes, keep %" PRIu32
               ", policy %s\n",
               info.budget_bytes, info.budget_tokens, info.bytes_per_token, info.keep_tokens,
               info.policy);
        rc = backcast_prompt(s, text, len, &gen);
    }
    if (rc == 0)
        rc = follow(c, s);
    if (rc < 0)
        fprintf(stderr, "budget: %s %s\n", backcast_last_error_field(c), backcast_last_error(c));
    backcast_session_close(&s);
    backcast_disconnect(&c);
    return rc < 0;
}
