#include "slices.h"

#include <algorithm>

namespace pds {
namespace {

constexpr int64_t kMaxPieces = 256;  // a batch call keeps the driver from everybody else meanwhile

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

const pds_plan &SliceWalk::plan_of(const Item &item) {
  if (item.part != planned_part_ || item.num_tokens != planned_tokens_) {
    plan_ = layout_.plan_of(job_.direction, item.part, item.num_tokens, has_batch_);
    planned_part_ = item.part, planned_tokens_ = item.num_tokens;
  }
  return plan_;
}

bool SliceWalk::next(Slice *slice, int64_t most_bytes) {
  slice->segments.clear();
  slice->bytes = 0;
  int64_t pieces = 0;
  const int64_t num_items = job_.items.size();
  while (item_ < num_items) {
    const Item &item = job_.items[item_];
    const pds_plan &plan = plan_of(item);
    const Part &part = layout_.parts[item.part];
    if (!slice->segments.empty() && plan.path != slice->path) break;
    slice->path = plan.path;
    const int64_t size = plan.path == PDS_PATH_STAGE ? sizes_.stage_bytes : sizes_.copy_bytes;
    const int64_t limit = std::min(size, most_bytes);
    const int64_t per_layer = part.token_bytes * item.num_tokens;
    int64_t layers =
        std::min<int64_t>(part.num_layers - layer_, (limit - slice->bytes) / per_layer);
    if (plan.path == PDS_PATH_BATCH) {
      const int64_t blocks = (item.num_tokens + layout_.block_tokens - 1) / layout_.block_tokens;
      const int64_t per = std::max<int64_t>(1, plan.num_pieces * blocks / part.num_layers);
      layers = std::min(layers, std::max<int64_t>(0, kMaxPieces - pieces) / per);
      pieces += std::max<int64_t>(layers, 0) * per;
    }
    if (layers < 1 && !slice->segments.empty()) break;
    // Half an item now and half in the next slice costs twice the strided copies and DMAs: begin it
    // there. A batch has as many pieces either way, and full slices.
    const bool cut = layers < part.num_layers - layer_ && plan.path != PDS_PATH_BATCH;
    if (cut && layer_ == 0 && !slice->segments.empty()) break;
    const int32_t count = static_cast<int32_t>(std::max<int64_t>(1, layers));
    slice->segments.push_back({item_, layer_, layer_ + count});
    slice->bytes += plan.path == PDS_PATH_STAGE ? in_ring(count * per_layer) : count * per_layer;
    layer_ += count;
    if (layer_ == part.num_layers) layer_ = 0, ++item_;
  }
  return !slice->segments.empty();
}

void add_pieces(const Layout &layout, const JobItems &job, const Segment &segment, Copies *copies) {
  const auto add = [&](const RegionClass &regions, size_t begin, size_t end, const Block &block) {
    const Shape &shape = regions.shape;
    Rows rows = rows_of(shape, block);
    if (regions.is_one_run(block)) {
      rows.bytes *= static_cast<int64_t>(end - begin);
      end = begin + 1;
    }
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
