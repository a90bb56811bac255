#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "arena_index.h"

namespace pds::arena {
namespace {

// A word: whether somebody waits, the number of the entry, which of its lives.
constexpr uint32_t kWaiting = 0x80000000, kLifeMask = 0x003fffff;
constexpr int kEntryShift = 22;
static_assert(kNumOwners << kEntryShift <= kWaiting);

constexpr off_t kLocksAt = off_t{1} << 60;  // behind every file's end
constexpr int64_t kLookAgain = 2'000'000;   // ns: a holder's death is seen within it

flock record_of(uint32_t entry) {
  flock record{};
  record.l_type = F_WRLCK, record.l_whence = SEEK_SET;
  record.l_start = kLocksAt + entry, record.l_len = 1;
  return record;
}

uint32_t entry_of(uint32_t word) { return (word & ~kWaiting) >> kEntryShift; }

}  // namespace

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

int futex_wait(std::atomic<uint32_t> &word, uint32_t seen, int64_t ns) {
  if (ns <= 0) return ETIMEDOUT;
  const timespec time{ns / 1'000'000'000, ns % 1'000'000'000};
  const long failed = syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
  return failed ? errno : 0;
}

void futex_wake(std::atomic<uint32_t> &word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE, count, nullptr, nullptr, 0);
}

bool Owner::enter(int file, Header &header) {
  for (uint32_t entry = 0; entry < kNumOwners; ++entry) {
    flock record = record_of(entry);
    if (fcntl(file, F_OFD_SETLK, &record) != 0) continue;
    uint32_t life = (header.lives[entry].load() + 1) & kLifeMask;
    if (life == 0) life = 1;  // no word is 0
    header.lives[entry] = life;
    file_ = file, header_ = &header, word_ = entry << kEntryShift | life;
    return true;
  }
  return false;
}

bool Owner::lives(uint32_t word) const {
  const uint32_t entry = entry_of(word);
  if (entry >= kNumOwners) return false;
  if (entry == entry_of(word_)) return (word & ~kWaiting) == word_;
  flock record = record_of(entry);
  if (fcntl(file_, F_OFD_GETLK, &record) != 0) return true;  // in doubt it does
  return record.l_type != F_UNLCK && header_->lives[entry].load() == (word & kLifeMask);
}

Locked lock(Header &header, const Owner &owner, int64_t deadline_ns) {
  const uint32_t mine = owner.word();
  uint32_t waiting = 0;  // kWaiting after a wait: others may still wait, so the unlock wakes one
  for (;;) {
    uint32_t holder = 0;
    if (header.lock.compare_exchange_strong(holder, mine | waiting)) return Locked::kYes;
    const uint32_t seen = holder | kWaiting;
    if (holder != seen && !header.lock.compare_exchange_strong(holder, seen)) continue;
    waiting = kWaiting;
    const int64_t left = deadline_ns - now_ns();
    if (left <= 0) return Locked::kNo;
    if (futex_wait(header.lock, seen, std::min(left, kLookAgain)) != ETIMEDOUT) continue;
    uint32_t dead = seen;
    if (!owner.lives(seen) && header.lock.compare_exchange_strong(dead, mine | kWaiting)) {
      return Locked::kAfterDeath;
    }
  }
}

void unlock(Header &header) {
  if (header.lock.exchange(0) & kWaiting) futex_wake(header.lock, 1);
}

}  // namespace pds::arena
