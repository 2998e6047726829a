/* kn_assert.h: facts about the program, checked in every build. The kernels stand below
 * daemon/base, so they bring their own. Checks stand at the head of ops, never inside inner loops.
 */
#ifndef BACKCAST_KN_ASSERT_H
#define BACKCAST_KN_ASSERT_H
#include <stdio.h>
#include <stdlib.h>

#define kn_assert(x)                                                                               \
    do {                                                                                           \
        if (!(x)) {                                                                                \
            fprintf(stderr, "%s:%d: assertion failed: %s\n", __FILE__, __LINE__, #x);              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#define KN_MIN(a, b) ((a) < (b) ? (a) : (b))
#define KN_MAX(a, b) ((a) > (b) ? (a) : (b))
#endif
