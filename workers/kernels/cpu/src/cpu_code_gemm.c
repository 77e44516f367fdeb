/* Products of weights held as codes of 4 or 8 bits, with a scale and perhaps a zero for each group of inputs, and inputs
   of 1, 2 or 3 bytes, for CPUs with VNNI: integers are summed within a group, and the groups' sums in order. See
   cpu_code_gemm.py for the layout and the meaning. */
#include "cpu_grouped.h"
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "cpu_rounding.h"

#define TILE_UNROLLED _Pragma("GCC unroll 24")
#define BLOCK 32     /* outputs of one block of weights */
#define VECTORS 2    /* of 16 outputs */
#define TOGETHER 8   /* inputs whose codes stand together: two of each output in a byte, four apart, or a byte each */
#define RUN 64       /* eights of inputs whose codes stay in the L1 cache while rows pass over them */
#define TILE_BYTES 8 /* bytes of inputs of a tile: with their results and what feeds them, 16 sums fill the registers */
#define GROUP_ROWS 48 /* rows whose sums are kept at a time */

/* How a weight is held: the numbers of cpu_code_gemm.py's CodeLayout, places in bytes; 0: there is none. tables: what
   codes of 4 bits mean, less offset, up to three bytes of it: the highest first. */
typedef struct {
  long outputs, inputs, groups, line, scale_at, zero_at, outer_at, ends_at, order_at, planes;
  long offsets[3], tables[3][16];
} layout;
#define NIBBLES (BLOCK * TOGETHER / 2) /* `line`: bytes of eight inputs of a block; the other one is BLOCK * TOGETHER */

/* Eights of inputs of a group, which its codes are padded to. */
INLINE long eights_of(const int32_t *ends, long g) {
  return (ends[g] - (g ? ends[g - 1] : 0) + TOGETHER - 1) / TOGETHER;
}

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
  const uint8_t *ahead; /* memory that is read next: two lines of it are fetched with each line, `apart` bytes apart */
  long apart;
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
      TILE_UNROLLED for (int o = 0; o < line; o += NIBBLES) {
        _mm_prefetch((const char *)ahead + o, _MM_HINT_T0);
        _mm_prefetch((const char *)ahead + o + t->apart, _MM_HINT_T0);
      }
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

/* Rows that have been rounded: codes [row][plane][stride], and as in `work`. */
typedef struct {
  const int8_t *codes;
  long stride;
  const float *scales; /* [row] */
  const int32_t *sums;
  const float *totals;
  int planes;
} rounded_rows;

/* Rows [first, first + count) times the groups of a run, by one table of the codes, in tiles of nearly equal height, of
   which the first two fetch the run after it if the last table is there. Of inputs of two bytes only the higher is
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
    const int fetches = is_last && t < 2 && next;
    height = (count - row + tiles - t - 1) / (tiles - t);
    run.x = x + (first + row) * rows->planes * rows->stride;
    run.sums = rows->sums + (first + row) * rows->planes * l->groups;
    run.totals = rows->totals + (first + row) * l->groups;
    run.results = results + row * BLOCK;
    run.ahead = fetches ? next + 64 * t : run.codes;
    run.apart = fetches && tiles == 1 ? 64 : 0;
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

/* Rows [first, end) times one block, of which `outputs` are there. */
static void multiply_block(const layout *l, const uint8_t *held, long block, const rounded_rows *rows, long first, long end,
                           float unit, const element *bias, element *out, long out_stride, long outputs) {
  const long parts = (end - first + GROUP_ROWS - 1) / GROUP_ROWS;
  const float *outer = l->outer_at ? (const float *)(held + l->outer_at) + block * BLOCK : 0;
  for (long part = 0; part < parts; part++) {
    const long begin = first + (end - first) * part / parts, stop = first + (end - first) * (part + 1) / parts;
    float results[GROUP_ROWS * BLOCK];
    memset(results, 0, (stop - begin) * BLOCK * sizeof *results);
    multiply_all(l, held, block, rows, begin, stop - begin, results);
    for (long row = begin; row < stop; row++)
      for (long o = 0; o < BLOCK && o < outputs; o += LANES) {
        floats y = (floats)_mm512_loadu_ps(results + (row - begin) * BLOCK + o) * (rows->scales[row] * unit);
        if (outer) y *= (floats)_mm512_loadu_ps(outer + o);
        if (bias) y += load_some(bias + o, outputs - o);
        store_some(out + row * out_stride + o, y, outputs - o);
      }
  }
}

/* One row's inputs as integers, group by group, each from the start of an eight. sorted: where the inputs go if the weight
   has an order of its own. */
