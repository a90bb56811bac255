// The owners that have an arena open, and the lock of its index.
//
// Decision: not pthread's robust mutex. It keeps pointers in the shared memory, so that damaged
// bytes there crash whoever unlocks. Here the file holds one word: who holds the lock. Whether that
// one lives is asked of the kernel: every owner holds a record lock (F_OFD_SETLK) on a byte of its
// own, which ends with its process, also across containers that do not see each other's processes.
#pragma once
#include <cstdint>

#include "arena_layout.h"

namespace pds::arena {

int64_t now_ns();  // the same clock in every process of this boot

// Returns 0, or the errno of the wait: ETIMEDOUT after `ns`.
int futex_wait(std::atomic<uint32_t> &word, uint32_t seen, int64_t ns);
void futex_wake(std::atomic<uint32_t> &word, int count);

// One open arena's entry among the owners. The word is unlike that of every earlier owner.
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

enum class Locked { kNo, kYes, kAfterDeath };  // the last one held it when it died

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

}  // namespace pds::arena
