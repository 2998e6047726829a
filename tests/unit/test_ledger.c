/* The ledger: sums agree along the tree of owners, whoever books, and nobody leaves with a charge. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "ledger.h"

static void kinds_have_names(void **state)
{
    (void)state;
    for (unsigned i = 0; i < N_LEDGER; i++) {
        assert_true(strlen(ledger_name(i)) > 0 && strlen(ledger_text(i)) > 0);
        for (unsigned k = 0; k < i; k++)
            assert_string_not_equal(ledger_name(i), ledger_name(k));
    }
    assert_null(ledger_name(N_LEDGER));
    assert_string_equal(ledger_name(LEDGER_kv), "kv");
}

static void charges_go_up_the_tree(void **state)
{
    (void)state;
    struct ledger *l;
    struct ledger_owner model, session[2];
    assert_int_equal(ledger_open(&l, NULL), BC_OK);
    struct ledger_owner *daemon = ledger_daemon(l), *user = ledger_uid_get(l, 1000);
    ledger_owner_open(&model, LEDGER_MODEL, daemon);
    ledger_owner_open(&session[0], LEDGER_SESSION, user);
    ledger_owner_open(&session[1], LEDGER_SESSION, user);
    ledger_charge(&model, LEDGER_weights, 1000);
    ledger_charge(&session[0], LEDGER_kv, 70);
    ledger_charge(&session[1], LEDGER_kv, 30);
    ledger_charge(&session[1], LEDGER_state, 5);
    ledger_charge(user, LEDGER_shared, 400);
    ledger_charge(NULL, LEDGER_kv, 99); /* nobody */
    assert_int_equal(ledger_own(user, LEDGER_kv), 0);
    assert_int_equal(ledger_all(user, LEDGER_kv), 100);
    assert_int_equal(ledger_sum(user), 505);
    assert_int_equal(ledger_all(daemon, LEDGER_kv), 100);
    assert_int_equal(ledger_sum(daemon), 1505);
    ledger_set(&model, LEDGER_weights, 300);
    ledger_set(&model, LEDGER_scratch, 11);
    assert_int_equal(ledger_sum(daemon), 816);
    ledger_set(&model, LEDGER_weights, 0);
    ledger_set(&model, LEDGER_scratch, 0);
    ledger_credit(&session[0], LEDGER_kv, 70);
    ledger_credit(&session[1], LEDGER_kv, 30);
    ledger_credit(&session[1], LEDGER_state, 5);
    ledger_credit(user, LEDGER_shared, 400);
    assert_int_equal(ledger_sum(daemon), 0);
    ledger_owner_close(&session[0]);
    ledger_owner_close(&session[1]);
    ledger_owner_close(&model);
    ledger_uid_put(l, &user);
    ledger_close(&l);
    assert_null(l);
}

static void users_are_found_again_while_they_are_held(void **state)
{
    (void)state;
    struct ledger *l;
    assert_int_equal(ledger_open(&l, NULL), BC_OK);
    struct ledger_owner *a = ledger_uid_get(l, 5), *b = ledger_uid_get(l, 6),
                        *again = ledger_uid_get(l, 5);
    assert_ptr_equal(a, again);
    assert_ptr_not_equal(a, b);
    ledger_charge(a, LEDGER_rings, 3);
    ledger_uid_put(l, &again);
    assert_null(again);
    assert_int_equal(ledger_own(a, LEDGER_rings), 3);
    ledger_credit(a, LEDGER_rings, 3);
    ledger_uid_put(l, &a);
    ledger_uid_put(l, &b);
    ledger_close(&l);
}

/* ---- what must be noticed ---- */

static void closes_with_a_charge(struct ledger *l)
{
    struct ledger_owner o;
    ledger_owner_open(&o, LEDGER_SESSION, ledger_daemon(l));
    ledger_charge(&o, LEDGER_kv, 1);
    ledger_owner_close(&o);
}

static void takes_off_too_much(struct ledger *l)
{
    struct ledger_owner o;
    ledger_owner_open(&o, LEDGER_SESSION, ledger_daemon(l));
    ledger_charge(&o, LEDGER_kv, 7);
    ledger_credit(&o, LEDGER_kv, 8);
}

static void takes_off_another_kind(struct ledger *l)
{
    ledger_charge(ledger_daemon(l), LEDGER_kv, 7);
    ledger_credit(ledger_daemon(l), LEDGER_state, 7);
}

static void leaves_somebody_below(struct ledger *l)
{
    struct ledger_owner a, b;
    ledger_owner_open(&a, LEDGER_UID, ledger_daemon(l));
    ledger_owner_open(&b, LEDGER_SESSION, &a);
    ledger_owner_close(&a);
}

static void a_wrong_book_stops_the_program(void **state)
{
    (void)state;
    void (*const wrongs[])(struct ledger *) = {closes_with_a_charge, takes_off_too_much,
                                               takes_off_another_kind, leaves_somebody_below};
    for (size_t i = 0; i < ARRAY_LEN(wrongs); i++) {
        int status = 0;
        pid_t child = fork();
        if (child == 0) {
            struct ledger *l;
            if (freopen("/dev/null", "w", stderr) == NULL || ledger_open(&l, NULL) < 0)
                _exit(1);
            wrongs[i](l);
            _exit(0);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    }
}

/* ---- three threads book into one user ---- */

#define ROUNDS 20000

struct booker {
    struct ledger *l;
    unsigned kind;
};

static void *book(void *arg)
{
    struct booker *b = arg;
    for (int i = 0; i < ROUNDS; i++) {
        struct ledger_owner *u = ledger_uid_get(b->l, (uint32_t)i % 3);
        struct ledger_owner o;
        ledger_owner_open(&o, LEDGER_SESSION, u);
        ledger_charge(&o, (enum ledger_kind)b->kind, 10);
        ledger_charge(u, (enum ledger_kind)b->kind, 1);
        ledger_credit(&o, (enum ledger_kind)b->kind, 10);
        ledger_owner_close(&o);
        ledger_credit(u, (enum ledger_kind)b->kind, 1);
        ledger_uid_put(b->l, &u);
    }
    return NULL;
}

static void threads_lose_nothing(void **state)
{
    (void)state;
    struct ledger *l;
    pthread_t thread[3];
    struct booker b[3];
    assert_int_equal(ledger_open(&l, NULL), BC_OK);
    for (unsigned i = 0; i < 3; i++) {
        b[i] = (struct booker){l, i / 2};
        assert_int_equal(pthread_create(&thread[i], NULL, book, &b[i]), 0);
    }
    for (unsigned i = 0; i < 3; i++)
        pthread_join(thread[i], NULL);
    assert_int_equal(ledger_sum(ledger_daemon(l)), 0);
    ledger_close(&l); /* asserts that nothing is left */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kinds_have_names),
        cmocka_unit_test(charges_go_up_the_tree),
        cmocka_unit_test(users_are_found_again_while_they_are_held),
        cmocka_unit_test(a_wrong_book_stops_the_program),
        cmocka_unit_test(threads_lose_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
