/* memory.h: inside the shim: device memory (memory.cc). */
#pragma once
#include "simt.h"

namespace simt
{

/* What lies at p, in words, for reports. */
void heap_tell(const void *p, char *text, size_t bytes);
/* Bytes from p to the end of the allocation that p lies in; 0 if it lies in none. */
size_t heap_room(const void *p);

} // namespace simt
