#include "layout.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "sums.h"
#include "ticket.h"

namespace pds {
namespace {

constexpr int64_t kLargePiece = 64 << 10;
constexpr int64_t kLongPiece = 16 << 10;
constexpr int64_t kLargeOut = 512 << 10, kLargeIn = 2 << 20;

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

constexpr int64_t kMaxPieces = 256;  // nobody else can use the driver during a batch call

// Calls visit(regions, begin, end, block) for every class and engine block of a segment.
template <typename Visit>
void for_each_block(const Layout &layout, const JobItems &job, const Segment &segment,
                    Visit visit) {
  const Item &item = job.items[segment.item];
  const auto [first, last] = layout.blocks_of(item);
  for (const RegionClass &regions : layout.parts[item.part].classes) {
    const auto [begin, end] = regions.range(segment.layer0, segment.layer1);
    for (int32_t number = first; number < last && begin < end; ++number) {
      visit(regions, begin, end, layout.block_of(item, number, job.ids[item.first_id + number]));
    }
  }
}

}  // namespace

std::pair<size_t, size_t> RegionClass::range(int32_t layer0, int32_t layer1) const {
  const auto first = std::lower_bound(layers.begin(), layers.end(), layer0);
  return {first - layers.begin(), std::lower_bound(first, layers.end(), layer1) - layers.begin()};
}

bool RegionClass::is_strided(const Block &block) const {
  const Rows rows = rows_of(shape, block);
  const int64_t pitch = shape.block_stride;
  if (rows.tokens * rows.heads != 1 || rows.bytes > pitch) return false;
  if (bases.size() == 1) return true;
  const bool by_depth = step % pitch == 0 && pitch <= kMaxPitch;
  const bool by_pitch = step >= rows.bytes && step <= kMaxPitch;
  return step > 0 && (by_depth || by_pitch);
}

void Layout::assign(const pds_options &options, const pds_part *shapes, const pds_region *regions) {
  path = options.path;
  if (path < PDS_PATH_AUTO || path > PDS_PATH_STAGE) refuse("no such path");
  for (int32_t i = 0; i < options.num_parts; ++i) {
    if (shapes[i].num_layers < 1 || shapes[i].num_heads < 1 || shapes[i].cell < 1) {
      refuse("a part has no layers, heads or bytes");
    }
    if (shapes[i].num_blocks < 1 || shapes[i].num_blocks > INT32_MAX ||
        shapes[i].block_tokens < 1 || shapes[i].max_tokens < shapes[i].block_tokens) {
      refuse("no engine blocks");
    }
    parts.push_back({shapes[i].num_layers,
                     shapes[i].num_heads * shapes[i].cell,
                     shapes[i].num_blocks,
                     shapes[i].block_tokens,
                     shapes[i].max_tokens,
                     {}});
  }
  for (int32_t i = 0; i < options.num_regions; ++i) {
    const int32_t part = regions[i].part;
    if (part < 0 || part >= options.num_parts) refuse("a region of no part");
    add(regions[i], shapes[part]);
  }
  for (Part &part : parts) {
    if (part.classes.empty()) refuse("a part without regions");
    for (RegionClass &of_shape : part.classes) of_shape.step = step_of(of_shape);
    part.can_be_summed = can_sum(part);
  }
  if (parts.empty()) refuse("no parts");
}

void Layout::add(const pds_region &r, const pds_part &p) {
  if (r.base == 0 || r.width < 1 || r.start < 0 || r.start + r.width > p.cell) {
    refuse("a region is outside its payload's cell");
  }
  if (r.layer < 0 || r.layer >= p.num_layers) refuse("a region's layer is outside its part");
  const Shape shape = join({r.block_stride, r.token_stride, r.head_stride, r.width, r.start, p.cell,
                            p.num_heads, false, false});
  auto &classes = parts[r.part].classes;
  auto found = std::find_if(classes.begin(), classes.end(),
                            [&](const RegionClass &c) { return same(c.shape, shape); });
  if (found == classes.end()) found = classes.insert(found, RegionClass{shape, {}, {}, 0});
  if (!found->layers.empty() && found->layers.back() >= r.layer) {
    refuse("regions are not in the order of their layers");
  }
  found->bases.push_back(r.base);
  found->layers.push_back(r.layer);
}

std::pair<int32_t, int32_t> Layout::blocks_of(const Item &item) const {
  const int32_t step = parts[item.part].block_tokens;
  return {item.first_token / step, (item.num_tokens + step - 1) / step};
}

Block Layout::block_of(const Item &item, int32_t number, int64_t id) const {
  const int32_t step = parts[item.part].block_tokens, first = number * step;
  return {item.payload, static_cast<int32_t>(id), item.num_tokens, first,
          std::min(step, item.num_tokens - first)};
}

pds_plan Layout::plan_of(Direction direction, int32_t number, int32_t num_tokens,
                         bool has_batch) const {
  const Part &part = parts[number];
  const Block block{0, 0, num_tokens, 0, std::min(part.block_tokens, num_tokens)};
  const int64_t bytes = part.num_layers * part.token_bytes * block.count;
  pds_plan plan{PDS_PATH_STAGE, 0, INT64_MAX, bytes, ""};
  bool is_strided = true;
  for (const RegionClass &regions : part.classes) {
    const Rows rows = rows_of(regions.shape, block);
    plan.num_pieces += static_cast<int32_t>(regions.bases.size()) * rows.tokens * rows.heads;
    plan.piece_bytes = std::min(plan.piece_bytes, rows.bytes);
    is_strided = is_strided && regions.is_strided(block);
  }
  const bool has_time = direction == Direction::kOut && plan.piece_bytes >= kLongPiece;
  const auto choose = [&](int32_t chosen, const char *why) {
    plan.path = chosen;
    std::snprintf(plan.why, sizeof plan.why, "%s", why);
    return plan;
  };
  if (path == PDS_PATH_STRIDED && !is_strided) {
    return choose(PDS_PATH_STAGE, "forced path is not possible for these strides");
  }
  if (path != PDS_PATH_AUTO) return choose(path, "forced");
  if (has_batch && plan.num_pieces == 1 && plan.piece_bytes >= kLargePiece / 2) {
    return choose(PDS_PATH_BATCH, "an engine block is one piece");
  }
  if (has_batch && plan.piece_bytes >= kLargePiece) {
    return choose(PDS_PATH_BATCH, "pieces of 64 KiB or more");
  }
  if (is_strided && bytes >= (has_time ? kLargeOut : kLargeIn)) {
    return choose(PDS_PATH_STRIDED, has_time ? "regular strides, engine blocks of 512 KiB or more"
                                             : "regular strides, engine blocks of 2 MiB or more");
  }
  return choose(PDS_PATH_STAGE, is_strided ? "small engine blocks of small pieces"
                                           : "small pieces, or another order than the payload's");
}

SliceWalk::SliceWalk(const Layout &layout, const JobItems &job, const PumpOptions &sizes,
                     bool has_batch)
    : layout_(layout), job_(job), sizes_(sizes), has_batch_(has_batch), order_(job.items.size()) {
  std::iota(order_.begin(), order_.end(), int64_t{0});
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int64_t a, int64_t b) { return job.items[a].part < job.items[b].part; });
}

