/* Products of codes with inputs of one byte, on CPUs with AVX2 and without VNNI: sums of 16 bits, which are widened before
   they could be full. Follows cpu_code_words.h. */
#define QUADS 2        /* of inputs in an eight */
#define MOST_VALUE 63  /* of which two products of pairs fit into 16 bits */
#define FULL_SUM 32767
#define LARGEST_INPUT 127

/* Eights of inputs whose products fit into sums of 16 bits; 0: not one. */
static long eights_at_once(const layout *l) {
  long largest = 0;
  for (int i = 0; i < 16; i++) largest = l->tables[0][i] > largest ? l->tables[0][i] : largest;
  if (l->planes > 1 || l->line > NIBBLES || largest > MOST_VALUE) return 0;
  const long fit = FULL_SUM / (2 * LARGEST_INPUT * (largest ? largest : 1)) / QUADS;
  return fit < CHUNK ? fit : CHUNK;
}

/* The values of vector `v` of an eight, as quads without sign. */
INLINE void undo_bytes(const work *t, const uint8_t *w, int v, const meaning kind, __m256i *quad) {
  const __m256i codes = load_bytes(w + v * LANE_BYTES), low = _mm256_set1_epi8(15);
  quad[0] = _mm256_and_si256(codes, low);
  quad[1] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
  if (kind == TABLE) TILE_UNROLLED for (int q = 0; q < QUADS; q++) quad[q] = _mm256_shuffle_epi8(t->table, quad[q]);
}

INLINE void add_byte_products(__m256i *sum, __m256i values, __m256i inputs) {
  __m256i products;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(*sum), "=&x"(products) : "x"(values), "x"(inputs));
}

/* Sums of R rows and V vectors start at what values have been raised by. */
INLINE void start_sums(const work *t, __m256i *whole, const int R, const int V) {
  TILE_UNROLLED for (int r = 0; r < R; r++) {
    const __m256i start = _mm256_set1_epi32(t->raised ? -(int32_t)t->raised * t->sums[r * t->groups] : 0);
    TILE_UNROLLED for (int v = 0; v < V; v++) whole[r * V + v] = start;
  }
}

INLINE void widen_sums(__m256i *whole, const __m256i *sum, const int count) {
  TILE_UNROLLED for (int i = 0; i < count; i++)
    whole[i] = _mm256_add_epi32(whole[i], _mm256_madd_epi16(sum[i], _mm256_set1_epi16(1)));
}

/* As multiply_few. */
INLINE void multiply_few_bytes(const work *t, const int R, const meaning kind) {
  const int V = R <= 2 ? 4 : 2;
  for (int o = 0; o < 4; o += V) {
    const uint8_t *w = t->codes + o * LANE_BYTES;
    const char *x = t->x;
    __m256i whole[FEW_ROWS * 2];
    start_sums(t, whole, R, V);
    for (long from = 0; from < t->eights; from += t->at_once) {
      const long end = from + t->at_once < t->eights ? from + t->at_once : t->eights;
      __m256i sum[FEW_ROWS * 2];
      TILE_UNROLLED for (int i = 0; i < R * V; i++) sum[i] = _mm256_setzero_si256();
      for (long e = from; e < end; e++, w += NIBBLES, x += 4 * QUADS) {
        if (!o) TILE_UNROLLED for (int at = 0; at < NIBBLES; at += 64) _mm_prefetch((const char *)w + AHEAD + at, _MM_HINT_T0);
        TILE_UNROLLED for (int v = 0; v < V; v++) {
          __m256i quad[QUADS];
          undo_bytes(t, w, v, kind, quad);
          TILE_UNROLLED for (int r = 0; r < R; r++)
            TILE_UNROLLED for (int q = 0; q < QUADS; q++)
              add_byte_products(sum + r * V + v, quad[q], spread(x + r * t->stride + 4 * q));
        }
      }
      widen_sums(whole, sum, R * V);
    }
    add_sums(t, o * LANE_SUMS, whole, R, 1, V);
  }
}

