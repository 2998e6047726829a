/* Accounts: no limit is ever passed, every charge comes back, users do not see each other, the ration
 * of frames is steady. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "quota.h"

static const struct server_limits limits = {.connections = 7,
                                            .sessions = 5,
                                            .requests = 9,
                                            .queued_bytes = 1000,
                                            .ring_bytes = 100000,
                                            .frames_per_second = 100};
static const uint64_t max[N_QUOTAS] = {7, 5, 9, 1000, 100000};

static void charges_return_to_zero(void **state)
{
    (void)state;
    struct accounts as = {0};
    uint32_t x = 1;
    enum { TAKEN = 400 };
    struct {
        struct account *a;
        enum quota_kind kind;
        uint64_t n;
    } taken[TAKEN];
    unsigned n_taken = 0, refused = 0;
    uint64_t sum[3][N_QUOTAS] = {{0}};
    for (unsigned i = 0; i < 100000; i++) {
        x = x * 1664525u + 1013904223u;
        uint32_t uid = (x >> 10) % 3;
        if ((x >> 20) % 2 == 0 && n_taken < TAKEN) {
            enum quota_kind kind = (enum quota_kind)((x >> 12) % N_QUOTAS);
            uint64_t n = 1 + (x >> 16) % (max[kind] / 3);
            struct account *a = account_get(&as, uid);
            struct err e;
            int rc = quota_take(a, &limits, kind, n, &e);
            assert_int_equal(rc == BC_OK, sum[uid][kind] + n <= max[kind]);
            if (rc == BC_OK) {
                sum[uid][kind] += n;
                taken[n_taken].a = a;
                taken[n_taken].kind = kind;
                taken[n_taken++].n = n;
            } else {
                assert_int_equal(rc, BC_EBUSY);
                assert_true(e.needed == n && e.available == max[kind] - sum[uid][kind]);
                assert_true(e.field[0] != '\0');
                refused++;
            }
        } else if (n_taken > 0) {
            unsigned k = x % n_taken;
            quota_give(taken[k].a, taken[k].kind, taken[k].n);
            sum[taken[k].a->uid][taken[k].kind] -= taken[k].n;
            taken[k] = taken[--n_taken];
        }
        for (unsigned u = 0; u < 3; u++)
            for (unsigned k = 0; k < N_QUOTAS; k++)
                assert_true(account_get(&as, u)->used[k] == sum[u][k]);
    }
    assert_true(refused > 1000);
    while (n_taken > 0) {
        n_taken--;
        quota_give(taken[n_taken].a, taken[n_taken].kind, taken[n_taken].n);
    }
    accounts_free(&as); /* asserts that nothing is charged */
}

static void limits_may_shrink_below_what_is_used(void **state)
{
    (void)state;
    struct accounts as = {0};
    struct server_limits less = limits;
    struct err e;
    struct account *a = account_get(&as, 1);
    assert_int_equal(quota_take(a, &limits, QUOTA_SESSIONS, 5, &e), BC_OK);
    less.sessions = 2;
    assert_int_equal(quota_take(a, &less, QUOTA_SESSIONS, 1, &e), BC_EBUSY);
    assert_true(e.available == 0);
    quota_give(a, QUOTA_SESSIONS, 4);
    assert_int_equal(quota_take(a, &less, QUOTA_SESSIONS, 1, &e), BC_OK);
    quota_give(a, QUOTA_SESSIONS, 2);
    assert_int_equal(quota_take(a, &less, QUOTA_QUEUED, UINT64_MAX, &e), BC_EBUSY);
    accounts_free(&as);
}

static void frames_flow_steadily(void **state)
{
    (void)state;
    struct accounts as = {0};
    struct account *a = account_get(&as, 1), *b = account_get(&as, 2);
    uint64_t now = 1000000000;
    unsigned passed = 0;
    for (unsigned i = 0; i < 500; i++)
        passed += quota_frame(a, &limits, now);
    assert_int_equal(passed, 100); /* a second's worth at once */
    assert_true(quota_frame(b, &limits, now));
    passed = 0;
    for (unsigned i = 0; i < 100000; i++) /* ten seconds, asking every 100 us */
        passed += quota_frame(a, &limits, now += 100);
    assert_true(passed >= 999 && passed <= 1001);
    now += 3600ull * 1000000; /* an hour of silence is worth a second, no more */
    passed = 0;
    for (unsigned i = 0; i < 500; i++)
        passed += quota_frame(a, &limits, now);
    assert_int_equal(passed, 100);
    accounts_free(&as);
}

static void users_make_room_for_users(void **state)
{
    (void)state;
    struct accounts as = {0};
    struct err e;
    for (uint32_t uid = 0; uid < ACCOUNTS_MAX; uid++) {
        struct account *a = account_get(&as, uid);
        assert_non_null(a);
        if (uid != 500)
            assert_int_equal(quota_take(a, &limits, QUOTA_CONNECTIONS, 1, &e), BC_OK);
    }
    assert_non_null(account_get(&as, 70000)); /* 500 had left */
    assert_int_equal(quota_take(account_get(&as, 70000), &limits, QUOTA_CONNECTIONS, 1, &e), BC_OK);
    assert_null(account_get(&as, 70001));
    for (struct account *a = as.first; a != NULL; a = a->next)
        quota_give(a, QUOTA_CONNECTIONS, 1);
    accounts_free(&as);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(charges_return_to_zero),
        cmocka_unit_test(limits_may_shrink_below_what_is_used),
        cmocka_unit_test(frames_flow_steadily),
        cmocka_unit_test(users_make_room_for_users),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
