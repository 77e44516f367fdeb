/* Packs a weight into blocks of 64 outputs. See weight_blocks.py for the layout. */
#include "cpu_vector.h"

#include <sys/mman.h>

#define BLOCK 64 /* outputs of one block */

/* The units from `from` on, one by one: [rows][units] -> [units][BLOCK]. */
#define ONE_BY_ONE(TYPE, NAME)                                                                       \
  static void NAME(const TYPE *w, TYPE *out, long units, long from, long rows) {                     \
    for (long u = from; u < units; u++)                                                              \
      for (long row = 0; row < BLOCK; row++) out[u * BLOCK + row] = row < rows ? w[row * units + u] : 0; \
  }
ONE_BY_ONE(uint32_t, words_one_by_one)
ONE_BY_ONE(uint16_t, halves_one_by_one)

#if defined(__AVX512BW__)
/* Turns 16 vectors of 16 numbers of 32 bits around. */
INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
  UNROLLED for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  UNROLLED for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  UNROLLED for (int i = 0; i < 16; i += 8)
    UNROLLED for (int j = 0; j < 4; j++) { /* lanes 0 and 2, then 1 and 3, of rows i.. and i + 4.. */
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0x88);
      t[i + 4 + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0xdd);
    }
  UNROLLED for (int j = 0; j < 8; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
  }
}
INLINE __m512i row_at(const void *at, int there) { return there ? _mm512_loadu_si512(at) : _mm512_setzero_si512(); }

/* Results are written past the caches: nobody reads them before the first step. */
static void pack_words(const uint32_t *w, uint32_t *out, long units, long rows) {
  long u = 0;
  for (; u + 16 <= units; u += 16)
    for (int v = 0; v < BLOCK; v += 16) {
      __m512i r[16];
      UNROLLED for (int k = 0; k < 16; k++) r[k] = row_at(w + (v + k) * units + u, v + k < rows);
      transpose(r);
      UNROLLED for (int k = 0; k < 16; k++) _mm512_stream_si512((__m512i *)(out + (u + k) * BLOCK + v), r[k]);
    }
  words_one_by_one(w, out, units, u, rows);
}
/* As words, of two outputs each: their low and their high units of every 8 are two matrices. */
static void pack_halves(const uint16_t *w, uint16_t *out, long units, long rows) {
  long u = 0;
  for (; u + 32 <= units; u += 32)
    for (int v = 0; v < BLOCK; v += 32)
      UNROLLED for (int high = 0; high < 2; high++) {
        __m512i r[16];
        UNROLLED for (int k = 0; k < 16; k++) {
          const int row = v + 2 * k;
          const __m512i even = row_at(w + row * units + u, row < rows);
          const __m512i odd = row_at(w + (row + 1) * units + u, row + 1 < rows);
          r[k] = high ? _mm512_unpackhi_epi16(even, odd) : _mm512_unpacklo_epi16(even, odd);
        }
        transpose(r);
        UNROLLED for (int k = 0; k < 16; k++)
          _mm512_stream_si512((__m512i *)(out + (u + k / 4 * 8 + high * 4 + k % 4) * BLOCK + v), r[k]);
      }
  halves_one_by_one(w, out, units, u, rows);
}
#define WRITTEN _mm_sfence()
#else
static void pack_words(const uint32_t *w, uint32_t *out, long units, long rows) {
  words_one_by_one(w, out, units, 0, rows);
}
static void pack_halves(const uint16_t *w, uint16_t *out, long units, long rows) {
  halves_one_by_one(w, out, units, 0, rows);
}
#define WRITTEN
#endif

#define PAGE 4096
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
/* Asks for the pages of new memory at once: a first write to each costs twice as much. Kernels before 5.14 refuse. */
static void provide(char *from, long size) { /* where pages are larger, nothing comes of it */
  const uintptr_t first = ((uintptr_t)from + PAGE - 1) / PAGE * PAGE, end = ((uintptr_t)from + size) / PAGE * PAGE;
  if (first < end) madvise((void *)first, end - first, MADV_POPULATE_WRITE);
}

/* weight: [outputs][units] of unit_bytes, 2 or 4; out: [outputs / BLOCK][units][BLOCK], aligned to 64 bytes. */
void pack_blocks(const char *weight, char *out, long outputs, long units, int unit_bytes, int threads) {
  const long blocks = (outputs + BLOCK - 1) / BLOCK, size = BLOCK * units * unit_bytes;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1) nowait
    for (long block = 0; block < blocks; block++) {
      const long left = outputs - block * BLOCK, rows = left < BLOCK ? left : BLOCK;
      provide(out + block * size, size);
      if (unit_bytes == 4)
        pack_words((const uint32_t *)(weight + block * size), (uint32_t *)(out + block * size), units, rows);
      else
        pack_halves((const uint16_t *)(weight + block * size), (uint16_t *)(out + block * size), units, rows);
    }
    WRITTEN;
  }
}
