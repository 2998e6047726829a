/* rt.h: the runtime calls that the backend uses: CUDA's own names, from the toolkit's headers or, in the shim's build
 * (-DBC_SIMT, tests/simt/include first on the path), from the shim's headers of the same names.
 *
 * The driver's calls for virtual memory come through the runtime (rt_driver_open), so that nothing links libcuda: the
 * shared object loads on a machine without a driver and can then say so. */
#ifndef BACKCAST_CUDA_RT_H
#define BACKCAST_CUDA_RT_H
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

struct rt_driver {
    CUresult (*address_reserve)(CUdeviceptr *ret, size_t bytes, size_t align, CUdeviceptr at,
                                unsigned long long flags);
    CUresult (*address_free)(CUdeviceptr at, size_t bytes);
    CUresult (*create)(CUmemGenericAllocationHandle *ret, size_t bytes,
                       const CUmemAllocationProp *prop, unsigned long long flags);
    CUresult (*release)(CUmemGenericAllocationHandle handle);
    CUresult (*map)(CUdeviceptr at, size_t bytes, size_t offset,
                    CUmemGenericAllocationHandle handle, unsigned long long flags);
    CUresult (*unmap)(CUdeviceptr at, size_t bytes);
    CUresult (*set_access)(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *desc, size_t n);
    CUresult (*granularity)(size_t *ret, const CUmemAllocationProp *prop,
                            CUmemAllocationGranularity_flags option);
};

/* Fills the table; an error names (in *missing) the first call that the driver lacks. The versions are those in which
 * the calls came with today's signatures (CUDA 10.2). */
static inline cudaError_t rt_driver_open(struct rt_driver *ret, const char **missing)
{
    struct rt_driver d;
    const struct {
        const char *name;
        void **at;
    } calls[] = {
        {"cuMemAddressReserve", (void **)&d.address_reserve},
        {"cuMemAddressFree", (void **)&d.address_free},
        {"cuMemCreate", (void **)&d.create},
        {"cuMemRelease", (void **)&d.release},
        {"cuMemMap", (void **)&d.map},
        {"cuMemUnmap", (void **)&d.unmap},
        {"cuMemSetAccess", (void **)&d.set_access},
        {"cuMemGetAllocationGranularity", (void **)&d.granularity},
    };
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
        cudaError_t e = cudaGetDriverEntryPointByVersion(calls[i].name, calls[i].at, 10020,
                                                         cudaEnableDefault, &found);
        if (e != cudaSuccess || found != cudaDriverEntryPointSuccess) {
            *missing = calls[i].name;
            return e != cudaSuccess ? e : cudaErrorNotSupported;
        }
    }
    *ret = d;
    return cudaSuccess;
}
#endif
