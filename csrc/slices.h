// A job cut into slices, and a slice as descriptors.
//
// Decision: a slice is what one lane has in flight, so its size bounds how long somebody else's
// small copy waits. It holds whole items where they fit, and a range of one item's layers where
// they do not; one path per slice.
#pragma once
#include <vector>

#include "layout.h"

namespace pds {

// An item whose payload is summed after the copy, and where its digests begin among the job's.
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

// Segments begin at multiples of this in a lane's ring.
constexpr int64_t in_ring(int64_t bytes) { return (bytes + 255) / 256 * 256; }

struct PumpOptions {
  int64_t copy_bytes, stage_bytes;  // of a slice
  int64_t first_bytes;  // where nothing runs yet: the first slice is prepared before the link works
  int64_t linger_us;    // how long a thread that has nothing to do sleeps lightly
};

class SliceWalk {
 public:
  SliceWalk(const Layout &layout, const JobItems &job, const PumpOptions &sizes, bool has_batch)
      : layout_(layout), job_(job), sizes_(sizes), has_batch_(has_batch) {}

  // The next slice, of at most so many bytes, into `slice`; false at the end.
  bool next(Slice *slice, int64_t most_bytes);

 private:
  const pds_plan &plan_of(const Item &item);

  const Layout &layout_;
  const JobItems &job_;
  const PumpOptions &sizes_;
  const bool has_batch_;
  int64_t item_ = 0;
  int32_t layer_ = 0;
  int32_t planned_part_ = -1, planned_tokens_ = -1;  // what plan_ is of
  pds_plan plan_{};
};

// Adds a segment's contiguous pieces, or its strided copies.
void add_pieces(const Layout &layout, const JobItems &job, const Segment &segment, Copies *copies);
void add_strided(const Layout &layout, const JobItems &job, const Segment &segment,
                 std::vector<Strided> *copies);

}  // namespace pds
