/* Product of any number of rows, y = x W^T + b, in which a row's sums have one order. See row_gemm.py. */
#include "cpu_vector.h"

#define BLOCK 64 /* outputs of one block of the packed weight */
#define VECTORS (BLOCK / LANES)
#define MOST_FEW 6 /* rows whose inputs are not widened beforehand */
const int row_gemm_few = MOST_FEW;
#define TILE_ROWS 6 /* times VECTORS: 24 sums and what feeds them fill the registers */
#ifdef __AVX512F__
const int row_gemm_fills_registers = 1; /* elsewhere a tile's sums do not fit into them */
#endif
#define RUN 128 /* inputs whose weights stay in the L1 cache while a piece's rows pass over them */

INLINE floats spread(element x) {
#if ELEMENT == 0
  return (floats){} + x;
#else
  return (floats)((words){} + ((uint32_t)x << 16));
#endif
}

/* R rows times BLOCK outputs over one run of inputs, which are summed one by one, in order; then the run's sum is added
   to those before it. sums: [row][BLOCK]. */
INLINE void multiply(const element *w, const element *x, long x_stride, float *sums, long count, int first, const int R) {
  floats sum[TILE_ROWS * VECTORS];
  UNROLLED for (int i = 0; i < R * VECTORS; i++) sum[i] = (floats){};
  for (long i = 0; i < count; i++) {
    floats weight[VECTORS];
    UNROLLED for (int v = 0; v < VECTORS; v++) weight[v] = load(w + i * BLOCK + v * LANES);
    UNROLLED for (int v = 0; v < BLOCK * (int)sizeof(element); v += 64)
      __builtin_prefetch((const char *)(w + (i + RUN) * BLOCK) + v, 0, 3);
    UNROLLED for (int r = 0; r < R; r++) {
      const floats input = spread(x[r * x_stride + i]);
      UNROLLED for (int v = 0; v < VECTORS; v++) sum[r * VECTORS + v] += weight[v] * input;
    }
  }
  UNROLLED for (int i = 0; i < R * VECTORS; i++) {
    floats before = {};
    if (!first) memcpy(&before, sums + i * LANES, sizeof before);
    sum[i] += before;
    memcpy(sums + i * LANES, sum + i, sizeof *sum);
  }
}

typedef void tile(const element *, const element *, long, float *, long, int);
#define TILE(R)                                                                                            \
  static void tile_##R(const element *w, const element *x, long xs, float *s, long n, int first) {         \
    multiply(w, x, xs, s, n, first, R);                                                                    \
  }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
static tile *const TILES[TILE_ROWS] = {tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};

/* Writes `rows` rows of at most `width` outputs, of which there are `outputs`. sums: [row][width]. */
static void finish(const float *sums, long width, const element *bias, element *out, long out_stride, long rows,
                   long outputs) {
  for (long row = 0; row < rows; row++)
    for (long o = 0; o < outputs && o < width; o += LANES) {
      const long left = outputs - o;
      floats sum;
      memcpy(&sum, sums + row * width + o, sizeof sum);
      if (bias) sum += load_some(bias + o, left);
      store_some(out + row * out_stride + o, sum, left);
    }
}

/* Few rows: each piece reads the weight from memory, and each tile widens it anew. */
static void multiply_few(const element *weight, const element *x, long x_stride, const element *bias, element *out,
                         long rows, long inputs, long outputs) {
  const long blocks = (outputs + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static)
  for (long block = 0; block < blocks; block++) {
    float sums[MOST_FEW * BLOCK];
    for (long from = 0; from < inputs; from += RUN)
      for (long row = 0; row < rows; row += TILE_ROWS) {
        const long height = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
        TILES[height - 1](weight + (block * inputs + from) * BLOCK, x + row * x_stride + from, x_stride,
                          sums + row * BLOCK, inputs - from < RUN ? inputs - from : RUN, from == 0);
      }
    const long o = block * BLOCK;
    finish(sums, BLOCK, bias ? bias + o : 0, out + o, outputs, rows, outputs - o);
  }
}

/* Many rows: inputs are widened once, a run of weights once for each group of tiles. Tiles are tall, since inputs come
   from memory as they are multiplied, and narrow, so that a run of widened weights stays in the L1 cache. */
#ifdef __AVX512F__
#define PART 16
#define TALL 14 /* rows of a tile: 28 sums */
#else
#define PART 8
#define TALL 6 /* 12 sums */
#endif
#define WIDE (2 * PART)
#define GROUP 16 /* tiles that share a run of widened weights */
typedef float part __attribute__((vector_size(4 * PART)));

/* R rows times WIDE outputs over one run of inputs, summed as in multiply(). w: [input][WIDE]. x: [input / LANES][R]
   [LANES]. sums: [R][WIDE]. ahead: weights that
   are read next, one line with each step. */
