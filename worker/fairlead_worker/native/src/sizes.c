/* Sizes of the structures that Python mirrors with ctypes, so that a mirror with a wrong field is found before it corrupts memory. */
#include <string.h>

#include "decoder.h"
#include "native.h"

#define SIZE(name) {#name, sizeof(name)}

/* Returns the bytes of a structure, or 0 for an unknown name. */
EXPORT int64_t fairlead_size_of(const char *name) {
    static const struct {
        const char *name;
        int64_t bytes;
    } sizes[] = {SIZE(Panel), SIZE(Linear), SIZE(Activation), SIZE(Attention), SIZE(Step), SIZE(Norm), SIZE(Rope), SIZE(Layer), SIZE(Decoder), SIZE(Pass)};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (strcmp(sizes[i].name, name) == 0)
            return sizes[i].bytes;
    return 0;
}
