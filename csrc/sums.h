// Sums of payloads where they lie in the paged cache: each chunk's digest (checksum.h).
//
// Decision: values are summed in the paged cache, when they are saved and after they were loaded:
// any process that maps an arena may change its bytes at any time, but nobody else changes the
// cache. A GPU (H200) sums 1 GiB in
// 0.25 ms and a range of 32 MiB in 0.02 ms; that range's copy takes 0.6 ms. Summing on processors
// before the copy cost D 38 % of its wait at 8k tokens. Chunks are found word by word from the
// payload's order, so one kernel fits all paths and all rows that begin and end at 16 bytes.
// Decision: docs/decisions/040-arena-summed-after-the-copy.md
#pragma once
#include "layout.h"

namespace pds {

constexpr int64_t kWordBytes = 16;
constexpr uint32_t kChunkWords = 256;

// Where a word of a payload lies, and how many words from it on lie in a row.
struct Place {
  uint64_t address;
  uint32_t words;
};

constexpr uint32_t words_of(const SumParams &p, const SumItem &item) {
  const Shape &s = p.shapes[0];
  return static_cast<uint32_t>(p.num_layers * layer_bytes(s, item.num_tokens) / kWordBytes);
}

// The item that a chunk belongs to.
constexpr const SumItem &item_of(const SumParams &p, uint32_t chunk) {
  int32_t first = 0, last = p.num_items;
  while (last - first > 1) {
    const int32_t middle = (first + last) / 2;
    (p.items[middle].first_chunk <= chunk ? first : last) = middle;
  }
  return p.items[first];
}

constexpr Place place_of(const SumParams &p, const SumItem &item, uint32_t word) {
  const uint32_t heads = p.shapes[0].num_heads, cell = p.shapes[0].cell / kWordBytes;
  const uint32_t tokens = item.num_tokens, per_layer = tokens * heads * cell;
  const uint32_t layer = word / per_layer, in_layer = word - layer * per_layer;
  const uint32_t row = in_layer / cell, in_cell = in_layer - row * cell;
  const uint32_t token = row / heads, head = row - token * heads;
  const uint32_t number = token / p.block_tokens, at = token - number * p.block_tokens;
  int32_t k = 0;
  while (k + 1 < p.num_shapes && in_cell * kWordBytes >= p.shapes[k + 1].start) ++k;
  const Shape &s = p.shapes[k];
  const Block block{0, p.ids[item.first_id + number], 0, 0, 0};
  const uint64_t address = p.bases[k * p.num_layers + layer] + cache_offset(s, block, at, head) +
                           in_cell * kWordBytes - s.start;
  const uint32_t left = tokens - number * p.block_tokens;
  const uint32_t count = left < p.block_tokens ? left : p.block_tokens;
  uint32_t words = static_cast<uint32_t>((s.start + s.width) / kWordBytes) - in_cell;
  if (s.tokens_joined) {
    words = ((count - at) * heads - head) * cell - in_cell;
  } else if (s.heads_joined) {
    words = (heads - head) * cell - in_cell;
  }
  return {address, words};
}

// A quarter of XXH3's state for a chunk: two of its eight lanes, numbers 2 * quarter and the next.
struct Quarter {
  uint64_t a, b;

  constexpr void add(uint64_t first, uint64_t second, uint64_t key, uint64_t next) {
    const uint64_t x = first ^ key, y = second ^ next;
    a += second + (x & 0xffffffff) * (x >> 32);
    b += first + (y & 0xffffffff) * (y >> 32);
  }
  constexpr void scramble(uint64_t key, uint64_t next) {
    a = (a ^ a >> 47 ^ key) * 0x9E3779B1u;
    b = (b ^ b >> 47 ^ next) * 0x9E3779B1u;
  }
};

// The digest, from the sum of all quarters' products.
constexpr uint64_t end_of_chunk(uint64_t sum) {
  sum += static_cast<uint64_t>(kChunkWords * kWordBytes) * 0x9E3779B185EBCA87u;
  sum = (sum ^ sum >> 37) * 0x165667919E3779F9u;
  return sum ^ sum >> 32;
}

// True if payloads of a part can be summed where they lie.
bool can_sum(const Part &part);
// Sets XXH3's constants, which are the same in all sums.
void set_keys(SumParams *params);
// Adds a job's sums of one part, as many as fit from number `begin` on; returns where to go on.
size_t add_sums(const Layout &layout, const JobItems &job, int32_t part, size_t begin,
                SumParams *params);

}  // namespace pds
