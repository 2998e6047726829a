/* race.cc */
#include "race.h"

namespace simt
{
void race_launch() {}
void race_block(uint64_t) {}
void race_barrier() {}
void race_warp_sync(uint32_t) {}
void race_access(const void *, size_t, enum access) {}
bool race_active()
{
    return false;
}
} // namespace simt
namespace simt
{
void race_copy(void *, const void *, size_t) {}
void race_range(void *, size_t, bool) {}
void atomic_begin(const void *p, size_t bytes)
{
    check_access(p, bytes, bytes, "atomic");
}
void atomic_end() {}
void fence() {}
} // namespace simt
