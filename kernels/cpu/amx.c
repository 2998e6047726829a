/* amx.c: tiles before they are used. Linux hands out the 8 KiB of tile registers only on request, and few processors
 * have them: so the machine shows that its products are right before it gets real ones. It does so in a process of its own:
 * a virtual machine that announces tiles and faults on them (this has been seen of others' programs) costs that process. */
#include "amx.h"
#include "kn_assert.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define REQ_XCOMP_PERM 0x1023 /* of arch_prctl */
#define XFEATURE_XTILEDATA 18

bool amx_permit(char *why, size_t why_len)
{
    if (syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)
        return true;
    snprintf(why, why_len, "the system does not give out AMX tiles: %s", strerror(errno));
    return false;
}

/* ---- the proof --------------------------------------------------------------------------------------- */

#define PROOF_BLOCKS 5 /* odd: pairs of blocks and a single one */

struct proof {
    struct tile_room tiles;
    struct act_wide wide[PROOF_BLOCKS];
    struct act_block x[PROOF_BLOCKS]; /* the high bytes alone */
    uint8_t codes[PROOF_BLOCKS * 512];
    float d[PROOF_BLOCKS * CPU_LANES], m[PROOF_BLOCKS * CPU_LANES];
    float got[CPU_ROWS][CPU_LANES], want[CPU_ROWS][CPU_LANES];
};

static uint32_t bits(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static float small(uint64_t *state)
{
    return (float)((int)(bits(state) % 2001) - 1000) * 0x1p-12f;
}

static void proof_row(struct act_block *x, struct act_wide *wide, uint32_t r, uint64_t *state)
{
    int32_t high = 0, low = 0;
    for (int k = 0; k < KN_INT8_BLOCK; k++) {
        x->a[r][k] = wide->high.a[r][k] = (int8_t)((int)(bits(state) % 255) - 127);
        wide->low[r][k] = (int8_t)((int)(bits(state) % 255) - 127);
        high += x->a[r][k];
        low += wide->low[r][k];
    }
    float da = small(state);
    act_row_set(x, r, da, (const int32_t[2]){high, 0}, false);
    act_row_set(&wide->high, r, da, (const int32_t[2]){KN_INT16_BASE * high, low}, false);
}

static void proof_fill(struct proof *p)
{
    uint64_t state = 1;
    for (size_t i = 0; i < sizeof p->codes; i++)
        p->codes[i] = (uint8_t)bits(&state);
    for (uint32_t i = 0; i < PROOF_BLOCKS * CPU_LANES; i++) {
        p->d[i] = small(&state);
        p->m[i] = small(&state);
    }
    for (int b = 0; b < PROOF_BLOCKS; b++)
        for (uint32_t r = 0; r < CPU_ROWS; r++)
            proof_row(&p->x[b], &p->wide[b], r, &state);
}

/* n rows from `row` on, by mat and by the plain kernel. */
static bool proof_same(struct proof *p, const struct matmul_kernels *mat, struct q8_tile t)
{
    memset(p->got, 0, sizeof p->got);
    memset(p->want, 0, sizeof p->want);
    t.acc = p->want[0];
    matmul_scalar.q8(&t);
    t.acc = p->got[0];
    t.tiles = &p->tiles;
    mat->begin(&p->tiles);
    mat->q8(&t);
    mat->end(&p->tiles);
    return memcmp(p->got, p->want, sizeof p->got) == 0;
}

/* All forms, whole row blocks and parts. */
static bool proof_run(struct proof *p, const struct matmul_kernels *mat, bool wide)
{
    static const int8_t table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
    static const struct {
        enum cpu_form form;
        uint8_t zero;
        bool has_min;
    } forms[] = {{FORM_NIB, 8, false},
                 {FORM_NIB_MIN, 0, true},
                 {FORM_TABLE, 128, false},
                 {FORM_BYTE, 128, false},
                 {FORM_BYTE_MIN, 0, true}};
    bool same = true;
    for (size_t i = 0; same && i < sizeof forms / sizeof forms[0]; i++) {
        struct q8_tile t = {.form = forms[i].form,
                            .zero = forms[i].zero,
                            .table = table,
                            .codes = p->codes,
                            .d = p->d,
                            .m = forms[i].has_min ? p->m : NULL,
                            .n_blocks = PROOF_BLOCKS,
                            .x = wide ? (const void *)p->wide : (const void *)p->x,
                            .wide = wide,
                            .n_rows = CPU_ROWS,
                            .acc_stride = CPU_LANES};
        same = proof_same(p, mat, t);
        t.row = 3;
        t.n_rows = CPU_TILE_ROWS_MIN + 1;
        same = same && proof_same(p, mat, t);
    }
    return same;
}

enum { PROVEN, DISPROVEN };

static void child_run(struct proof *p, const struct matmul_kernels *mat)
{
    static const int faults[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT};
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
        signal(faults[i], SIG_DFL); /* the program's own handlers have no business here */
    _exit(proof_run(p, mat, false) && proof_run(p, mat, true) ? PROVEN : DISPROVEN);
}

bool amx_proves(const struct matmul_kernels *mat, char *why, size_t why_len)
{
    struct proof *p = aligned_alloc(64, (sizeof *p + 63) / 64 * 64);
    pid_t child = -1;
    int status = 0;
    if (p) {
        memset(p, 0, sizeof *p);
        proof_fill(p);
        child = fork(); /* what it may do was granted to this process and is inherited */
        if (child == 0)
            child_run(p, mat);
    }
    while (child > 0 && waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            child = -1;
    free(p);
    if (child < 0)
        snprintf(why, why_len, "AMX tiles could not be tried: %s", strerror(errno));
    else if (WIFSIGNALED(status))
        snprintf(why, why_len, "this machine faults on AMX tiles (signal %d)", WTERMSIG(status));
    else if (WEXITSTATUS(status) != PROVEN)
        snprintf(why, why_len, "this machine's AMX tiles give wrong products");
    else
        return true;
    return false;
}
