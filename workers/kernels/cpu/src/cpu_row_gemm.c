/* Product of any number of rows, y = x W^T + b, in which a row's sums have one order. See row_gemm.py. */
#include "cpu_vector.h"

#define BLOCK 64 /* outputs of one block of the packed weight */
#define RUN 128  /* inputs whose weights stay in the L1 cache while rows pass over them: the next ones would drive them out */
#define FEW 6    /* rows whose inputs are widened run by run */
#if defined(__AVX512F__) || defined(__AVX2__)
const int row_gemm_fills_registers = 1; /* elsewhere a tile's sums may not fit into them */
#endif
const int row_gemm_few = FEW;

/* As many floats as a tile keeps in one register, from `at`. */
#ifdef __AVX512F__
#define PART LANES
typedef floats part;
INLINE part load_part(const element *at) { return load(at); }
#else
#define PART 8
typedef float part __attribute__((vector_size(32)));
INLINE part load_part(const element *at) {
#if ELEMENT == 1 && defined(__AVX2__) /* compilers turn the portable conversion into more instructions */
  return (part)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16);
#elif ELEMENT == 1
  typedef uint32_t bits __attribute__((vector_size(32)));
  uint16_t narrow __attribute__((vector_size(16)));
  memcpy(&narrow, at, sizeof narrow);
  return (part)(__builtin_convertvector(narrow, bits) << 16);
#else
  part x;
  memcpy(&x, at, sizeof x);
  return x;
#endif
}
#endif

INLINE float widened(element x) {
#if ELEMENT == 0
  return x;
#else
  const uint32_t bits = (uint32_t)x << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
#endif
}

/* Adds the sums of a run to those before it. */
INLINE void add_run(float *sums, part sum, int first) {
  part before = {};
  if (!first) memcpy(&before, sums, sizeof before);
  sum += before;
  memcpy(sums, &sum, sizeof sum);
}

/* Registers: R * P sums, P weights and an input. */
#if PART == 8
#define TILE_SUMS 12
#define PARTS(R) ((R) == 1 ? 8 : (R) <= 3 ? 4 : 2)
#else
#define TILE_SUMS 24
#define PARTS(R) (BLOCK / PART)
#endif

/* Few rows: R of them times P parts of a block's outputs over one run of inputs, which are summed one by one, in order;
   then the run's sum is added to those before it. x: [row][RUN]. sums: [row][BLOCK]. */
INLINE void multiply(const element *w, const float *x, float *sums, long count, int first, const int R, const int P) {
  part sum[TILE_SUMS];
  UNROLLED for (int i = 0; i < R * P; i++) sum[i] = (part){};
  for (long i = 0; i < count; i++) {
    part weight[P];
    UNROLLED for (int p = 0; p < P; p++) weight[p] = load_part(w + i * BLOCK + p * PART);
    UNROLLED for (int v = 0; v < P * PART * (int)sizeof(element); v += 64)
      __builtin_prefetch((const char *)(w + (i + RUN) * BLOCK) + v, 0, P * PART == BLOCK ? 3 : 2); /* see RUN */
    UNROLLED for (int r = 0; r < R; r++) {
      const float input = x[r * RUN + i];
      UNROLLED for (int p = 0; p < P; p++) sum[r * P + p] += weight[p] * input;
    }
  }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int p = 0; p < P; p++) add_run(sums + r * BLOCK + p * PART, sum[r * P + p], first);
}

typedef void tile(const element *, const float *, float *, long, int);
#define TILE(R)                                                                                        \
  static void tile_##R(const element *w, const float *x, float *s, long n, int first) {                \
    for (int o = 0; o < BLOCK; o += PARTS(R) * PART) multiply(w + o, x, s + o, n, first, R, PARTS(R)); \
  }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
static tile *const TILES[FEW] = {tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};

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

/* A run of each row's inputs as floats: a row's are read again for each part of the outputs. wide: [row][RUN]. */
INLINE void widen_run(const element *x, long x_stride, long rows, long count, float *wide) {
  for (long row = 0; row < rows; row++, x += x_stride, wide += RUN) {
    long i = 0;
    for (; i + PART <= count; i += PART) {
      const part given = load_part(x + i);
      memcpy(wide + i, &given, sizeof given);
    }
    for (; i < count; i++) wide[i] = widened(x[i]);
  }
}

/* Up to FEW rows: each tile widens the weights that it reads. */
static void multiply_few(const element *weight, const element *x, long x_stride, const element *bias, element *out,
                         long rows, long inputs, long outputs) {
  const long blocks = (outputs + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static)
  for (long block = 0; block < blocks; block++) {
    float sums[FEW * BLOCK], wide[FEW * RUN];
    for (long from = 0; from < inputs; from += RUN) {
      const long count = inputs - from < RUN ? inputs - from : RUN;
      widen_run(x + from, x_stride, rows, count, wide);
      TILES[rows - 1](weight + (block * inputs + from) * BLOCK, wide, sums, count, from == 0);
    }
    const long o = block * BLOCK;
    finish(sums, BLOCK, bias ? bias + o : 0, out + o, outputs, rows, outputs - o);
  }
}

