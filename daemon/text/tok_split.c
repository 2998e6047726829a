/* tok_split.c: cuts text into words before merging; no merge crosses a word's edge.
 *
 * A splitter is a list of regular expressions. Each one cuts every piece that the one before left
 * into matches and the gaps between them; both go on to the next:
 *
 *   "abc 12"   \p{N}      ->  "abc " | "1" | "2"
 *              GPT-2's    ->  "abc" | " " | "1" | "2"
 *
 * The names are those of tokenizer.ggml.pre. White space is Unicode's White_Space property, spelled
 * out, because PCRE2's \s also takes U+180E. Every expression is linear: none can start over inside
 * a run that it has just scanned in vain. PCRE2 compiles to machine code where it may; where it may
 * not (no executable memory), its interpreter gives the same words.
 */
#include "tok_internal.h"
#include "utf8.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WS "\\t-\\r\\x{85}\\p{Z}"                  /* inside brackets */
#define WS_TAIL "[" WS "]+(?![^" WS "])|[" WS "]+" /* a run of space, but for one before a word */
#define NEWLINES "[" WS "]*[\\r\\n]+|"
#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define HAN_KANA "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{30ff}]+"
#define CJK "[\\x{800}-\\x{9fa5}\\x{ac00}-\\x{d7ff}]+"

#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" WS "\\p{L}\\p{N}]+|" WS_TAIL
/* digits: how many digits make a word */
#define CL100K(digits)                                                                             \
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits "| ?[^" WS                               \
                 "\\p{L}\\p{N}]+[\\r\\n]*|" NEWLINES WS_TAIL
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define O200K(contractions, digits)                                                                \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" contractions "|[^\\r\\n\\p{L}\\p{N}]?" UPPER      \
    "+" LOWER "*" contractions "|" digits "| ?[^" WS "\\p{L}\\p{N}]+[\\r\\n/]*|" NEWLINES WS_TAIL

/* Letters of the scripts with upper and lower case, as DeepSeek's first tokeniser lists them. */
#define CASED                                                                                      \
    "A-Za-z\\x{b5}\\x{c0}-\\x{d6}\\x{d8}-\\x{f6}\\x{f8}-\\x{1ba}\\x{1bc}-\\x{1bf}"                 \
    "\\x{1c4}-\\x{293}\\x{295}-\\x{2af}\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37b}-\\x{37d}"         \
    "\\x{37f}\\x{386}\\x{388}-\\x{38a}\\x{38c}\\x{38e}-\\x{3a1}\\x{3a3}-\\x{3f5}"                  \
    "\\x{3f7}-\\x{481}\\x{48a}-\\x{52f}\\x{531}-\\x{556}\\x{10a0}-\\x{10c5}"                       \
    "\\x{13a0}-\\x{13f5}\\x{13f8}-\\x{13fd}\\x{1c90}-\\x{1cba}\\x{1cbd}-\\x{1cbf}"                 \
    "\\x{1d00}-\\x{1d2b}\\x{1d6b}-\\x{1d77}\\x{1d79}-\\x{1d9a}\\x{1e00}-\\x{1f15}"                 \
    "\\x{1f18}-\\x{1f1d}\\x{1f20}-\\x{1f45}\\x{1f48}-\\x{1f4d}\\x{1f50}-\\x{1f57}"                 \
    "\\x{1f59}\\x{1f5b}\\x{1f5d}\\x{1f5f}-\\x{1f7d}\\x{1f80}-\\x{1fb4}\\x{1fb6}-\\x{1fbc}"         \
    "\\x{1fbe}\\x{1fc2}-\\x{1fc4}\\x{1fc6}-\\x{1fcc}\\x{1fd0}-\\x{1fd3}"                           \
    "\\x{1fd6}-\\x{1fdb}\\x{1fe0}-\\x{1fec}\\x{1ff2}-\\x{1ff4}\\x{1ff6}-\\x{1ffc}"                 \
    "\\x{2102}\\x{2107}\\x{210a}-\\x{2113}\\x{2115}\\x{2119}-\\x{211d}\\x{2124}\\x{2126}"          \
    "\\x{2128}\\x{212a}-\\x{212d}\\x{212f}-\\x{2134}\\x{2139}\\x{213c}-\\x{213f}"                  \
    "\\x{2145}-\\x{2149}\\x{214e}\\x{2183}\\x{2184}\\x{2c00}-\\x{2c7b}\\x{2c7e}-\\x{2ce4}"         \
    "\\x{2ceb}-\\x{2cee}\\x{2cf2}\\x{2cf3}\\x{a640}-\\x{a66d}\\x{a680}-\\x{a69b}"                  \
    "\\x{a722}-\\x{a76f}\\x{a771}-\\x{a787}\\x{a78b}-\\x{a78e}\\x{ab70}-\\x{abbf}"                 \
    "\\x{fb00}-\\x{fb06}\\x{fb13}-\\x{fb17}\\x{ff21}-\\x{ff3a}\\x{ff41}-\\x{ff5a}"                 \
    "\\x{10400}-\\x{1044f}\\x{104b0}-\\x{104d3}\\x{104d8}-\\x{104fb}\\x{10c80}-\\x{10cb2}"         \
    "\\x{10cc0}-\\x{10cf2}\\x{118a0}-\\x{118df}\\x{1e900}-\\x{1e943}"

