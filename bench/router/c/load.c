/* A load client: CONNECTIONS kept-alive connections, each with one request after the other, for some seconds. Prints one line of JSON.
 *
 * load PORT CONNECTIONS WARM_SECONDS SECONDS BODY_FILE PATH. Counts what ends after the warm-up. Latencies in microseconds: `whole` from
 * the request to its answer's end, `first` to its first body byte, `way` of an event from the mock's clock to ours. */
#include "net.h"

typedef struct {
    int fd, in_body, chunked, counted, close_after;
    long left;              /* of the body, or of the chunk; -1: a chunk's size is next */
    int64_t sent, first;
    Bytes in, body;
} Client;

typedef struct { float *at; size_t used, room; } Samples;

static Samples whole, first, way;
static Client *clients;
static Bytes request;
static int port, epoll;
static int64_t begins, ends;
static long errors, answers, chunks;

static void sample(Samples *s, double value) {
    if (s->used == s->room) s->at = realloc(s->at, (s->room = s->room ? 2 * s->room : 65536) * sizeof *s->at);
    s->at[s->used++] = value;
}

static int up(const void *a, const void *b) { return (*(float *)a > *(float *)b) - (*(float *)a < *(float *)b); }

static void print(const char *name, Samples *s) {
    double sum = 0;
    qsort(s->at, s->used, sizeof *s->at, up);
    for (size_t i = 0; i < s->used; i++) sum += s->at[i];
    printf(", \"%s\": {\"count\": %zu", name, s->used);
    if (s->used) printf(", \"mean\": %.2f, \"p50\": %.2f, \"p90\": %.2f, \"p99\": %.2f, \"max\": %.2f", sum / s->used, s->at[s->used / 2],
                        s->at[s->used * 9 / 10], s->at[s->used * 99 / 100], s->at[s->used - 1]);
    printf("}");
}

static void start(Client *c) {
    c->sent = now_ns();
    c->first = 0;
    c->in_body = 0;
    Bytes out = {0};
    append(&out, request.at, request.used);
    if (flush_to(c->fd, &out)) errors++;
    free(out.at);
}

static void dial(Client *c) {
    struct sockaddr_in address = loopback(port);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    c->in.used = c->body.used = 0;
    if (connect(c->fd, (void *)&address, sizeof address)) fatal("connect");
    make_ready(c->fd);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &e);
    start(c);
}

/* Whole events at the front of the body so far. */
static void events_of(Client *c) {
    char *at = c->body.at, *end;
    size_t left = c->body.used;
    int64_t now = now_ns();
    while (left && (end = memmem(at, left, "\n\n", 2))) {
        char *mark = memmem(at, end - at, "t=", 2);
        if (mark && now >= begins) { chunks++; sample(&way, (now - atoll(mark + 2)) / 1e3); }
        left -= end + 2 - at;
        at = end + 2;
    }
    drop(&c->body, c->body.used - left);
}

static void finished(Client *c) {
    int64_t now = now_ns();
    if (now >= begins && now < ends) {
        answers++;
        sample(&whole, (now - c->sent) / 1e3);
        sample(&first, (c->first - c->sent) / 1e3);
    }
    c->body.used = 0;
    if (c->close_after) { close(c->fd); dial(c); }
    else start(c);
}

static void parse(Client *c) {
    for (;;) {
        if (!c->in_body) {
            char *end = c->in.used ? memmem(c->in.at, c->in.used, "\r\n\r\n", 4) : NULL;
            if (!end) return;
            if (strncmp(c->in.at, "HTTP/1.1 200", 12) && errors++ < 3) fprintf(stderr, "load: %.*s\n", (int)c->in.used, c->in.at);
            char *length = header(c->in.at, end, "content-length:"), *kept = header(c->in.at, end, "connection:");
            c->close_after = kept && !strncasecmp(kept, "close", 5);
            c->chunked = !length;
            c->left = length ? atol(length) : -1;
            c->in_body = 1;
            drop(&c->in, end + 4 - c->in.at);
        }
        if (c->chunked && c->left < 0) {
            char *end = c->in.used ? memmem(c->in.at, c->in.used, "\r\n", 2) : NULL;
            if (!end) { events_of(c); return; }
            long size = strtol(c->in.at, NULL, 16);
            if (size == 0) {
                if (c->in.used < (size_t)(end + 4 - c->in.at)) return;
                drop(&c->in, end + 4 - c->in.at);
                events_of(c);
                finished(c);
                continue;
            }
            drop(&c->in, end + 2 - c->in.at);
            c->left = size + 2;
        }
        if (!c->in.used) { events_of(c); return; }
        size_t n = c->in.used < (size_t)c->left ? c->in.used : (size_t)c->left, data = n;
        if (c->chunked) data = (long)n > c->left - 2 ? (c->left > 2 ? (size_t)c->left - 2 : 0) : n;
        if (!c->first) c->first = now_ns();
        append(&c->body, c->in.at, data);
        drop(&c->in, n);
        c->left -= n;
        if (c->left == 0) {
            if (c->chunked) c->left = -1;
            else finished(c);
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 7) { fprintf(stderr, "load PORT CONNECTIONS WARM SECONDS BODY_FILE PATH\n"); return 2; }
    int connections = atoi(argv[2]);
    port = atoi(argv[1]);
    FILE *file = fopen(argv[5], "r");
    if (!file) fatal(argv[5]);
    static char body[8 << 20];
    size_t size = fread(body, 1, sizeof body, file);
    char head[512];
    append(&request, head, snprintf(head, sizeof head, "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nuser-agent: load\r\naccept: */*\r\n"
        "content-type: application/json\r\nauthorization: Bearer sk-bench\r\ncontent-length: %zu\r\n\r\n", argv[6], port, size));
    append(&request, body, size);
    epoll = epoll_create1(0);
    clients = calloc(connections, sizeof *clients);
    int64_t began = now_ns();
    begins = began + atof(argv[3]) * 1e9;
    ends = begins + atof(argv[4]) * 1e9;
    for (int i = 0; i < connections; i++) dial(&clients[i]);
    struct epoll_event events[512];
    while (now_ns() < ends) {
        int n = epoll_wait(epoll, events, 512, 100);
        for (int i = 0; i < n; i++) {
            Client *c = events[i].data.ptr;
            if (fill_from(c->fd, &c->in) == 0) {
                errors++;
                if (errors > 100000) fatal("the router closes every connection");
                close(c->fd);
                dial(c);
                continue;
            }
            parse(c);
        }
    }
    double seconds = atof(argv[4]);
    printf("{\"requests\": %ld, \"errors\": %ld, \"rps\": %.1f, \"chunks\": %ld, \"chunks_per_second\": %.1f", answers, errors, answers / seconds,
           chunks, chunks / seconds);
    print("whole", &whole);
    print("first", &first);
    print("way", &way);
    printf("}\n");
    return 0;
}
