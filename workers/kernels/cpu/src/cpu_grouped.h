/* What the kernels of experts share: parts of vectors, and which experts have rows. */
#include "cpu_vector.h"

/* Up to 16 elements at the end of a row. */
INLINE void store_first(element *at, floats x, long count) {
  if (count >= LANES) { store(at, x); return; }
  element some[LANES];
  store(some, x);
  memcpy(at, some, count * sizeof *at);
}
INLINE floats load_first(const element *at, long count) {
  if (count >= LANES) return load(at);
  element some[LANES] = {0};
  memcpy(some, at, count * sizeof *at);
  return load(some);
}

#if ELEMENT == 0
INLINE float load_one(const element *at) { return *at; }
#else
INLINE float load_one(const element *at) {
  const uint32_t bits = (uint32_t)*at << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
#endif

/* Writes the experts that have rows, in order; returns how many. ends: where the rows of each expert end. */
INLINE long experts_used(const int32_t *ends, long experts, int *used) {
  long count = 0;
  for (long e = 0; e < experts; e++)
    if (ends[e] > (e ? ends[e - 1] : 0)) used[count++] = e;
  return count;
}

#define MOST_BLOCKS 4 /* that a group of rows passes while it is in the L2 cache */
#define LEAST_ITEMS 8 /* of a thread, so that threads end at the same time */

/* How many of `blocks` blocks of outputs a thread takes at a time. */
INLINE long blocks_of_item(long blocks, int threads) {
  const long fair = blocks / (threads * LEAST_ITEMS);
  return fair < 1 ? 1 : fair < MOST_BLOCKS ? fair : MOST_BLOCKS;
}
