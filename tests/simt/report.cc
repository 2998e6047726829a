/* report.cc: says what a kernel did wrong, and where, and ends the process.
 *
 *      simt: missing barrier: thread (33,0,0) wrote shared byte 128 and no barrier ...
 *      simt:   kernel block_sum, grid (1,1,1) x (64,1,1), block (0,0,0), thread (5,0,0), last seen at k.cu:12
 *
 * A fault (SIGSEGV, SIGBUS, SIGILL) while a kernel runs becomes such a report, too: guard pages stand around device
 * memory, shared memory and fiber stacks. The handlers are in place only while a kernel runs. */
#include "exec.h"
#include "memory.h"
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

namespace simt
{

static void where_print(FILE *out)
{
    if (!w.ex || !w.ex->shape)
        return;
    const launch_shape *s = w.ex->shape;
    fprintf(out, "simt:   kernel %s, grid (%u,%u,%u) x (%u,%u,%u), block (%u,%u,%u)", s->name,
            s->grid.x, s->grid.y, s->grid.z, s->block.x, s->block.y, s->block.z, w.bid.x, w.bid.y,
            w.bid.z);
    if (w.cur) {
        fprintf(out, ", thread (%u,%u,%u)", w.cur->tid.x, w.cur->tid.y, w.cur->tid.z);
        if (w.cur->at.file)
            fprintf(out, ", last seen at %s:%d", w.cur->at.file, w.cur->at.line);
        else
            fprintf(out, ", before its first barrier or collective");
    }
    fputc('\n', out);
}

void report(const char *kind, const char *format, ...)
{
    report_signals_off();
    fflush(stdout);
    fprintf(stderr, "simt: %s: ", kind);
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    where_print(stderr);
    fflush(stderr);
    abort();
}

/* ---- faults ---- */

static const int signals[] = {SIGSEGV, SIGBUS, SIGILL};
constexpr size_t N_SIGNALS = sizeof signals / sizeof signals[0];

static struct sigaction old_actions[N_SIGNALS];
static bool signals_are_on;

/* What lies at an address, in words. */
static void address_tell(const void *p, char *text, size_t bytes)
{
    exec *ex = w.ex;
    const char *c = (const char *)p, *smem = ex->smem_map;
    for (unsigned i = 0; i < ex->threads.size(); i++) {
        const char *stack = ex->threads[i].stack;
        if (c < stack && c >= stack - 4096) {
            snprintf(text, bytes, "below the stack of a thread: %zu bytes of locals are too many",
                     STACK_BYTES);
            return;
        }
    }
    /* after the stacks: their guard pages may lie right behind shared memory */
    if (c >= smem && c < smem + ex->smem_map_bytes + 65536) {
        snprintf(text, bytes, "byte %td of a block's %zu bytes of shared memory",
                 c - (const char *)w.smem, w.smem_bytes);
        return;
    }
    heap_tell(p, text, bytes);
}

static void on_fault(int sig, siginfo_t *info, void *)
{
    char what[256];
    if (sig == SIGILL)
        report("illegal instruction", "at %p", info->si_addr);
    if (!info->si_addr) /* the processor names no address for a misaligned vector */
        report("misaligned or invalid address",
               "a null pointer, or an instruction whose operand must be "
               "aligned");
    address_tell(info->si_addr, what, sizeof what);
    report("out of bounds", "%s at %p, %s", sig == SIGBUS ? "bus error" : "access", info->si_addr,
           what);
}

void report_signals_on()
{
    static thread_local bool have_stack;
    static thread_local char stack[32768];
    if (!have_stack) {
        stack_t now;
        if (sigaltstack(nullptr, &now) == 0 && (now.ss_flags & SS_DISABLE)) {
            stack_t mine = {};
            mine.ss_sp = stack;
            mine.ss_size = sizeof stack;
            sigaltstack(&mine, nullptr);
        }
        have_stack = true;
    }
    struct sigaction sa = {};
    sa.sa_sigaction = on_fault;
    sa.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&sa.sa_mask);
    for (size_t i = 0; i < N_SIGNALS; i++)
        sigaction(signals[i], &sa, &old_actions[i]);
    signals_are_on = true;
}

void report_signals_off()
{
    if (!signals_are_on)
        return;
    signals_are_on = false;
    for (size_t i = 0; i < N_SIGNALS; i++)
        sigaction(signals[i], &old_actions[i], nullptr);
}

} // namespace simt
