#include "ring.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

namespace pds {

// The kernel's structs and numbers of io_uring, as they are since Linux 5.4.
struct RingEntry {
  uint8_t operation, flags;
  uint16_t priority;
  int32_t file;
  uint64_t at, parts;
  uint32_t num_parts, how;
  uint64_t number, unused[3];
};
static_assert(sizeof(RingEntry) == 64, "the kernel's size");

struct RingResult {
  uint64_t number;
  int32_t moved;
  uint32_t flags;
};

namespace {

struct OffsetsOfAdded {
  uint32_t head, tail, mask, num_entries, flags, dropped, places, reserved;
  uint64_t unused;
};
struct OffsetsOfEnded {
  uint32_t head, tail, mask, num_entries, overflow, results, flags, reserved;
  uint64_t unused;
};
static_assert(sizeof(OffsetsOfAdded) == 40 && sizeof(OffsetsOfEnded) == 40, "the kernel's sizes");

struct Setup {
  uint32_t num_entries, num_results, flags, cpu, idle, features, shared, reserved[3];
  OffsetsOfAdded added;
  OffsetsOfEnded ended;
};
static_assert(sizeof(Setup) == 120, "the kernel's size");

constexpr long kSetupCall = 425, kEnterCall = 426;
constexpr uint8_t kNothing = 0, kRead = 1, kWrite = 2;  // readv and writev
constexpr uint32_t kOneMapping = 1, kWait = 1;
constexpr off_t kEntriesAt = 0x10000000;

uint32_t load(const uint32_t *from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
void store(uint32_t *to, uint32_t value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }

}  // namespace

Ring *Ring::of_thread(int32_t *why) {
  static thread_local std::unique_ptr<Ring> ring;
  // A child of a fork has its parent's ring, whose ends the parent takes.
  if (ring == nullptr || ring->process_ != getpid()) ring = std::make_unique<Ring>();
  *why = ring->why_;
  return ring->is_open() ? ring.get() : nullptr;
}

Ring::Ring() : process_(getpid()) {
  why_ = open();
  if (why_ == 0) why_ = check();
}

Ring::~Ring() {
  if (entries_ != nullptr) munmap(entries_, entries_bytes_);
  if (rings_ != nullptr) munmap(rings_, rings_bytes_);
  if (has_file()) close(file_);  // a child that became a daemon has closed all of its files
}

bool Ring::has_file() const {
  struct stat status{};
  return file_ >= 0 && fstat(file_, &status) == 0 && status.st_dev == device_ &&
         status.st_ino == inode_;
}

int32_t Ring::open() {
  Setup setup{};
  file_ = static_cast<int>(syscall(kSetupCall, kDepth, &setup));
  if (file_ < 0) return errno;
  struct stat status{};
  if (fstat(file_, &status) != 0) return errno;
  device_ = status.st_dev, inode_ = status.st_ino;
  if (!(setup.features & kOneMapping)) return ENOSYS;  // before Linux 5.4
  rings_bytes_ = std::max<size_t>(setup.added.places + setup.num_entries * sizeof(uint32_t),
                                  setup.ended.results + setup.num_results * sizeof(RingResult));
  entries_bytes_ = setup.num_entries * sizeof(RingEntry);
  const auto mapped = [&](size_t bytes, off_t at) {
    void *place =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, at);
    return place == MAP_FAILED ? nullptr : place;
  };
  rings_ = mapped(rings_bytes_, 0);
  entries_ = static_cast<RingEntry *>(mapped(entries_bytes_, kEntriesAt));
  if (rings_ == nullptr || entries_ == nullptr) return ENOMEM;
  const auto at = [&](uint32_t offset) {
    return reinterpret_cast<uint32_t *>(static_cast<char *>(rings_) + offset);
  };
  added_tail_ = at(setup.added.tail), added_mask_ = at(setup.added.mask);
  places_ = at(setup.added.places);
  ended_head_ = at(setup.ended.head), ended_tail_ = at(setup.ended.tail);
  ended_mask_ = at(setup.ended.mask);
  results_ = reinterpret_cast<RingResult *>(at(setup.ended.results));
  return 0;
}

// Has the kernel do nothing once: a sandbox may allow a ring and refuse its use.
int32_t Ring::check() {
  RingEntry nothing{};
  nothing.operation = kNothing;
  push(nothing);
  uint32_t num_started = 0;
  if (const int32_t why = enter(1, &num_started)) return why;
  uint64_t number;
  int32_t moved;
  return take(&number, &moved) ? -moved : EIO;
}

void Ring::add(bool is_write, int file, const iovec *parts, int32_t num_parts, int64_t at,
               uint64_t number) {
  RingEntry entry{};
  entry.operation = is_write ? kWrite : kRead;
  entry.file = file, entry.at = at, entry.number = number;
  entry.parts = reinterpret_cast<uint64_t>(parts), entry.num_parts = num_parts;
  push(entry);
}

void Ring::push(const RingEntry &entry) {
  const uint32_t tail = *added_tail_, place = tail & *added_mask_;
  entries_[place] = entry;
  places_[place] = place;
  store(added_tail_, tail + 1);
  ++num_added_;
}

int32_t Ring::enter(uint32_t num_awaited, uint32_t *num_started) {
  *num_started = 0;
  while (num_added_ > 0 || num_awaited > 0) {
    const uint32_t how = num_awaited > 0 ? kWait : 0;
    const long done = syscall(kEnterCall, file_, num_added_, num_awaited, how, nullptr, 0);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 || (done == 0 && num_added_ > 0)) {
      const int32_t why = done < 0 ? errno : EAGAIN;
      store(added_tail_, *added_tail_ - num_added_);  // the kernel looks only when it is called
      num_added_ = 0;
      return why;
    }
    num_added_ -= static_cast<uint32_t>(done);
    *num_started += static_cast<uint32_t>(done);
    if (num_added_ == 0) break;  // the kernel has waited, if it was to
  }
  return 0;
}

bool Ring::take(uint64_t *number, int32_t *moved) {
  const uint32_t head = *ended_head_;
  if (head == load(ended_tail_)) return false;
  const RingResult &result = results_[head & *ended_mask_];
  *number = result.number, *moved = result.moved;
  store(ended_head_, head + 1);
  return true;
}

}  // namespace pds
