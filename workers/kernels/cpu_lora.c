/* Grouped LoRA of a few tokens per adapter, for CPUs. See cpu_lora.py for its meaning. */
#include <omp.h>

#include "cpu_vector.h"

#define TILE 4    /* tokens of one adapter that share a read of its rows; 1, 2 or this */
#define ROWS 4    /* rows of A read side by side */
#define VECTORS 16 /* sums of an expand that stay in registers */
#define PIECE 512 /* columns of y that one thread takes at a time */
#define LINE (64 / (int)sizeof(element)) /* elements of a cache line */
#define PARALLEL_ELEMENTS 65536 /* below this a second thread costs more than it brings */

typedef struct { /* as SectionTables in lora_ops.py; all fields have 8 bytes */
  const int64_t *a_rows, *b_rows;
  const int32_t *ranks;
  const float *scales;
  int64_t room, outputs, start;
} section;

typedef struct { /* of the list of tokens, and their adapter */
  int32_t first, count, slot;
} tile;

typedef struct {
  element *y;
  const element *x, *slab;
  long y_stride, x_stride, inputs;
  const int32_t *tokens;
} layer;

typedef struct { /* a piece of work: rows first..last of A, or columns first..last of y */
  const section *s;
  const tile *t;
  float *shrunk;
  long first, last;
} piece;

/* Whether the work that begins at `before` of `total` is thread `me`'s: neighbours go to one thread, shares are even. */
INLINE int is_mine(long before, long total, int me, int threads) { return before * threads / total == me; }

/* out[c * stride + k] = scale * x[c] . a[k]; meanwhile the rows `ahead` are fetched. */
INLINE void dots(const element *const *x, const element *const *a, const element *const *ahead, long inputs, float *out,
                 long stride, float scale, const int C, const int K) {
  floats sum[TILE * ROWS];
  UNROLLED for (int i = 0; i < C * K; i++) sum[i] = (floats){};
  for (long i = 0; i < inputs; i += LANES) {
    floats row[ROWS];
    if (i % LINE == 0) UNROLLED for (int k = 0; k < K; k++) __builtin_prefetch(ahead[k] + i, 0, 3);
    UNROLLED for (int k = 0; k < K; k++) row[k] = load(a[k] + i);
    UNROLLED for (int c = 0; c < C; c++) {
      const floats token = load(x[c] + i);
      UNROLLED for (int k = 0; k < K; k++) sum[c * K + k] += token * row[k];
    }
  }
  UNROLLED for (int c = 0; c < C; c++)
    UNROLLED for (int k = 0; k < K; k++) out[c * stride + k] = scale * sum_lanes(sum[c * K + k]);
}

/* The tile's tokens against up to ROWS rows of A. */
INLINE void shrink(const layer *l, const piece *p, const piece *next, const int C) {
  const section *s = p->s;
  const element *x[TILE], *a[ROWS], *ahead[ROWS];
  UNROLLED for (int c = 0; c < C; c++) x[c] = l->x + l->tokens[p->t->first + c] * l->x_stride;
  for (long k = 0; k < ROWS; k++) {
    a[k] = l->slab + s->a_rows[p->t->slot * s->room + (p->first + k < p->last ? p->first + k : p->first)];
    ahead[k] = l->slab + next->s->a_rows[next->t->slot * next->s->room + (next->first + k < next->last ? next->first + k : next->first)];
  }
  const float scale = s->scales[p->t->slot];
  float *out = p->shrunk + p->first;
  if (p->last - p->first == ROWS)
    dots(x, a, ahead, l->inputs, out, s->room, scale, C, ROWS);
  else
    for (long k = 0; k < p->last - p->first; k++) dots(x, a + k, ahead + k, l->inputs, out + k, s->room, scale, C, 1);
}

