#include "sums.h"

#include <algorithm>

#include "checksum.h"

namespace pds {

static_assert(kChunkWords * kWordBytes == kChunkBytes);

bool can_sum(const Part &part) {
  const auto size = static_cast<int64_t>(part.classes.size());
  if (size > kSumShapes || size * part.num_layers > kSumRegions) return false;
  if (part.max_tokens / part.block_tokens >= kSumIds) return false;
  const int64_t most_bytes = part.num_layers * part.token_bytes * part.max_tokens;
  if (most_bytes / kWordBytes >= UINT32_MAX) return false;
  int64_t end = 0;  // of a cell's bytes that the regions so far hold
  for (const RegionClass &regions : part.classes) {
    const Shape &s = regions.shape;
    if (s.start != end || static_cast<int32_t>(regions.bases.size()) != part.num_layers)
      return false;
    end += s.width;
    uint64_t bits = alignment_bits(s) | s.width | s.cell;
    for (const uint64_t base : regions.bases) bits |= base;
    if (bits % kWordBytes != 0) return false;
  }
  return end == part.classes[0].shape.cell;
}

void set_keys(SumParams *params) {
  const xxh_u64 start[8] = XXH3_INIT_ACC;
  std::copy_n(start, 8, params->start);
  for (int i = 0; i < 24; ++i) params->secret[i] = XXH_readLE64(XXH3_kSecret + 8 * i);
  for (int i = 0; i < 8; ++i) params->last[i] = XXH_readLE64(XXH3_kSecret + 121 + 8 * i);
  for (int i = 0; i < 8; ++i) params->merge[i] = XXH_readLE64(XXH3_kSecret + 11 + 8 * i);
}

size_t add_sums(const Layout &layout, const JobItems &job, int32_t number, size_t begin,
                SumParams *p) {
  const Part &part = layout.parts[number];
  p->num_shapes = 0, p->num_layers = part.num_layers, p->block_tokens = part.block_tokens;
  for (const RegionClass &regions : part.classes) {
    std::copy(regions.bases.begin(), regions.bases.end(),
              p->bases + p->num_shapes * part.num_layers);
    p->shapes[p->num_shapes++] = regions.shape;
  }
  p->num_items = 0, p->num_chunks = 0;
  for (uint32_t num_ids = 0; begin < job.sums.size(); ++begin) {
    const Item &item = job.items[job.sums[begin].item];
    if (item.part != number) continue;
    const int32_t last = layout.blocks_of(item).second;
    if (p->num_items == kSumItems || num_ids + last > kSumIds) break;
    const uint32_t tokens = item.num_tokens;
    p->items[p->num_items++] = {p->num_chunks, job.sums[begin].first_digest, num_ids, tokens};
    p->num_chunks += num_chunks_of(part.num_layers * part.token_bytes * item.num_tokens);
    for (int32_t n = 0; n < last; ++n) p->ids[num_ids++] = job.ids[item.first_id + n];
  }
  return begin;
}

}  // namespace pds