/* As multiply_many; values: [quad][BLOCK][4]. */
INLINE void multiply_many_bytes(const work *t, const uint8_t *values, const int R) {
  enum { V = 2 };
  for (long o = 0; o < BLOCK; o += V * LANE_SUMS) {
    const uint8_t *w = values + 4 * o;
    const char *x = t->x;
    __m256i whole[TILE_ROWS * V];
    start_sums(t, whole, R, V);
    for (long from = 0; from < t->eights; from += t->at_once) {
      const long end = from + t->at_once < t->eights ? from + t->at_once : t->eights;
      __m256i sum[TILE_ROWS * V];
      TILE_UNROLLED for (int i = 0; i < R * V; i++) sum[i] = _mm256_setzero_si256();
      for (long q = from * QUADS; q < end * QUADS; q++, w += 4 * BLOCK, x += 4) {
        const __m256i first = load_bytes(w), second = load_bytes(w + LANE_BYTES);
        TILE_UNROLLED for (int r = 0; r < R; r++) {
          const __m256i inputs = spread(x + r * t->stride);
          add_byte_products(sum + r * V, first, inputs);
          add_byte_products(sum + r * V + 1, second, inputs);
        }
      }
      widen_sums(whole, sum, R * V);
    }
    add_sums(t, o, whole, R, 1, V);
  }
}

typedef void byte_tile(const work *, const uint8_t *);
#define FEW_BYTES(R)                                                                    \
  static void few_bytes_##R##_plain(const work *t) { multiply_few_bytes(t, R, PLAIN); } \
  static void few_bytes_##R##_table(const work *t) { multiply_few_bytes(t, R, TABLE); }
#define MANY_BYTES(R) \
  static void many_bytes_##R(const work *t, const uint8_t *values) { multiply_many_bytes(t, values, R); }
FEW_BYTES(1) FEW_BYTES(2) FEW_BYTES(3) FEW_BYTES(4)
MANY_BYTES(1) MANY_BYTES(2) MANY_BYTES(3) MANY_BYTES(4) MANY_BYTES(5) MANY_BYTES(6)
#define FEW_BYTES_NAMES(R) {few_bytes_##R##_plain, few_bytes_##R##_table}
static few_tile *const FEW_BYTE_TILES[FEW_ROWS][2] = {FEW_BYTES_NAMES(1), FEW_BYTES_NAMES(2), FEW_BYTES_NAMES(3),
                                                      FEW_BYTES_NAMES(4)};
static byte_tile *const MANY_BYTE_TILES[TILE_ROWS] = {many_bytes_1, many_bytes_2, many_bytes_3,
                                                      many_bytes_4, many_bytes_5, many_bytes_6};

INLINE void undo_all_bytes(const work *t, const meaning kind, uint8_t *values) {
  for (long e = 0; e < t->eights; e++)
    TILE_UNROLLED for (int v = 0; v < 4; v++) {
      __m256i quad[QUADS];
      undo_bytes(t, t->codes + e * NIBBLES, v, kind, quad);
      TILE_UNROLLED for (int q = 0; q < QUADS; q++)
        _mm256_storeu_si256((__m256i *)(values + ((e * QUADS + q) * BLOCK + v * LANE_SUMS) * 4), quad[q]);
    }
}

/* Inputs as integers of one byte, in order, up to whole vectors. */
INLINE void round_bytes(const element *x, long inputs, float steps, int8_t *codes, int32_t *sum) {
  ints total = {0};
  for (long i = 0; i < inputs; i += LANES) {
    const floats given = load_some(x + i, inputs - i) * steps;
    __m256 half[2];
    __m256i code[2];
    memcpy(half, &given, sizeof given);
    TILE_UNROLLED for (int h = 0; h < 2; h++) code[h] = _mm256_cvtps_epi32(half[h]);
    ints wide;
    memcpy(&wide, code, sizeof wide);
    total += wide;
    int8_t narrow __attribute__((vector_size(16))) = __builtin_convertvector(wide, __typeof__(narrow));
    memcpy(codes + i, &narrow, sizeof narrow);
  }
  *sum = 0;
  for (int lane = 0; lane < LANES; lane++) *sum += total[lane];
}
