/* chat_templates.c: the conversation formats that are known, and how to tell them from a file's
 * template text.
 *
 * A file carries its format as a Jinja program. Running programs from files is no good idea; there
 * are few formats, and their characteristic fragments tell them apart. The first row whose
 * fragments fit counts, so special cases stand above general ones. To add a format: a row here, a
 * conversation in tests/unit/test_chat.c.
 */
#include "chat_internal.h"
#include <stdlib.h>
#include <string.h>

#define BAR "\xef\xbd\x9c" /* U+FF5C, DeepSeek's vertical bar */
#define HEADER(role) "<|start_header_id|>" role "<|end_header_id|>\n\n"
/* Llama 3.1 and later put these lines before any system message. The template's own fixed date is
 * kept, not today's: the same conversation gives the same tokens on any day. */
#define LLAMA31_DATES "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"

static const struct chat_template templates[] = {
    {
        .name = "chatml",
        .needs = {"<|im_start|>", "<|im_end|>"},
        .lacks = {"<|im_sep|>", "<end_of_utterance>"},
        .system_open = "<|im_start|>system\n",
        .system_close = "<|im_end|>\n",
        .user_open = "<|im_start|>user\n",
        .user_close = "<|im_end|>\n",
        .answer_open = "<|im_start|>assistant\n",
        .reply_open = "<|im_start|>assistant\n",
        .reply_close = "<|im_end|>\n",
        .after_end = "\n",
        .think = "<|im_start|>assistant\\n<think>\\n'",
        .fallback = "<|im_start|>system",
        .flags = TEMPLATE_LATE_SYSTEM,
    },
    {
        .name = "llama-3.1",
        .needs = {"<|start_header_id|>", "Cutting Knowledge Date: December 2023", "Today Date: "},
        .system_open = HEADER("system") LLAMA31_DATES,
        .system_close = "<|eot_id|>",
        .user_open = HEADER("user"),
        .user_close = "<|eot_id|>",
        .answer_open = HEADER("assistant"),
        .reply_open = HEADER("assistant"),
        .reply_close = "<|eot_id|>",
        .after_end = "",
        .flags = TEMPLATE_TRIMS | TEMPLATE_ALWAYS,
    },
    {
        .name = "llama-3",
        .needs = {"<|start_header_id|>", "<|eot_id|>"},
        .lacks = {"Cutting Knowledge Date", ">>>"},
        .system_open = HEADER("system"),
        .system_close = "<|eot_id|>",
        .user_open = HEADER("user"),
        .user_close = "<|eot_id|>",
        .answer_open = HEADER("assistant"),
        .reply_open = HEADER("assistant"),
        .reply_close = "<|eot_id|>",
        .after_end = "",
        .flags = TEMPLATE_TRIMS | TEMPLATE_LATE_SYSTEM,
    },
    {
        .name = "deepseek-r1",
        .needs = {"'<" BAR "User" BAR ">' + message['content']", "<" BAR "Assistant" BAR ">"},
        .lacks = {"'<" BAR "User" BAR ">' + message['content'] + ", "if not thinking is defined"},
        .system_open = "",
        .system_close = "",
        .user_open = "<" BAR "User" BAR ">",
        .user_close = "",
        .answer_open = "<" BAR "Assistant" BAR ">",
        .reply_open = "<" BAR "Assistant" BAR ">",
        .reply_close = "{eos}",
        .after_end = "",
        .think = "<" BAR "Assistant" BAR "><think>\\n",
    },
    {
        .name = "llama-2",
        .needs = {"<<SYS>>", "bos_token + '[INST] '"},
        .system_open = "{bos}[INST] <<SYS>>\n",
        .system_close = "\n<</SYS>>\n\n",
        .user_open = "{bos}[INST] ",
        .user_close = " [/INST]",
        .answer_open = "",
        .reply_open = " ",
        .reply_close = " {eos}",
        .after_end = "",
        .flags = TEMPLATE_FOLDS | TEMPLATE_TRIMS | TEMPLATE_ALTERNATES,
    },
    {
        .name = "mistral-v7",
        .needs = {"'[SYSTEM_PROMPT] '", "[INST]"},
        .system_open = "[SYSTEM_PROMPT] ",
        .system_close = "[/SYSTEM_PROMPT]",
        .user_open = "[INST] ",
        .user_close = "[/INST]",
        .answer_open = "",
        .reply_open = " ",
        .reply_close = "{eos}",
        .after_end = "",
        .flags = TEMPLATE_LATE_SYSTEM | TEMPLATE_ALTERNATES,
    },
    {
        .name = "mistral-v7-tekken",
        .needs = {"[SYSTEM_PROMPT]", "[INST]"},
        .system_open = "[SYSTEM_PROMPT]",
        .system_close = "[/SYSTEM_PROMPT]",
        .user_open = "[INST]",
        .user_close = "[/INST]",
        .answer_open = "",
        .reply_open = "",
        .reply_close = "{eos}",
        .after_end = "",
        .flags = TEMPLATE_LATE_SYSTEM | TEMPLATE_ALTERNATES,
    },
    {
        .name = "mistral-v1",
        .needs = {"' [INST] ' + system_message"},
        .system_open = " [INST] ",
        .system_close = "\n\n",
        .user_open = " [INST] ",
        .user_close = " [/INST]",
        .answer_open = "",
        .reply_open = " ",
        .reply_close = "{eos}",
        .after_end = "",
        .flags = TEMPLATE_FOLDS | TEMPLATE_ALTERNATES,
    },
    {
        .name = "mistral-v3-tekken",
        .needs = {"[AVAILABLE_TOOLS]", "\"[INST]\" + message"},
        .system_open = "[INST]",
        .system_close = "\n\n",
        .user_open = "[INST]",
        .user_close = "[/INST]",
        .answer_open = "",
        .reply_open = "",
        .reply_close = "{eos}",
        .after_end = "",
        .flags = TEMPLATE_FOLDS | TEMPLATE_ALTERNATES,
    },
    {
        .name = "mistral-v3",
        .needs = {"[AVAILABLE_TOOLS]", "\"[INST] \" + message"},
        .system_open = "[INST] ",
        .system_close = "\n\n",
        .user_open = "[INST] ",
        .user_close = "[/INST]",
        .answer_open = "",
        .reply_open = " ",
        .reply_close = "{eos}",
        .after_end = "",
        .flags = TEMPLATE_FOLDS | TEMPLATE_ALTERNATES,
    },
    {
        .name = "mistral-v0.1",
        .needs = {"'[INST] ' + message['content'] + ' [/INST]'",
                  "message['content'] + eos_token + ' '"},
        .system_open = "[INST] ",
        .system_close = "\n\n",
        .user_open = "[INST] ",
        .user_close = " [/INST]",
        .answer_open = "",
        .reply_open = "",
        .reply_close = "{eos} ",
        .after_end = " ",
        .flags = TEMPLATE_FOLDS | TEMPLATE_ALTERNATES,
    },
    {
        .name = "mistral",
        .needs = {"'[INST] ' + message['content'] + ' [/INST]'", "message['content'] + eos_token"},
        .system_open = "[INST] ",
        .system_close = "\n\n",
        .user_open = "[INST] ",
        .user_close = " [/INST]",
        .answer_open = "",
        .reply_open = "",
        .reply_close = "{eos}",
        .after_end = "",
        .flags = TEMPLATE_FOLDS | TEMPLATE_ALTERNATES,
    },
    {
        .name = "zephyr",
        .needs = {"'<|user|>\\n' + message['content'] + eos_token", "'<|assistant|>'"},
        .system_open = "<|system|>\n",
        .system_close = "{eos}\n",
        .user_open = "<|user|>\n",
        .user_close = "{eos}\n",
        .answer_open = "<|assistant|>\n",
        .reply_open = "<|assistant|>\n",
        .reply_close = "{eos}\n",
        .after_end = "\n",
        .flags = TEMPLATE_LATE_SYSTEM,
    },
};

