// Where an engine's caches lie: parts, their regions, the blocks of an item. Also: which path moves
// a payload, and how a job is cut into slices.
//
// Decision: regions that differ only in base and layer are one class, so that a block of many
// layers is one strided copy or one kernel launch. Everything is checked once, when the layout is
// assigned.
//
// Decision: only the layout, the direction and the tokens in the block decide the path, so that it
// never changes unseen. The copy engines get pieces of 64 KiB and engine blocks of 2 MiB; to the
// host also engine blocks of 512 KiB in pieces of 16 KiB. All else passes a device ring.
// Decision: docs/decisions/022-no-kernel-writes-host.md
//
// Decision: a slice is what one lane has in flight, so its size limits how long another small copy
// waits. It holds whole items if they fit, else a range of one item's layers. All of a slice takes
// one path. A job's items are walked part by part: in the order of a prompt's blocks, a part with
// small pieces between two with large ones would make each item a slice, for which a lane waits.
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
  int64_t step = 0;  // from layer to layer; 0 if the distances differ

  // First and last + 1 of the regions in a range of layers.
  std::pair<size_t, size_t> range(int32_t layer0, int32_t layer1) const;
  // True if the copy engines can take the layers of an engine block as one strided copy.
  bool is_strided(const Block &block) const;
};

struct Part {
  int32_t num_layers = 0;
  int64_t token_bytes = 0;  // of one layer
  int64_t num_blocks = 0;
  int32_t block_tokens = 0, max_tokens = 0;  // of an engine block, of a payload
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
  int32_t path = PDS_PATH_AUTO;  // forced

  // Throws a Failure if these regions are no layout.
  void assign(const pds_options &options, const pds_part *shapes, const pds_region *regions);

  // True if the item's payload is one of this layout.
  bool holds(const pds_item &item) const {
    return item.part >= 0 && item.part < static_cast<int32_t>(parts.size()) &&
           item.num_tokens >= 1 && item.num_tokens <= parts[item.part].max_tokens;
  }
  int64_t payload_bytes(const pds_item &item) const {
    return parts[item.part].num_layers * parts[item.part].token_bytes * item.num_tokens;
  }
  // Engine blocks of an item that have tokens to move: first and last + 1.
  std::pair<int32_t, int32_t> blocks_of(const Item &item) const;
  Block block_of(const Item &item, int32_t number, int64_t id) const;
  // The path of a part's payloads of `num_tokens` tokens; has_batch: the device copies in batches.
  pds_plan plan_of(Direction direction, int32_t part, int32_t num_tokens, bool has_batch) const;

 private:
  void add(const pds_region &region, const pds_part &shape);
};

// An item whose payload is summed in the cache, and where its digests begin among the job's.
struct SumOf {
  int64_t item;
  uint32_t first_digest;
};

struct JobItems {
  Direction direction;
  std::vector<Item> items;
  std::vector<int64_t> ids;
  std::vector<SumOf> sums{};
  int64_t num_digests = 0;
};

// Some layers of one item.
struct Segment {
  int64_t item;
  int32_t layer0, layer1;
};

struct Slice {
  int32_t path = PDS_PATH_STAGE;
  int64_t bytes = 0;
  std::vector<Segment> segments;
};

// Rounds up to a multiple of 256 bytes: segments begin there in a lane's ring.
constexpr int64_t in_ring(int64_t bytes) { return (bytes + 255) / 256 * 256; }

struct PumpOptions {
  int64_t copy_bytes, stage_bytes;  // of a slice
};

class SliceWalk {
 public:
  SliceWalk(const Layout &layout, const JobItems &job, const PumpOptions &sizes, bool has_batch);

  // The next slice, into `slice`; false at the end.
  bool next(Slice *slice);

 private:
  const pds_plan &plan_of(const Item &item);

  const Layout &layout_;
  const JobItems &job_;
  const PumpOptions &sizes_;
  const bool has_batch_;
  std::vector<int64_t> order_;  // of the job's items
  size_t at_ = 0;               // in order_
  int32_t layer_ = 0;
  int32_t planned_part_ = -1, planned_tokens_ = -1;  // what plan_ is for
  pds_plan plan_{};
};

// Adds a segment's contiguous pieces, or its strided copies.
void add_pieces(const Layout &layout, const JobItems &job, const Segment &segment, Copies *copies);
void add_strided(const Layout &layout, const JobItems &job, const Segment &segment,
                 std::vector<Strided> *copies);

}  // namespace pds
