/* Gumbel noise of 64 ids at a time, as workers/kernels/gumbel_noise.py defines it: the same bits, so sources that include
   this are compiled with -ffp-contract=off. Philox runs on 64-bit lanes whose upper halves are arbitrary: a product of
   lower halves is one instruction, and its high half one shift. */
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define BLOCK 64 /* ids that share 16 counters, whose four words are of 16 ids each */
#define ROUNDS 10

typedef uint64_t longs __attribute__((vector_size(64)));

/* What the noise of a row depends on beside ids. */
typedef struct {
  uint64_t seed;
  uint32_t choice, position;
} noise_key;

/* Products of the lower halves. */
INLINE longs multiply(longs x, uint32_t by) {
#if defined(__AVX512F__)
  return (longs)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(by));
#elif defined(__AVX2__)
  __m256i half[2];
  memcpy(half, &x, sizeof x);
  for (int i = 0; i < 2; i++) half[i] = _mm256_mul_epu32(half[i], _mm256_set1_epi64x(by));
  memcpy(&x, half, sizeof x);
  return x;
#elif defined(__SSE2__)
  __m128i part[4];
  memcpy(part, &x, sizeof x);
  for (int i = 0; i < 4; i++) part[i] = _mm_mul_epu32(part[i], _mm_set1_epi64x(by));
  memcpy(&x, part, sizeof x);
  return x;
#else
  return (x & 0xffffffffu) * (uint64_t)by;
#endif
}

/* The words of the ids `first` to first + 63, by 16 ids. first: a multiple of 64. */
INLINE void random_words(long first, noise_key key, words found[4]) {
  const longs even = {0, 2, 4, 6, 8, 10, 12, 14};
  longs c[2][4]; /* of even counters, and of odd ones */
  for (int odd = 0; odd < 2; odd++) {
    c[odd][0] = (longs){} + key.position;
    c[odd][1] = (longs){} + key.choice;
    c[odd][2] = even + (uint64_t)(first / 4 + odd);
    c[odd][3] = (longs){};
  }
  uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
  UNROLLED for (int round = 0; round < ROUNDS; round++) {
    UNROLLED for (int odd = 0; odd < 2; odd++) {
      const longs p0 = multiply(c[odd][0], 0xD2511F53u), p1 = multiply(c[odd][2], 0xCD9E8D57u);
      c[odd][0] = p1 >> 32 ^ c[odd][1] ^ (uint64_t)k0;
      c[odd][1] = p1;
      c[odd][2] = p0 >> 32 ^ c[odd][3] ^ (uint64_t)k1;
      c[odd][3] = p0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  UNROLLED for (int w = 0; w < 4; w++) found[w] = (words)((c[0][w] & 0xffffffffu) | c[1][w] << 32);
}

/* ln(2^power * (1 + f)) for f in [-1/4, 1/2). */
INLINE floats log_of(floats power, floats f) {
  floats ratio = f * 0.08561437f + -0.16933757f;
  ratio = ratio * f + 0.20627064f;
  ratio = ratio * f + -0.25044364f;
  ratio = ratio * f + 0.33318055f;
  ratio = ratio * f + -0.49999198f;
  ratio = ratio * f + 1.0f;
  return power * 0.69314718f + ratio * f;
}

/* y = 2^power * (1 + f), for positive y. */
INLINE floats split(floats y, floats *f) {
  const ints power = ((ints)y - 0x3f400000) >> 23;
  *f = (floats)((ints)y - (power << 23)) - 1.0f;
  return __builtin_convertvector(power, floats);
}

INLINE floats noise_of(words random) {
  const floats below_one = (floats){} + 0x1.fffffep-1f;
  floats v = (__builtin_convertvector(random, floats) + 0.5f) * 0x1p-32f, f;
  v = choose_lanes(v < below_one, v, below_one);
  floats power = split(1.0f - v, &f);
  const floats waited = -log_of(power, choose_lanes((ints)(power == 0.0f), -v, f));
  power = split(waited, &f);
  return -log_of(power, f);
}
