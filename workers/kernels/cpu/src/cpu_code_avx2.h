/* The product on CPUs with AVX2 and without VNNI: which tiles multiply, and how inputs are rounded for them. */
#include "cpu_rounding.h"
#include "cpu_code_words.h"
#include "cpu_code_bytes.h"

/* Sets and returns what codes mean by one of their tables. */
static meaning look_up_in(const layout *l, long table, work *chunk) {
  uint8_t values[LANE_BYTES];
  int is_plain = !l->offsets[table];
  for (int i = 0; i < LANE_BYTES; i++) {
    values[i] = l->tables[table][i % 16];
    is_plain = is_plain && values[i] == i % 16;
  }
  chunk->table = load_bytes(values);
  chunk->offset = _mm256_set1_epi16((int16_t)l->offsets[table]);
  chunk->factor = 1;
  for (long lower = table + 1; lower < l->planes; lower++) chunk->factor *= 256;
  return l->line > NIBBLES ? WIDE : is_plain ? PLAIN : TABLE;
}

/* Undoes the codes of a chunk, as bytes or as pairs of integers. */
static void undo_chunk(const work *chunk, meaning kind, void *values) {
  if (chunk->at_once && kind == PLAIN) undo_all_bytes(chunk, PLAIN, values);
  else if (chunk->at_once) undo_all_bytes(chunk, TABLE, values);
  else if (kind == PLAIN) undo_all(chunk, PLAIN, values);
  else if (kind == TABLE) undo_all(chunk, TABLE, values);
  else undo_all(chunk, WIDE, values);
}

/* All rows times the codes of a chunk, which are undone once for more than MOST_FEW digits. */
static void multiply_chunk(work chunk, meaning kind, long count, int digits) {
  const int few = count * digits <= MOST_FEW;
  const long most = (few ? FEW_ROWS : TILE_ROWS) / digits, tiles = (count + most - 1) / most;
  digit values[CHUNK * TOGETHER * BLOCK];
  if (!few) undo_chunk(&chunk, kind, values);
  for (long t = 0, height; t < tiles; t++) {
    height = (count + tiles - t - 1) / (tiles - t);
    if (few) (chunk.at_once ? FEW_BYTE_TILES[height - 1][kind] : FEW_TILES[digits - 1][height - 1][kind])(&chunk);
    else if (chunk.at_once) MANY_BYTE_TILES[height - 1](&chunk, (uint8_t *)values);
    else MANY_TILES[digits - 1][height - 1](&chunk, values);
    count -= height;
    chunk.x += height * digits * chunk.stride;
    chunk.totals += height * chunk.groups;
    chunk.sums += height * chunk.groups;
    chunk.results += height * BLOCK;
  }
}

/* Up to GROUP_ROWS rows times one block, chunk by chunk of each group. */
static void multiply_all(const layout *l, const uint8_t *held, long block, const rounded_rows *rows, long first, long count,
                         float *results) {
  const int32_t *ends = (const int32_t *)(held + l->ends_at);
  const long numbers = block * BLOCK * l->groups;
  long all = 0;
  for (long g = 0; g < l->groups; g++) all += eights_of(ends, g);
  const int digits = DIGITS(rows->planes);
  work chunk = {.codes = held + block * all * l->line, .x = (const char *)(rows->codes + first * digits * rows->stride),
                .stride = rows->stride * sizeof(digit), .groups = l->groups, .results = results,
                .at_once = rows->planes == 1 ? eights_at_once(l) : 0};
  for (long g = 0; g < l->groups; g++) {
    long left = eights_of(ends, g);
    for (int is_first = 1; left; left -= chunk.eights, is_first = 0) {
      chunk.eights = left < CHUNK ? left : CHUNK;
      for (long table = 0; table < l->planes; table++) {
        const meaning kind = look_up_in(l, table, &chunk);
        chunk.scales = (const float *)(held + l->scale_at) + numbers + g * BLOCK;
        chunk.narrow = l->outer_at ? held + l->scale_at + numbers + g * BLOCK : 0;
        chunk.zeros = l->zero_at && is_first && !table ? (const float *)(held + l->zero_at) + numbers + g * BLOCK : 0;
        chunk.totals = rows->totals + first * l->groups + g;
        chunk.sums = rows->sums + first * digits * l->groups + g;
        chunk.raised = is_first ? l->offsets[table] : 0;
        multiply_chunk(chunk, kind, count, digits);
      }
      chunk.codes += chunk.eights * l->line;
      chunk.x += chunk.eights * TOGETHER * (chunk.at_once ? 1 : sizeof(digit));
    }
  }
}


/* Rounds the inputs of a group, from the input `at` of a row on. */
INLINE void round_group(const layout *l, const element *x, long inputs, float steps, int planes, digit *codes, long at,
                        long stride, int32_t *sums, long sums_stride) {
  if (planes == 1 && eights_at_once(l)) round_bytes(x, inputs, steps, (int8_t *)codes + at, sums);
  else round_words(x, inputs, steps, planes, codes + at, stride, sums, sums_stride);
}
