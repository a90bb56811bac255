#include "plan.h"

#include <algorithm>

namespace pds {
namespace {

constexpr int64_t kLargePiece = 64 << 10;
constexpr int64_t kLongPiece = 16 << 10;
constexpr int64_t kLargeOut = 512 << 10, kLargeIn = 2 << 20;

struct Pieces {
  int64_t count = 0, smallest = INT64_MAX;
  bool strided = true;
};

Pieces pieces_of(const Part &part, const Block &block) {
  Pieces pieces;
  for (const RegionClass &regions : part.classes) {
    const Rows rows = rows_of(regions.shape, block);
    const int64_t layers = regions.bases.size();
    const bool one = is_one_run(regions, block);
    pieces.count += one ? 1 : layers * rows.tokens * rows.heads;
    pieces.smallest = std::min(pieces.smallest, one ? layers * rows.bytes : rows.bytes);
    pieces.strided = pieces.strided && is_strided(regions, block);
  }
  return pieces;
}

}  // namespace

Plan plan_of(const Layout &layout, Direction direction, int32_t number, int32_t num_tokens,
             bool has_batch) {
  const Part &part = layout.part(number);
  const Block block{0, 0, num_tokens, 0, std::min(layout.block_tokens(), num_tokens)};
  const Pieces pieces = pieces_of(part, block);
  const int64_t bytes = part.num_layers * part.token_bytes * block.count;
  Plan plan{Path::kStage, static_cast<int32_t>(pieces.count), pieces.smallest, bytes, ""};
  const bool has_time = direction == Direction::kOut && pieces.smallest >= kLongPiece;
  const int64_t large = has_time ? kLargeOut : kLargeIn;
  const auto choose = [&](Path path, const char *why) { plan.path = path, plan.why = why; };
  if (layout.path() != PDS_PATH_AUTO) {
    choose(static_cast<Path>(layout.path()), "forced");
    const bool possible = plan.path != Path::kStrided || pieces.strided;
    if (!possible) choose(Path::kStage, "forced path is not possible for these strides");
  } else if (layout.mode() == PDS_THROUGHPUT) {
    choose(Path::kStage, "throughput mode");
  } else if (has_batch && pieces.count == 1 && pieces.smallest >= kLargePiece / 2) {
    choose(Path::kBatch, "an engine block is one piece");
  } else if (has_batch && pieces.smallest >= kLargePiece) {
    choose(Path::kBatch, "pieces of 64 KiB or more");
  } else if (pieces.strided && bytes >= large) {
    choose(Path::kStrided, large == kLargeOut ? "regular strides, engine blocks of 512 KiB or more"
                                              : "regular strides, engine blocks of 2 MiB or more");
  } else {
    choose(Path::kStage, pieces.strided ? "small engine blocks of small pieces"
                                        : "small pieces, or another order than the payload's");
  }
  return plan;
}

}  // namespace pds
