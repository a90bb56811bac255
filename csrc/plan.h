// Which path moves which payload, and why.
//
// Decision: chosen by the layout, the direction and the tokens in the block alone, so that a path
// never changes unseen. Nothing ever writes host memory from the GPU's processors: even two thread
// blocks that do so slow a decode step by 149 %; copy engines cost it about 1 %. The copy engines
// want pieces of 64 KiB or engine blocks of 2 MiB; everything smaller is gathered in device memory
// first. On the way to the host blocks of 512 KiB in pieces of 16 KiB are enough: a prefill runs
// beside those copies, and gathering slows it more than the copies gain.
#pragma once
#include <string>

#include "layout.h"

namespace pds {

enum class Path : int32_t {
  kBatch = PDS_PATH_BATCH,
  kStrided = PDS_PATH_STRIDED,
  kStage = PDS_PATH_STAGE,
};

struct Plan {
  Path path;
  int32_t num_pieces;
  int64_t piece_bytes, block_bytes;
  std::string why;
};

// The path of payloads of a part with this many tokens; has_batch: the device can copy in batches.
Plan plan_of(const Layout &layout, Direction direction, int32_t part, int32_t num_tokens,
             bool has_batch);

}  // namespace pds
