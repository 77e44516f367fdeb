/* Products of codes with inputs of two bytes, on CPUs with AVX2 and without VNNI: pairs of integers of 16 bits. Follows
   cpu_code_layout.h. A value is an integer from -128 to 255, so that 256 products of one sum fit into int32. */
#define LANE_BYTES 32 /* of a vector: 8 sums, or 8 pairs of integers */
#define LANE_SUMS 8
#define CHUNK 32     /* eights of inputs of which a sum is taken */
#define PAIRS 4      /* of inputs in an eight: (0, 2), (1, 3), (4, 6), (5, 7), as their codes are apart by shifts */
#define TILE_ROWS 6  /* digits of inputs of a tile: times two vectors of outputs, 12 sums and what feeds them */
#define FEW_ROWS 4   /* digits of a tile that undoes the codes that it reads */
#define MOST_FEW 8   /* digits up to which such tiles multiply */
#define AHEAD 1024   /* bytes by which codes are fetched before they are read */

/* What codes are: 4 bits that are values, 4 bits of a table, or bytes; the last two less an offset. */
typedef enum { PLAIN, TABLE, WIDE } meaning;

/* What a tile multiplies: some eights of one group of one block by some rows. */
typedef struct {
  const uint8_t *codes;
  const char *x;       /* integers of the first row: [row][digit][stride] */
  long stride, eights; /* bytes from one digit to the next */
  const float *scales, *zeros; /* of the group: [BLOCK]; zeros: may be none */
  const uint8_t *narrow;       /* scales in E4M3 instead; else none */
  const float *totals;         /* of the first row's group, the next row's `groups` further */
  long groups;
  float factor; /* of the scales, a power of two */
  __m256i table, offset;
  long at_once, raised; /* of cpu_code_bytes.h: eights of a sum of 16 bits, and what values have been raised by */
  const int32_t *sums;  /* of the first row's group, as totals */
  float *results; /* [row][BLOCK] */
} work;

INLINE __m256i load_bytes(const void *at) { return _mm256_loadu_si256((const __m256i *)at); }

/* The values of vector `v` of an eight, as pairs. */
INLINE void undo(const work *t, const uint8_t *w, int v, const meaning kind, __m256i *pair) {
  const __m256i codes = load_bytes(w + v * LANE_BYTES), low = _mm256_set1_epi16(15);
  if (kind == PLAIN) {
    pair[0] = _mm256_and_si256(codes, low);
    pair[1] = _mm256_and_si256(_mm256_srli_epi16(codes, 8), low);
    pair[2] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
    pair[3] = _mm256_srli_epi16(codes, 12);
    return;
  }
  TILE_UNROLLED for (int half = 0; half < 2; half++) {
    __m256i given;
    if (kind == WIDE) {
      given = load_bytes(w + half * NIBBLES + v * LANE_BYTES);
    } else {
      const __m256i shifted = half ? _mm256_srli_epi16(codes, 4) : codes;
      given = _mm256_shuffle_epi8(t->table, _mm256_and_si256(shifted, _mm256_set1_epi8(15)));
    }
    pair[2 * half] = _mm256_sub_epi16(_mm256_and_si256(given, _mm256_set1_epi16(255)), t->offset);
    pair[2 * half + 1] = _mm256_sub_epi16(_mm256_srli_epi16(given, 8), t->offset);
  }
}

/* Four bytes of inputs, for all outputs: two integers, or four. */
INLINE __m256i spread(const char *x) {
  int32_t four;
  memcpy(&four, x, sizeof four);
  return _mm256_set1_epi32(four);
}

/* Adds products of pairs. As intrinsics gcc 12 multiplies all rows before it adds, and spills the sums. */
INLINE void add_products(__m256i *sum, __m256i values, __m256i inputs) {
  __m256i products;
  __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(*sum), "=&x"(products) : "x"(values), "x"(inputs));
}

/* Floats of 8 numbers in E4M3, as in cpu_code_vnni.h. */
INLINE __m256 of_e4m3(const uint8_t *at) {
  const __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)at));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(codes, _mm_set1_epi16(128)), 8);
  const __m128i rest = _mm_slli_epi16(_mm_and_si128(codes, _mm_set1_epi16(127)), 7);
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, rest)), _mm256_set1_ps(256));
}

