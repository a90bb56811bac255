// The index of an arena: slots by key, by size, by use. Every call is made with the lock held.
//
// Decision: nothing that is read from the file is trusted. A slot's number is checked before its
// descriptor is read, a list's link needs one that leads back, a chain must end. A contradiction
// throws Damaged, and the caller rebuilds lists, chains and counts from the descriptors. These are
// written in an order that leaves each one right whenever its writer dies: when a use of the slot
// begins, the state is written last; when it ends, the generation first.
#pragma once
#include <algorithm>
#include <cstddef>
#include <limits>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "arena_layout.h"
#include "pdstore.h"

namespace pds::arena {

int64_t now_ns();  // the same clock in every process of this boot

// Returns 0, or the errno of the wait: ETIMEDOUT after `ns`.
int futex_wait(std::atomic<uint32_t> &word, uint32_t seen, int64_t ns);
void futex_wake(std::atomic<uint32_t> &word, int count);

// One open arena's entry among the owners. Its word differs from those of all earlier owners. The
// kernel tells whether an owner lives: each holds a record lock (F_OFD_SETLK) on a byte of its own,
// which ends with its process, also across containers that do not see each other's processes.
// Decision: docs/decisions/028-arena.md
class Owner {
 public:
  // False if all entries are taken.
  bool enter(int file, Header &header);
  uint32_t word() const { return word_; }
  // True if the owner of this word still has the arena open.
  bool lives(uint32_t word) const;

 private:
  int file_ = -1;
  Header *header_ = nullptr;
  uint32_t word_ = 0;
};

enum class Locked { kNo, kYes, kAfterDeath };  // kAfterDeath: its last holder died

// Waits at most until `deadline_ns`.
Locked lock(Header &header, const Owner &owner, int64_t deadline_ns);
void unlock(Header &header);

class Unlock {
 public:
  explicit Unlock(Header &header) : header_(header) {}
  ~Unlock() { unlock(header_); }

