// The checksum of a stored value: xxh3_64 of its bytes without those that hold the sum itself.
#pragma once
#include <algorithm>
#include <cstdint>

#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

namespace pds {

constexpr int64_t kHeaderBytes = 64, kSummedOfHeader = 56;  // the sum itself is the rest
constexpr int64_t kPieceBytes = 256 << 10;                  // what a core's own cache holds

class Sum {
 public:
  Sum() { XXH3_64bits_reset(&state_); }

  // Adds the bytes [begin, end) of a value, in order.
  void add(const char *value, int64_t begin, int64_t end) {
    const int64_t header_end = std::min(end, kSummedOfHeader);
    if (begin < header_end) XXH3_64bits_update(&state_, value + begin, header_end - begin);
    begin = std::max(begin, kHeaderBytes);
    if (begin < end) XXH3_64bits_update(&state_, value + begin, end - begin);
  }
  uint64_t digest() const { return XXH3_64bits_digest(&state_); }

 private:
  XXH3_state_t state_;
};

}  // namespace pds
