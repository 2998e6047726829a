/* clock.h: monotonic time. Nothing in the daemon reads the wall clock to decide anything. */
#ifndef BACKCAST_CLOCK_H
#define BACKCAST_CLOCK_H
#include <stdint.h>
#include <time.h>
static inline uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static inline uint64_t clock_us(void)
{
    return clock_ns() / 1000;
}
#endif