INLINE void multiply_tall(const float *w, const float *x, float *sums, long count, int first, const char *ahead,
                          const int R) {
  part sum[2 * TALL];
  UNROLLED for (int i = 0; i < 2 * R; i++) sum[i] = (part){};
  for (long from = 0; from < count; from += LANES, x += R * LANES) {
    const long steps = count - from < LANES ? count - from : LANES;
    for (long i = 0; i < steps; i++, w += WIDE, ahead += BLOCK * sizeof(element)) {
      part low, high;
      memcpy(&low, w, sizeof low);
      memcpy(&high, w + PART, sizeof high);
      __builtin_prefetch(ahead, 0, 2);
      UNROLLED for (int r = 0; r < R; r++) {
        const float input = x[r * LANES + i];
        sum[2 * r] += low * input;
        sum[2 * r + 1] += high * input;
      }
    }
  }
  UNROLLED for (int i = 0; i < 2 * R; i++) {
    part before = {};
    if (!first) memcpy(&before, sums + i * PART, sizeof before);
    sum[i] += before;
    memcpy(sums + i * PART, sum + i, sizeof *sum);
  }
}

typedef void tall_tile(const float *, const float *, float *, long, int, const char *);
#define TALL_TILE(R)                                                                                        \
  static void tall_##R(const float *w, const float *x, float *s, long n, int first, const char *ahead) {    \
    multiply_tall(w, x, s, n, first, ahead, R);                                                             \
  }
TALL_TILE(1) TALL_TILE(2) TALL_TILE(3) TALL_TILE(4) TALL_TILE(5) TALL_TILE(6)
#if TALL > 6
TALL_TILE(7) TALL_TILE(8) TALL_TILE(9) TALL_TILE(10) TALL_TILE(11) TALL_TILE(12) TALL_TILE(13) TALL_TILE(14)
#endif
static tall_tile *const TALL_TILES[TALL] = {tall_1, tall_2, tall_3, tall_4, tall_5, tall_6,
#if TALL > 6
  tall_7, tall_8, tall_9, tall_10, tall_11, tall_12, tall_13, tall_14,
#endif
};

/* Where tile `i` of `count` begins among `rows` rows that all tiles share evenly. */
INLINE long start_of(long i, long count, long rows) { return i * rows / count; }

/* A tile's rows as floats: [input / LANES][height][LANES], with zeros behind the last input. */
static void widen_rows(const element *x, long x_stride, long height, long inputs, float *wide) {
  for (long i = 0; i < inputs; i += LANES)
    for (long row = 0; row < height; row++, wide += LANES) {
      const floats given = load_some(x + row * x_stride + i, inputs - i);
      memcpy(wide, &given, sizeof given);
    }
}

static void multiply_many(const element *weight, const element *x, long x_stride, const element *bias, element *out,
                          long rows, long inputs, long outputs, float *wide_x) {
  const long tiles = (rows + TALL - 1) / TALL, groups = (tiles + GROUP - 1) / GROUP;
  const long slices = (outputs + WIDE - 1) / WIDE, padded = (inputs + LANES - 1) / LANES * LANES;
#pragma omp for schedule(static)
  for (long tile = 0; tile < tiles; tile++) {
    const long row = start_of(tile, tiles, rows);
    widen_rows(x + row * x_stride, x_stride, start_of(tile + 1, tiles, rows) - row, inputs, wide_x + row * padded);
  }
#pragma omp for schedule(static) collapse(2)
  for (long group = 0; group < groups; group++)
    for (long slice = 0; slice < slices; slice++) {
      const long o = slice * WIDE, begin = start_of(group, groups, tiles), end = start_of(group + 1, groups, tiles);
      const element *w = weight + o / BLOCK * BLOCK * inputs + o % BLOCK;
      const long first_row = start_of(begin, tiles, rows), last_row = start_of(end, tiles, rows);
      float sums[GROUP * TALL * WIDE] __attribute__((aligned(64))), wide[RUN * WIDE] __attribute__((aligned(64)));
      for (long from = 0; from < inputs; from += RUN, w += RUN * BLOCK) {
        const long count = inputs - from < RUN ? inputs - from : RUN;
        for (long i = 0; i < count; i++)
          for (int v = 0; v < WIDE; v += LANES) {
            const floats weights = load(w + i * BLOCK + v);
            memcpy(wide + i * WIDE + v, &weights, sizeof weights);
          }
        for (long tile = begin; tile < end; tile++) {
          const long row = start_of(tile, tiles, rows), height = start_of(tile + 1, tiles, rows) - row;
          TALL_TILES[height - 1](wide, wide_x + row * padded + from * height, sums + (row - first_row) * WIDE, count,
                                 from == 0, (const char *)(w + RUN * BLOCK));
        }
      }
      finish(sums, WIDE, bias ? bias + o : 0, out + first_row * outputs + o, outputs, last_row - first_row, outputs - o);
    }
}

/* weight: [outputs / BLOCK][inputs][BLOCK], padded with zeros. wide: floats for the widened inputs of wide_rows rows, each
   of them whole vectors; unused for rows up to row_gemm_few. */
void row_gemm(const element *weight, const element *x, long x_stride, const element *bias, element *out, long rows,
              long inputs, long outputs, float *wide, long wide_rows, int threads) {
#pragma omp parallel num_threads(threads)
  if (rows <= MOST_FEW)
    multiply_few(weight, x, x_stride, bias, out, rows, inputs, outputs);
  else
    for (long row = 0; row < rows; row += wide_rows)
      multiply_many(weight, x + row * x_stride, x_stride, bias, out + row * outputs,
                    rows - row < wide_rows ? rows - row : wide_rows, inputs, outputs, wide);
}
