/* Products of codes with bytes of inputs, on CPUs with VNNI. Follows cpu_code_layout.h. */
#include "cpu_rounding.h"

#define VECTORS 2    /* of 16 outputs */
#define RUN 64       /* eights of inputs whose codes stay in the L1 cache while rows pass over them */
#define TILE_BYTES 8 /* bytes of inputs of a tile: with their results and what feeds them, 16 sums fill the registers */

/* The values of codes of 4 bits, each in the lower half of a byte whose other bits are ignored. */
#ifdef __AVX512VBMI__
INLINE __m512i look_up(__m512i table, __m512i codes) { return _mm512_permutexvar_epi8(codes, table); }
#else
INLINE __m512i look_up(__m512i table, __m512i codes) {
  return _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
}
#endif

/* As _mm512_dpbusd_epi32, for which gcc 12 copies each sum in every step, and spills those of large tiles. */
INLINE void add_products(__m512i *sum, __m512i values, __m512i inputs) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(values), "v"(inputs));
}

/* What a tile multiplies: groups [first, last) of one block by some rows. */
typedef struct {
  const uint8_t *codes;        /* of the first group */
  const float *scales, *zeros; /* of the block; zeros: may be none */
  const uint8_t *narrow;       /* scales in E4M3 instead; else none */
  const int32_t *ends;
  long first, last, groups;
  long offset;      /* what values have been raised by */
  float factor;     /* of the scales, a power of two */
  __m512i table;
  const int8_t *x;  /* the rows' bytes at the first group: [row][plane][stride] */
  long stride, sums_stride; /* of a byte to the next */
  const int32_t *sums;  /* of the inputs: [row][plane][groups] */
  const float *totals;  /* of each row's: [row][groups], where there are zeros */
  float *results;       /* [row][BLOCK] */
  const uint8_t *ahead; /* memory that is read next: a line of it is fetched with each line */
} work;

/* Floats of 16 numbers in E4M3. Their bits are those of half floats 2**8 times as small, subnormal ones too; the two codes
   of NaN become 480. */
INLINE __m512 of_e4m3(const uint8_t *at) {
  const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)at));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(128)), 8);
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(127)), 7);
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256));
}

/* Adds what a group's sums stand for to the results. */
INLINE void add_group(const work *t, long g, const __m512i *sum, __m512 *result, const int R, const int P) {
  __m512 scale[VECTORS], zero[VECTORS];
  TILE_UNROLLED for (int v = 0; v < VECTORS; v++) {
    const long at = g * BLOCK + v * LANES;
    scale[v] = t->narrow ? of_e4m3(t->narrow + at) : _mm512_loadu_ps(t->scales + at);
    scale[v] = _mm512_mul_ps(scale[v], _mm512_set1_ps(t->factor));
    zero[v] = _mm512_setzero_ps();
    if (t->zeros) zero[v] = _mm512_mul_ps(_mm512_loadu_ps(t->zeros + at), _mm512_set1_ps(1 / t->factor));
  }
  TILE_UNROLLED for (int r = 0; r < R; r++) {
    const __m512 total = _mm512_set1_ps(t->zeros ? t->totals[r * t->groups + g] : 0);
    TILE_UNROLLED for (int v = 0; v < VECTORS; v++) {
      __m512 whole = _mm512_cvtepi32_ps(sum[r * P * VECTORS + v]);
      TILE_UNROLLED for (int p = 1; p < P; p++)
        whole = _mm512_fmadd_ps(whole, _mm512_set1_ps(256), _mm512_cvtepi32_ps(sum[(r * P + p) * VECTORS + v]));
      if (t->zeros) whole = _mm512_fnmadd_ps(zero[v], total, whole);
      result[r * VECTORS + v] = _mm512_fmadd_ps(whole, scale[v], result[r * VECTORS + v]);
    }
  }
}

/* R rows of P bytes an input. WIDE: codes of 8 bits. Few rows have a sum of their own for each half of the eight. */
INLINE void multiply(const work *t, const int R, const int P, const int WIDE) {
  enum { SUMS = TILE_BYTES * VECTORS };
  const int split = R * P <= 3, line = WIDE ? 2 * NIBBLES : NIBBLES;
  const uint8_t *w = t->codes, *ahead = t->ahead;
  const int8_t *x = t->x;
  __m512 result[SUMS];
  TILE_UNROLLED for (int i = 0; i < R * VECTORS; i++) result[i] = _mm512_loadu_ps(t->results + i * LANES);
  for (long g = t->first; g < t->last; g++) {
    const long eights = eights_of(t->ends, g);
    if (!eights) continue;
    __m512i sum[SUMS], more[SUMS];
    TILE_UNROLLED for (int i = 0; i < R * P; i++) {
      const __m512i start = _mm512_set1_epi32(-(int32_t)t->offset * t->sums[i * t->sums_stride + g]);
      TILE_UNROLLED for (int v = 0; v < VECTORS; v++) {
        sum[i * VECTORS + v] = start;
        if (split) more[i * VECTORS + v] = _mm512_setzero_si512();
      }
    }
    for (long e = 0; e < eights; e++, w += line, ahead += line, x += TOGETHER) {
      TILE_UNROLLED for (int o = 0; o < line; o += NIBBLES) _mm_prefetch((const char *)ahead + o, _MM_HINT_T0);
      TILE_UNROLLED for (int half = 0; half < 2; half++) {
        __m512i values[VECTORS];
        TILE_UNROLLED for (int v = 0; v < VECTORS; v++) {
          if (WIDE) {
            values[v] = _mm512_loadu_si512(w + half * NIBBLES + v * 64);
          } else {
            const __m512i codes = _mm512_loadu_si512(w + v * 64);
            values[v] = look_up(t->table, half ? _mm512_srli_epi16(codes, 4) : codes);
          }
        }
        TILE_UNROLLED for (int i = 0; i < R * P; i++) {
          int32_t four;
          memcpy(&four, x + i * t->stride + half * 4, sizeof four);
          const __m512i inputs = _mm512_set1_epi32(four);
          TILE_UNROLLED for (int v = 0; v < VECTORS; v++) {
            add_products((split && half ? more : sum) + i * VECTORS + v, values[v], inputs);
          }
        }
      }
    }
    if (split) TILE_UNROLLED for (int i = 0; i < R * P * VECTORS; i++) sum[i] = _mm512_add_epi32(sum[i], more[i]);
    add_group(t, g, sum, result, R, P);
  }
  TILE_UNROLLED for (int i = 0; i < R * VECTORS; i++) _mm512_storeu_ps(t->results + i * LANES, result[i]);
}