/* Adds what the sums of R rows and V vectors, from output `o` on, stand for to the results. */
INLINE void add_sums(const work *t, long o, const __m256i *sum, const int R, const int P, const int V) {
  TILE_UNROLLED for (int v = 0; v < V; v++) {
    const long at = o + v * LANE_SUMS;
    const __m256 held = t->narrow ? of_e4m3(t->narrow + at) : _mm256_loadu_ps(t->scales + at);
    const __m256 scale = _mm256_mul_ps(held, _mm256_set1_ps(t->factor));
    __m256 zero = _mm256_setzero_ps();
    if (t->zeros) zero = _mm256_mul_ps(_mm256_loadu_ps(t->zeros + at), _mm256_set1_ps(1 / t->factor));
    TILE_UNROLLED for (int r = 0; r < R; r++) {
      __m256 whole = _mm256_cvtepi32_ps(sum[r * P * V + v]);
      if (P == 2) whole = _mm256_fmadd_ps(whole, _mm256_set1_ps(256), _mm256_cvtepi32_ps(sum[(r * P + 1) * V + v]));
      if (t->zeros) whole = _mm256_fnmadd_ps(zero, _mm256_set1_ps(t->totals[r * t->groups]), whole);
      float *result = t->results + r * BLOCK + at;
      _mm256_storeu_ps(result, _mm256_fmadd_ps(whole, scale, _mm256_loadu_ps(result)));
    }
  }
}

/* R rows of P digits an input times the codes. */
INLINE void multiply_few(const work *t, const int R, const int P, const meaning kind) {
  enum { V = 4 };
  const long line = kind == WIDE ? 2 * NIBBLES : NIBBLES;
  const int together = R * P <= 2 ? V : V / 2;
  for (int o = 0; o < V; o += together) {
    const uint8_t *w = t->codes + o * LANE_BYTES;
    const char *x = t->x;
    __m256i sum[FEW_ROWS * V];
    TILE_UNROLLED for (int i = 0; i < R * P * together; i++) sum[i] = _mm256_setzero_si256();
    for (long e = 0; e < t->eights; e++, w += line, x += 4 * PAIRS) {
      if (!o) TILE_UNROLLED for (int at = 0; at < line; at += 64) _mm_prefetch((const char *)w + AHEAD + at, _MM_HINT_T0);
      TILE_UNROLLED for (int v = 0; v < together; v++) {
        __m256i pair[PAIRS];
        undo(t, w, v, kind, pair);
        TILE_UNROLLED for (int i = 0; i < R * P; i++)
          TILE_UNROLLED for (int p = 0; p < PAIRS; p++)
            add_products(sum + i * together + v, pair[p], spread(x + i * t->stride + 4 * p));
      }
    }
    add_sums(t, o * LANE_SUMS, sum, R, P, together);
  }
}

/* R rows of P digits an input times values that have been undone: [pair][BLOCK][2]. */
INLINE void multiply_many(const work *t, const digit *values, const int R, const int P) {
  enum { V = 2 };
  for (long o = 0; o < BLOCK; o += V * LANE_SUMS) {
    const digit *w = values + 2 * o;
    const char *x = t->x;
    __m256i sum[TILE_ROWS * V];
    TILE_UNROLLED for (int i = 0; i < R * P * V; i++) sum[i] = _mm256_setzero_si256();
    for (long p = 0; p < t->eights * PAIRS; p++, w += 2 * BLOCK, x += 4) {
      const __m256i first = load_bytes(w), second = load_bytes(w + 2 * LANE_SUMS);
      TILE_UNROLLED for (int i = 0; i < R * P; i++) {
        const __m256i inputs = spread(x + i * t->stride);
        add_products(sum + i * V, first, inputs);
        add_products(sum + i * V + 1, second, inputs);
      }
    }
    add_sums(t, o, sum, R, P, V);
  }
}

