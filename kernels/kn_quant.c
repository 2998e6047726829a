/* kn_quant.c: the table of tensor types. */
#include "kn_quant.h"
#include <string.h>

static const struct kn_type_info types[] = {
    {KN_F32, "F32", 1, 4},         {KN_F16, "F16", 1, 2},           {KN_Q4_0, "Q4_0", 32, 18},
    {KN_Q4_1, "Q4_1", 32, 20},     {KN_Q5_0, "Q5_0", 32, 22},       {KN_Q5_1, "Q5_1", 32, 24},
    {KN_Q8_0, "Q8_0", 32, 34},     {KN_Q2_K, "Q2_K", 256, 84},      {KN_Q3_K, "Q3_K", 256, 110},
    {KN_Q4_K, "Q4_K", 256, 144},   {KN_Q5_K, "Q5_K", 256, 176},     {KN_Q6_K, "Q6_K", 256, 210},
    {KN_IQ4_NL, "IQ4_NL", 32, 18}, {KN_IQ4_XS, "IQ4_XS", 256, 136}, {KN_I32, "I32", 1, 4},
    {KN_BF16, "BF16", 1, 2},
};

const struct kn_type_info *kn_type_find(uint32_t type)
{
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if ((uint32_t)types[i].type == type)
            return &types[i];
    return NULL;
}

const struct kn_type_info *kn_type_named(const char *name)
{
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (strcmp(types[i].name, name) == 0)
            return &types[i];
    return NULL;
}
