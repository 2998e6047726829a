/* asan_wide.c: vector accesses under AddressSanitizer. gcc calls __asan_loadN and __asan_storeN for those of 32 and 64 bytes, and the
 * runtime's walk over their shadow took most of a sanitized test's time. Here the shadow bytes are looked at at once: all zero is a good
 * access (a shadow byte stands for 8 bytes, and 0 says that all of them may be touched); whatever else goes to the runtime, which knows
 * and reports. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

void *__asan_region_is_poisoned(void *at, size_t n);
void __asan_report_load_n(void *at, size_t n);
void __asan_report_store_n(void *at, size_t n);
void __asan_loadN(uintptr_t at, size_t n);
void __asan_storeN(uintptr_t at, size_t n);

#define SHADOW(at) (((at) >> 3) + 0x7fff8000u) /* x86-64 Linux */

/* Whether nothing of n bytes is poisoned; 0: nobody knows. The last shadow byte is one more when they begin within eight. */
static inline int clean(uintptr_t at, size_t n)
{
    const uint8_t *first = (const uint8_t *)SHADOW(at), *last = (const uint8_t *)SHADOW(at + n - 1);
    uint64_t a;
    uint32_t b;
    if (n == 64) {
        memcpy(&a, first, 8);
        return (a | *last) == 0;
    }
    if (n == 32) {
        memcpy(&b, first, 4);
        return (b | *last) == 0;
    }
    return 0;
}

void __asan_loadN(uintptr_t at, size_t n)
{
    if (!clean(at, n) && __asan_region_is_poisoned((void *)at, n))
        __asan_report_load_n((void *)at, n);
}

void __asan_storeN(uintptr_t at, size_t n)
{
    if (!clean(at, n) && __asan_region_is_poisoned((void *)at, n))
        __asan_report_store_n((void *)at, n);
}
