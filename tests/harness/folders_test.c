/* folders_test.c: see folders_test.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "folders_test.h"

#define PATH_BYTES (2 * FOLDER_PATH + 300)

static void path_in(char ret[PATH_BYTES], const char *folder, const char *name)
{
    assert_true(snprintf(ret, PATH_BYTES, "%s/%s", folder, name) < PATH_BYTES);
}

static int is_folder(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

void folder_root(char ret[FOLDER_PATH], const char *what)
{
    snprintf(ret, FOLDER_PATH, "/tmp/backcast-%s-XXXXXX", what);
    assert_non_null(mkdtemp(ret));
}

void folder_root_memory(char ret[FOLDER_PATH], const char *what)
{
    snprintf(ret, FOLDER_PATH, "/dev/shm/backcast-%s-XXXXXX", what);
    if (mkdtemp(ret) == NULL)
        folder_root(ret, what);
}

void folder_drop(const char *path)
{
    char child[PATH_BYTES];
    struct dirent *e;
    DIR *d = opendir(path);
    while (d != NULL && (e = readdir(d)) != NULL) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        path_in(child, path, e->d_name);
        if (is_folder(child))
            folder_drop(child);
        else
            unlink(child);
    }
    if (d != NULL)
        closedir(d);
    rmdir(path);
}

void folder_fresh(char ret[FOLDER_PATH], const char *root, const char *name)
{
    assert_true(snprintf(ret, FOLDER_PATH, "%s/%s", root, name) < FOLDER_PATH);
    folder_drop(ret);
    assert_int_equal(mkdir(ret, 0700), 0);
}

uint8_t *file_load(const char *path, size_t *ret_n)
{
    struct stat st;
    int fd = open(path, O_RDONLY);
    assert_true(fd >= 0 && fstat(fd, &st) == 0);
    uint8_t *bytes = malloc((size_t)st.st_size + 1);
    assert_non_null(bytes);
    assert_int_equal(read(fd, bytes, (size_t)st.st_size), st.st_size);
    close(fd);
    *ret_n = (size_t)st.st_size;
    return bytes;
}

void file_store(const char *path, const void *bytes, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, n), n);
    close(fd);
}

void file_copy(const char *from, const char *to)
{
    size_t n;
    uint8_t *bytes = file_load(from, &n);
    file_store(to, bytes, n);
    free(bytes);
}

void folder_copy(const char *from, const char *to)
{
    char a[PATH_BYTES], b[PATH_BYTES];
    struct dirent *e;
    DIR *d = opendir(from);
    assert_non_null(d);
    mkdir(to, 0700);
    while ((e = readdir(d)) != NULL) {
        if (e->d_name[0] == '.')
            continue;
        path_in(a, from, e->d_name);
        path_in(b, to, e->d_name);
        if (is_folder(a))
            folder_copy(a, b);
        else
            file_copy(a, b);
    }
    closedir(d);
}

unsigned folder_files(const char *path)
{
    char child[PATH_BYTES];
    unsigned n = 0;
    struct dirent *e;
    DIR *d = opendir(path);
    while (d != NULL && (e = readdir(d)) != NULL) {
        if (e->d_name[0] == '.')
            continue;
        path_in(child, path, e->d_name);
        n += is_folder(child) ? folder_files(child) : 1;
    }
    if (d != NULL)
        closedir(d);
    return n;
}
