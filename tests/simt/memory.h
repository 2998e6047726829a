/* memory.h: inside the shim: device memory and pinned host memory (memory.cc, vmm.cc). */
#pragma once
#include <map>
#include "simt.h"

namespace simt
{

enum block_kind {
    BLOCK_MALLOC, /* cudaMalloc */
    BLOCK_MAPPED, /* a mapped piece of a reserved range */
    BLOCK_PINNED, /* host memory that the device may read and write: never closed to the host */
};

/* One piece of memory that kernels may touch. */
struct block {
    enum block_kind kind;
    char *p;
    size_t bytes;
    char *map; /* whole pages around it */
    size_t map_bytes;
    bool can_access; /* BLOCK_MAPPED: cuMemSetAccess has been called */
    bool registered; /* BLOCK_PINNED: memory of the caller's own */
    uint64_t handle; /* BLOCK_MAPPED */
};

struct reserved_range {
    size_t bytes;
};

struct physical { /* of cuMemCreate: a piece of one memory file */
    size_t offset, bytes;
    unsigned n_maps;
    bool released;
};

struct heap {
    std::map<char *, block> blocks; /* by p */
    std::map<char *, size_t> freed; /* device memory that was, for reports */
    std::map<char *, reserved_range> ranges;
    std::map<uint64_t, physical> physicals;
    std::multimap<size_t, size_t> holes; /* of the memory file: bytes -> offset */
    uint64_t next_handle;
    int poison; /* memfd of POISON_BYTES of 0xff, -1 until needed: what large blocks start as */
    int file;   /* memfd of the mapped pieces, -1 until needed */
    size_t file_bytes;
    char *space, *space_end,
        *next; /* address space of the device; addresses are never used twice */
    size_t bytes_used;
    bool is_open; /* device memory has its rights now */
};

heap *heap_get();
/* NULL: device_bytes or address space would be exceeded. */
void *heap_alloc(size_t bytes);
bool heap_free(void *p); /* false: p is no allocation */
void *heap_alloc_pinned(size_t bytes);
bool heap_free_pinned(void *p);
bool heap_register(void *p, size_t bytes);
bool heap_unregister(void *p);
char *heap_space(size_t bytes, size_t align); /* address space with guards on both sides */

/* Gives device memory its rights, and takes them away. */
void heap_open();
void heap_close();

/* The block that p lies in, or NULL. */
const block *heap_find(const void *p);
/* Bytes from p to the end of the block that p lies in; 0 if it lies in none. */
size_t heap_room(const void *p);
/* What lies at p, in words, for reports. */
void heap_tell(const void *p, char *text, size_t bytes);
/* Has anything been written just outside a block? Reports. */
void heap_check();
void block_guard(const block &b);

} // namespace simt
