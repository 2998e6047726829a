/* folders_test.h: folders of a test: made, copied as a kill at this moment would leave them, counted. */
#ifndef BACKCAST_FOLDERS_TEST_H
#define BACKCAST_FOLDERS_TEST_H
#include <stddef.h>
#include <stdint.h>

#define FOLDER_PATH 200

void folder_root(char ret[FOLDER_PATH], const char *what); /* a new one in /tmp */
/* In memory where there is /dev/shm: for tests that ask nothing of the disk. */
void folder_root_memory(char ret[FOLDER_PATH], const char *what);
void folder_drop(const char *path); /* and all in it */
/* root/name, empty. */
void folder_fresh(char ret[FOLDER_PATH], const char *root, const char *name);
void folder_copy(const char *from, const char *to); /* `to` may exist */
unsigned folder_files(const char *path);            /* in it and below; 0: it is not there */
void file_copy(const char *from, const char *to);
uint8_t *file_load(const char *path, size_t *ret_n); /* malloced */
void file_store(const char *path, const void *bytes, size_t n);
#endif
