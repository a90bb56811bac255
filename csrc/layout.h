// Where the caches of one engine are: parts, their regions, and the blocks of an item.
//
// Decision: regions that differ only in base and layer are one class, so that a block of many
// layers is one strided copy or one kernel launch. Everything is checked once, when the layout is
// assigned.
#pragma once
#include <string>
#include <vector>

#include "geometry.h"
#include "pdstore.h"

namespace pds {

// Regions of a part that have one shape, by layer.
struct RegionClass {
  Shape shape;
  std::vector<uint64_t> bases;
  std::vector<int32_t> layers;
  int64_t step = 0;  // from layer to layer; 0 where it is not one distance

  // First and last + 1 of the regions in a range of layers.
  void range(int32_t layer0, int32_t layer1, size_t *begin, size_t *end) const;
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

class Layout {
 public:
  // Empty, or why these regions are not a layout.
  std::string assign(const pds_options &options, const pds_part *parts, const pds_region *regions);

  const Part &part(int32_t number) const { return parts_[number]; }
  int32_t num_parts() const { return static_cast<int32_t>(parts_.size()); }
  int32_t block_tokens() const { return block_tokens_; }
  int64_t num_blocks() const { return num_blocks_; }
  int32_t max_tokens() const { return max_tokens_; }
  int32_t mode() const { return mode_; }
  int32_t path() const { return path_; }  // forced, or PDS_PATH_AUTO
  int64_t largest_layer_bytes() const;
  int64_t payload_bytes(int32_t part, int32_t num_tokens) const {
    return parts_[part].num_layers * parts_[part].token_bytes * num_tokens;
  }
  // Engine blocks of an item that have tokens to move: [begin, end).
  void blocks_of(const Item &item, int32_t *begin, int32_t *end) const;
  Block block_of(const Item &item, int32_t number, int64_t id) const;

 private:
  std::string add(const pds_region &region, const pds_part *parts);

  std::vector<Part> parts_;
  int64_t num_blocks_ = 0;
  int32_t block_tokens_ = 0, max_tokens_ = 0;
  int32_t order_ = 0, mode_ = 0, path_ = 0;
};

// All layers of an engine block are one run on both sides.
bool is_one_run(const RegionClass &regions, const Block &block);
// The copy engines can take the layers of an engine block as one strided copy.
bool is_strided(const RegionClass &regions, const Block &block);

}  // namespace pds
