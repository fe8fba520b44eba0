/* A worker without a model: answers at once, or streams events, as fast as the sockets take them or at a pace.
 *
 * mock PORT PROMPT_FORMAT_FILE. The prompt says what is wanted: "chunks=N;" events of a stream (with "stream": true), "pace=US;"
 * microseconds between them (0: each running stream gets one event a round, as steps of an engine do). Every event carries the time
 * at which it was sent, "t=%019lld", so that a client on this machine can tell how long it was on its way. */
#include "net.h"

typedef struct Stream {
    int fd, listed, full, watched;
    long left, pace_ns;
    int64_t next;
    Bytes in, out;
} Stream;

static Stream *streams[65536], *running[65536];
static int count, epoll;
static char format[1 << 20];
static size_t format_size;

static const char WHOLE[] =
    "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1,\"model\":\"bench\",\"choices\":[{\"index\":0,\"text\":\" a short answer\","
    "\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":8,\"completion_tokens\":4,\"total_tokens\":12}}";
static const char LOOKS[] =
    "{\"ready\":true,\"status\":\"ok\",\"pod\":\"mock\",\"address\":\"\",\"draining\":false,\"object\":\"list\",\"model_path\":\"bench\","
    "\"tokenizer_path\":\"bench\",\"is_generation\":true,\"served_model_name\":\"bench\",\"version\":\"0\",\"data\":[{\"id\":\"bench\","
    "\"object\":\"model\",\"created\":1,\"owned_by\":\"mock\",\"root\":\"bench\",\"max_model_len\":4096}]}";

static void answer(Stream *s, const char *body, size_t size) {
    char head[256];
    int n = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", size);
    append(&s->out, head, n);
    append(&s->out, body, size);
}

static void event(Stream *s) {
    char text[512];
    int n = snprintf(text, sizeof text,
        "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1,\"model\":\"bench\",\"choices\":[{\"index\":0,"
        "\"text\":\"t=%019lld\",\"finish_reason\":null}]}\n\n", (long long)now_ns());
    char size[16];
    append(&s->out, size, snprintf(size, sizeof size, "%x\r\n", n));
    append(&s->out, text, n);
    append(&s->out, "\r\n", 2);
    if (--s->left == 0) append(&s->out, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", 24);
}

static long number(char *from, size_t size, const char *name) {
    char *at = memmem(from, size, name, strlen(name));
    return at ? atol(at + strlen(name)) : 0;
}

static void shut(Stream *s) {
    if (s->listed) for (int i = 0; i < count; i++) if (running[i] == s) { running[i] = running[--count]; break; }
    streams[s->fd] = NULL;
    close(s->fd);
    free(s->in.at);
    free(s->out.at);
    free(s);
}

/* One whole request at the front of `in`; 0 when it is not whole yet. */
static int take(Stream *s) {
    char *end = s->in.used ? memmem(s->in.at, s->in.used, "\r\n\r\n", 4) : NULL;
    if (!end) return 0;
    char *length = header(s->in.at, end, "content-length:");
    size_t body = length ? strtoul(length, NULL, 10) : 0, whole = end + 4 - s->in.at + body;
    if (s->in.used < whole) return 0;
    *end = 0;
    char *at = end + 4;
    if (!strncmp(s->in.at, "GET /internal/prompt-format", 27)) answer(s, format, format_size);
    else if (strncmp(s->in.at, "POST /v1/", 9)) answer(s, LOOKS, sizeof LOOKS - 1);
    else if (!memmem(at, body, "\"stream\":true", 13) && !memmem(at, body, "\"stream\": true", 14)) answer(s, WHOLE, sizeof WHOLE - 1);
    else {
        static const char HEAD[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
        append(&s->out, HEAD, sizeof HEAD - 1);
        s->left = number(at, body, "chunks=");
        if (s->left < 1) s->left = 1;
        s->pace_ns = 1000 * number(at, body, "pace=");
        s->next = now_ns();
        s->listed = 1;
        running[count++] = s;
    }
    drop(&s->in, whole);
    return 1;
}

static int push(Stream *s) {
    int state = flush_to(s->fd, &s->out);
    if (state < 0) return -1;
    s->full = state;
    if (s->full != s->watched) {
        struct epoll_event e = {.events = EPOLLIN | (s->full ? EPOLLOUT : 0), .data.fd = s->fd};
        epoll_ctl(epoll, EPOLL_CTL_MOD, s->fd, &e);
        s->watched = s->full;
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 3) { fprintf(stderr, "mock PORT PROMPT_FORMAT_FILE\n"); return 2; }
    FILE *file = fopen(argv[2], "r");
    if (!file) fatal(argv[2]);
    format_size = fread(format, 1, sizeof format, file);
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in address = loopback(atoi(argv[1]));
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 4096)) fatal("listen");
    fcntl(listener, F_SETFL, O_NONBLOCK);
    epoll = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener}, events[512];
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &e);
    for (;;) {
        int64_t now = now_ns(), soonest = now + 1000000000;
        for (int i = count - 1; i >= 0; i--) {
            Stream *s = running[i];
            if (!s->full && s->next <= now) {
                event(s);
                s->next += s->pace_ns;
                if (s->left == 0) { s->listed = 0; running[i] = running[--count]; }
                if (push(s)) { shut(s); continue; }
            }
            if (s->listed && !s->full && s->next < soonest) soonest = s->next;
        }
        now = now_ns();
        int timeout = soonest <= now ? 0 : (soonest - now + 999999) / 1000000;
        int n = epoll_wait(epoll, events, 512, timeout);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) {
                while ((fd = accept(listener, NULL, NULL)) >= 0) {
                    make_ready(fd);
                    if (!(streams[fd] = calloc(1, sizeof(Stream)))) fatal("calloc");
                    streams[fd]->fd = fd;
                    e = (struct epoll_event){.events = EPOLLIN, .data.fd = fd};
                    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e);
                }
                continue;
            }
            Stream *s = streams[fd];
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
                if (fill_from(fd, &s->in) == 0) { shut(s); continue; }
                while (!s->listed && take(s)) {}
            }
            if (s->out.used && push(s)) shut(s);
            else if (!s->out.used && s->watched) push(s);
        }
    }
}
