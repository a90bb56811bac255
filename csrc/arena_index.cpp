#include "arena_index.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

namespace pds::arena {
namespace {

constexpr int kLongestChain = 4096;

// Tails have as many sizes as a block has tokens: they share slots of 1, 2, 3, 4, 6, 8, ... units.
int64_t rounded(int64_t units) {
  int64_t power = 1;
  while (power < units) power *= 2;
  return power >= 4 && power / 4 * 3 >= units ? power / 4 * 3 : power;
}

// An owner's word: a bit if somebody waits, the entry's number, and the number of the entry's life.
constexpr uint32_t kWaiting = 0x80000000, kLifeMask = 0x003fffff;
constexpr int kEntryShift = 22;
static_assert(kNumOwners << kEntryShift <= kWaiting);

constexpr off_t kLocksAt = off_t{1} << 60;  // after the end of any file
constexpr int64_t kLookAgain = 2'000'000;   // ns: a holder's death is seen within it

flock record_of(uint32_t entry) {
  flock record{};
  record.l_type = F_WRLCK, record.l_whence = SEEK_SET;
  record.l_start = kLocksAt + entry, record.l_len = 1;
  return record;
}

uint32_t entry_of(uint32_t word) { return (word & ~kWaiting) >> kEntryShift; }

}  // namespace

// Owners and the lock.

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
  if (fcntl(file_, F_OFD_GETLK, &record) != 0) return true;  // in doubt it lives
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

// Slots.

Index::Index(int file, char *base, const Geometry &geometry, const pds_arena_options &times,
             const Owner &owner)
    : file_(file),
      geometry_(geometry),
      times_(times),
      owner_(owner),
      header_(reinterpret_cast<Header *>(base)),
      slabs_(reinterpret_cast<Slab *>(base + geometry.slabs_at)),
      heads_(reinterpret_cast<uint32_t *>(base + geometry.heads_at)),
      slots_(reinterpret_cast<Slot *>(base + geometry.slots_at)) {}

uint32_t Index::hash_of(std::string_view key) const {
  return static_cast<uint32_t>(XXH3_64bits_withSeed(key.data(), key.size(), header_->seed));
}

int64_t Index::slots_of(int64_t slab) const {
  const int64_t units = slabs_[slab].units;
  return units >= 1 && units <= geometry_.slots_per_slab ? geometry_.slots_per_slab / units : 0;
}

Slot &Index::slot(uint32_t id) {
  const int64_t slab = slab_of(id);
  if (slab >= geometry_.num_slabs || id % geometry_.slots_per_slab >= slots_of(slab))
    throw Damaged();
  return slots_[id];
}

Slot *Index::unlocked(int64_t id) {
  return id >= 0 && id < geometry_.num_slabs * geometry_.slots_per_slab ? &slots_[id] : nullptr;
}

int64_t Index::offset_of(uint32_t id) {
  const int64_t slab = slab_of(id);
  return slab * geometry_.slab_bytes + id % geometry_.slots_per_slab * slabs_[slab].units * kUnit;
}

// Keys.

uint32_t Index::find(std::string_view key, int64_t now) {
  const uint32_t hash = hash_of(key), head = hash & (geometry_.num_heads - 1);
  int steps = 0;
  for (uint32_t id = heads_[head]; id != kNone; id = slots_[id].chain) {
    const Slot &found = slot(id);
    const bool fits =
        found.state == State::kStored && (found.hash & (geometry_.num_heads - 1)) == head;
    if (!fits || ++steps > kLongestChain) throw Damaged();
    if (found.hash != hash || key_of(found) != key) continue;
    if (found.kind != kShortLived || since(found.used_at, now) < times_.short_lived_ns) return id;
    free(id);
    return kNone;
  }
  return kNone;
}

void Index::chain(uint32_t id) {
  uint32_t &head = head_of(slots_[id].hash);
  slots_[id].chain = head;
  head = id;
}

void Index::unchain(uint32_t id) {
  uint32_t *link = &head_of(slots_[id].hash);
  for (int steps = 0; *link != id; link = &slots_[*link].chain) {
    slot(*link);
    if (++steps > kLongestChain) throw Damaged();
  }
  *link = slots_[id].chain;
}

// Lists.

void Index::add_newest(List &list, uint32_t id) {
  slots_[id].newer = kNone, slots_[id].older = list.newest;
  if (list.newest != kNone) slot(list.newest).newer = id;
  if (list.oldest == kNone) list.oldest = id;
  list.newest = id;
}

void Index::add_oldest(List &list, uint32_t id) {
  slots_[id].older = kNone, slots_[id].newer = list.oldest;
  if (list.oldest != kNone) slot(list.oldest).older = id;
  if (list.newest == kNone) list.newest = id;
  list.oldest = id;
}

void Index::unlink(List &list, uint32_t id) {
  const uint32_t newer = slots_[id].newer, older = slots_[id].older;
  uint32_t &from_newer = newer == kNone ? list.newest : slot(newer).older;
  uint32_t &from_older = older == kNone ? list.oldest : slot(older).newer;
  if (from_newer != id || from_older != id) throw Damaged();
  from_newer = older, from_older = newer;
}

// The states of a slot.

void Index::make_newest(uint32_t id) {
  Class &sized = class_of_slot(id);
  unlink(sized.used, id);
  add_newest(sized.used, id);
}

void Index::use(uint32_t id, int64_t now) {
  make_newest(id);
  slot(id).used_at = slabs_[slab_of(id)].used_at = now;
}

void Index::touch(uint32_t id, int64_t now) {
  Slot &used = slot(id);
  Slab &slab = slabs_[slab_of(id)];
  use(id, now);
  used.lease_end = std::max(used.lease_end, now + times_.lease_ns);
  slab.lease_end = std::max(slab.lease_end, used.lease_end);
}

// The units of the slot that a value gets; more than a slab has if it gets none.
int64_t Index::units_for(Kind kind, int64_t bytes) const {
  const int64_t units = units_of(bytes);
  const bool is_rounded = kind == kShortLived && units <= geometry_.slots_per_slab;
  return is_rounded ? std::min(rounded(units), geometry_.slots_per_slab) : units;
}

uint32_t Index::reserve(std::string_view key, Kind kind, int64_t bytes, int64_t now,
                        MayEvict may_evict) {
  const int64_t units = units_for(kind, bytes);
  if (units > geometry_.slots_per_slab) return kNone;
  Class *sized = class_of(units);
  if (sized == nullptr) return kNone;
  const uint32_t id = reserve_slot(*sized, kind, now, may_evict);
  if (id == kNone) return kNone;
  Slot &taken = slot(id);
  taken.kind = kind, taken.key_bytes = static_cast<uint8_t>(key.size());
  taken.hash = hash_of(key), taken.bytes = bytes, taken.owner = owner_.word();
  taken.used_at = now, taken.lease_end = 0;
  std::memcpy(taken.key, key.data(), key.size());
  ++slabs_[slab_of(id)].num_used, ++slabs_[slab_of(id)].num_reserved;
  taken.state = State::kReserved;
  return id;
}

void Index::publish(uint32_t id, int64_t now) {
  Slot &made = slot(id);
  // P1: reserves slot 3 for a key                        publishes: the key has slot 3
  // P2:                           reserves slot 4 for it                               publishes
  // So the value that is whole first stays, and the other slot is free again.
  if (find(key_of(made), now) != kNone) return free(id);
  Slab &slab = slabs_[slab_of(id)];
  Class &sized = class_of_slot(id);
  made.used_at = now, made.is_backed = 1;
  made.lease_end = made.kind == kForever ? kForeverNs : now + times_.fresh_ns;
  slab.used_at = now, slab.lease_end = std::max(slab.lease_end, made.lease_end);
  --slab.num_reserved;
  made.state = State::kStored;
  chain(id);
  add_newest(sized.used, id);
  ++header_->changes;
}

void Index::free(uint32_t id) {
  Slot &given = slot(id);
  Slab &slab = slabs_[slab_of(id)];
  Class &sized = class_of_slot(id);
  const State state = given.state;
  if (state == State::kFree) return;
  if (state == State::kStored) unchain(id);
  if (state == State::kReserved) {
    --slab.num_reserved;
  } else {
    unlink(sized.used, id);
  }
  give_up(given);
  add_newest(sized.free, id);
  sized.full_until = 0;
  if (--slab.num_used == 0) slab.lease_end = 0;
}

void Index::set_aside(uint32_t id, int64_t until) {
  Slot &given = slot(id);
  Slab &slab = slabs_[slab_of(id)];
  Class &sized = class_of_slot(id);
  if (given.state != State::kReserved) throw Damaged();
  ++given.generation;
  given.lease_end = until;
  given.state = State::kResting;
  --slab.num_reserved;
  slab.lease_end = std::max(slab.lease_end, until);
  add_oldest(sized.used, id);
  sized.full_until = 0;
}

bool Index::is_reserved(int64_t id, uint64_t generation) {
  const Slot *given = unlocked(id);
  return given != nullptr && given->generation == generation && given->state == State::kReserved &&
         given->owner == owner_.word();
}

void Index::free_if_reserved(int64_t id, uint64_t generation) {
  if (is_reserved(id, generation)) free(static_cast<uint32_t>(id));
}

}  // namespace pds::arena
