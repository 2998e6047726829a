/* Eight clients with random requests, cancels, budgets and ends, for two minutes (client_mix.h). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "client_mix.h"

static void a_mix_of_clients_leaves_nothing_behind(void **state)
{
    (void)state;
    client_mix(120, 120);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_mix_of_clients_leaves_nothing_behind)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