/* Many rows: inputs are widened once, and so is a run of weights for each group of more than FEW_TILES tiles. Tiles are
   tall, since inputs come from memory as they are multiplied, and narrow, so that a run stays in the L1 cache. */
#if PART == 8
#define TALL 6 /* rows of a tile: 12 sums */
#else
#define TALL 14 /* 28 sums */
#endif
#define WIDE (2 * PART)
#define FEW_TILES 2
#define GROUP 16 /* tiles that share a run of widened weights */

/* R rows times WIDE outputs over one run of inputs, summed as in multiply(). w: floats, [input][WIDE], or elements,
   [input][BLOCK]. x: [input / LANES][R][LANES]. sums: [R][WIDE]. ahead: weights that are read next, one line with each
   step. */
INLINE void multiply_tall(const void *w, const float *x, float *sums, long count, int first, const element *ahead,
                          const int R, const int is_wide) {
  const float *wide = w;
  const element *narrow = w;
  part sum[2 * TALL];
  UNROLLED for (int i = 0; i < 2 * R; i++) sum[i] = (part){};
  for (long from = 0; from < count; from += LANES, x += R * LANES) {
    const long steps = count - from < LANES ? count - from : LANES;
    for (long i = 0; i < steps; i++, wide += WIDE, narrow += BLOCK, ahead += BLOCK) {
      part low, high;
      if (is_wide) {
        memcpy(&low, wide, sizeof low);
        memcpy(&high, wide + PART, sizeof high);
      } else {
        low = load_part(narrow);
        high = load_part(narrow + PART);
      }
      __builtin_prefetch(ahead, 0, 2);
      UNROLLED for (int r = 0; r < R; r++) {
        const float input = x[r * LANES + i];
        sum[2 * r] += low * input;
        sum[2 * r + 1] += high * input;
      }
    }
  }
  UNROLLED for (int i = 0; i < 2 * R; i++) add_run(sums + i * PART, sum[i], first);
}

typedef void tall_tile(const void *, const float *, float *, long, int, const element *);
#define TALL_TILE(R)                                                                                            \
  static void tall_##R(const void *w, const float *x, float *s, long n, int first, const element *ahead) {      \
    multiply_tall(w, x, s, n, first, ahead, R, 0);                                                              \
  }                                                                                                             \
  static void tall_wide_##R(const void *w, const float *x, float *s, long n, int first, const element *ahead) { \
    multiply_tall(w, x, s, n, first, ahead, R, 1);                                                              \
  }
TALL_TILE(1) TALL_TILE(2) TALL_TILE(3) TALL_TILE(4) TALL_TILE(5) TALL_TILE(6)
#if TALL > 6
TALL_TILE(7) TALL_TILE(8) TALL_TILE(9) TALL_TILE(10) TALL_TILE(11) TALL_TILE(12) TALL_TILE(13) TALL_TILE(14)
#define SIZES(name) {name##1, name##2, name##3, name##4, name##5, name##6, name##7, name##8, name##9, name##10, \
                     name##11, name##12, name##13, name##14}
#else
#define SIZES(name) {name##1, name##2, name##3, name##4, name##5, name##6}
#endif
static tall_tile *const TALL_TILES[2][TALL] = {SIZES(tall_), SIZES(tall_wide_)};

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

static void widen_weights(const element *w, long count, float *wide) {
  for (long i = 0; i < count; i++)
    UNROLLED for (int p = 0; p < 2; p++) {
      const part given = load_part(w + i * BLOCK + p * PART);
      memcpy(wide + i * WIDE + p * PART, &given, sizeof given);
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
      const int is_wide = end - begin > FEW_TILES;
      float sums[GROUP * TALL * WIDE] __attribute__((aligned(64))), wide[RUN * WIDE] __attribute__((aligned(64)));
      for (long from = 0; from < inputs; from += RUN, w += RUN * BLOCK) {
        const long count = inputs - from < RUN ? inputs - from : RUN;
        if (is_wide) widen_weights(w, count, wide);
        for (long tile = begin; tile < end; tile++) {
          const long row = start_of(tile, tiles, rows), height = start_of(tile + 1, tiles, rows) - row;
          TALL_TILES[is_wide][height - 1](is_wide ? (const void *)wide : w, wide_x + row * padded + from * height,
                                          sums + (row - first_row) * WIDE, count, from == 0, w + RUN * BLOCK);
        }
      }
      finish(sums, WIDE, bias ? bias + o : 0, out + first_row * outputs + o, outputs, last_row - first_row, outputs - o);
    }
}

/* weight: [outputs / BLOCK][inputs][BLOCK], padded with zeros. wide: floats for the widened inputs of wide_rows rows, each
   of them whole vectors; unused for rows up to row_gemm_few. */
void row_gemm(const element *weight, const element *x, long x_stride, const element *bias, element *out, long rows,
              long inputs, long outputs, float *wide, long wide_rows, int threads) {
  if (rows == 0) return;
#pragma omp parallel num_threads(threads)
  if (rows <= FEW)
    multiply_few(weight, x, x_stride, bias, out, rows, inputs, outputs);
  else
    for (long row = 0; row < rows; row += wide_rows)
      multiply_many(weight, x + row * x_stride, x_stride, bias, out + row * outputs,
                    rows - row < wide_rows ? rows - row : wide_rows, inputs, outputs, wide);
}
