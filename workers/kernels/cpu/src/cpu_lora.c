/* Grouped LoRA of a few tokens per adapter, for CPUs. See cpu_lora.py for its meaning. */
#include <omp.h>

#include "cpu_vector.h"

#define TILE 4                           /* tokens of one adapter that share a read of its rows: 1, 2 or this many */
#define ROWS 4                           /* rows of A read side by side */
#define VECTORS 16                       /* sums of an expand that stay in registers */
#define PIECE 512                        /* columns of y that one thread takes at a time */
#define LINE (64 / (int)sizeof(element)) /* elements of a cache line */
#define PARALLEL_ELEMENTS (1L << 20)     /* below this waking a second thread costs more than it brings */

/* The operand of one multiplication: pairs of bfloat16 where the CPU multiplies them, else floats. */
#if ELEMENT == 1 && defined(__AVX512BF16__)
#define STEP (2 * LANES)
typedef __m512i operand;
INLINE operand load_operand(const element *at, long left) {
  return left >= STEP ? _mm512_loadu_si512(at) : _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)at));
}
INLINE floats add_product(floats sum, operand a, operand b) {
  return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
#define STEP LANES
typedef floats operand;
INLINE operand load_operand(const element *at, long left) { (void)left; return load(at); }
INLINE floats add_product(floats sum, operand a, operand b) { return sum + a * b; }
#endif

typedef struct { /* as ProjectionTables in lora_ops.py; all fields have 8 bytes */
  const int64_t *a_rows, *b_rows;
  const int32_t *ranks;
  const float *scales;
  int64_t room, outputs, start;
} projection;

typedef struct { /* a range of the list of tokens, and their adapter */
  int32_t first, count, slot;
} tile;

typedef struct {
  element *y;
  const element *x, *slab;
  long y_stride, x_stride, inputs;
  const int32_t *tokens;
} layer;

typedef struct { /* a piece of work: rows first..last of A, or columns first..last of y */
  const projection *s;
  const tile *t;
  float *shrunk;
  long first, last;
} piece;

/* Whether the work at `before` of `total` is thread `me`'s: neighbours go to one thread, shares are even. */
INLINE int is_mine(long before, long total, int me, int threads) { return before * threads / total == me; }

INLINE long least(long a, long b) { return a < b ? a : b; }

/* Row k of the tile's adapter in a table. */
INLINE const element *row_at(const layer *l, const int64_t *table, const piece *p, long k) {
  return l->slab + table[p->t->slot * p->s->room + k];
}

/* out[c * stride + k] = scale * x[c] . a[k]; meanwhile the rows `ahead` are prefetched. */
INLINE void dots(const element *const *x, const element *const *a, const element *const *ahead, long inputs, float *out,
                 long stride, float scale, const int C, const int K) {
  floats sum[TILE * ROWS];
  UNROLLED for (int i = 0; i < C * K; i++) sum[i] = (floats){};
  for (long i = 0; i < inputs; i += STEP) {
    operand row[ROWS];
    UNROLLED for (int k = 0; k < K; k++) __builtin_prefetch(ahead[k] + i, 0, 3);
    UNROLLED for (int k = 0; k < K; k++) row[k] = load_operand(a[k] + i, inputs - i);
    UNROLLED for (int c = 0; c < C; c++) {
      const operand token = load_operand(x[c] + i, inputs - i);
      UNROLLED for (int k = 0; k < K; k++) sum[c * K + k] = add_product(sum[c * K + k], token, row[k]);
    }
  }
  UNROLLED for (int c = 0; c < C; c++)
    UNROLLED for (int k = 0; k < K; k++) out[c * stride + k] = scale * sum_lanes(sum[c * K + k]);
}

/* The tile's tokens against up to ROWS rows of A. */
INLINE void shrink(const layer *l, const piece *p, const piece *next, const int C) {
  const projection *s = p->s;
  const element *x[TILE], *a[ROWS], *ahead[ROWS];
  UNROLLED for (int c = 0; c < C; c++) x[c] = l->x + l->tokens[p->t->first + c] * l->x_stride;
  for (long k = 0; k < ROWS; k++) {
    a[k] = row_at(l, s->a_rows, p, least(p->first + k, p->last - 1));
    ahead[k] = row_at(l, next->s->a_rows, next, least(next->first + k, next->last - 1));
  }
  const float scale = s->scales[p->t->slot];
  float *out = p->shrunk + p->first;
  if (p->last - p->first == ROWS)
    dots(x, a, ahead, l->inputs, out, s->room, scale, C, ROWS);
  else
    for (long k = 0; k < p->last - p->first; k++) dots(x, a + k, ahead + k, l->inputs, out + k, s->room, scale, C, 1);
}

/* y[c][column..] += sum over k of shrunk[c * its stride + k] * B[k][column..], V vectors wide; meanwhile columns
   ahead.. of the next piece's rows are prefetched. */
INLINE void add_columns(const layer *l, const piece *p, const piece *next, element *const *y, long column, long ahead,
                        const int C, const int V) {
  const long rank = p->s->ranks[p->t->slot], rank_ahead = next->s->ranks[next->t->slot];
  floats sum[VECTORS];
  UNROLLED for (int c = 0; c < C; c++)
    UNROLLED for (int v = 0; v < V; v++) sum[c * V + v] = load(y[c] + column + v * LANES);
  for (long k = 0; k < rank; k++) {
    const element *b = row_at(l, p->s->b_rows, p, k) + column;
    if (k < rank_ahead) {
      const element *later = row_at(l, next->s->b_rows, next, k) + ahead;
      UNROLLED for (int v = 0; v < V * LANES; v += LINE) __builtin_prefetch(later + v, 0, 3);
    }
    floats factor[TILE];
    UNROLLED for (int c = 0; c < C; c++) factor[c] = (floats){} + p->shrunk[c * p->s->room + k];
    UNROLLED for (int v = 0; v < V; v++) {
      const floats part = load(b + v * LANES);
      UNROLLED for (int c = 0; c < C; c++) sum[c * V + v] += factor[c] * part;
    }
  }
  UNROLLED for (int c = 0; c < C; c++)
    UNROLLED for (int v = 0; v < V; v++) store(y[c] + column + v * LANES, sum[c * V + v]);
}

/* The piece's columns. */
INLINE void expand(const layer *l, const piece *p, const piece *next, const int C) {
  const int V = VECTORS / C;
  element *y[TILE];
  UNROLLED for (int c = 0; c < C; c++) y[c] = l->y + l->tokens[p->t->first + c] * l->y_stride + p->s->start;
  long column = p->first;
  for (; column + V * LANES <= p->last; column += V * LANES)
    add_columns(l, p, next, y, column, next->first + column - p->first, C, V);
  for (; column < p->last; column += LANES)
    add_columns(l, p, next, y, column, next->first + column - p->first, C, 1);
}

/* Constants for the number of tokens, so that sums stay in registers. */
#define FIXED(name, count)                                                               \
  static void name##_##count(const layer *l, const piece *p, const piece *next) { name(l, p, next, count); }
#define FIXED_TILE(name) FIXED(name, 1) FIXED(name, 2) FIXED(name, 4)
FIXED_TILE(shrink)
FIXED_TILE(expand)

#define CHOOSE(name, count) ((count) == 1 ? name##_1 : (count) == 2 ? name##_2 : name##_4)

typedef struct {
  const projection *projections, *projections_end;
  const tile *tiles, *tiles_end;
  float *shrunk; /* every projection's [tokens, its room], one projection after another */
  long num_tokens;
} work;

/* Prefetches the tables' rows into this core's cache, many at a time, to overlap their latencies. */
static void fetch_tables(const work *w) {
  for (const projection *s = w->projections; s < w->projections_end; s++)
    for (const tile *t = w->tiles; t < w->tiles_end; t++)
      for (long at = t->slot * s->room, end = at + s->ranks[t->slot]; at < end; at += 64 / (long)sizeof(int64_t)) {
        __builtin_prefetch(s->a_rows + at, 0, 3);
        __builtin_prefetch(s->b_rows + at, 0, 3);
      }
}

/* Thread `me`'s share of all rows of A, split into `blocks` of ROWS; each runs once the next is known, to prefetch it. */
static void shrink_share(const layer *l, const work *w, long blocks, int me, int threads) {
  piece now = {0};
  long before = 0;
  float *out = w->shrunk;
  for (const projection *s = w->projections; s < w->projections_end; out += w->num_tokens * s++->room)
    for (const tile *t = w->tiles; t < w->tiles_end; t++)
      for (long rank = s->ranks[t->slot], k = 0; k < rank; k += ROWS)
        if (is_mine(before++, blocks, me, threads)) {
          const piece next = {s, t, out + t->first * s->room, k, least(k + ROWS, rank)};
          if (now.s) CHOOSE(shrink, now.t->count)(l, &now, &next);
          now = next;
        }
  if (now.s) CHOOSE(shrink, now.t->count)(l, &now, &now);
}

/* Thread `me`'s share of all columns, weighted by rank: `cells` in all. */
static void expand_share(const layer *l, const work *w, long cells, int me, int threads) {
  piece now = {0};
  long before = 0;
  float *out = w->shrunk;
  for (const projection *s = w->projections; s < w->projections_end; out += w->num_tokens * s++->room)
    for (const tile *t = w->tiles; t < w->tiles_end; t++)
      for (long rank = s->ranks[t->slot], first = 0, last; rank && first < s->outputs; first = last) {
        last = least(first + PIECE, s->outputs);
        if (is_mine(before, cells, me, threads)) {
          const piece next = {s, t, out + t->first * s->room, first, last};
          if (now.s) CHOOSE(expand, now.t->count)(l, &now, &next);
          now = next;
        }
        before += rank * (last - first);
      }
  if (now.s) CHOOSE(expand, now.t->count)(l, &now, &now);
}

/* Adds all tiles. They cover num_tokens; shrunk has room for `work`. */
void lora_add(element *y, long y_stride, const element *x, long x_stride, const element *slab, long inputs,
              const projection *projections, long num_projections, const int32_t *tokens, long num_tokens, const tile *tiles,
              long num_tiles, float *shrunk, int threads) {
  const layer l = {y, x, slab, y_stride, x_stride, inputs, tokens};
  const work w = {projections, projections + num_projections, tiles, tiles + num_tiles, shrunk, num_tokens};
  long rows = 0, blocks = 0, cells = 0; /* of A: rows, blocks of ROWS; of B: elements */
  for (const projection *s = projections; s < w.projections_end; s++)
    for (const tile *t = tiles; t < w.tiles_end; t++) {
      const long rank = s->ranks[t->slot];
      rows += rank;
      blocks += (rank + ROWS - 1) / ROWS;
      cells += rank * s->outputs;
    }
#pragma omp parallel num_threads(threads) if (rows * inputs + cells >= PARALLEL_ELEMENTS)
  {
    const int me = omp_get_thread_num(), all = omp_get_num_threads();
    fetch_tables(&w);
    shrink_share(&l, &w, blocks, me, all);
#pragma omp barrier
    expand_share(&l, &w, cells, me, all);
  }
}

/* Copies rows of the slab one after another. */
void lora_gather(const element *slab, const int64_t *rows, long count, long length, element *out) {
  for (long k = 0; k < count; k++) memcpy(out + k * length, slab + rows[k], length * sizeof *out);
}
