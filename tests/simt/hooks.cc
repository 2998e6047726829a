/* hooks.cc: what instrumented kernels call.
 *
 * -fsanitize=thread puts a call before every access to memory that another thread might see; the names are
 * ThreadSanitizer's, the functions ours: they tell the race detector (race.cc). The program is not linked with -fsanitize=thread.
 *
 * -fsanitize=alignment,bounds,shift puts calls behind checks that failed; the names are UndefinedBehaviorSanitizer's. A
 * misaligned int4 is an error on a GPU and nothing on a CPU, and an index past the end of an array in registers is the
 * neighbour's value on either. In builds with the real sanitizers theirs are used. */
#include "exec.h"
#include "race.h"
#include <stdio.h>

#if !defined(SIMT_SANITIZED) /* with the real sanitizers these names are taken */

using namespace simt;

extern "C" {

void __tsan_init()
{
    race_activate();
}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}

#define HOOKS(n)                                                                                   \
    void __tsan_read##n(void *p)                                                                   \
    {                                                                                              \
        race_access(p, n, ACCESS_READ);                                                            \
    }                                                                                              \
    void __tsan_write##n(void *p)                                                                  \
    {                                                                                              \
        race_access(p, n, ACCESS_WRITE);                                                           \
    }                                                                                              \
    void __tsan_unaligned_read##n(void *p)                                                         \
    {                                                                                              \
        race_access(p, n, ACCESS_READ);                                                            \
    }                                                                                              \
    void __tsan_unaligned_write##n(void *p)                                                        \
    {                                                                                              \
        race_access(p, n, ACCESS_WRITE);                                                           \
    }                                                                                              \
    void __tsan_volatile_read##n(void *p)                                                          \
    {                                                                                              \
        race_access(p, n, ACCESS_READ);                                                            \
    }                                                                                              \
    void __tsan_volatile_write##n(void *p)                                                         \
    {                                                                                              \
        race_access(p, n, ACCESS_WRITE);                                                           \
    }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
#undef HOOKS

/* The host's: kernels have the shim's own. */
void __tsan_atomic32_store(volatile unsigned *p, unsigned v, int)
{
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);
}
void __tsan_read_range(void *p, unsigned long bytes)
{
    race_access(p, bytes, ACCESS_READ);
}
void __tsan_write_range(void *p, unsigned long bytes)
{
    race_access(p, bytes, ACCESS_WRITE);
}

} // extern "C"

/* As the compiler lays them out. */
struct source_place {
    const char *file;
    uint32_t line, column;
};
struct type_name {
    uint16_t kind, info;
    char name[1];
};
struct mismatch {
    source_place at;
    const type_name *type;
    uint8_t log_align, kind;
};
struct bounds {
    source_place at;
    const type_name *array, *index;
};

static void place_note(const source_place &at)
{
    if (w.cur)
        w.cur->at = place{at.file, (int)at.line};
}

extern "C" {

void __ubsan_handle_type_mismatch_v1_abort(mismatch *m, void *p)
{
    place_note(m->at);
    if (!p)
        report("out of bounds", "an access through a null pointer at %s:%u", m->at.file,
               m->at.line);
    report("misaligned access", "%s at %p, which is no multiple of %u, at %s:%u", m->type->name, p,
           1u << m->log_align, m->at.file, m->at.line);
}

void __ubsan_handle_out_of_bounds_abort(bounds *b, unsigned long index)
{
    place_note(b->at);
    report("out of bounds", "index %ld of %s at %s:%u", (long)index, b->array->name, b->at.file,
           b->at.line);
}

void __ubsan_handle_shift_out_of_bounds_abort(source_place *at, unsigned long, unsigned long by)
{
    place_note(*at);
    report("bad shift", "by %ld at %s:%u", (long)by, at->file, at->line);
}

} // extern "C"

#endif
