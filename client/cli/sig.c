/* sig.c: Ctrl-C. The first one is counted, so that a running answer can be cancelled and its session
 * left in order; the second ends the program at once with 130. Handlers are installed without
 * SA_RESTART: a blocked poll returns and its loop looks at the count. */
#include <signal.h>
#include <string.h>
#include <unistd.h>
#include "cli.h"

static volatile sig_atomic_t interrupts;

static void interrupt_seen(int sig)
{
    (void)sig;
    interrupts = interrupts + 1;
    if (interrupts >= 2)
        _exit(CLI_INTERRUPTED);
}

void interrupt_watch(void)
{
    struct sigaction sa;
    memset(&sa, 0, sizeof(sa));
    sa.sa_handler = interrupt_seen;
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
}

int interrupt_count(void)
{
    return (int)interrupts;
}

void interrupt_reset(void)
{
    interrupts = 0;
}
