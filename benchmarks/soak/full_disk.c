/* A disk that fills up below one directory, for LD_PRELOAD.

   Every call that needs space for a file below $SOAK_ROOT is counted in the file $SOAK_CONTROL, over all processes.
   The call number `first_failure` gets half of its bytes written, as on a disk with a little space left, or fails if
   it writes no bytes. The `num_failures` calls after it fail with ENOSPC. A number of 0 lets all calls through. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
    long num_calls;
    long first_failure;
    long num_failures;
};

enum verdict { PASS, HALF, FAIL };

static const char *root;
static size_t root_length;
static struct control *control;

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

__attribute__((constructor)) static void open_control(void) {
    root = getenv("SOAK_ROOT");
    const char *path = getenv("SOAK_CONTROL");
    if (!root || !path) return;
    root_length = strlen(root);
    int fd = REAL(open)(path, O_RDWR);
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) control = mapped;
    close(fd);
}

static int is_below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int path_is_below(int directory, const char *path) {
    char full[PATH_MAX], link[64];
    if (!control || !path) return 0;
    if (path[0] == '/') return is_below(path);
    if (directory == AT_FDCWD) {
        if (!getcwd(full, sizeof full)) return 0;
        return is_below(full);
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, full, sizeof full - 1);
    if (length < 0) return 0;
    full[length] = 0;
    return is_below(full);
}

static int file_is_below(int fd) {
    char full[PATH_MAX], link[64];
    if (!control) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, full, sizeof full - 1);
    if (length < 0) return 0;
    full[length] = 0;
    return is_below(full);
}

static enum verdict next_call(void) {
    long number = __atomic_add_fetch(&control->num_calls, 1, __ATOMIC_SEQ_CST);
    long first = control->first_failure;
    if (!first || number < first || number > first + control->num_failures) return PASS;
    return number == first ? HALF : FAIL;
}

static int is_refused(int concerned) {
    if (!concerned || next_call() == PASS) return 0;
    errno = ENOSPC;
    return 1;
}

/* How many of `count` bytes may be written: all, half of them, or -1 for none. */
static ssize_t allowed(int fd, size_t count) {
    if (!count || !file_is_below(fd)) return count;
    enum verdict verdict = next_call();
    if (verdict == PASS) return count;
    if (verdict == HALF && count > 1) return count / 2;
    errno = ENOSPC;
    return -1;
}

ssize_t write(int fd, const void *data, size_t count) {
    ssize_t some = allowed(fd, count);
    return some < 0 ? -1 : REAL(write)(fd, data, some);
}

ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) {
    ssize_t some = allowed(fd, count);
    return some < 0 ? -1 : REAL(pwrite)(fd, data, some, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t count, off64_t offset) {
    ssize_t some = allowed(fd, count);
    return some < 0 ? -1 : REAL(pwrite64)(fd, data, some, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    return is_refused(file_is_below(fd)) ? -1 : REAL(writev)(fd, parts, count);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    return is_refused(file_is_below(fd)) ? -1 : REAL(pwritev)(fd, parts, count, offset);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
    return is_refused(file_is_below(fd)) ? -1 : REAL(pwritev64)(fd, parts, count, offset);
}

ssize_t sendfile(int to, int from, off_t *offset, size_t count) {
    ssize_t some = allowed(to, count);
    return some < 0 ? -1 : REAL(sendfile)(to, from, offset, some);
}

ssize_t sendfile64(int to, int from, off64_t *offset, size_t count) {
    ssize_t some = allowed(to, count);
    return some < 0 ? -1 : REAL(sendfile64)(to, from, offset, some);
}

int fsync(int fd) { return is_refused(file_is_below(fd)) ? -1 : REAL(fsync)(fd); }

int fdatasync(int fd) { return is_refused(file_is_below(fd)) ? -1 : REAL(fdatasync)(fd); }

int rename(const char *from, const char *to) {
    return is_refused(path_is_below(AT_FDCWD, to)) ? -1 : REAL(rename)(from, to);
}

int renameat(int from_fd, const char *from, int to_fd, const char *to) {
    return is_refused(path_is_below(to_fd, to)) ? -1 : REAL(renameat)(from_fd, from, to_fd, to);
}

int mkdir(const char *path, mode_t mode) {
    struct stat status;
    int is_new = path_is_below(AT_FDCWD, path) && stat(path, &status);
    return is_refused(is_new) ? -1 : REAL(mkdir)(path, mode);
}

int mkdirat(int directory, const char *path, mode_t mode) {
    struct stat status;
    int is_new = path_is_below(directory, path) && fstatat(directory, path, &status, 0);
    return is_refused(is_new) ? -1 : REAL(mkdirat)(directory, path, mode);
}

/* Opening a file takes space only if the file is new. */
static int open_is_refused(int directory, const char *path, int flags) {
    struct stat status;
    return is_refused((flags & O_CREAT) && path_is_below(directory, path) && fstatat(directory, path, &status, 0));
}

#define MODE(flags)                                     \
    mode_t mode = 0;                                    \
    if (flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) { \
        va_list rest;                                   \
        va_start(rest, flags);                          \
        mode = va_arg(rest, mode_t);                    \
        va_end(rest);                                   \
    }

int open(const char *path, int flags, ...) {
    MODE(flags);
    return open_is_refused(AT_FDCWD, path, flags) ? -1 : REAL(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE(flags);
    return open_is_refused(AT_FDCWD, path, flags) ? -1 : REAL(open64)(path, flags, mode);
}

int openat(int directory, const char *path, int flags, ...) {
    MODE(flags);
    return open_is_refused(directory, path, flags) ? -1 : REAL(openat)(directory, path, flags, mode);
}

int openat64(int directory, const char *path, int flags, ...) {
    MODE(flags);
    return open_is_refused(directory, path, flags) ? -1 : REAL(openat64)(directory, path, flags, mode);
}

/* The standard library's streams write with calls that cannot be replaced; creating a file with them can be. */
FILE *fopen64(const char *path, const char *how) {
    struct stat status;
    int is_new = how[0] != 'r' && path_is_below(AT_FDCWD, path) && stat(path, &status);
    return is_refused(is_new) ? NULL : REAL(fopen64)(path, how);
}