const pds_plan &SliceWalk::plan_of(const Item &item) {
  if (item.part != planned_part_ || item.num_tokens != planned_tokens_) {
    plan_ = layout_.plan_of(job_.direction, item.part, item.num_tokens, has_batch_);
    planned_part_ = item.part, planned_tokens_ = item.num_tokens;
  }
  return plan_;
}

bool SliceWalk::next(Slice *slice) {
  slice->segments.clear();
  slice->bytes = 0;
  int64_t pieces = 0;
  while (at_ < order_.size() && slice->segments.size() < kMaxPieces) {
    const int64_t number = order_[at_];
    const Item &item = job_.items[number];
    const pds_plan &plan = plan_of(item);
    const Part &part = layout_.parts[item.part];
    if (!slice->segments.empty() && plan.path != slice->path) break;
    slice->path = plan.path;
    const int64_t limit = plan.path == PDS_PATH_STAGE ? sizes_.stage_bytes : sizes_.copy_bytes;
    const int64_t per_layer = part.token_bytes * item.num_tokens;
    int64_t layers =
        std::min<int64_t>(part.num_layers - layer_, (limit - slice->bytes) / per_layer);
    if (plan.path == PDS_PATH_BATCH) {
      const int64_t blocks = (item.num_tokens + part.block_tokens - 1) / part.block_tokens;
      const int64_t per = std::max<int64_t>(1, plan.num_pieces * blocks / part.num_layers);
      layers = std::min(layers, std::max<int64_t>(0, kMaxPieces - pieces) / per);
      pieces += std::max<int64_t>(layers, 0) * per;
    }
    if (layers < 1 && !slice->segments.empty()) break;
    // An item in two slices costs twice the strided copies and DMAs: so begin it in the next slice.
    // A batch has as many pieces either way, so its slices are filled.
    const bool cut = layers < part.num_layers - layer_ && plan.path != PDS_PATH_BATCH;
    if (cut && layer_ == 0 && !slice->segments.empty()) break;
    const int32_t count = static_cast<int32_t>(std::max<int64_t>(1, layers));
    slice->segments.push_back({number, layer_, layer_ + count});
    slice->bytes += plan.path == PDS_PATH_STAGE ? in_ring(count * per_layer) : count * per_layer;
    layer_ += count;
    if (layer_ == part.num_layers) layer_ = 0, ++at_;
  }
  return !slice->segments.empty();
}

void add_pieces(const Layout &layout, const JobItems &job, const Segment &segment, Copies *copies) {
  const auto add = [&](const RegionClass &regions, size_t begin, size_t end, const Block &block) {
    const Shape &shape = regions.shape;
    const Rows rows = rows_of(shape, block);
    for (size_t i = begin; i < end; ++i) {
      for (int32_t token = 0; token < rows.tokens; ++token) {
        for (int32_t head = 0; head < rows.heads; ++head) {
          copies->add(regions.bases[i] + cache_offset(shape, block, token, head),
                      block.payload + payload_offset(shape, block, regions.layers[i], token, head),
                      rows.bytes);
        }
      }
    }
  };
  for_each_block(layout, job, segment, add);
}

void add_strided(const Layout &layout, const JobItems &job, const Segment &segment,
                 std::vector<Strided> *copies) {
  const auto add = [&](const RegionClass &regions, size_t begin, size_t end, const Block &block) {
    const Shape &shape = regions.shape;
    copies->push_back({regions.bases[begin] + cache_offset(shape, block, 0, 0),
                       block.payload + payload_offset(shape, block, regions.layers[begin], 0, 0),
                       rows_of(shape, block).bytes, static_cast<int64_t>(end - begin), regions.step,
                       layer_bytes(shape, block.num_tokens), shape.block_stride});
  };
  for_each_block(layout, job, segment, add);
}

}  // namespace pds