static const char *const re_gpt2[] = {GPT2, NULL};
static const char *const re_smollm[] = {"\\p{N}", GPT2, NULL};
static const char *const re_falcon[] = {"[\\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]", NULL};
static const char *const re_default[] = {"[\\p{P}$+<=>^~|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]",
                                         NULL};
static const char *const re_llama3[] = {CL100K("\\p{N}{1,3}"), NULL};
static const char *const re_qwen2[] = {CL100K("\\p{N}"), NULL};
static const char *const re_minicpm5[] = {"\\p{N}{1,3}", CL100K("\\p{N}+"), NULL};
static const char *const re_qwen35[] = {CONTRACTIONS
                                        "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^" WS
                                        "\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" NEWLINES WS_TAIL,
                                        NULL};
static const char *const re_seed_coder[] = {CONTRACTIONS
                                            "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^" WS
                                            "\\p{L}\\p{N}\\r\\n]+|" NEWLINES WS_TAIL,
                                            NULL};
static const char *const re_tekken[] = {O200K("", "\\p{N}"), NULL};
static const char *const re_gpt4o[] = {O200K(CONTRACTIONS "?", "\\p{N}{1,3}"), NULL};
static const char *const re_deepseek_coder[] = {"[\\r\\n]", "[" WS "]?\\p{L}+", "[" WS "]?\\p{P}+",
                                                CJK,        "\\p{N}",           NULL};
static const char *const re_deepseek_llm[] = {
    "[\\r\\n]",
    "[" WS "]?[" CASED "]+",
    "[" WS
    "]?[!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3000}-\\x{3002}]+",
    "(?<![" WS "])[" WS "]+$",
    CJK,
    "\\p{N}+",
    NULL};
static const char *const re_deepseek_v3[] = {
    "\\p{N}{1,3}", HAN_KANA,
    "[!-/:-@\\[-`{-~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
    "?[\\p{P}\\p{S}]+[\\r\\n]*|" NEWLINES WS_TAIL,
    NULL};

static const struct splitter splitters[] = {
    {"gpt-2", false, false, re_gpt2},
    {"smollm", false, false, re_smollm},
    {"falcon", false, false, re_falcon},
    {"default", false, false, re_default},
    {"llama-bpe", true, true, re_llama3},
    {"dbrx", false, false, re_llama3},
    {"qwen2", false, false, re_qwen2},
    {"qwen35", false, false, re_qwen35},
    {"minicpm5", true, false, re_minicpm5},
    {"seed-coder", false, false, re_seed_coder},
    {"tekken", true, true, re_tekken},
    {"gpt-4o", false, false, re_gpt4o},
    {"deepseek-coder", false, false, re_deepseek_coder},
    {"deepseek-llm", false, false, re_deepseek_llm},
    {"deepseek-v3", false, false, re_deepseek_v3},
};

