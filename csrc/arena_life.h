// The life of an arena in one process: calls while it is open, and an end that waits for them.
#pragma once
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <new>
#include <shared_mutex>

#include "arena_index.h"
#include "pdstore.h"

namespace pds::arena {

class Life {
 public:
  // False in the child of a fork, which has none of the parent's threads and must end nothing.
  bool is_own() const { return getpid() == pid_; }
  bool is_over() const { return over_; }

  // Calls body while the arena is open, and turns what it throws into codes.
  template <typename Body>
  int32_t call(Body body) {
    if (over_ || !is_own()) return PDS_ERR_CLOSED;
    const std::shared_lock<std::shared_mutex> alive(calls_);
    if (over_) return PDS_ERR_CLOSED;
    try {
      return body();
    } catch (const std::bad_alloc &) {
      return PDS_ERR_MEMORY;
    } catch (const Damaged &) {
      return PDS_ERR_FORMAT;
    }
  }

  // Refuses calls from now on. Returns false if another call has ended it.
  bool end() { return !over_.exchange(true); }

  // Waits for the calls that run, after `end`.
  std::unique_lock<std::shared_mutex> alone() {
    return std::unique_lock<std::shared_mutex>(calls_);
  }

 private:
  std::shared_mutex calls_;  // shared by those that run
  std::atomic<bool> over_{false};
  const int32_t pid_ = getpid();
};

}  // namespace pds::arena