typedef void tile(const work *);
#define TILE(R, P)                                                                    \
  static void tile_##R##_##P##_nibbles(const work *t) { multiply(t, R, P, 0); } \
  static void tile_##R##_##P##_bytes(const work *t) { multiply(t, R, P, 1); }
#define NAMES(R, P) {tile_##R##_##P##_nibbles, tile_##R##_##P##_bytes}
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1) TILE(7, 1) TILE(8, 1)
#define BYTE_TILES NAMES(1, 1), NAMES(2, 1), NAMES(3, 1), NAMES(4, 1), NAMES(5, 1), NAMES(6, 1), NAMES(7, 1), NAMES(8, 1)
#if ELEMENT == 0
TILE(1, 3) TILE(2, 3)
#define WHOLE_TILES NAMES(1, 3), NAMES(2, 3)
#else
TILE(1, 2) TILE(2, 2) TILE(3, 2) TILE(4, 2)
#define WHOLE_TILES NAMES(1, 2), NAMES(2, 2), NAMES(3, 2), NAMES(4, 2)
#endif
static tile *const TILES_OF[2][TILE_BYTES][2] = {{BYTE_TILES}, {WHOLE_TILES}};

/* Rows [first, first + count) times the groups of a run, by one table of the codes, in tiles of nearly equal height. Of
   several the first two fetch the run after it if the last table is there: one alone the CPU's own prefetching serves. Of inputs of two bytes only the higher is
   multiplied by the lower byte of values: the lower is as far below as what has been rounded. */
static void multiply_run(const layout *l, const rounded_rows *rows, long first, long count, work run, long table,
                         const uint8_t *next) {
  const int planes = table && rows->planes == 2 ? 1 : rows->planes, is_last = table == l->planes - 1;
  const long most = TILE_BYTES / planes, tiles = (count + most - 1) / most;
  uint8_t values[64];
  for (int i = 0; i < 64; i++) values[i] = l->tables[table][i % 16];
  run.table = _mm512_loadu_si512(values);
  run.offset = l->offsets[table];
  run.factor = planes < rows->planes ? 256 : 1;
  for (long lower = table + 1; lower < l->planes; lower++) run.factor *= 256;
  run.stride = rows->stride * (rows->planes / planes);
  run.sums_stride = l->groups * (rows->planes / planes);
  if (table) run.zeros = 0;
  const int8_t *x = run.x;
  float *results = run.results;
  for (long t = 0, row = 0, height; t < tiles; t++, row += height) {
    const int fetches = is_last && tiles > 1 && t < 2 && next;
    height = (count - row + tiles - t - 1) / (tiles - t);
    run.x = x + (first + row) * rows->planes * rows->stride;
    run.sums = rows->sums + (first + row) * rows->planes * l->groups;
    run.totals = rows->totals + (first + row) * l->groups;
    run.results = results + row * BLOCK;
    run.ahead = fetches ? next + 64 * t : run.codes;
    TILES_OF[planes > 1][height - 1][l->line > NIBBLES](&run);
  }
}

/* Up to GROUP_ROWS rows times one block, run by run, each of whole groups. */
static void multiply_all(const layout *l, const uint8_t *held, long block, const rounded_rows *rows, long first, long count,
                         float *results) {
  const int32_t *ends = (const int32_t *)(held + l->ends_at);
  const long numbers = block * BLOCK * l->groups;
  long all = 0, eights;
  for (long g = 0; g < l->groups; g++) all += eights_of(ends, g);
  work run = {.codes = held + block * all * l->line,
              .scales = (const float *)(held + l->scale_at) + numbers,
              .narrow = l->outer_at ? held + l->scale_at + numbers : 0,
              .zeros = l->zero_at ? (const float *)(held + l->zero_at) + numbers : 0, .ends = ends, .groups = l->groups,
              .x = rows->codes, .results = results};
  for (; run.first < l->groups; run.first = run.last, run.codes += eights * l->line, run.x += eights * TOGETHER) {
    run.last = run.first + 1;
    for (eights = eights_of(ends, run.first); run.last < l->groups; run.last++) {
      if (eights + eights_of(ends, run.last) > RUN) break;
      eights += eights_of(ends, run.last);
    }
    const uint8_t *next = run.codes + eights * l->line;
    for (long table = 0; table < l->planes; table++)
      multiply_run(l, rows, first, count, run, table, next < held + l->scale_at ? next : 0);
  }
}

/* Rounds the inputs of a group, from the input `at` of a row on. */
INLINE void round_group(const layout *l, const element *x, long inputs, float steps, int planes, digit *codes, long at,
                        long stride, int32_t *sums, long sums_stride) {
  round_inputs(x, inputs, steps, planes, codes + at, stride, sums, sums_stride);
}