static void round_row(const layout *l, const uint8_t *held, const element *x, element *sorted, int planes, int8_t *codes,
                      long stride, float *scale, int32_t *sums, float *totals) {
  const int32_t *ends = (const int32_t *)(held + l->ends_at), *order = (const int32_t *)(held + l->order_at);
  const float steps = row_steps(x, l->inputs, planes, scale);
  if (l->order_at) {
    for (long i = 0; i < l->inputs; i++) sorted[i] = x[order[i]];
    x = sorted;
  }
  for (long g = 0, start = 0; g < l->groups; g++) {
    round_inputs(x + start, ends[g] - start, steps, planes, codes, stride, sums + g, l->groups);
    codes += eights_of(ends, g) * TOGETHER;
    start = ends[g];
    if (!l->zero_at) continue;
    totals[g] = 0;
    for (int plane = 0; plane < planes; plane++) totals[g] = totals[g] * 256 + sums[plane * l->groups + g];
  }
}

/* codes [rows][planes][stride], row_scales [rows], sums [rows][planes][groups], totals [rows][groups] and sorted
   [rows][inputs]: to work in; the last two where the weight has zeros, and an order. unit: of the values. */
void code_gemm(const layout *l, const uint8_t *held, float unit, const element *x, long x_stride, const element *bias,
               element *out, int8_t *codes, long stride, float *row_scales, int32_t *sums, float *totals, element *sorted,
               int planes, long rows, int threads) {
  const long blocks = (l->outputs + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows >= 16)
  for (long row = 0; row < rows; row++)
    round_row(l, held, x + row * x_stride, sorted + row * l->inputs, planes, codes + row * planes * stride, stride,
              row_scales + row, sums + row * planes * l->groups, totals + row * l->groups);
  const rounded_rows all = {codes, stride, row_scales, sums, totals, planes};
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long block = 0; block < blocks; block++) {
    const long o = block * BLOCK;
    multiply_block(l, held, block, &all, 0, rows, unit, bias ? bias + o : 0, out + o, l->outputs, l->outputs - o);
  }
}

/* Lays out codes [outputs][inputs], a byte each, in `held`, whose ends of groups are there and whose rest is zero. */
void pack_codes(const layout *l, const uint8_t *codes, uint8_t *held, int threads) {
  const int32_t *ends = (const int32_t *)(held + l->ends_at);
  long all = 0;
  for (long g = 0; g < l->groups; g++) all += eights_of(ends, g);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long o = 0; o < l->outputs; o++) {
    const uint8_t *row = codes + o * l->inputs;
    uint8_t *at = held + o / BLOCK * all * l->line + o % BLOCK * 4;
    for (long g = 0, start = 0; g < l->groups; start = ends[g], g++)
      for (long i = start; i < ends[g]; i += TOGETHER, at += l->line) {
        uint32_t halves[2] = {0, 0};
        memcpy(halves, row + i, ends[g] - i < TOGETHER ? ends[g] - i : TOGETHER);
        if (l->line == NIBBLES) halves[0] |= halves[1] << 4;
        memcpy(at, halves, 4);
        if (l->line > NIBBLES) memcpy(at + NIBBLES, halves + 1, 4);
      }
  }
}

/* As grouped_gemm (cpu_grouped_gemm.c). held: of each expert, `expert_bytes` apart. */
void grouped_code_gemm(const layout *l, const uint8_t *held, long expert_bytes, float unit, const element *x, long x_stride,
                       const element *bias, element *out, int8_t *codes, long stride, float *row_scales, int32_t *sums,
                       float *totals, element *sorted, int planes, const int32_t *order, const int32_t *ends, long experts,
                       long top_k, int threads) {
  const long blocks = (l->outputs + BLOCK - 1) / BLOCK, rows = ends[experts - 1];
  int used[experts];
  const long count = experts_used(ends, experts, used), run = blocks_of_item(count * blocks, threads);
  const long runs = (blocks + run - 1) / run;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows >= 16)
  for (long row = 0; row < rows; row++) {
    long expert = 0;
    while (ends[expert] <= row) expert++;
    round_row(l, held + expert * expert_bytes, x + (top_k ? order[row] / top_k : row) * x_stride, sorted + row * l->inputs,
              planes, codes + row * planes * stride, stride, row_scales + row, sums + row * planes * l->groups,
              totals + row * l->groups);
  }
  const rounded_rows all = {codes, stride, row_scales, sums, totals, planes};
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (long item = 0; item < count * runs; item++) {
    const long expert = used[item / runs], begin = expert ? ends[expert - 1] : 0, first = item % runs * run;
    for (long block = first; block < first + run && block < blocks; block++) {
      const long o = block * BLOCK;
      multiply_block(l, held + expert * expert_bytes, block, &all, begin, ends[expert], unit,
                     bias ? bias + expert * l->outputs + o : 0, out + o, l->outputs, l->outputs - o);
    }
  }
}
#endif
