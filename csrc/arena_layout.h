// The layout of an arena's file: header, slabs, hash heads, slots' descriptors and, from the start
// of a huge page on, the values.
//
// Decision: values lie in slabs, each cut into slots of one size. Each slab is registered with a
// device by itself, so that no value lies in two registered ranges. Every slot that a slab could
// have has a descriptor at a place that follows from its number: the file is sparse, so unused
// descriptors cost nothing, and none is ever allocated. Only the descriptors' own fields say what
// is stored; lists, hash chains and counts follow from them and are built anew if a process died
// while it changed them.
#pragma once
#include <atomic>
#include <cstdint>
#include <limits>

namespace pds::arena {

constexpr uint64_t kMagic = 0x616e657261534450;  // "PDSarena"
constexpr uint32_t kVersion = 3;
constexpr int64_t kUnit = 4096;  // slot sizes are multiples of it
constexpr int64_t kHugePage = 2 << 20;
constexpr int kMaxKeyBytes = 200;
constexpr uint32_t kNumOwners = 512;  // stores that have the arena open at once
constexpr int kNumClasses = 256;      // slot sizes at once
constexpr uint32_t kNone = 0xffffffff;
constexpr int64_t kForeverNs = std::numeric_limits<int64_t>::max();  // a lease without an end

enum class State : uint8_t {
  kFree,
  kReserved,  // its owner writes to it, nobody finds it
  kStored,
  kResting,  // its owner died; a device may still write to it until the lease's end
};

enum Kind : uint8_t { kBlock, kShortLived, kForever, kNumKinds };

struct List {
  uint32_t newest, oldest;
};

// The slots of one size.
struct Class {
  int64_t units;       // of a slot; 0: not in use
  List free, used;     // used: stored and resting
  int64_t full_until;  // before that time every used slot is kept
};

struct Slab {
  int64_t units;      // of a slot; 0: not in use
  int64_t used_at;    // when a slot of it was used last
  int64_t lease_end;  // the latest of its slots
  uint32_t num_reserved, num_used;
};

struct Slot {
  std::atomic<uint64_t> generation;  // changes whenever a stored or reserved value is given up
  std::atomic<State> state;
  uint8_t kind, key_bytes;
  uint8_t is_backed;  // the file system has allocated the memory
  uint32_t hash;
  int64_t bytes, lease_end, used_at;
  uint32_t owner;         // an Owner's word
  uint32_t newer, older;  // in its class's list
  uint32_t chain;         // the next slot of its hash head
  char key[kMaxKeyBytes];
};
static_assert(sizeof(Slot) == 256);

struct Header {
  uint64_t magic;
  uint32_t version, num_heads;
  int64_t data_bytes, slab_bytes;
  char boot[40];  // the boot in which it was made: owners and times are of that boot
  uint64_t seed;  // of the keys' hashes
  alignas(64) std::atomic<uint32_t> lock;     // the holder's word, or 0
  alignas(64) std::atomic<uint32_t> changes;  // counts publications
  alignas(64) int64_t swept_at;
  std::atomic<uint32_t> is_damaged;         // lists, chains and counts must be made anew
  int64_t denied_until;                     // the file system had no memory for another slab
  std::atomic<uint32_t> lives[kNumOwners];  // how often each owner's entry was taken
  Class classes[kNumClasses];
};

// The offsets and sizes in a file. They are computed from what the caller wants or a header says,
// checked once, and never read from the file again.
struct Geometry {
  int64_t data_bytes = 0, slab_bytes = 0;
  int64_t num_slabs = 0, num_heads = 0, slots_per_slab = 0;
  int64_t slabs_at = 0, heads_at = 0, slots_at = 0, data_at = 0;

  // False for sizes that no arena can have.
  bool make(int64_t wanted_data_bytes, int64_t wanted_slab_bytes) {
    constexpr int64_t kMostSlabs = 1 << 17, kLargest = int64_t{1} << 46;
    data_bytes = wanted_data_bytes, slab_bytes = wanted_slab_bytes;
    if (slab_bytes < kUnit || slab_bytes % kUnit != 0 || slab_bytes > (int64_t{1} << 32))
      return false;
    if (data_bytes < slab_bytes || data_bytes % slab_bytes != 0 || data_bytes > kLargest)
      return false;
    num_slabs = data_bytes / slab_bytes, slots_per_slab = slab_bytes / kUnit;
    if (num_slabs > kMostSlabs || num_slabs * slots_per_slab >= kNone) return false;
    num_heads = 1024;
    while (num_heads < data_bytes >> 16) num_heads *= 2;
    slabs_at = up(sizeof(Header), kUnit);
    heads_at = up(slabs_at + num_slabs * static_cast<int64_t>(sizeof(Slab)), kUnit);
    slots_at = up(heads_at + num_heads * 4, kUnit);
    data_at =
        up(slots_at + num_slabs * slots_per_slab * static_cast<int64_t>(sizeof(Slot)), kHugePage);
    return true;
  }
  int64_t file_bytes() const { return data_at + data_bytes; }

 private:
  static constexpr int64_t up(int64_t value, int64_t step) {
    return (value + step - 1) / step * step;
  }
};

}  // namespace pds::arena
