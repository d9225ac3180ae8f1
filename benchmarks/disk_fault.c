/* Preloaded into every process of a run: calls that would change a chosen file fail, as on a full or read-only disk.

   FAULT_PATH     fail for files whose path contains this text
   FAULT_ERRNO    with this error
   FAULT_TEXT     only if the bytes to write contain this text (optional)
   FAULT_AFTER    let this many matching writes pass first (optional; counted in each process)
   FAULT_SYNC     if set, fail fsync and fdatasync of such files instead of everything else */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static long passed = 0;

static int refuses(const char *path) {
    const char *part = getenv("FAULT_PATH");
    if (!part || !path || !strstr(path, part)) return 0;
    errno = atoi(getenv("FAULT_ERRNO"));
    return 1;
}

static int is_for_sync(void) { return getenv("FAULT_SYNC") != NULL; }

static int refuses_descriptor(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0 || path[0] != '/') return 0;
    path[length] = 0;
    return refuses(path);
}

static int changes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT); }

/* A file that exists may be opened on a full disk; only writing to it fails. */
static int refuses_open(const char *path, int flags) {
    if (is_for_sync() || getenv("FAULT_TEXT") || getenv("FAULT_AFTER") || !changes(flags)) return 0;
    if (atoi(getenv("FAULT_ERRNO") ? getenv("FAULT_ERRNO") : "0") == ENOSPC && access(path, F_OK) == 0) return 0;
    return refuses(path);
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int open(const char *path, int flags, ...) {
    va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more);
    REAL(open);
    return refuses_open(path, flags) ? -1 : real(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more);
    REAL(open64);
    return refuses_open(path, flags) ? -1 : real(path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more);
    REAL(openat);
    return refuses_open(path, flags) ? -1 : real(folder, path, flags, mode);
}
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return !is_for_sync() && !getenv("FAULT_AFTER") && refuses(path) ? -1 : real(path, mode);
}
int rename(const char *from, const char *to) {
    REAL(rename);
    int read_only = getenv("FAULT_ERRNO") && atoi(getenv("FAULT_ERRNO")) == EROFS;
    return read_only && !getenv("FAULT_AFTER") && !is_for_sync() && refuses(to) ? -1 : real(from, to);
}
ssize_t write(int fd, const void *bytes, size_t count) {
    REAL(write);
    const char *text = getenv("FAULT_TEXT"), *after = getenv("FAULT_AFTER");
    if (fd <= 2 || is_for_sync() || !getenv("FAULT_PATH")) return real(fd, bytes, count);
    if (text && !memmem(bytes, count, text, strlen(text))) return real(fd, bytes, count);
    int error = errno;
    if (refuses_descriptor(fd)) {
        if (!after || passed++ >= atol(after)) return -1;
    }
    errno = error;
    return real(fd, bytes, count);
}
int fsync(int fd) {
    REAL(fsync);
    return is_for_sync() && refuses_descriptor(fd) ? -1 : real(fd);
}
int fdatasync(int fd) {
    REAL(fdatasync);
    return is_for_sync() && refuses_descriptor(fd) ? -1 : real(fd);
}
