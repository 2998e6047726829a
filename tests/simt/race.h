/* race.h: what the race detector is told (race.cc).
 *
 * It sees plain accesses only where kernels are compiled with -fsanitize=thread: the compiler then calls __tsan_read4 and
 * its kin at every access, and those are ours (hooks.cc), not ThreadSanitizer's. Without such kernels it sleeps. */
#pragma once
#include "simt.h"

namespace simt
{

enum access { ACCESS_READ, ACCESS_WRITE, ACCESS_ATOMIC };

bool race_active();
void race_activate(); /* an instrumented kernel is in the program */

/* by exec.cc and warp.cc */
void race_launch();                 /* a launch begins */
void race_block(uint64_t index);    /* a block begins */
void race_barrier();                /* all threads of the block have met */
void race_warp_sync(uint32_t mask); /* those lanes of the running warp have met in __syncwarp */
void race_access(const void *p, size_t bytes, enum access kind); /* by the running thread */

/* by copies and cuBLAS: the running stream operation as a whole */
void race_range(const void *p, size_t bytes, enum access kind);
/* the memory there is new: nobody has written it */
void race_forget(const void *p, size_t bytes);

} // namespace simt
