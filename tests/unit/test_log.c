/* The log: one line a message, whatever the names in it hold. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
#include "log.h"

/* What log_warn(topic "test", "%s", text) writes. */
static const char *written(const char *text)
{
    static char got[2048];
    int ends[2], err = dup(STDERR_FILENO);
    assert_true(err >= 0 && pipe(ends) == 0);
    assert_int_equal(dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
    log_warn("test", "%s", text);
    assert_int_equal(dup2(err, STDERR_FILENO), STDERR_FILENO);
    close(err);
    close(ends[1]);
    ssize_t n = read(ends[0], got, sizeof got - 1);
    close(ends[0]);
    assert_true(n >= 0);
    got[n] = '\0';
    return got;
}

static void a_message_is_one_line(void **state)
{
    (void)state;
    assert_string_equal(written("plain"), "warn: test: plain\n");
    assert_string_equal(written("a\nerror: forged\r\033[2J\177\tb"),
                        "warn: test: a?error: forged??[2J??b\n");
    assert_string_equal(written("M\xc3\xbchle"), "warn: test: M\xc3\xbchle\n");
    char text[3000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    const char *got = written(text);
    assert_true(strlen(got) < 1100 && got[strlen(got) - 1] == '\n');
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_message_is_one_line)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
