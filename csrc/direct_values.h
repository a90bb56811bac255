// Values that are files, read and written past the page cache.
#pragma once
#include <cstdint>
#include <vector>

#include "checksum.h"
#include "direct.h"
#include "pdstore.h"

namespace pds {

struct DirectValues {
  std::vector<const char *> paths;
  const uint64_t *addresses;
  const int64_t *sizes;
  const char *starts;  // headers without their sums; null: a value's bytes are what they are
  int64_t count;

  const char *start(int64_t i) const {
    return starts == nullptr ? nullptr : starts + i * kSummedOfHeader;
  }
};

// Both return how many leading values are done. `why`: 0, or what is wrong with the next one: an
// errno, kShorter for another length, EBADMSG for another start or checksum.
int64_t read_directly(const DirectValues &values, DirectWay way, int32_t *why);
// Completes the headers in memory if there are starts. Each value is written under a name that
// begins with `temporary`, and gets its own when it is whole; one that exists counts as done.
int64_t write_directly(const DirectValues &values, const char *temporary, DirectWay way,
                       int32_t *why);

// The way that a number of the C interface means.
inline DirectWay direct_way_of(int32_t way) {
  return way == PDS_DIRECT ? DirectWay::kRing : DirectWay::kThreads;
}

}  // namespace pds
