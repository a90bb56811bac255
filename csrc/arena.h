// One process's view of an arena: a file that many processes map, with values by key.
//
// Decision: the lock is held while descriptors change and never while bytes move. Whoever copies a
// value out looks at its slot's generation afterwards: as long as that is the one it found, the
// bytes were those of the value.
// Decision: docs/decisions/028-arena.md
#pragma once
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "arena_index.h"

namespace pds::arena {

using Keys = std::vector<std::string_view>;

// Where a value is or will be. A slot of -1 is none.
struct Place {
  int64_t slot = -1;
  uint64_t generation = 0;
  int64_t offset = 0;    // of the values' memory
  int64_t unbacked = 0;  // bytes that the file system must give before they are written
};
using Places = std::vector<Place>;

// Makes an empty file an arena. A code of pdstore.h.
int32_t format(int file, int64_t data_bytes, int64_t slab_bytes, uint64_t seed);

class Arena {
 public:
  // The descriptor stays the caller's. Codes of pdstore.h, as all below.
  static int32_t open(int file, const pds_arena_options &options, std::unique_ptr<Arena> *made);
  ~Arena();
  Arena(const Arena &) = delete;
  Arena &operator=(const Arena &) = delete;

  const Geometry &geometry() const { return geometry_; }

  // After it no call of this process is in the index. In the child of a fork: only lets go of the
  // parent's locks, which must not live as long as the child.
  int32_t close();

  // lock_ns: how long a call waits for the lock; negative: for as long as the options say.
  // stored: of each key. leases: leases the first ones, and looks no further than they go.
  int32_t find(const Keys &keys, bool leases, uint8_t *stored, int64_t lock_ns);
  int32_t remove(const Keys &keys);
  int32_t clear(std::string_view prefix);
  // places: of the first keys for which there is room; none for what is stored.
  int32_t reserve(const Keys &keys, const uint8_t *kinds, const int64_t *sizes, Places *places,
                  int64_t lock_ns);
  // done: how many of the first were still this process's, and are stored now.
  int32_t publish(const Places &places, int64_t *done, int64_t lock_ns);
  // Gives back what is reserved; if the lock is not free in time, the next call does so.
  int32_t abandon(const Places &places);
  void abandon_later(const Places &places);
  // places: of the first keys that are stored and have the size.
  int32_t borrow(const Keys &keys, const int64_t *sizes, Places *places, int64_t lock_ns);
  // Counts the first that are what they were when their places were given.
  int64_t still_there(const Places &places);
  int32_t wait_for_change(uint32_t seen, int64_t timeout_us, uint32_t *changes);
  int32_t count(pds_arena_counts *counts);
  int32_t oldest_age(int64_t bytes, int64_t num_values, int64_t *age_ns);
  int32_t list(int64_t *next, pds_arena_value *values, int64_t room, int64_t *count);

 private:
  Arena(int file, char *base, const Geometry &geometry, const pds_arena_options &options);

  bool is_of_this_process() const;
  template <typename Body>
  int32_t while_open(Body body);
  template <typename Body>
  int32_t with_lock(int64_t lock_ns, Body body);
  template <typename Body>
  int32_t locked(int64_t lock_ns, Body body);
  int32_t back(Places *places);

  int file_;  // for locks, never mapped
  char *base_;
  const Geometry geometry_;
  const int64_t lock_timeout_ns_;
  const int32_t process_;
  Owner owner_;
  Index index_;
  std::shared_mutex calls_;  // shared by those that run
  std::atomic<bool> is_over_{false};
  std::mutex mutex_;  // guards abandoned_
  Places abandoned_;  // without the lock; else they would stay reserved while this process lives
};

}  // namespace pds::arena
