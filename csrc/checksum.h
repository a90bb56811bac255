// The checksum of a stored value: xxh3_64 of its header without the sum itself and, if it has a
// payload, of the digests of the payload's chunks, in order, and its length. A chunk's digest is
// the xxh3_64 of its 4 KiB; the last chunk is filled up with zeros.
//
// Decision: chunks allow a GPU to sum what it has copied: four threads sum a chunk, and a block
// range has enough chunks for all threads. A sum of all bytes in a row would be one thread's work.
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

// True if a header begins with `start` and holds this sum.
inline bool is_header(const char *header, const char *start, uint64_t sum) {
  return std::memcmp(header, start, kSummedOfHeader) == 0 &&
         std::memcmp(header + kSummedOfHeader, &sum, sizeof sum) == 0;
}

// Writes a header. The sum is little-endian, like every machine that this is built for.
inline void set_header(char *header, const char *start, uint64_t sum) {
  std::memcpy(header, start, kSummedOfHeader);
  std::memcpy(header + kSummedOfHeader, &sum, sizeof sum);
}

class Sum {
 public:
  Sum() { XXH3_64bits_reset(&state_); }

  void add_header(const char *value) { XXH3_64bits_update(&state_, value, kSummedOfHeader); }
  // Adds bytes of a payload, in order: whole chunks, except at the payload's end.
  void add(const char *payload, int64_t bytes) {
    payload_bytes_ += bytes;
    for (; bytes >= kChunkBytes; payload += kChunkBytes, bytes -= kChunkBytes) {
      add_digest(digest_of_chunk(payload));
    }
    if (bytes == 0) return;
    char last[kChunkBytes] = {};
    std::memcpy(last, payload, bytes);
    add_digest(digest_of_chunk(last));
  }
  // Adds a payload by the digests of its chunks.
  void add_payload(const uint64_t *digests, int64_t bytes) {
    payload_bytes_ += bytes;
    for (; bytes > 0; bytes -= kChunkBytes) add_digest(*digests++);
  }
  // Ends the sum: nothing can be added afterwards.
  uint64_t digest() {
    if (payload_bytes_ > 0) add_digest(payload_bytes_);
    return XXH3_64bits_digest(&state_);
  }

 private:
  void add_digest(uint64_t digest) { XXH3_64bits_update(&state_, &digest, sizeof digest); }

  XXH3_state_t state_;
  int64_t payload_bytes_ = 0;
};

inline uint64_t sum_of(const char *value, int64_t bytes) {
  Sum sum;
  sum.add_header(value);
  sum.add(value + kHeaderBytes, bytes - kHeaderBytes);
  return sum.digest();
}

}  // namespace pds
