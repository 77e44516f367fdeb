/* Rows of inputs as integers of 1, 2 or 3 bytes, for products that sum integers. Follows cpu_vector.h. See
   cpu_int8_gemm.py for the meaning. */
#define MOST_PLANES 3

/* What a row's inputs are multiplied by to be rounded. One byte: the largest becomes 127. More: a power of two, so that
   numbers with few bits stay as they are, and the largest fits. */
INLINE float steps_per_one(float largest, int planes) {
  if (!(largest > 0)) return 0;
  if (planes == 1) return 127.0f / largest;
  int exponent; /* largest = [0.5, 1) * 2^exponent */
  frexpf(largest, &exponent);
  const float most = planes == 2 ? 0x1p15f - 0x1p8f : 0x1p23f - 0x1p16f; /* 127 in the highest byte, 0 below */
  const float steps = ldexpf(1, (planes == 2 ? 15 : 23) - (exponent < -90 ? -90 : exponent));
  return largest * steps > most ? steps / 2 : steps;
}

/* The largest absolute value as bits, which order NaN above all others. */
INLINE uint32_t largest_bits(const element *x, long inputs) {
#ifdef __AVX512F__
  __m512i largest = _mm512_setzero_si512();
  for (long i = 0; i < inputs; i += LANES) {
    const __m512i bits = _mm512_and_si512((__m512i)load_some(x + i, inputs - i), _mm512_set1_epi32(0x7fffffff));
    largest = _mm512_max_epu32(largest, bits);
  }
  return _mm512_reduce_max_epu32(largest);
#else
  ints largest = {0};
  for (long i = 0; i < inputs; i += LANES) {
    const ints bits = (ints)load_some(x + i, inputs - i) & 0x7fffffff;
    largest = (ints)choose_lanes(bits > largest, (floats)bits, (floats)largest);
  }
  int32_t most = 0;
  for (int lane = 0; lane < LANES; lane++) most = largest[lane] > most ? largest[lane] : most;
  return most;
#endif
}

/* Returns what a row's inputs are multiplied by, and sets what their integers are. */
INLINE float row_steps(const element *x, long inputs, int planes, float *scale) {
  const uint32_t bits = largest_bits(x, inputs);
  float most;
  memcpy(&most, &bits, sizeof most);
  const float steps = steps_per_one(most, planes);
  *scale = planes == 1 || !(most < INFINITY) ? most / 127 : steps > 0 ? 1 / steps : 0; /* NaN stays NaN */
  return steps;
}

#ifdef __AVX512F__
/* Inputs as integers of `planes` bytes, the highest first: codes[plane][stride], zeros behind them up to whole vectors.
   Sets the sums of each plane: sums[plane * sums_stride]. */
INLINE void round_inputs(const element *x, long inputs, float steps, int planes, int8_t *codes, long stride, int32_t *sums,
                         long sums_stride) {
  __m512i total[MOST_PLANES] = {{0}};
  for (long i = 0; i < inputs; i += LANES) {
    __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)load_some(x + i, inputs - i), _mm512_set1_ps(steps)));
    for (int plane = planes - 1; plane >= 0; plane--) {
      const __m128i low = _mm512_cvtepi32_epi8(code);
      const __m512i wide = _mm512_cvtepi8_epi32(low);
      total[plane] = _mm512_add_epi32(total[plane], wide);
      _mm_storeu_si128((__m128i *)(codes + plane * stride + i), low);
      code = _mm512_srai_epi32(_mm512_sub_epi32(code, wide), 8);
    }
  }
  for (int plane = 0; plane < planes; plane++) sums[plane * sums_stride] = _mm512_reduce_add_epi32(total[plane]);
}
#endif
