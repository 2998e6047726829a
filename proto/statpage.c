/* statpage.c: see statpage.h. Everything on the page is moved in 8-byte words by atomic
 * accesses, so that a torn read is detected and never undefined. A word is stored with release
 * after `sequence` became odd, and loaded with acquire before `sequence` is looked at again:
 * whoever saw one new word sees the odd number. (No fences: ThreadSanitizer does not model them.)
 */
#include "statpage.h"
#include <string.h>

static const struct stat_info infos[N_STATS] = {
#define STAT(name_, kind_, unit_, text_)                                                           \
    {.name = #name_,                                                                               \
     .text = text_,                                                                                \
     .kind = STAT_##kind_,                                                                         \
     .unit = STAT_##unit_,                                                                         \
     .per_user = (text_)[0] == '*'},
#include "stats.tbl"
#undef STAT
};

const struct stat_info *stat_info(unsigned id)
{
    return id < N_STATS ? &infos[id] : NULL;
}

size_t statpage_bytes(uint32_t entries_max)
{
    size_t n = STATPAGE_ENTRIES_OFFSET + (size_t)entries_max * sizeof(struct stat_entry);
    return (n + 4095) & ~(size_t)4095;
}

void statpage_init(struct statpage *p, uint32_t uid, uint32_t entries_max)
{
    atomic_store(&p->abi, STATPAGE_ABI);
    atomic_store(&p->n_counters, N_STATS);
    atomic_store(&p->entry_bytes, sizeof(struct stat_entry));
    atomic_store(&p->entries_max, entries_max);
    atomic_store(&p->uid, uid);
    atomic_store(&p->magic, STATPAGE_MAGIC);
}

static void words_put(_Atomic uint64_t *to, const void *from, size_t bytes)
{
    const unsigned char *at = from;
    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t w;
        memcpy(&w, at + 8 * i, 8);
        atomic_store_explicit(&to[i], w, memory_order_release);
    }
}

static void words_get(void *to, const _Atomic uint64_t *from, size_t bytes)
{
    unsigned char *at = to;
    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t w = atomic_load_explicit(&from[i], memory_order_acquire);
        memcpy(at + 8 * i, &w, 8);
    }
}

#define ENTRIES_WORD ((STATPAGE_ENTRIES_OFFSET - STATPAGE_COUNTERS_OFFSET) / 8)

void statpage_write(struct statpage *p, uint64_t now_micros, const uint64_t counters[N_STATS],
                    const struct stat_entry *entries, uint32_t n_entries)
{
    uint32_t max = atomic_load_explicit(&p->entries_max, memory_order_relaxed);
    uint64_t s = atomic_load_explicit(&p->sequence, memory_order_relaxed);
    if (n_entries > max)
        n_entries = max;
    atomic_store_explicit(&p->sequence, s + 1, memory_order_relaxed);
    atomic_store_explicit(&p->now_micros, now_micros, memory_order_release);
    atomic_store_explicit(&p->n_entries, n_entries, memory_order_release);
    words_put(p->words, counters, 8 * N_STATS);
    if (n_entries > 0)
        words_put(p->words + ENTRIES_WORD, entries, n_entries * sizeof *entries);
    atomic_store_explicit(&p->sequence, s + 2, memory_order_release);
}

static int refuse(int code, const char **why, const char *text)
{
    if (why != NULL)
        *why = text;
    return code;
}

int statpage_read(const struct statpage *p, size_t mapped_bytes, struct statpage_copy *ret,
                  struct stat_entry *entries, uint32_t max, const char **why)
{
    if (mapped_bytes < STATPAGE_ENTRIES_OFFSET || atomic_load(&p->magic) != STATPAGE_MAGIC ||
        atomic_load(&p->abi) != STATPAGE_ABI)
        return refuse(WIRE_EPROTOCOL, why, "stats page: wrong magic or layout version");
    uint32_t n_counters = atomic_load(&p->n_counters), stride = atomic_load(&p->entry_bytes);
    uint32_t entries_max = atomic_load(&p->entries_max);
    if (STATPAGE_COUNTERS_OFFSET + 8ull * n_counters > STATPAGE_ENTRIES_OFFSET ||
        stride < sizeof *entries || stride % 8 != 0 || entries_max > STATPAGE_ENTRIES_MAX ||
        STATPAGE_ENTRIES_OFFSET + (uint64_t)stride * entries_max > mapped_bytes)
        return refuse(WIRE_EPROTOCOL, why, "stats page: parts larger than the page");
    struct statpage_copy copy;
    for (int i = 0; i < STATPAGE_TRIES; i++) {
        uint64_t s = atomic_load_explicit(&p->sequence, memory_order_acquire);
        memset(&copy, 0, sizeof copy);
        copy.uid = atomic_load(&p->uid);
        copy.now_micros = atomic_load_explicit(&p->now_micros, memory_order_acquire);
        uint64_t n = atomic_load_explicit(&p->n_entries, memory_order_acquire);
        copy.n_entries = n > entries_max ? entries_max : (uint32_t)n;
        words_get(copy.counters, p->words, 8 * (n_counters < N_STATS ? n_counters : N_STATS));
        for (uint32_t k = 0; k < copy.n_entries && k < max; k++)
            words_get(&entries[k], p->words + ENTRIES_WORD + (size_t)k * (stride / 8),
                      sizeof *entries);
        if (s % 2 == 0 && atomic_load_explicit(&p->sequence, memory_order_relaxed) == s) {
            *ret = copy;
            return WIRE_OK;
        }
    }
    return refuse(WIRE_EBUSY, why, "stats page: being written all the time");
}
