/* arithmetic.c: the identity of the numbers: what a cached key or value depends on beside the weights
 * and the tokens. Two runs of equal identity compute the same bits; of different ones, perhaps not.
 *
 * It is a hash (FNV-1a) of the backend's and the instruction set's names, of the bits to which products
 * round their inputs, and of the build: the ids
 * that the linker gave this program and every library of ours that it has loaded. */
#include "core.h"
#include <elf.h>
#include <link.h>
#include <string.h>

#define FNV_START 0xcbf29ce484222325u
#define FNV_PRIME 0x100000001b3u

static uint64_t hash(uint64_t h, const void *bytes, size_t n)
{
    const uint8_t *p = bytes;
    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * FNV_PRIME;
    return h;
}

/* The notes of one segment: only a build id counts. */
static uint64_t hash_notes(uint64_t h, const uint8_t *at, size_t n)
{
    while (n >= sizeof(ElfW(Nhdr))) {
        ElfW(Nhdr) note;
        memcpy(&note, at, sizeof note);
        size_t name = (note.n_namesz + 3) & ~(size_t)3, desc = (note.n_descsz + 3) & ~(size_t)3;
        if (name > n - sizeof note || desc > n - sizeof note - name)
            break;
        if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 &&
            memcmp(at + sizeof note, "GNU", 4) == 0)
            h = hash(h, at + sizeof note + name, note.n_descsz);
        at += sizeof note + name + desc;
        n -= sizeof note + name + desc;
    }
    return h;
}

static int on_object(struct dl_phdr_info *info, size_t size, void *arg)
{
    uint64_t *h = arg;
    (void)size;
    bool program = info->dlpi_name == NULL || info->dlpi_name[0] == '\0';
    if (!program && strstr(info->dlpi_name, "libbackcast") == NULL)
        return 0;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_NOTE) {
            uintptr_t at = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            *h = hash_notes(*h, (const uint8_t *)at, info->dlpi_phdr[i].p_memsz);
        }
    return 0;
}

uint64_t models_arithmetic(const struct model_ref *m)
{
    uint64_t h = FNV_START;
    h = hash(h, m->kn->name, strlen(m->kn->name) + 1);
    h = hash(h, m->kn->isa, strlen(m->kn->isa) + 1);
    h = hash(h, &m->kn->activations, sizeof m->kn->activations);
    dl_iterate_phdr(on_object, &h);
    return h;
}
