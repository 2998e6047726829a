/* runtime.h: inside the shim: what every call of the fake runtime begins with, and the calls that can fail. */
#pragma once
#include <mutex>
#include "cuda.h"
#include "simt.h"

namespace simt
{

/* One call at a time: the world is not made for two threads. */
struct call_lock {
    call_lock();
    ~call_lock();
};

/* The error that the call has to give back at once: a sticky one from before, or an injected one; cudaSuccess: go on. */
cudaError_t call_begin(const char *name);
/* Remembers e for cudaGetLastError and gives it back. */
cudaError_t call_end(cudaError_t e);
/* From now on every call gives back e. */
void stick(cudaError_t e);
bool is_sticky(cudaError_t e);
cudaError_t sticky_error();

void *driver_entry(const char *name); /* vmm.cc */

#define ENTER(name)                                                                                \
    simt::call_lock lock_;                                                                         \
    do {                                                                                           \
        cudaError_t e_ = simt::call_begin(name);                                                   \
        if (e_ != cudaSuccess)                                                                     \
            return simt::call_end(e_);                                                             \
    } while (0)

#define ENTER_DRIVER(name)                                                                         \
    simt::call_lock lock_;                                                                         \
    do {                                                                                           \
        cudaError_t e_ = simt::call_begin(name);                                                   \
        if (e_ != cudaSuccess)                                                                     \
            return (CUresult)e_; /* the driver's numbers are the runtime's where they matter */    \
    } while (0)

} // namespace simt
