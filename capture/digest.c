/* One pass over a tensor's bytes: sums, extremes, non-finite counts, and a 64-bit hash.
 *
 * Compiled on demand (digest_native.py). digest_numpy.py computes the same hash bit for bit and the
 * same statistics up to the rounding of a double; digest_cuda.py does so on a GPU.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CHUNK 1024            /* elements summed in one precision before their sums are looked at */
#define BLOCK_WORDS 8192      /* words that share one block weight */
#define STEP UINT64_C(0x9E3779B97F4A7C15)

typedef struct {
    double sum, abs_sum, sq_sum, min, max;
    uint64_t nan, pos_inf, neg_inf, finite, hash;
    uint64_t name; /* the hash of a whole tensor; hash alone is the sum that parts add up to */
} digest_t;

static uint64_t mix(uint64_t z)
{
    z += STEP;
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static uint64_t weights[BLOCK_WORDS];

void digest_init(void)
{
    for (uint64_t j = 0; j < BLOCK_WORDS; j++) {
        uint64_t z = (j + 1) * STEP;
        weights[j] = (z ^ (z >> 31)) | 1;
    }
}

static uint64_t hash_block(const unsigned char *p, size_t words)
{
    uint64_t acc = 0;
    for (size_t j = 0; j < words; j++) {
        uint64_t x;
        memcpy(&x, p + 8 * j, 8);
        acc += (x ^ (x >> 29)) * weights[j];
    }
    return acc;
}

/* Sum over whole blocks from byte 0 of p; the last word of the tensor is padded with zeros. */
uint64_t digest_hash(const unsigned char *p, uint64_t nbytes, uint64_t first_block)
{
    uint64_t total = 0, words = nbytes / 8, block = first_block, done = 0;
    while (done < words) {
        uint64_t n = words - done < BLOCK_WORDS ? words - done : BLOCK_WORDS;
        uint64_t acc = hash_block(p + 8 * done, n);
        if (done + n == words && nbytes % 8 && n < BLOCK_WORDS) {
            uint64_t x = 0;
            memcpy(&x, p + 8 * words, nbytes % 8);
            acc += (x ^ (x >> 29)) * weights[n];
        }
        total += (mix(block) | 1) * acc;
        done += n;
        block++;
    }
    if (nbytes % 8 && words % BLOCK_WORDS == 0) {
        uint64_t x = 0;
        memcpy(&x, p + 8 * words, nbytes % 8);
        total += (mix(block) | 1) * ((x ^ (x >> 29)) * weights[0]);
    }
    return total;
}

static void add_one(digest_t *d, double v)
{
    if (isnan(v)) { d->nan++; return; }
    if (isinf(v)) { if (v > 0) d->pos_inf++; else d->neg_inf++; return; }
    d->finite++;
    d->sum += v;
    d->abs_sum += fabs(v);
    d->sq_sum += v * v;
    if (v < d->min) d->min = v;
    if (v > d->max) d->max = v;
}

static float half_to_float(uint16_t h)
{
    uint32_t magnitude = (uint32_t)(h & 0x7FFF) << 13, bits, sign = (uint32_t)(h & 0x8000) << 16;
    float f;
    memcpy(&f, &magnitude, 4);
    f *= 5.192296858534828e33f; /* 2^112 moves the exponent's bias, and makes subnormals normal */
    memcpy(&bits, &f, 4);
    if ((h & 0x7C00) == 0x7C00) bits = 0x7F800000 | ((uint32_t)(h & 0x3FF) << 13);
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}

static float brain_to_float(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Float types: a chunk is summed in single precision as if nothing in it could go wrong. When its sums say
 * that something did (not finite, or squares near the smallest float) it is summed again in double. */
static void walk_floats(const float *x, uint64_t n, digest_t *d)
{
    float s = 0, a = 0, q = 0, lo = INFINITY, hi = -INFINITY;
#pragma omp simd reduction(+ : s, a, q) reduction(min : lo) reduction(max : hi)
    for (uint64_t i = 0; i < n; i++) {
        float v = x[i];
        s += v;
        a += fabsf(v);
        q += v * v;
        lo = v < lo ? v : lo;
        hi = v > hi ? v : hi;
    }
    if (a < INFINITY && q < INFINITY && (q > 1e-25f || a == 0)) {
        d->finite += n;
        d->sum += s;
        d->abs_sum += a;
        d->sq_sum += q;
        if (lo < d->min) d->min = lo;
        if (hi > d->max) d->max = hi;
        return;
    }
    for (uint64_t i = 0; i < n; i++) add_one(d, x[i]);
}

static void walk_doubles(const double *x, uint64_t n, digest_t *d)
{
    double s = 0, a = 0, q = 0, lo = INFINITY, hi = -INFINITY;
#pragma omp simd reduction(+ : s, a, q) reduction(min : lo) reduction(max : hi)
    for (uint64_t i = 0; i < n; i++) {
        double v = x[i];
        s += v;
        a += fabs(v);
        q += v * v;
        lo = v < lo ? v : lo;
        hi = v > hi ? v : hi;
    }
    if (a < INFINITY && q < INFINITY) {
        d->finite += n;
        d->sum += s;
        d->abs_sum += a;
        d->sq_sum += q;
        if (lo < d->min) d->min = lo;
        if (hi > d->max) d->max = hi;
        return;
    }
    for (uint64_t i = 0; i < n; i++) add_one(d, x[i]);
}

/* Other types are converted a chunk at a time. */
#define WALK(NAME, STORED, REAL, CONVERT, SUM)                                             \
    static void NAME(const unsigned char *p, uint64_t n, digest_t *d)                      \
    {                                                                                      \
        REAL buffer[CHUNK];                                                                \
        for (uint64_t at = 0; at < n; at += CHUNK) {                                       \
            uint64_t len = n - at < CHUNK ? n - at : CHUNK;                                \
            const unsigned char *q = p + at * sizeof(STORED);                              \
            for (uint64_t i = 0; i < len; i++) {                                           \
                STORED raw;                                                                \
                memcpy(&raw, q + i * sizeof(STORED), sizeof(STORED));                      \
                buffer[i] = CONVERT(raw);                                                  \
            }                                                                              \
            SUM(buffer, len, d);                                                           \
        }                                                                                  \
    }

WALK(walk_f16, uint16_t, float, half_to_float, walk_floats)
WALK(walk_bf16, uint16_t, float, brain_to_float, walk_floats)
WALK(walk_u8, uint8_t, float, (float), walk_floats)
WALK(walk_i8, int8_t, float, (float), walk_floats)
WALK(walk_i16, int16_t, float, (float), walk_floats)
WALK(walk_u16, uint16_t, float, (float), walk_floats)
WALK(walk_i32, int32_t, double, (double), walk_doubles)
WALK(walk_u32, uint32_t, double, (double), walk_doubles)
WALK(walk_i64, int64_t, double, (double), walk_doubles)
WALK(walk_u64, uint64_t, double, (double), walk_doubles)

static void walk_f32(const unsigned char *p, uint64_t n, digest_t *d)
{
    for (uint64_t at = 0; at < n; at += CHUNK)
        walk_floats((const float *)p + at, n - at < CHUNK ? n - at : CHUNK, d);
}

static void walk_f64(const unsigned char *p, uint64_t n, digest_t *d)
{
    for (uint64_t at = 0; at < n; at += CHUNK)
        walk_doubles((const double *)p + at, n - at < CHUNK ? n - at : CHUNK, d);
}

/* Eight-bit floats: count the 256 values, then look each up in `table`. */
static void walk_bytes(const unsigned char *p, uint64_t n, const double *table, digest_t *d)
{
    uint64_t counts[4][256] = {{0}};
    uint64_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int k = 0; k < 4; k++) counts[k][p[i + k]]++;
    for (; i < n; i++) counts[0][p[i]]++;
    for (int v = 0; v < 256; v++) {
        uint64_t c = counts[0][v] + counts[1][v] + counts[2][v] + counts[3][v];
        if (!c) continue;
        double x = table[v];
        if (isnan(x)) { d->nan += c; continue; }
        if (isinf(x)) { if (x > 0) d->pos_inf += c; else d->neg_inf += c; continue; }
        d->finite += c;
        d->sum += x * (double)c;
        d->abs_sum += fabs(x) * (double)c;
        d->sq_sum += x * x * (double)c;
        if (x < d->min) d->min = x;
        if (x > d->max) d->max = x;
    }
}

/* kind: index into digest_native.KINDS; n: elements; first_block: of the hash, for split tensors. */
int digest_run(const unsigned char *p, uint64_t n, int kind, uint64_t first_block, const double *table, digest_t *d)
{
    static const int sizes[] = {4, 8, 2, 2, 2, 2, 4, 4, 8, 8, 1, 1, 1};
    static void (*const walks[])(const unsigned char *, uint64_t, digest_t *) = {
        walk_f32, walk_f64, walk_f16, walk_bf16, walk_i16, walk_u16, walk_i32, walk_u32, walk_i64, walk_u64, NULL,
        walk_u8, walk_i8};
    if (kind < 0 || kind > 12) return 1;
    memset(d, 0, sizeof *d);
    d->min = INFINITY;
    d->max = -INFINITY;
    /* One hash block at a time, so that the second look at the bytes finds them in the cache. */
    uint64_t per_block = BLOCK_WORDS * 8 / sizes[kind], block = first_block;
    for (uint64_t at = 0; at < n; at += per_block, block++) {
        uint64_t len = n - at < per_block ? n - at : per_block;
        const unsigned char *q = p + at * sizes[kind];
        d->hash += digest_hash(q, len * sizes[kind], block);
        if (kind == 10) walk_bytes(q, len, table, d);
        else walks[kind](q, len, d);
    }
    d->name = mix(d->hash + mix(n * sizes[kind]));
    return 0;
}