typedef void few_tile(const work *);
typedef void many_tile(const work *, const digit *);
#define FEW(R, P)                                                                 \
  static void few_##R##_##P##_plain(const work *t) { multiply_few(t, R, P, PLAIN); } \
  static void few_##R##_##P##_table(const work *t) { multiply_few(t, R, P, TABLE); } \
  static void few_##R##_##P##_wide(const work *t) { multiply_few(t, R, P, WIDE); }
#define MANY(R, P) \
  static void many_##R##_##P(const work *t, const digit *values) { multiply_many(t, values, R, P); }
#define FEW_NAMES(R, P) {few_##R##_##P##_plain, few_##R##_##P##_table, few_##R##_##P##_wide}
FEW(1, 1) FEW(2, 1) FEW(3, 1) FEW(4, 1)
MANY(1, 1) MANY(2, 1) MANY(3, 1) MANY(4, 1) MANY(5, 1) MANY(6, 1)
#define FEW_OF_ONE {FEW_NAMES(1, 1), FEW_NAMES(2, 1), FEW_NAMES(3, 1), FEW_NAMES(4, 1)}
#define MANY_OF_ONE {many_1_1, many_2_1, many_3_1, many_4_1, many_5_1, many_6_1}
#if ELEMENT == 0
FEW(1, 2) FEW(2, 2)
MANY(1, 2) MANY(2, 2) MANY(3, 2)
static few_tile *const FEW_TILES[2][FEW_ROWS][3] = {FEW_OF_ONE, {FEW_NAMES(1, 2), FEW_NAMES(2, 2)}};
static many_tile *const MANY_TILES[2][TILE_ROWS] = {MANY_OF_ONE, {many_1_2, many_2_2, many_3_2}};
#else
static few_tile *const FEW_TILES[1][FEW_ROWS][3] = {FEW_OF_ONE};
static many_tile *const MANY_TILES[1][TILE_ROWS] = {MANY_OF_ONE};
#endif

INLINE void undo_all(const work *t, const meaning kind, digit *values) {
  const long line = kind == WIDE ? 2 * NIBBLES : NIBBLES;
  for (long e = 0; e < t->eights; e++)
    TILE_UNROLLED for (int v = 0; v < 4; v++) {
      __m256i pair[PAIRS];
      undo(t, t->codes + e * line, v, kind, pair);
      TILE_UNROLLED for (int p = 0; p < PAIRS; p++)
        _mm256_storeu_si256((__m256i *)(values + ((e * PAIRS + p) * BLOCK + v * LANE_SUMS) * 2), pair[p]);
    }
}

/* Inputs as integers, each eight in the order of its pairs, up to whole vectors; three bytes: two digits, of which the
   second has one byte. sums: of each digit, `sums_stride` apart. */
INLINE void round_words(const element *x, long inputs, float steps, int planes, digit *codes, long stride, int32_t *sums,
                            long sums_stride) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  __m256i total[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (long i = 0; i < inputs; i += LANES) {
    const floats given = load_some(x + i, inputs - i);
    __m256 half[2];
    memcpy(half, &given, sizeof given);
    TILE_UNROLLED for (int h = 0; h < 2; h++) {
      __m256i code[2] = {_mm256_cvtps_epi32(_mm256_mul_ps(half[h], _mm256_set1_ps(steps)))};
      if (planes == 3) {
        const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(code[0], _mm256_set1_epi32(128)), 8);
        code[1] = _mm256_sub_epi32(code[0], _mm256_slli_epi32(high, 8));
        code[0] = high;
      }
      for (int d = 0; d < DIGITS(planes); d++) {
        total[d] = _mm256_add_epi32(total[d], code[d]);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(code[d]), _mm256_extracti128_si256(code[d], 1));
        _mm_storeu_si128((__m128i *)(codes + d * stride + i + h * TOGETHER), _mm_shuffle_epi8(words, order));
      }
    }
  }
  for (int d = 0; d < DIGITS(planes); d++) {
    int32_t lanes[LANE_SUMS], sum = 0;
    memcpy(lanes, &total[d], sizeof lanes);
    for (int lane = 0; lane < LANE_SUMS; lane++) sum += lanes[lane];
    sums[d * sums_stride] = sum;
  }
}