 private:
  Header &header_;
};

struct Damaged {};

enum class MayEvict { kNo, kYes };  // for a new value

// From where a plan may take memory that the file system has not allocated yet.
enum class Growth { kAny, kOtherSizes, kNone };  // kOtherSizes: only within slabs that are in use

// The age of a time in the file; an impossible time is infinitely old.
inline int64_t since(int64_t then, int64_t now) {
  return then >= 0 && then <= now ? now - then : std::numeric_limits<int64_t>::max();
}

inline int64_t units_of(int64_t bytes) { return (bytes + kUnit - 1) / kUnit; }

// True for a lease that has not ended; false for an end that no lease has.
inline bool is_ahead(int64_t lease_end, int64_t now) {
  constexpr int64_t kLongestLease = int64_t{86'400} * 1'000'000'000;
  return lease_end > now && (lease_end <= now + kLongestLease || lease_end == kForeverNs);
}

inline bool is_marker(const Slot &slot) {
  return slot.state == State::kStored && slot.kind == kShortLived && slot.bytes <= kUnit;
}

struct NewValue {
  Kind kind;
  int64_t bytes;
};

// A choice of what goes for new values, and of where they will be.
struct Plan {
  struct Cut {  // a slab that gets slots of another size
    int64_t slab, units;
    int64_t count;  // its leading slots that new values get
  };
  std::vector<uint32_t> slots;                     // in slabs that keep their size; some are free
  std::vector<Cut> cuts;                           // of slabs, some of which are not in use
  std::set<std::pair<int64_t, int64_t>> unbacked;  // offsets and bytes, in the values' memory
};

class Index {
 public:
  Index(int file, char *base, const Geometry &geometry, const pds_arena_options &times,
        const Owner &owner);

  Header &header() { return *header_; }
  static std::string_view key_of(const Slot &slot) {
    return {slot.key, std::min<size_t>(slot.key_bytes, kMaxKeyBytes)};
  }

  // The slot that a key is stored in, or kNone.
  uint32_t find(std::string_view key, int64_t now);
  // Counts a stored slot as used now.
  void use(uint32_t id, int64_t now);
  // Leases a stored slot, and counts it as used now.
  void touch(uint32_t id, int64_t now);
  // Lets a stored slot be the last of its size that goes.
  void make_newest(uint32_t id);
  // Ends a slot's lease soon, if it ends at all: whoever waited for the value reads it now.
  void begin_read(uint32_t id, int64_t now) {
    if (slot(id).kind != kForever) slot(id).lease_end = now + times_.fresh_ns;
  }
  // True if the slot was published or leased last at `then` or later, and a read began after that:
  // only a read leaves such an end. False for a read at the very end of a lease.
  bool was_read_since(uint32_t id, int64_t then) {
    const int64_t end = slot(id).lease_end, used_at = slot(id).used_at;
    return used_at >= then && end > used_at + times_.fresh_ns && end < used_at + times_.lease_ns;
  }
  // Reserves a slot for this owner's value; kNone if there is no room. Evicts values that are not
  // kept, the oldest first, and for a marker also kept values, if it may evict.
  uint32_t reserve(std::string_view key, Kind kind, int64_t bytes, int64_t now, MayEvict may_evict);
  // Chooses what goes for new values: values that are not kept, then kept blocks and tails that
  // were used before `now`, the oldest first, and no markers. False if they can have no room.
  // Changes nothing.
  bool make_plan(const std::vector<NewValue> &values, Growth growth, int64_t now, Plan *plan);
  // Lets go what a plan names, which is of this very time, and whose memory is there. False, with
  // nothing gone, if the file system has no memory for descriptors.
  bool carry_out(const Plan &plan, int64_t now);
  // True for some time after `deny`.
  bool is_denied(int64_t now) const;
  // Makes a reserved slot findable; or frees it, if its key is stored meanwhile.
  void publish(uint32_t id, int64_t now);
  // Frees a slot, whatever it holds.
  void free(uint32_t id);
  // Gives up a reserved slot, which nobody else may get before the time `until`.
  void set_aside(uint32_t id, int64_t until);
  // Sets aside reserved slots of dead owners, or of this one: a device may still write to them.
  enum class Whose { kDead, kOwn };
  void rest(Whose whose, int64_t now);
  // For slots that a caller remembers: false, or no effect, for a slot that it no longer owns.
  bool is_reserved(int64_t id, uint64_t generation);
  void free_if_reserved(int64_t id, uint64_t generation);
  // The bytes that a slot has room for.
  int64_t room_of(uint32_t id) { return slabs_[slab_of(id)].units * kUnit; }
  void count(pds_arena_counts *counts);
  // Copies out what is stored from slot *next on, up to `room` values; returns how many.
  int64_t list(int64_t *next, pds_arena_value *values, int64_t room, int64_t now);
  // The age of the value that goes first for `count` new ones of a size, in ns since its last use;
  // -1 if none has to go, or none may.
  int64_t oldest_age(int64_t bytes, int64_t count, int64_t now);
  // Takes no slab for a while, because the file system has no memory; returns until when.
  int64_t deny(int64_t now);
  // Calls body(id, slot) for every slot that there is, whatever its state.
  template <typename Body>
  void for_each_slot(Body body) {
    for (int64_t slab = 0; slab < geometry_.num_slabs; ++slab) {
      for (int64_t i = 0, count = slots_of(slab); i < count; ++i) {
        body(id_of(slab, i), slots_[id_of(slab, i)]);
      }
    }
  }
  // Makes lists, chains and counts anew from the descriptors.
  void rebuild();

  // Throws Damaged unless there is a slot of this id now.
  Slot &slot(uint32_t id);
  // For readers without the lock: null if no slot can have this id.
  Slot *unlocked(int64_t id);
  int64_t offset_of(uint32_t id);

 private:
  friend class Planner;

  int64_t slots_of(int64_t slab) const;
  uint32_t id_of(int64_t slab, int64_t i) const {
    return static_cast<uint32_t>(slab * geometry_.slots_per_slab + i);
  }
  int64_t slab_of(uint32_t id) const { return id / geometry_.slots_per_slab; }
  uint32_t hash_of(std::string_view key) const;
  uint32_t &head_of(uint32_t hash) { return heads_[hash & (geometry_.num_heads - 1)]; }

  Class *class_of(int64_t units);
  Class &class_of_slot(uint32_t id);
  static void give_up(Slot &slot) {
    ++slot.generation;
    slot.state = State::kFree;
  }
  uint32_t reserve_slot(Class &sized, Kind kind, int64_t now, MayEvict may_evict);
  // The first to go for a slot of a class: `slab` whole if it is not -1, else `slot`, or kNone.
  struct Oldest {
    uint32_t slot;
    int64_t slab;
  };
  Oldest oldest(Class &sized, int64_t now);
  bool evict(Class &sized, int64_t now);
  bool evict_kept(Class &sized, int64_t now);
  uint32_t oldest_unkept(Class &sized, int64_t now);
  int64_t units_for(Kind kind, int64_t bytes) const;
  bool is_kept(const Slot &slot, int64_t now) const;
  void sweep(int64_t now);
  bool add_slab(Class &sized, int64_t now);
  bool describe(int64_t slab, int64_t units, int64_t now);
  void cut(int64_t slab, Class &sized, int64_t now);
  bool resize(int64_t slab, Class &sized, int64_t now);
  template <typename MayGo>
  int64_t coldest_slab(const Class &beside, MayGo may_go) const;
  void empty(int64_t slab);

  void chain(uint32_t id);
  void unchain(uint32_t id);
  void add_newest(List &list, uint32_t id);
  void add_oldest(List &list, uint32_t id);
  void unlink(List &list, uint32_t id);

  void mend(Slot &slot, int64_t units, int64_t now);
  void list_again(uint32_t id, int64_t now);

  int file_;
  Geometry geometry_;
  const pds_arena_options times_;
  const Owner &owner_;
  Header *header_;
  Slab *slabs_;
  uint32_t *heads_;
  Slot *slots_;
};

}  // namespace pds::arena
