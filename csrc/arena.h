// One process's view of an arena: a file that many processes map, with values by key.
//
// Decision: the lock is held while descriptors change and never while bytes move. Whoever copies a
// value out looks at its slot's generation afterwards: as long as that is the one it found, the
// bytes were those of the value.
// Decision: docs/decisions/028-arena.md
#pragma once
#include <memory>

#include "arena_file.h"
#include "arena_index.h"
#include "arena_life.h"
#include "arena_owed.h"
#include "pdstore.h"

namespace pds::arena {

using Keys = std::vector<std::string_view>;

// Where values are or will be; an array of the caller's for each. A slot of -1 is none.
struct Places {
  int64_t *slots;
  uint64_t *generations;
  int64_t *offsets;  // of the values' memory; may be null where they are not asked for

  Places from(int64_t i) const {
    return {slots + i, generations + i, offsets == nullptr ? nullptr : offsets + i};
  }
};

class Arena {
 public:
  // The descriptor stays the caller's.
  static int32_t open(int file, const pds_arena_options &options, std::unique_ptr<Arena> *made);
  ~Arena();
  Arena(const Arena &) = delete;
  Arena &operator=(const Arena &) = delete;

  const Geometry &geometry() const { return geometry_; }

  // Codes of pdstore.h, as all below. After it no call of this process is in the index.
  int32_t close();
  // In the child of a fork: the parent's locks must not live as long as the child.
  void forget();

  // lock_ns: how long a call waits for the lock; negative: for as long as the options say.
  int32_t match(const Keys &keys, int64_t *found, int64_t lock_ns);
  int32_t which(const Keys &keys, uint8_t *stored, int64_t lock_ns);
  int32_t remove(const Keys &keys);
  int32_t clear(std::string_view prefix);
  int32_t reserve(const Keys &keys, const uint8_t *kinds, const int64_t *sizes, Places places,
                  int64_t *covered, int64_t lock_ns);
  int32_t publish(Places places, int64_t count, int64_t *done, int64_t lock_ns);
  int32_t abandon(Places places, int64_t count, int64_t lock_ns);
  // Abandons with the next call that gets the lock.
  void owe(Places places, int64_t count) { owed_.add(places.slots, places.generations, count); }
  int32_t borrow(const Keys &keys, const int64_t *sizes, Places places, int64_t *found,
                 int64_t lock_ns);
  int64_t still_there(Places places, int64_t count);
  int32_t wait(uint32_t seen, int64_t timeout_us, uint32_t *changes);
  int32_t count(pds_arena_counts *counts);
  int32_t list(int64_t *next, pds_arena_value *values, int64_t room, int64_t *count);

 private:
  Arena(int file, char *base, const Geometry &geometry, const pds_arena_options &options);

  template <typename Body>
  int32_t with_lock(int64_t lock_ns, Body body);
  struct Unbacked {
    int64_t number, bytes;  // of the place; of its whole slot
  };
  int32_t back(Places places, const std::vector<Unbacked> &unbacked, int64_t *covered);

  int file_;  // for locks, never mapped
  char *base_;
  Geometry geometry_;
  int64_t lock_timeout_ns_;
  Owner owner_;
  Index index_;
  Life life_;
  Owed owed_;
};

}  // namespace pds::arena
