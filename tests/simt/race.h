/* race.h: what the race detector is told (race.cc). It sees plain accesses only in builds whose kernels are compiled
 * with -fsanitize=thread: the compiler then calls __tsan_read4 and its kin at every access, and those are ours. */
#pragma once
#include "simt.h"

namespace simt
{

void race_launch();                 /* a launch begins */
void race_block(uint64_t index);    /* a block begins */
void race_barrier();                /* all threads of the block have met */
void race_warp_sync(uint32_t mask); /* those lanes of the running warp have met in __syncwarp */
enum access { ACCESS_READ, ACCESS_WRITE, ACCESS_ATOMIC };
void race_access(const void *p, size_t bytes, enum access kind); /* by the running thread */
/* A copy (src NULL: a fill) by the running stream operation. */
void race_copy(void *dst, const void *src, size_t bytes);
void race_range(void *p, size_t bytes, bool write);
bool race_active();

} // namespace simt
