/* TEMPORARY */
#include "lanes.h"
void store(Member *m, const Attention *l, const Step *s, const void *k, int64_t ks, const void *v, int64_t vs) {(void)m;(void)l;(void)s;(void)k;(void)ks;(void)v;(void)vs;}
void attend(Member *m, const Attention *l, const Step *s, const void *q, int64_t qs, void *o, int64_t os){(void)m;(void)l;(void)s;(void)q;(void)qs;(void)o;(void)os;}
