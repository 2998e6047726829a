/* fault.c: see fault.h. A slot of the table is taken by its length going from 0 to FAULT_CLAIMED, is valid once `base` and the true length are
 * stored, and is free again when the length is 0. The handler reads it without locks and calls mmap alone, which is a plain system call. */
#include "fault.h"
#include "base.h"
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#define FAULT_CLAIMED SIZE_MAX

static struct fault_range {
    _Atomic uintptr_t base;
    _Atomic size_t len; /* 0: free */
    atomic_bool seen;
} fault_ranges[FAULT_RANGES_MAX];
static _Atomic uintptr_t fault_page;

static void fault_handle(int sig, siginfo_t *info, void *context)
{
    (void)context;
    uintptr_t at = (uintptr_t)info->si_addr;
    for (unsigned i = 0; i < FAULT_RANGES_MAX; i++) {
        struct fault_range *r = &fault_ranges[i];
        size_t len = atomic_load(&r->len);
        uintptr_t base = atomic_load(&r->base);
        if (len == 0 || len == FAULT_CLAIMED || at < base || at - base >= len)
            continue;
        uintptr_t from = at / fault_page * fault_page;
        if (mmap((void *)from, base + len - from, PROT_READ,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
            break;
        atomic_store(&r->seen, true);
        return;
    }
    signal(sig, SIG_DFL); /* not ours: the faulting read repeats and ends the process */
}

/* At every watch: test runners and libraries install handlers of their own in between. */
static void fault_install(void)
{
    fault_page = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct sigaction sa = {.sa_sigaction = fault_handle, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigemptyset(&sa.sa_mask);
    sigaction(SIGBUS, &sa, NULL);
}

int fault_watch(void *base, size_t len)
{
    bc_assert(base != NULL && len > 0 && len < FAULT_CLAIMED);
    fault_install();
    for (int i = 0; i < FAULT_RANGES_MAX; i++) {
        size_t none = 0;
        if (!atomic_compare_exchange_strong(&fault_ranges[i].len, &none, FAULT_CLAIMED))
            continue;
        atomic_store(&fault_ranges[i].seen, false);
        atomic_store(&fault_ranges[i].base, (uintptr_t)base);
        atomic_store(&fault_ranges[i].len, len);
        return i;
    }
    return -1;
}

bool fault_seen(int range)
{
    bc_assert(range < FAULT_RANGES_MAX);
    return range >= 0 && atomic_load(&fault_ranges[range].seen);
}

void fault_unwatch(int range)
{
    bc_assert(range < FAULT_RANGES_MAX);
    if (range >= 0)
        atomic_store(&fault_ranges[range].len, 0);
}
