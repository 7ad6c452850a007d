/* Counts the file operations of a process below one folder and lets one of them fail, for scripts/fault_battery.py.

   Loaded with LD_PRELOAD, idle until `arm` is called. An operation is whatever changes a file or folder: opening for
   writing, write, fsync, ftruncate, mkdir, rename, unlink, rmdir. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { KILL = 1, FAIL = 2, FAIL_ON = 3, SIGNAL = 4, TEAR = 5 };

static char root[PATH_MAX];
static size_t root_length;
static long count, at = -1;
static int action, value, armed;

void arm(const char *folder, long operation, int what, int detail) {
    strncpy(root, folder, sizeof root - 1);
    root_length = strlen(root);
    count = 0, at = operation, action = what, value = detail, armed = 1;
}

long counted(void) { return count; }

static int below(int descriptor, const char *path) {
    char link[64], found[PATH_MAX];
    ssize_t length;
    if (path && path[0] == '/') return strncmp(path, root, root_length) == 0;
    if (descriptor < 0) return 0; /* relative to the working directory, where nothing is written */
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    length = readlink(link, found, sizeof found - 1);
    return length > 0 && (size_t)length >= root_length && strncmp(found, root, root_length) == 0;
}

/* Returns 1 if the operation is to fail, with errno set. */
static int meets(int descriptor, const char *path) {
    int before = errno;
    if (!armed || !below(descriptor, path)) { errno = before; return 0; }
    errno = before;
    long number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST); /* a thread writes checkpoints */
    if (number != at && !(action == FAIL_ON && at > 0 && number > at)) return 0;
    if (action == KILL || action == TEAR) kill(getpid(), SIGKILL);
    if (action == SIGNAL) kill(getpid(), value);
    if (action == FAIL || action == FAIL_ON) { errno = value; return 1; }
    return 0;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))

int open(const char *path, int flags, ...) {
    MODE(flags) REAL(int, "open", const char *, int, mode_t);
    return WRITES(flags) && meets(-1, path) ? -1 : real(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags) REAL(int, "open64", const char *, int, mode_t);
    return WRITES(flags) && meets(-1, path) ? -1 : real(path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    MODE(flags) REAL(int, "openat", int, const char *, int, mode_t);
    return WRITES(flags) && meets(folder, path) ? -1 : real(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags) REAL(int, "openat64", int, const char *, int, mode_t);
    return WRITES(flags) && meets(folder, path) ? -1 : real(folder, path, flags, mode);
}
ssize_t write(int descriptor, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (armed && action == TEAR && count + 1 == at && below(descriptor, 0)) real(descriptor, data, size / 2);
    return meets(descriptor, 0) ? -1 : real(descriptor, data, size);
}
int fsync(int descriptor) {
    REAL(int, "fsync", int);
    return meets(descriptor, 0) ? -1 : real(descriptor);
}
int ftruncate(int descriptor, off_t size) {
    REAL(int, "ftruncate", int, off_t);
    return meets(descriptor, 0) ? -1 : real(descriptor, size);
}
int ftruncate64(int descriptor, off64_t size) {
    REAL(int, "ftruncate64", int, off64_t);
    return meets(descriptor, 0) ? -1 : real(descriptor, size);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    return meets(-1, path) ? -1 : real(path, mode);
}
int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    return meets(folder, path) ? -1 : real(folder, path, mode);
}
int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    return meets(-1, to) ? -1 : real(from, to);
}
int renameat(int from_folder, const char *from, int folder, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    return meets(folder, to) ? -1 : real(from_folder, from, folder, to);
}
int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    return meets(-1, path) ? -1 : real(path);
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    return meets(folder, path) ? -1 : real(folder, path, flags);
}
int rmdir(const char *path) {
    REAL(int, "rmdir", const char *);
    return meets(-1, path) ? -1 : real(path);
}
