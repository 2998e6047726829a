/* base.h: what every layer of the daemon leans on: magic numbers, assertions, error codes and
 * errors that name what and where. No state, no threads.
 *
 * Assertions state facts about the program and stay on in releases; the world (files, clients,
 * memory) is handled with negative codes. A function that fails leaves its ret_* outputs untouched.
 */
#ifndef BACKCAST_BASE_H
#define BACKCAST_BASE_H
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum bc_code {
    BC_OK = 0,
#define ERR(name, number, text) BC_E##name = -(number),
#include "errors.tbl"
#undef ERR
};

/* An error as it travels up: code, the field, key or tensor that it concerns ("" if none), one
 * sentence, and for BUDGET and BUSY the numbers. All functions that can fail for the world's sake
 * take one. */
struct err {
    int code;
    char field[64];
    char text[320];
    uint64_t needed, available;
};

const char *err_name(int code);  /* "INVALID"; static */
const char *err_brief(int code); /* "invalid argument"; static */

/* Fills e (which may be NULL) and returns code, so that callers write `return err_set(e, ...)`. */
int err_set(struct err *e, int code, const char *field, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* The same for BC_EBUDGET and BC_EBUSY, with the two numbers. */
int err_amount(struct err *e, int code, const char *field, uint64_t needed, uint64_t available,
               const char *fmt, ...) __attribute__((format(printf, 6, 7)));
/* Out of memory, said once the same way. */
int err_nomem(struct err *e, size_t bytes);
/* Puts the file that an error is of before its sentence, which may name it already; of a long path its end. */
void err_of_file(struct err *e, const char *path);

_Noreturn void bc_panic(const char *file, int line, const char *what);
#define bc_assert(x) ((x) ? (void)0 : bc_panic(__FILE__, __LINE__, #x))

/* Every long-lived object starts with `unsigned magic`; functions check it on entry. */
#define MAGIC_OK(obj, m) bc_assert((obj) != NULL && (obj)->magic == (m))

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define BC_MIN(a, b) ((a) < (b) ? (a) : (b))
#define BC_MAX(a, b) ((a) > (b) ? (a) : (b))

/* Checked size arithmetic: false on overflow, *ret untouched. */
static inline bool size_mul(size_t a, size_t b, size_t *ret)
{
    size_t r;
    if (__builtin_mul_overflow(a, b, &r))
        return false;
    *ret = r;
    return true;
}
static inline bool size_add(size_t a, size_t b, size_t *ret)
{
    size_t r;
    if (__builtin_add_overflow(a, b, &r))
        return false;
    *ret = r;
    return true;
}
#endif
