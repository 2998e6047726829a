/* A model file that somebody truncates while it is being read: refused with a sentence, never SIGBUS. The file is cut at a place
 * behind the header right after it was opened, so that the tensors (and the vocabulary, when the cut is early) lie past its end. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "fault.h"
#include "gguf.h"
#include "model.h"
#include "tok.h"

static char copy_path[128];

static off_t model_copy(void)
{
    snprintf(copy_path, sizeof copy_path, "/tmp/backcast-truncated-%d.gguf", (int)getpid());
    int in = open(TEST_VECTORS "/tiny-llama.gguf", O_RDONLY | O_CLOEXEC);
    int out = open(copy_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(in >= 0 && out >= 0);
    char buf[65536];
    ssize_t n;
    off_t total = 0;
    while ((n = read(in, buf, sizeof buf)) > 0) {
        assert_int_equal(write(out, buf, (size_t)n), n);
        total += n;
    }
    close(in);
    close(out);
    return total;
}

static void weights_past_the_end(void **state)
{
    (void)state;
    struct err e;
    struct gguf *g = NULL;
    struct model *m = NULL;
    struct kn *kn = NULL;
    off_t len = model_copy();
    const struct kn_options opt = {.backend = "ref"};
    assert_int_equal(kn_open(&kn, &opt, NULL, 0), 0);
    assert_int_equal(gguf_open(&g, copy_path, &e), BC_OK);
    assert_int_equal(gguf_intact(g, &e), BC_OK);
    assert_int_equal(truncate(copy_path, len / 2), 0);
    assert_int_equal(model_open(&m, kn, g, NULL, NULL, NULL, &e), BC_ECORRUPT);
    assert_null(m);
    assert_non_null(strstr(e.text, "truncated"));
    assert_int_equal(gguf_intact(g, &e), BC_ECORRUPT);
    gguf_close(&g);
    kn_close(&kn);
    unlink(copy_path);
}

static void vocabulary_past_the_end(void **state)
{
    (void)state;
    struct err e;
    struct gguf *g = NULL;
    struct tok *t = NULL;
    model_copy();
    assert_int_equal(gguf_open(&g, copy_path, &e), BC_OK);
    assert_int_equal(truncate(copy_path, 0), 0);
    assert_int_equal(tok_open(&t, g, &e), BC_ECORRUPT);
    assert_null(t);
    gguf_close(&g);
    unlink(copy_path);
}

/* A SIGBUS outside every watched range still ends the process. */
static void strangers_fault_as_usual(void **state)
{
    (void)state;
    model_copy();
    pid_t child = fork();
    if (child == 0) {
        int fd = open(copy_path, O_RDWR | O_CLOEXEC);
        char *watched = mmap(NULL, 8192, PROT_READ, MAP_SHARED, fd, 0);
        volatile char *other = mmap(NULL, 8192, PROT_READ, MAP_SHARED, fd, 0);
        if (fd < 0 || watched == MAP_FAILED || other == MAP_FAILED ||
            fault_watch(watched, 8192) < 0)
            _exit(1);
        if (ftruncate(fd, 0) != 0)
            _exit(2);
        _exit(other[0] == 'x' ? 3 : 4);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    unlink(copy_path);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGBUS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_past_the_end),
        cmocka_unit_test(vocabulary_past_the_end),
        cmocka_unit_test(strangers_fault_as_usual),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
