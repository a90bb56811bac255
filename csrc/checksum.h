// The checksum of a stored value: xxh3_64 of its header without the sum itself, and, if it has a
// payload, of the digests of its chunks in their order and of its length. A chunk's digest: xxh3_64
// of its 4 KiB, the last with zeros behind it.
//
// Decision: chunks, so that a GPU sums what it has copied: four of its threads sum a chunk, and a
// range of a load has enough of them for all. A sum of all bytes in a row is one thread's work.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

namespace pds {

constexpr int64_t kHeaderBytes = 64, kSummedOfHeader = 56;  // the sum itself is the rest
constexpr int64_t kPieceBytes = 256 << 10;                  // what a core's own cache holds
constexpr int64_t kChunkBytes = 4096;

constexpr int64_t num_chunks_of(int64_t payload_bytes) {
  return (payload_bytes + kChunkBytes - 1) / kChunkBytes;
}
inline uint64_t digest_of_chunk(const char *chunk) { return XXH3_64bits(chunk, kChunkBytes); }

// True if a header begins so and holds this sum.
inline bool is_header(const char *header, const char *start, uint64_t sum) {
  return std::memcmp(header, start, kSummedOfHeader) == 0 &&
         std::memcmp(header + kSummedOfHeader, &sum, sizeof sum) == 0;
}

// Completes a header. Little-endian, as every machine this is built for.
inline void set_header(char *header, const char *start, uint64_t sum) {
  std::memcpy(header, start, kSummedOfHeader);
  std::memcpy(header + kSummedOfHeader, &sum, sizeof sum);
}

class Sum {
 public:
  Sum() { XXH3_64bits_reset(&state_); }

  // Adds the bytes [begin, end) of a value, in order.
  void add(const char *value, int64_t begin, int64_t end) {
    const int64_t header_end = std::min(end, kSummedOfHeader);
    if (begin < header_end) XXH3_64bits_update(&state_, value + begin, header_end - begin);
    begin = std::max(begin, kHeaderBytes);
    payload_bytes_ += std::max<int64_t>(0, end - begin);
    while (begin < end) {
      const int64_t bytes = std::min(end - begin, kChunkBytes - num_held_);
      if (bytes == kChunkBytes) {
        add_digest(digest_of_chunk(value + begin));
      } else {
        hold(value + begin, bytes);
      }
      begin += bytes;
    }
  }
  // Adds a payload by the digests of its chunks.
  void add_payload(const uint64_t *digests, int64_t bytes) {
    payload_bytes_ += bytes;
    for (; bytes > 0; bytes -= kChunkBytes) add_digest(*digests++);
  }
  // After it nothing can be added.
  uint64_t digest() {
    if (num_held_ > 0) {
      std::memset(held_ + num_held_, 0, kChunkBytes - num_held_);
      add_digest(digest_of_chunk(held_));
      num_held_ = 0;
    }
    if (payload_bytes_ > 0) add_digest(payload_bytes_);
    return XXH3_64bits_digest(&state_);
  }

 private:
  void add_digest(uint64_t digest) { XXH3_64bits_update(&state_, &digest, sizeof digest); }
  void hold(const char *bytes, int64_t count) {
    std::memcpy(held_ + num_held_, bytes, count);
    num_held_ += count;
    if (num_held_ < kChunkBytes) return;
    add_digest(digest_of_chunk(held_));
    num_held_ = 0;
  }

  XXH3_state_t state_;
  int64_t num_held_ = 0, payload_bytes_ = 0;
  char held_[kChunkBytes];  // the beginning of a chunk
};

inline uint64_t sum_of(const char *value, int64_t bytes) {
  Sum sum;
  sum.add(value, 0, bytes);
  return sum.digest();
}

}  // namespace pds
