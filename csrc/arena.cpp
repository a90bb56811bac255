#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <new>

namespace pds::arena {
namespace {

constexpr int64_t kLookForEnd = 100'000'000;  // ns

// Keeps reads before it from moving behind it. A checker of races does not know fences.
void after_reads() {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

}  // namespace

int32_t Arena::open(int file, const pds_arena_options &options, std::unique_ptr<Arena> *made) {
  Geometry geometry;
  if (!read_geometry(file, &geometry)) return PDS_ERR_FORMAT;
  const int own = reopen(file);
  if (own < 0) return PDS_ERR_SYSTEM;
  char *base = map(file, geometry.data_at);
  if (base == nullptr) {
    ::close(own);
    return PDS_ERR_SYSTEM;
  }
  made->reset(new Arena(own, base, geometry, options));
  if ((*made)->owner_.enter(own, (*made)->index_.header())) return PDS_OK;
  made->reset();
  return PDS_ERR_FULL;
}

Arena::Arena(int file, char *base, const Geometry &geometry, const pds_arena_options &options)
    : file_(file),
      base_(base),
      geometry_(geometry),
      lock_timeout_ns_(options.lock_timeout_ns),
      index_(file, base, geometry,
             {options.lease_ns, options.fresh_ns, options.short_lived_ns, options.rest_ns},
             owner_) {}

Arena::~Arena() {
  if (file_ >= 0) ::close(file_);
  munmap(base_, geometry_.data_at);
}

// Calls body(now) with the lock; once more where the index contradicted itself and was rebuilt.
// `close` waits for no call that waits for a stopped process, nor long for that process itself.
template <typename Body>
int32_t Arena::with_lock(int64_t lock_ns, Body body) {
  Header &header = index_.header();
  if (lock_ns < 0) lock_ns = lock_timeout_ns_;
  const int64_t end = now_ns() + lock_ns;
  Locked locked;
  do {
    locked = lock(header, owner_, std::min(end, now_ns() + kLookForEnd));
  } while (locked == Locked::kNo && now_ns() < end && !life_.is_over());
  if (locked == Locked::kNo) return PDS_ERR_TIMEOUT;
  const Unlock at_end(header);
  if (locked == Locked::kAfterDeath) header.is_damaged = 1;
  for (int attempt = 0;; ++attempt) {
    if (header.is_damaged) {
      index_.rebuild();
      header.is_damaged = 0;
    }
    try {
      owed_.pay(index_);
      body(now_ns());
      return PDS_OK;
    } catch (const Damaged &) {
      header.is_damaged = 1;
      if (attempt > 0) throw;
    }
  }
}

int32_t Arena::close() {
  if (!life_.is_own()) return PDS_ERR_CLOSED;
  if (!life_.end()) return PDS_OK;
  ++index_.header().changes;
  futex_wake(index_.header().changes, INT_MAX);
  const auto alone = life_.alone();
  try {
    with_lock(-1, [&](int64_t now) { index_.rest(Index::Whose::kOwn, now); });
  } catch (const std::bad_alloc &) {  // then they are found by others, as after a death
  } catch (const Damaged &) {
  }
  ::close(file_);
  file_ = -1;
  return PDS_OK;
}

void Arena::forget() {
  life_.end();
  if (file_ >= 0) ::close(file_);
  file_ = -1;
}

int32_t Arena::match(const Keys &keys, int64_t *found, int64_t lock_ns) {
  return life_.call([&] {
    return with_lock(lock_ns, [&](int64_t now) {
      *found = 0;
      for (const auto key : keys) {
        const uint32_t id = index_.find(key, now);
        if (id == kNone) break;
        index_.touch(id, now);
        ++*found;
      }
    });
  });
}

int32_t Arena::which(const Keys &keys, uint8_t *stored, int64_t lock_ns) {
  return life_.call([&] {
    return with_lock(lock_ns, [&](int64_t now) {
      for (size_t i = 0; i < keys.size(); ++i) stored[i] = index_.find(keys[i], now) != kNone;
    });
  });
}

int32_t Arena::remove(const Keys &keys) {
  return life_.call([&] {
    return with_lock(-1, [&](int64_t now) {
      for (const auto key : keys) {
        const uint32_t id = index_.find(key, now);
        if (id != kNone) index_.free(id);
      }
    });
  });
}

int32_t Arena::clear(std::string_view prefix) {
  return life_.call([&] {
    return with_lock(-1, [&](int64_t) {
      index_.for_each_stored([&](uint32_t id, const Slot &slot) {
        if (Index::key_of(slot).substr(0, prefix.size()) == prefix) index_.free(id);
      });
    });
  });
}

int32_t Arena::reserve(const Keys &keys, const uint8_t *kinds, const int64_t *sizes, Places places,
                       int64_t *covered, int64_t lock_ns) {
  *covered = 0;
  return life_.call([&] {
    std::vector<Unbacked> unbacked;
    unbacked.reserve(keys.size());
    const int32_t code = with_lock(lock_ns, [&](int64_t now) {
      for (int64_t i = 0; i < *covered; ++i) {  // of an attempt before the index was rebuilt
        if (places.slots[i] >= 0) index_.free_if_reserved(places.slots[i], places.generations[i]);
      }
      *covered = 0, unbacked.clear();
      for (int64_t i = 0; i < static_cast<int64_t>(keys.size()); ++i) {
        places.slots[i] = -1;
        if (index_.find(keys[i], now) == kNone) {
          const uint32_t id = index_.reserve(keys[i], static_cast<Kind>(kinds[i]), sizes[i], now);
          if (id == kNone) break;
          const Slot &slot = index_.slot(id);
          places.slots[i] = id, places.generations[i] = slot.generation;
          places.offsets[i] = index_.offset_of(id);
          if (!slot.is_backed) unbacked.push_back({i, index_.room_of(id)});
        }
        ++*covered;
      }
    });
    if (code != PDS_OK) return code;
    const int32_t failed = back(places, unbacked, covered);
    if (failed != PDS_OK) return failed;
    return *covered == 0 && !keys.empty() ? int32_t{PDS_ERR_FULL} : int32_t{PDS_OK};
  });
}

// Has the file system give the memory of slots, without which writing to them would be a SIGBUS;
// of whole slots, because the next value there may be longer.
int32_t Arena::back(Places places, const std::vector<Unbacked> &unbacked, int64_t *covered) {
  for (const auto &[number, bytes] : unbacked) {
    const int64_t i = number;
    if (fallocate(file_, 0, geometry_.data_at + places.offsets[i], bytes) == 0) continue;
    const int64_t end = *covered;
    *covered = i;
    const int32_t code = with_lock(-1, [&](int64_t now) {
      const int64_t until = index_.deny(now);
      for (int64_t j = i; j < end; ++j) {
        if (places.slots[j] < 0) continue;
        index_.set_aside_if_reserved(places.slots[j], places.generations[j], until);
        places.slots[j] = -1;
      }
    });
    if (code != PDS_OK) owed_.add(places.slots, places.generations, end);
    return code;
  }
  return PDS_OK;
}

int32_t Arena::publish(Places places, int64_t count, int64_t *done, int64_t lock_ns) {
  *done = 0;
  return life_.call([&] {
    bool any = false;
    const int32_t code = with_lock(lock_ns, [&](int64_t now) {
      for (; *done < count; ++*done) {
        int64_t &slot = places.slots[*done];
        if (slot < 0) continue;
        if (!index_.is_reserved(slot, places.generations[*done])) break;
        index_.publish(static_cast<uint32_t>(slot), now);
        slot = -1, any = true;
      }
    });
    if (any) futex_wake(index_.header().changes, INT_MAX);
    return code;
  });
}

int32_t Arena::abandon(Places places, int64_t count, int64_t lock_ns) {
  const auto is_none = [](int64_t slot) { return slot < 0; };
  if (std::all_of(places.slots, places.slots + count, is_none)) return PDS_OK;
  return life_.call([&] {
    const int32_t code = with_lock(lock_ns, [&](int64_t) {
      for (int64_t i = 0; i < count; ++i) {
        if (places.slots[i] < 0) continue;
        index_.free_if_reserved(places.slots[i], places.generations[i]);
        places.slots[i] = -1;
      }
    });
    const bool is_last_try = lock_ns < 0;
    if (code == PDS_ERR_TIMEOUT && is_last_try) owed_.add(places.slots, places.generations, count);
    return code;
  });
}

int32_t Arena::borrow(const Keys &keys, const int64_t *sizes, Places places, int64_t *found,
                      int64_t lock_ns) {
  *found = 0;
  return life_.call([&] {
    bool fits = true;
    const int32_t code = with_lock(lock_ns, [&](int64_t now) {
      *found = 0, fits = true;
      for (int64_t i = 0; i < static_cast<int64_t>(keys.size()); ++i) {
        const uint32_t id = index_.find(keys[i], now);
        if (id == kNone) return;
        const Slot &slot = index_.slot(id);
        fits = slot.bytes == sizes[i] && slot.bytes <= index_.room_of(id);
        if (!fits) return;
        index_.touch(id, now);
        places.slots[i] = id, places.generations[i] = slot.generation;
        places.offsets[i] = index_.offset_of(id);
        ++*found;
      }
    });
    return code == PDS_OK && !fits ? PDS_ERR_LENGTH : code;
  });
}

int64_t Arena::still_there(Places places, int64_t count) {
  after_reads();
  for (int64_t i = 0; i < count; ++i) {
    const Slot *slot = index_.unlocked(places.slots[i]);
    const bool is_same = slot != nullptr && slot->generation == places.generations[i] &&
                         slot->state == State::kStored;
    if (!is_same) return i;
  }
  return count;
}

int32_t Arena::wait(uint32_t seen, int64_t timeout_us, uint32_t *changes) {
  if (!life_.is_own()) return PDS_ERR_CLOSED;
  std::atomic<uint32_t> &word = index_.header().changes;
  const int64_t end = now_ns() + std::min(timeout_us, int64_t{3'600'000'000}) * 1000;
  while (!life_.is_over() && word == seen) {
    const int64_t left = end - now_ns();
    if (left <= 0) break;
    futex_wait(word, seen, left);
  }
  *changes = word;
  return life_.is_over() ? PDS_ERR_CLOSED : PDS_OK;
}

int32_t Arena::count(pds_arena_counts *counts) {
  return life_.call([&] { return with_lock(-1, [&](int64_t) { index_.count(counts); }); });
}

int32_t Arena::list(int64_t *next, pds_arena_value *values, int64_t room, int64_t *count) {
  return life_.call([&] {
    const int64_t first = *next;  // the body may run twice
    return with_lock(
        -1, [&](int64_t now) { *next = first, *count = index_.list(next, values, room, now); });
  });
}

}  // namespace pds::arena
