/* Runs functions of an Arm library for a process that is no Arm: under qemu-user, with that process's memory at the same addresses.
 *
 * A page that is touched and not there is copied from /proc/PID/mem; after the call the bytes that have changed are written back, and no
 * others: the other process goes on meanwhile, and may write to the rest of the page. So whatever a function's arguments point to, at any depth, is where they say. Usage: driver LIBRARY PID; calls come on stdin, one a line:
 * name, the count of whole arguments and each of them, the count of floats and each of them. The answer is the returned number. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, MOST = 1 << 16, WHOLE = 16, FLOATS = 4 };

typedef int64_t (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t, float, float, float, float);

static int memory;
static struct {
    char *page, *before;
} pages[MOST];
static int count, busy;

static void stop(const char *why) {
    ssize_t ignored = write(2, why, strlen(why));
    (void)ignored;
    _exit(3);
}

static char *new_page(void) {
    char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        stop("arm_driver: no memory\n");
    return page;
}

/* Threads take turns. A page is filled before it is moved to its place, so that no other thread sees it half empty. */
static void fault(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    char *page = (char *)((uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1));
    while (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE))
        ;
    int known = 0;
    for (int i = count - 1; i >= 0 && !known; i--)
        known = pages[i].page == page;
    if (!known) {
        char *filled = new_page(), *before = new_page();
        if (pread(memory, filled, PAGE, (off_t)page) != PAGE)
            stop("arm_driver: an address that the other process does not have\n");
        memcpy(before, filled, PAGE);
        if (count == MOST || mremap(filled, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page) != page)
            stop("arm_driver: too many pages, or one that cannot be placed\n");
        pages[count].page = page;
        pages[count++].before = before;
    }
    __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
}

static void write_back(void) {
    for (int i = 0; i < count; i++) {
        const char *now = pages[i].page, *before = pages[i].before;
        for (int begin = 0, end; begin < PAGE; begin = end + 1) {
            while (begin < PAGE && now[begin] == before[begin])
                begin++;
            for (end = begin; end < PAGE && now[end] != before[end];)
                end++;
            if (end > begin && pwrite(memory, now + begin, end - begin, (off_t)(now + begin)) != end - begin)
                stop("arm_driver: a page cannot be written back\n");
        }
        munmap(pages[i].page, PAGE);
        munmap(pages[i].before, PAGE);
    }
    count = 0;
}

int main(int argc, char **argv) {
    char path[64], name[128];
    void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        fprintf(stderr, "arm_driver LIBRARY PID: %s\n", argc == 3 ? dlerror() : "two arguments");
        return 2;
    }
    snprintf(path, sizeof path, "/proc/%s/mem", argv[2]);
    memory = open(path, O_RDWR);
    struct sigaction action = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    while (scanf("%127s", name) == 1) {
        int64_t whole[WHOLE] = {0};
        float floats[FLOATS] = {0};
        int n;
        if (scanf("%d", &n) != 1 || n > WHOLE)
            stop("arm_driver: too many arguments\n");
        for (int i = 0; i < n; i++)
            if (scanf("%ld", &whole[i]) != 1)
                stop("arm_driver: no number\n");
        if (scanf("%d", &n) != 1 || n > FLOATS)
            stop("arm_driver: too many floats\n");
        for (int i = 0; i < n; i++)
            if (scanf("%f", &floats[i]) != 1)
                stop("arm_driver: no float\n");
        Function function = (Function)dlsym(library, name);
        if (!function)
            stop("arm_driver: no such function\n");
        int64_t *w = whole;
        int64_t answer = function(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15], floats[0],
                                  floats[1], floats[2], floats[3]);
        write_back();
        printf("%ld\n", answer);
        fflush(stdout);
    }
    return 0;
}
