/* amx.h: may this process use tiles, and do they compute what they should? */
#ifndef BACKCAST_CPU_AMX_H
#define BACKCAST_CPU_AMX_H
#include <stdbool.h>
#include <stddef.h>
#include "kernels.h"

/* Asks the kernel for the tile registers: once for the whole process, threads to come included. false: why says. */
bool amx_permit(char *why, size_t why_len);
/* Products of every form by mat against kn_int8.h's plain ones, to the bit, on this machine. false: why says. */
bool amx_proves(const struct matmul_kernels *mat, char *why, size_t why_len);
#endif
