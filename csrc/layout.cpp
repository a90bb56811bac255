#include "layout.h"

#include <algorithm>

#include "sums.h"

namespace pds {
namespace {

constexpr int64_t kMaxPitch = (int64_t{1} << 31) - 1;  // beyond it a 2D copy is slow, silently

bool same(const Shape &a, const Shape &b) {
  return a.block_stride == b.block_stride && a.token_stride == b.token_stride &&
         a.head_stride == b.head_stride && a.width == b.width && a.start == b.start;
}

int64_t step_of(const RegionClass &regions) {
  if (regions.bases.size() < 2) return 0;
  const int64_t step = regions.bases[1] - regions.bases[0];
  for (size_t i = 1; i < regions.bases.size(); ++i) {
    if (static_cast<int64_t>(regions.bases[i] - regions.bases[i - 1]) != step) return 0;
    if (regions.layers[i] != regions.layers[i - 1] + 1) return 0;
  }
  return std::max<int64_t>(step, 0);
}

}  // namespace

void RegionClass::range(int32_t layer0, int32_t layer1, size_t *begin, size_t *end) const {
  *begin = std::lower_bound(layers.begin(), layers.end(), layer0) - layers.begin();
  *end = std::lower_bound(layers.begin(), layers.end(), layer1) - layers.begin();
}

bool is_one_run(const RegionClass &regions, const Block &block) {
  const Rows rows = rows_of(regions.shape, block);
  const int64_t layer = layer_bytes(regions.shape, block.num_tokens);
  return rows.tokens * rows.heads == 1 && rows.bytes == layer &&
         (regions.bases.size() == 1 || regions.step == layer);
}

bool is_strided(const RegionClass &regions, const Block &block) {
  const Rows rows = rows_of(regions.shape, block);
  const int64_t pitch = regions.shape.block_stride;
  if (rows.tokens * rows.heads != 1 || rows.bytes > pitch) return false;
  if (regions.bases.size() == 1) return true;
  const bool by_depth = regions.step % pitch == 0 && pitch <= kMaxPitch;
  const bool by_pitch = regions.step >= rows.bytes && regions.step <= kMaxPitch;
  return regions.step > 0 && (by_depth || by_pitch);
}

std::string Layout::assign(const pds_options &options, const pds_part *parts,
                           const pds_region *regions) {
  num_blocks_ = options.num_blocks;
  block_tokens_ = options.block_tokens, max_tokens_ = options.max_tokens;
  order_ = options.order, mode_ = options.mode, path_ = options.path;
  if (num_blocks_ < 1 || num_blocks_ > INT32_MAX || block_tokens_ < 1 ||
      max_tokens_ < block_tokens_) {
    return "no engine blocks";
  }
  if (order_ < 0 || order_ > 1 || mode_ < 0 || mode_ > 1 || path_ < 0 || path_ > 3) {
    return "no such order, mode or path";
  }
  for (int32_t i = 0; i < options.num_parts; ++i) {
    if (parts[i].num_layers < 1 || parts[i].num_heads < 1 || parts[i].cell < 1) {
      return "a part has no layers, heads or bytes";
    }
    parts_.push_back({parts[i].num_layers, parts[i].num_heads * parts[i].cell, {}});
  }
  for (int32_t i = 0; i < options.num_regions; ++i) {
    const std::string why = add(regions[i], parts);
    if (!why.empty()) return why;
  }
  for (Part &part : parts_) {
    if (part.classes.empty()) return "a part without regions";
    for (RegionClass &regions : part.classes) regions.step = step_of(regions);
  }
  for (int32_t i = 0; i < num_parts(); ++i) parts_[i].can_be_summed = can_sum(*this, i);
  return parts_.empty() ? "no parts" : "";
}

std::string Layout::add(const pds_region &r, const pds_part *parts) {
  if (r.part < 0 || r.part >= num_parts()) return "a region of no part";
  const pds_part &p = parts[r.part];
  if (r.base == 0 || r.width < 1 || r.start < 0 || r.start + r.width > p.cell) {
    return "a region is outside its payload's cell";
  }
  if (r.layer < 0 || r.layer >= p.num_layers) return "a region's layer is outside its part";
  const Shape shape = join({r.block_stride, r.token_stride, r.head_stride, r.width, r.start, p.cell,
                            p.num_heads, order_ == PDS_HEAD_MAJOR, false, false});
  auto &classes = parts_[r.part].classes;
  auto found = std::find_if(classes.begin(), classes.end(),
                            [&](const RegionClass &c) { return same(c.shape, shape); });
  if (found == classes.end()) found = classes.insert(found, RegionClass{shape, {}, {}, 0});
  if (!found->layers.empty() && found->layers.back() >= r.layer) {
    return "regions are not in the order of their layers";
  }
  found->bases.push_back(r.base);
  found->layers.push_back(r.layer);
  return "";
}

int64_t Layout::largest_layer_bytes() const {
  int64_t largest = 0;
  for (const Part &part : parts_) largest = std::max(largest, part.token_bytes * max_tokens_);
  return largest;
}

void Layout::blocks_of(const Item &item, int32_t *begin, int32_t *end) const {
  *begin = item.first_token / block_tokens_;
  *end = (item.num_tokens + block_tokens_ - 1) / block_tokens_;
}

Block Layout::block_of(const Item &item, int32_t number, int64_t id) const {
  const int32_t first = number * block_tokens_;
  return {item.payload, static_cast<int32_t>(id), item.num_tokens, first,
          std::min(block_tokens_, item.num_tokens - first)};
}

}  // namespace pds
