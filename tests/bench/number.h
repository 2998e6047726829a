/* number.h: numbers of a command line. One that is none, or out of bounds, ends the program with a sentence and code 2. */
#ifndef BACKCAST_BENCH_NUMBER_H
#define BACKCAST_BENCH_NUMBER_H
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define NUMBER_THREADS_MAX 1024u /* as backcastd */

/* A whole number, least .. most; text is the value of that option. */
static inline uint32_t number_take(const char *option, const char *text, uint32_t least,
                                   uint32_t most)
{
    char *end = NULL;
    errno = 0;
    unsigned long long n = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : 0;
    if (end != NULL && *end == '\0' && errno == 0 && n >= least && n <= most)
        return (uint32_t)n;
    fprintf(stderr, "%s: %s \"%s\" is not a whole number, %u to %u\n",
            program_invocation_short_name, option, text, least, most);
    exit(2);
}
#endif
