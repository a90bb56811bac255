// The slots that an arena could not give up because the lock was not free in time.
//
// Decision: the next call that gets the lock frees them. Without it they stay reserved for as long
// as their process lives, which a peer that was stopped for some seconds must not cost.
#pragma once
#include <mutex>
#include <utility>
#include <vector>

#include "arena_index.h"

namespace pds::arena {

class Owed {
 public:
  // A slot of -1 is none.
  void add(const int64_t *slots, const uint64_t *generations, int64_t count) {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (int64_t i = 0; i < count; ++i) {
      if (slots[i] >= 0) slots_.emplace_back(slots[i], generations[i]);
    }
  }

  // Called with the arena's lock.
  void pay(Index &index) {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (const auto &[slot, generation] : slots_) index.free_if_reserved(slot, generation);
    slots_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<int64_t, uint64_t>> slots_;
};

}  // namespace pds::arena
