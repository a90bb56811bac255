// One process's view of an arena: a file that many processes map, with values by key.
//
// Decision: the lock is held while descriptors change and never while bytes move. After a value was
// copied out, its slot's generation is read again: if it has not changed, the copied bytes were
// those of the value.
// Decision: docs/decisions/028-arena.md
#pragma once
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "arena_index.h"

namespace pds::arena {

using Keys = std::vector<std::string_view>;

// Where a value is or will be. A slot of -1 means no place.
struct Place {
  int64_t slot = -1;
  uint64_t generation = 0;
  int64_t offset = 0;    // in the values' memory
  int64_t unbacked = 0;  // bytes that the file system must allocate before a write
};
using Places = std::vector<Place>;

// Turns an empty file into an arena. Returns a code of pdstore.h.
int32_t format(int file, int64_t data_bytes, int64_t slab_bytes, uint64_t seed);

class Arena {
 public:
  // The caller closes the descriptor. Functions of this class return codes of pdstore.h.
  static int32_t open(int file, const pds_arena_options &options, std::unique_ptr<Arena> *made);
  ~Arena();
  Arena(const Arena &) = delete;
  Arena &operator=(const Arena &) = delete;

  const Geometry &geometry() const { return geometry_; }

  // Waits until no call of this process uses the index. In the child of a fork it only closes the
  // child's copy of the file, so that the parent's locks end with the parent.
  int32_t close();

  // lock_timeout_ns: how long a call waits for the lock; negative: for as long as the options say.
  // stored: set for each key. match: leases the leading stored keys, and stops after them; spares
  // what pds_arena_find says.
  int32_t find(const Keys &keys, uint8_t *stored, int64_t lock_timeout_ns);
  int32_t match(const Keys &keys, int64_t unread_from, int64_t unread_since_ns, uint8_t *stored,
                int64_t lock_timeout_ns);
  int32_t use(const Keys &keys);
  int32_t remove(const Keys &keys);
  int32_t clear(std::string_view prefix);
  // places: of the leading keys for which there is room; without a slot for a stored key.
  int32_t reserve(const Keys &keys, const uint8_t *kinds, const int64_t *sizes, Places *places,
                  int64_t lock_timeout_ns);
  // Lets values go, also kept ones, until all keys have room; leases the keys that are stored. With
  // PDS_ERR_FULL nothing has gone.
  int32_t make_room(const Keys &keys, const uint8_t *kinds, const int64_t *sizes);
  // done: how many leading places this process still owned; their values are stored now.
  int32_t publish(const Places &places, int64_t *done, int64_t lock_timeout_ns);
  // Frees reserved places; if the lock is not free in time, the next call frees them.
  int32_t abandon(const Places &places, int64_t lock_timeout_ns = -1);
  void abandon_later(const Places &places);
  // places: of the leading keys that are stored with this size.
  enum class Leases { kEnd, kStay };
  int32_t borrow(const Keys &keys, const int64_t *sizes, Places *places, int64_t lock_timeout_ns,
                 Leases leases);
  // Counts the leading places that still hold the value that they were given for.
  int64_t still_there(const Places &places);
  int32_t wait_for_change(uint32_t seen, int64_t timeout_us, uint32_t *changes);
  int32_t count(pds_arena_counts *counts);
  int32_t oldest_age(int64_t bytes, int64_t num_values, int64_t *age_ns);
  int32_t list(int64_t *next, pds_arena_value *values, int64_t room, int64_t *count);

 private:
  Arena(int file, char *base, const Geometry &geometry, const pds_arena_options &options);

  bool is_of_this_process() const;
  bool reserve_more(const Keys &keys, const uint8_t *kinds, const int64_t *sizes, Places *places,
                    int64_t now);
  std::vector<NewValue> missing_of(const Keys &keys, const uint8_t *kinds, const int64_t *sizes,
                                   int64_t now);
  template <typename Body>
  int32_t while_open(Body body);
  template <typename Body>
  int32_t with_lock(int64_t lock_timeout_ns, Body body);
  template <typename Body>
  int32_t locked(int64_t lock_timeout_ns, Body body);
  int32_t back(Places *places, size_t first, int64_t lock_timeout_ns, bool *can_continue);

  int file_;  // for locks, never mapped
  char *base_;
  const Geometry geometry_;
  const int64_t lock_timeout_ns_;
  const int32_t process_;
  Owner owner_;
  Index index_;
  std::shared_mutex calls_;  // held shared by running calls
  std::atomic<bool> is_over_{false};
  std::mutex mutex_;  // guards abandoned_
  Places abandoned_;  // to be freed by the next call that gets the lock
};

}  // namespace pds::arena
