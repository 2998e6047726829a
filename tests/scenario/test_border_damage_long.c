/* Model files cut at 200 places and 2,000 with one wrong byte in their header, named to a running daemon
 * (damaged_models.h). test_border_damage.c tries some of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "damaged_models.h"

static void damaged_models_harm_nobody(void **state)
{
    (void)state;
    damaged_models(200, 2000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(damaged_models_harm_nobody)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
