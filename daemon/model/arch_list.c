/* arch_list.c: the model families of this build, one line each. */
#include "arch.h"
#include <string.h>

static const struct arch *const list[] = {
    &arch_llama,
    &arch_qwen2,
    &arch_qwen3,
};

const struct arch *arch_at(unsigned i)
{
    return i < ARRAY_LEN(list) ? list[i] : NULL;
}

const struct arch *arch_find(struct gguf_str name)
{
    for (size_t i = 0; i < ARRAY_LEN(list); i++)
        if (strlen(list[i]->name) == name.len && memcmp(list[i]->name, name.s, name.len) == 0)
            return list[i];
    return NULL;
}