/* Other names under which files ask for a splitter of the table above. */
static const struct {
    const char *alias, *name;
} aliases[] = {
    {"phi-2", "gpt-2"},           {"mpt", "gpt-2"},          {"olmo", "gpt-2"},
    {"gigachat", "gpt-2"},        {"a.x-4.0", "gpt-2"},      {"mellum", "gpt-2"},
    {"exaone4", "gpt-2"},         {"trillion", "gpt-2"},     {"granite-docling", "gpt-2"},
    {"modern-bert", "gpt-2"},     {"starcoder", "smollm"},   {"refact", "smollm"},
    {"command-r", "smollm"},      {"codeshell", "smollm"},   {"exaone", "smollm"},
    {"minerva-7b", "smollm"},     {"mellum2", "smollm"},     {"llama3", "llama-bpe"},
    {"llama-v3", "llama-bpe"},    {"falcon3", "llama-bpe"},  {"falcon-h1", "llama-bpe"},
    {"pixtral", "llama-bpe"},     {"midm-2.0", "llama-bpe"}, {"lfm2", "llama-bpe"},
    {"smaug-bpe", "dbrx"},        {"stablelm2", "qwen2"},    {"deepseek-r1-qwen", "qwen2"},
    {"kormo", "qwen2"},           {"f2llmv2", "qwen2"},      {"megrez", "qwen2"},
    {"hunyuan", "qwen2"},         {"solar-open", "qwen2"},   {"grok-2", "qwen2"},
    {"llama4", "gpt-4o"},         {"kanana2", "gpt-4o"},     {"hunyuan-dense", "deepseek-v3"},
    {"joyai-llm", "deepseek-v3"},
};

static bool same(const char *name, const char *s, size_t n)
{
    return strlen(name) == n && memcmp(name, s, n) == 0;
}

const struct splitter *splitter_find(const char *name, size_t len)
{
    for (size_t i = 0; i < ARRAY_LEN(aliases); i++)
        if (same(aliases[i].alias, name, len)) {
            name = aliases[i].name;
            len = strlen(name);
            break;
        }
    for (size_t i = 0; i < ARRAY_LEN(splitters); i++)
        if (same(splitters[i].name, name, len))
            return &splitters[i];
    return NULL;
}

int splitter_compile(struct tok *t, struct err *e)
{
    for (; t->splitter->stages[t->n_stages] != NULL; t->n_stages++) {
        unsigned i = t->n_stages;
        int code;
        PCRE2_SIZE at, size = 0;
        bc_assert(i < TOK_STAGES_MAX);
        t->stages[i] =
            pcre2_compile((PCRE2_SPTR)t->splitter->stages[i], PCRE2_ZERO_TERMINATED,
                          PCRE2_UTF | PCRE2_UCP | PCRE2_DOLLAR_ENDONLY, &code, &at, NULL);
        if (t->stages[i] == NULL)
            return err_set(e, BC_EINTERNAL, "tokenizer.ggml.pre",
                           "splitter %s: expression %u does not compile: PCRE2 error %d at %zu",
                           t->splitter->name, i, code, at);
        t->jit[i] = pcre2_jit_compile(t->stages[i], PCRE2_JIT_COMPLETE) == 0;
        if (pcre2_pattern_info(t->stages[i], PCRE2_INFO_SIZE, &size) == 0)
            t->bytes += size;
        if (t->jit[i] && pcre2_pattern_info(t->stages[i], PCRE2_INFO_JITSIZE, &size) == 0)
            t->bytes += size;
    }
    return BC_OK;
}

struct split {
    const struct tok *t;
    pcre2_match_data *md[TOK_STAGES_MAX];
    pcre2_match_context *mctx;
    pcre2_jit_stack *stack;
    int (*word)(void *, const char *, size_t);
    void *arg;
    struct err *e;
};

