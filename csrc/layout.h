// Where the caches of one engine are: parts, their regions, the blocks of an item, and which path
// moves which payload.
//
// Decision: regions that differ only in base and layer are one class, so that a block of many
// layers is one strided copy or one kernel launch. Everything is checked once, when the layout is
// assigned.
//
// Decision: the path is chosen by the layout, the direction and the tokens in the block alone, so
// that it never changes unseen. Nothing ever writes host memory from the GPU's processors: even two
// thread blocks that do so slow a decode step by 149 %; copy engines cost it about 1 %. The copy
// engines want pieces of 64 KiB or engine blocks of 2 MiB; everything smaller is gathered in device
// memory first. On the way to the host blocks of 512 KiB in pieces of 16 KiB are enough: a prefill
// runs beside those copies, and gathering slows it more than the copies gain.
#pragma once
#include <utility>
#include <vector>

#include "device.h"

namespace pds {

// Regions of a part that have one shape, by layer.
struct RegionClass {
  Shape shape;
  std::vector<uint64_t> bases;
  std::vector<int32_t> layers;
  int64_t step = 0;  // from layer to layer; 0 where it is not one distance

  // First and last + 1 of the regions in a range of layers.
  std::pair<size_t, size_t> range(int32_t layer0, int32_t layer1) const;
  // All layers of an engine block are one run on both sides.
  bool is_one_run(const Block &block) const;
  // The copy engines can take the layers of an engine block as one strided copy.
  bool is_strided(const Block &block) const;
};

struct Part {
  int32_t num_layers = 0;
  int64_t token_bytes = 0;  // of one layer
  std::vector<RegionClass> classes;
  bool can_be_summed = false;  // where its payloads lie in the cache
};

// A job's item with its engine blocks.
struct Item {
  uint64_t payload;
  int32_t part, num_tokens, first_token;
  int64_t first_id;  // into the job's ids
};

struct Layout {
  std::vector<Part> parts;
  int64_t num_blocks = 0;
  int32_t block_tokens = 0, max_tokens = 0;
  int32_t path = PDS_PATH_AUTO;  // forced

  // Throws a Failure if these regions are no layout.
  void assign(const pds_options &options, const pds_part *shapes, const pds_region *regions);

  // Such a payload is one of this layout.
  bool holds(const pds_item &item) const {
    return item.part >= 0 && item.part < static_cast<int32_t>(parts.size()) &&
           item.num_tokens >= 1 && item.num_tokens <= max_tokens;
  }
  int64_t payload_bytes(const pds_item &item) const {
    return parts[item.part].num_layers * parts[item.part].token_bytes * item.num_tokens;
  }
  // Engine blocks of an item that have tokens to move: first and last + 1.
  std::pair<int32_t, int32_t> blocks_of(const Item &item) const;
  Block block_of(const Item &item, int32_t number, int64_t id) const;
  // The path of payloads of a part with this many tokens; has_batch: the device copies in batches.
  pds_plan plan_of(Direction direction, int32_t part, int32_t num_tokens, bool has_batch) const;

 private:
  void add(const pds_region &region, const pds_part &shape);
};

}  // namespace pds