/* y[c][..] += sum over k of shrunk[c * stride + k] * b[k][..], V vectors wide; meanwhile what is `ahead` is fetched. */
INLINE void add_columns(element *const *y, const element *slab, const int64_t *rows, long column, const float *shrunk,
                        long stride, long rank, const element *ahead, const int64_t *rows_ahead, long rank_ahead,
                        const int C, const int V) {
  floats sum[VECTORS];
  UNROLLED for (int c = 0; c < C; c++)
    UNROLLED for (int v = 0; v < V; v++) sum[c * V + v] = load(y[c] + column + v * LANES);
  for (long k = 0; k < rank; k++) {
    const element *b = slab + rows[k] + column;
    if (k < rank_ahead) UNROLLED for (int v = 0; v < V * LANES; v += LINE) __builtin_prefetch(ahead + rows_ahead[k] + v, 0, 3);
    floats factor[TILE];
    UNROLLED for (int c = 0; c < C; c++) factor[c] = (floats){} + shrunk[c * stride + k];
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
  const section *s = p->s;
  const int64_t *rows = s->b_rows + p->t->slot * s->room, *ahead = next->s->b_rows + next->t->slot * next->s->room;
  const long rank = s->ranks[p->t->slot], rank_ahead = next->s->ranks[next->t->slot];
  element *y[TILE];
  UNROLLED for (int c = 0; c < C; c++) y[c] = l->y + l->tokens[p->t->first + c] * l->y_stride + s->start;
  long column = p->first;
  for (; column + V * LANES <= p->last; column += V * LANES)
    add_columns(y, l->slab, rows, column, p->shrunk, s->room, rank, l->slab + next->first + column - p->first, ahead, rank_ahead, C, V);
  for (; column < p->last; column += LANES)
    add_columns(y, l->slab, rows, column, p->shrunk, s->room, rank, l->slab + next->first, ahead, 0, C, 1);
}

/* Constants for the number of tokens, so that sums stay in registers. */
#define FIXED(name, count)                                                               \
  static void name##_##count(const layer *l, const piece *p, const piece *next) { name(l, p, next, count); }
#define FIXED_TILE(name) FIXED(name, 1) FIXED(name, 2) FIXED(name, 4)
FIXED_TILE(shrink)
FIXED_TILE(expand)

#define CHOOSE(name, count) ((count) == 1 ? name##_1 : (count) == 2 ? name##_2 : name##_4)

INLINE long least(long a, long b) { return a < b ? a : b; }

/* shrunk: room for every section's [tokens, its room] floats, one section after another. tiles cover num_tokens. */
void lora_add(element *y, long y_stride, const element *x, long x_stride, const element *slab, long inputs,
              const section *sections, long num_sections, const int32_t *tokens, long num_tokens, const tile *tiles,
              long num_tiles, float *shrunk, int threads) {
  const layer l = {y, x, slab, y_stride, x_stride, inputs, tokens};
  long blocks = 0, cells = 0, rows = 0; /* of A: blocks of ROWS; of B: rank x columns; of A: rows */
  for (long i = 0; i < num_sections; i++)
    for (long j = 0; j < num_tiles; j++) {
      const long rank = sections[i].ranks[tiles[j].slot];
      rows += rank;
      blocks += (rank + ROWS - 1) / ROWS;
      cells += rank * sections[i].outputs;
    }
#pragma omp parallel num_threads(threads) if (rows * inputs + cells >= PARALLEL_ELEMENTS)
  {
    const int me = omp_get_thread_num(), all = omp_get_num_threads();
    long before = 0;
    float *out = shrunk;
    piece now = {0};
    for (long i = 0; i < num_sections; out += num_tokens * sections[i++].room)
      for (const tile *t = tiles; t < tiles + num_tiles; t++) {
        const long rank = sections[i].ranks[t->slot];
        for (long k = 0; k < rank; k += ROWS)
          if (is_mine(before++, blocks, me, all)) {
            const piece next = {sections + i, t, out + t->first * sections[i].room, k, least(k + ROWS, rank)};
            if (now.s) CHOOSE(shrink, now.t->count)(&l, &now, &next);
            now = next;
          }
      }
    if (now.s) CHOOSE(shrink, now.t->count)(&l, &now, &now);
#pragma omp barrier
    before = 0, out = shrunk, now.s = NULL;
    for (long i = 0; i < num_sections; out += num_tokens * sections[i++].room)
      for (const tile *t = tiles; t < tiles + num_tiles; t++) {
        const long rank = sections[i].ranks[t->slot], outputs = sections[i].outputs;
        for (long first = 0; rank && first < outputs; first += PIECE) {
          const long last = least(first + PIECE, outputs);
          if (is_mine(before, cells, me, all)) {
            const piece next = {sections + i, t, out + t->first * sections[i].room, first, last};
            if (now.s) CHOOSE(expand, now.t->count)(&l, &now, &next);
            now = next;
          }
          before += rank * (last - first);
        }
      }
    if (now.s) CHOOSE(expand, now.t->count)(&l, &now, &now);
  }
}