int split_open(struct split **ret, const struct tok *t, struct err *e)
{
    struct split *s = calloc(1, sizeof *s);
    bool ok = s != NULL;
    if (!ok)
        return err_nomem(e, sizeof *s);
    s->t = t;
    s->mctx = pcre2_match_context_create(NULL);
    s->stack = pcre2_jit_stack_create(32 << 10, 1 << 20, NULL); /* NULL: no JIT in this PCRE2 */
    ok = s->mctx != NULL;
    for (unsigned i = 0; i < t->n_stages; i++) {
        s->md[i] = pcre2_match_data_create(1, NULL);
        ok = ok && s->md[i] != NULL;
    }
    if (!ok) {
        split_close(&s);
        return err_nomem(e, sizeof *s);
    }
    if (s->stack != NULL)
        pcre2_jit_stack_assign(s->mctx, NULL, s->stack);
    *ret = s;
    return BC_OK;
}

void split_close(struct split **sp)
{
    struct split *s = *sp;
    if (s == NULL)
        return;
    for (unsigned i = 0; i < TOK_STAGES_MAX; i++)
        pcre2_match_data_free(s->md[i]);
    pcre2_match_context_free(s->mctx);
    pcre2_jit_stack_free(s->stack);
    free(s);
    *sp = NULL;
}

/* 1: a match at [ret_from, ret_to); 0: none; negative: an error code. */
static int match_next(struct split *s, unsigned stage, const char *text, size_t n, size_t from,
                      size_t *ret_from, size_t *ret_to)
{
    const struct tok *t = s->t;
    PCRE2_SPTR p = (PCRE2_SPTR)text;
    int rc = t->jit[stage] ? pcre2_jit_match(t->stages[stage], p, n, from, 0, s->md[stage], s->mctx)
                           : pcre2_match(t->stages[stage], p, n, from, PCRE2_NO_UTF_CHECK,
                                         s->md[stage], s->mctx);
    if (rc == PCRE2_ERROR_NOMATCH)
        return 0;
    if (rc < 0)
        return err_set(s->e, rc == PCRE2_ERROR_NOMEMORY ? BC_ENOMEM : BC_EUNSUPPORTED, "text",
                       "splitter %s gave up at byte %zu of a piece of %zu bytes: PCRE2 error %d",
                       t->splitter->name, from, n, rc);
    const PCRE2_SIZE *ov = pcre2_get_ovector_pointer(s->md[stage]);
    bc_assert(ov[0] < ov[1] && ov[0] >= from && ov[1] <= n); /* no expression matches nothing */
    *ret_from = ov[0];
    *ret_to = ov[1];
    return 1;
}

static int split_stage(struct split *s, unsigned stage, const char *text, size_t n)
{
    size_t at = 0, from = 0, to = 0;
    int rc;
    if (stage == s->t->n_stages)
        return s->word(s->arg, text, n);
    while (at < n) {
        rc = match_next(s, stage, text, n, at, &from, &to);
        if (rc < 0)
            return rc;
        if (rc == 0)
            break;
        rc = from > at ? split_stage(s, stage + 1, text + at, from - at) : BC_OK;
        if (rc == BC_OK)
            rc = split_stage(s, stage + 1, text + from, to - from);
        if (rc != BC_OK)
            return rc;
        at = to;
    }
    return at < n ? split_stage(s, stage + 1, text + at, n - at) : BC_OK;
}

int split_text(struct split *s, const char *text, size_t n,
               int (*word)(void *, const char *, size_t), void *arg, struct err *e)
{
    size_t limit =
        10000000 + 32 * n; /* linear: a runaway expression ends in an error, not in hours */
    s->word = word;
    s->arg = arg;
    s->e = e;
    pcre2_set_match_limit(s->mctx, (uint32_t)BC_MIN(limit, (size_t)UINT32_MAX));
    return split_stage(s, 0, text, n);
}
