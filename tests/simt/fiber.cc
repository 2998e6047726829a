/* fiber.cc: stacks and the switch between them.
 *
 *      stacks:  | no rights | fiber 0 | no rights | fiber 1 | ...     an overflow faults
 *
 * x86-64 has a switch of twelve instructions (System V keeps rbx, rbp, r12 to r15 over a call; the rest is saved by the
 * compiler around it). Other processors use swapcontext, which is slower (it asks the kernel for the signal mask). */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "exec.h"
#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
#define OWN_SWITCH 1
#else
#include <ucontext.h>
#endif
#ifdef SIMT_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt
{

void fiber_stacks_open(exec *ex)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), step = STACK_BYTES + page;
    void *map = mmap(nullptr, step * BLOCK_THREADS_MAX, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        report("out of memory", "no address space for %u fiber stacks", BLOCK_THREADS_MAX);
    ex->stacks = (char *)map;
    ex->threads.resize(BLOCK_THREADS_MAX);
    for (unsigned i = 0; i < BLOCK_THREADS_MAX; i++) {
        ex->threads[i].stack = ex->stacks + i * step + page;
        if (mprotect(ex->threads[i].stack, STACK_BYTES, PROT_READ | PROT_WRITE) != 0)
            report("out of memory", "fiber stack %u", i);
    }
}

#ifdef OWN_SWITCH

extern "C" void simt_switch(void **save, void *to) __attribute__((visibility("hidden")));
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
.p2align 4
simt_switch:
        pushq   %rbp
        pushq   %rbx
        pushq   %r12
        pushq   %r13
        pushq   %r14
        pushq   %r15
        movq    %rsp, (%rdi)
        movq    %rsi, %rsp
        popq    %r15
        popq    %r14
        popq    %r13
        popq    %r12
        popq    %rbx
        popq    %rbp
        ret
.size simt_switch, .-simt_switch
)");

static void context_make(thread *t, void (*entry)())
{
    /* the tops lie on different lines of a page: all at one offset would share a few sets of the cache */
    void **sp = (void **)(t->stack + STACK_BYTES - t->index * 320 % 4096);
    *--sp = nullptr; /* entry never returns; 16-byte alignment as after a call */
    *--sp = (void *)entry;
    for (int i = 0; i < 6; i++)
        *--sp = nullptr;
    t->ctx.sp = sp;
}

static void context_switch(context *from, context *to)
{
    simt_switch(&from->sp, to->sp);
}

#else

static ucontext_t *context_of(context *c)
{
    if (!c->sp)
        c->sp = calloc(1, sizeof(ucontext_t));
    return (ucontext_t *)c->sp;
}

static void context_make(thread *t, void (*entry)())
{
    ucontext_t *u = context_of(&t->ctx);
    getcontext(u);
    u->uc_stack.ss_sp = t->stack;
    u->uc_stack.ss_size = STACK_BYTES;
    u->uc_link = nullptr;
    makecontext(u, entry, 0);
}

static void context_switch(context *from, context *to)
{
    swapcontext(context_of(from), context_of(to));
}

#endif

void fiber_prepare(thread *t, void (*entry)())
{
#ifdef SIMT_ASAN
    __asan_unpoison_memory_region(t->stack, STACK_BYTES);
#endif
    t->ctx.fake = nullptr;
    context_make(t, entry);
}

#ifdef SIMT_ASAN
static void asan_leave(exec *ex, thread *from, thread *to)
{
    context *c = from ? &from->ctx : &ex->scheduler;
    bool gone = from && from->state == THREAD_DONE;
    __sanitizer_start_switch_fiber(gone ? nullptr : &c->fake, to ? to->stack : ex->host_stack,
                                   to ? STACK_BYTES : ex->host_stack_bytes);
}
static void asan_arrive(exec *ex, thread *in, bool first)
{
    const void *stack;
    size_t bytes;
    void *fake = first ? nullptr : in ? in->ctx.fake : ex->scheduler.fake;
    __sanitizer_finish_switch_fiber(fake, &stack, &bytes);
    if (!ex->host_stack) { /* the first arrival comes from the host's stack */
        ex->host_stack = stack;
        ex->host_stack_bytes = bytes;
    }
}
#else
static void asan_leave(exec *, thread *, thread *) {}
static void asan_arrive(exec *, thread *, bool) {}
#endif

void fiber_switch(exec *ex, thread *from, thread *to)
{
    ex->switches++;
    w.cur = to;
    if (to)
        w.tid = to->tid;
    asan_leave(ex, from, to);
    context_switch(from ? &from->ctx : &ex->scheduler, to ? &to->ctx : &ex->scheduler);
    asan_arrive(ex, from, false);
}

void fiber_entered(exec *ex)
{
    asan_arrive(ex, nullptr, true);
}

} // namespace simt