const struct chat_template *chat_template_at(unsigned i)
{
    return i < ARRAY_LEN(templates) ? &templates[i] : NULL;
}

bool chat_contains(const char *text, size_t len, const char *fragment)
{
    return memmem(text, len, fragment, strlen(fragment)) != NULL;
}

const struct chat_template *chat_template_match(const char *text, size_t len)
{
    for (size_t i = 0; i < ARRAY_LEN(templates); i++) {
        const struct chat_template *t = &templates[i];
        bool fits = true;
        for (size_t j = 0; j < ARRAY_LEN(t->needs) && t->needs[j] != NULL; j++)
            fits = fits && chat_contains(text, len, t->needs[j]);
        for (size_t j = 0; j < ARRAY_LEN(t->lacks) && t->lacks[j] != NULL; j++)
            fits = fits && !chat_contains(text, len, t->lacks[j]);
        if (fits)
            return t;
    }
    return NULL;
}

/* Copies n bytes of a quoted literal, with its escapes undone. */
static char *unescape(const char *s, size_t n)
{
    char *ret = malloc(n + 1), *out = ret;
    if (ret == NULL)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        char c = s[i];
        if (c == '\\' && i + 1 < n) {
            c = s[++i];
            c = c == 'n' ? '\n' : c == 't' ? '\t' : c;
        }
        *out++ = c;
    }
    *out = 0;
    return ret;
}

/* Length of the literal at s up to close: -1 if the quote ends or an expression begins before. */
static ptrdiff_t literal_len(const char *s, size_t n, char quote, const char *close)
{
    size_t close_len = strlen(close);
    for (size_t i = 0; i + close_len <= n; i++) {
        if (memcmp(s + i, close, close_len) == 0)
            return (ptrdiff_t)i;
        if (quote != 0 && s[i] == '\\')
            i++;
        else if (quote != 0 ? s[i] == quote : s[i] == '{')
            return -1;
    }
    return -1;
}

int chat_literal(const char *text, size_t len, const char *open, const char *close, char **ret)
{
    const char *at = text, *end = text + len;
    size_t open_len = strlen(open);
    *ret = NULL;
    while ((at = memmem(at, (size_t)(end - at), open, open_len)) != NULL) {
        char before = at > text ? at[-1] : 0;
        char quote = before == '\'' || before == '"' ? before : 0;
        const char *s = at += open_len;
        if (end - s >= 1 && s[0] == '\n')
            s++;
        else if (end - s >= 2 && s[0] == '\\' && s[1] == 'n')
            s += 2;
        else
            continue;
        ptrdiff_t n = literal_len(s, (size_t)(end - s), quote, close);
        if (n <= 0)
            continue;
        *ret = quote != 0 ? unescape(s, (size_t)n) : strndup(s, (size_t)n);
        return *ret != NULL ? BC_OK : BC_ENOMEM;
    }
    return BC_OK;
}
