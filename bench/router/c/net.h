/* What the mock worker and the load client share: sockets, a growing buffer, a clock. Linux. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct { char *at; size_t used, room; } Bytes;

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static inline void fatal(const char *what) { perror(what); exit(1); }

static inline char *reserve(Bytes *b, size_t more) {
    if (b->room - b->used < more) {
        while (b->room - b->used < more) b->room = b->room ? 2 * b->room : 4096;
        if (!(b->at = realloc(b->at, b->room))) fatal("realloc");
    }
    return b->at + b->used;
}

static inline void append(Bytes *b, const void *data, size_t size) { memcpy(reserve(b, size), data, size); b->used += size; }

static inline void drop(Bytes *b, size_t size) { b->used -= size; memmove(b->at, b->at + size, b->used); }

/* Sends what is there; 0 when all of it went, 1 when the socket is full, -1 when the other side is gone. */
static inline int flush_to(int fd, Bytes *b) {
    size_t sent = 0;
    while (sent < b->used) {
        ssize_t n = send(fd, b->at + sent, b->used - sent, MSG_NOSIGNAL);
        if (n <= 0) {
            if (errno != EAGAIN) return -1;
            drop(b, sent);
            return 1;
        }
        sent += n;
    }
    b->used = 0;
    return 0;
}

/* Reads what is there, at most one buffer of it; 0 at the end or an error, -1 when there is nothing yet. */
static inline ssize_t fill_from(int fd, Bytes *b) {
    ssize_t n = recv(fd, reserve(b, 65536), 65536, 0);
    if (n > 0) b->used += n;
    return n < 0 ? (errno == EAGAIN ? -1 : 0) : n;
}

static inline void make_ready(int fd) {
    int one = 1;
    fcntl(fd, F_SETFL, O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static inline struct sockaddr_in loopback(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    return a;
}

/* The value of a header of the head that ends at `end`, or NULL. `name` in full, with its colon. */
static inline char *header(char *head, char *end, const char *name) {
    size_t size = strlen(name);
    for (char *line = head; (line = memmem(line, end - line, "\r\n", 2));) {
        line += 2;
        if ((size_t)(end - line) > size && !strncasecmp(line, name, size)) {
            for (line += size; *line == ' ';) line++;
            return line;
        }
    }
    return NULL;
}
