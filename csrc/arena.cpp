#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>
#include <string>

namespace pds::arena {
namespace {

constexpr int64_t kLookForEnd = 100'000'000;  // ns

// Keeps earlier reads from moving after this call. Thread sanitizers do not know fences.
void after_reads() {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

void read_boot(char (&boot)[40]) {
  std::memset(boot, 0, sizeof boot);
  const int file = ::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  if (read(file, boot, sizeof boot - 1) < 0) boot[0] = 0;
  close(file);
}

// Maps the first bytes of a file; returns null if they cannot be mapped.
char *map(int file, int64_t bytes) {
  void *mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<char *>(mapped);
}

// False for a file that is no arena of this version and boot, or not as long as its header says.
bool read_geometry(int file, Geometry *geometry) {
  struct stat status;
  if (fstat(file, &status) != 0 || status.st_size < static_cast<off_t>(sizeof(Header)))
    return false;
  char *base = map(file, sizeof(Header));
  if (base == nullptr) return false;
  const auto *header = reinterpret_cast<const Header *>(base);
  char boot[40];
  read_boot(boot);
  const bool fits = header->magic == kMagic && header->version == kVersion &&
                    std::memcmp(header->boot, boot, sizeof boot) == 0 &&
                    geometry->make(header->data_bytes, header->slab_bytes) &&
                    geometry->file_bytes() == status.st_size;
  munmap(base, sizeof(Header));
  return fits;
}

}  // namespace

int32_t format(int file, int64_t data_bytes, int64_t slab_bytes, uint64_t seed) {
  Geometry geometry;
  if (!geometry.make(data_bytes, slab_bytes)) return PDS_ERR_ARGUMENT;
  if (ftruncate(file, geometry.file_bytes()) != 0) return PDS_ERR_SYSTEM;
  if (fallocate(file, 0, 0, geometry.slots_at) != 0) return PDS_ERR_SYSTEM;
  char *base = map(file, geometry.slots_at);
  if (base == nullptr) return PDS_ERR_SYSTEM;
  auto *header = new (base) Header{};
  header->version = kVersion, header->seed = seed;
  header->data_bytes = data_bytes, header->slab_bytes = slab_bytes;
  read_boot(header->boot);
  auto *heads = reinterpret_cast<uint32_t *>(base + geometry.heads_at);
  std::fill(heads, heads + geometry.num_heads, kNone);
  header->magic = kMagic;
  munmap(base, geometry.slots_at);
  return PDS_OK;
}

int32_t Arena::open(int file, const pds_arena_options &options, std::unique_ptr<Arena> *made) {
  Geometry geometry;
  if (!read_geometry(file, &geometry)) return PDS_ERR_FORMAT;
  // Locks end with the last reference to an open file. A mapping is a reference, and a forked child
  // has it as well: so the file is opened once more, for the locks alone.
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
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
      process_(getpid()),
      index_(file, base, geometry, options, owner_) {}

Arena::~Arena() {
  if (file_ >= 0) ::close(file_);
  munmap(base_, geometry_.data_at);
}

// The child of a fork has none of the parent's threads and must end nothing.
bool Arena::is_of_this_process() const { return getpid() == process_; }

// Calls body while the arena is open, and turns what it throws into codes.
template <typename Body>
int32_t Arena::while_open(Body body) {
  if (is_over_ || !is_of_this_process()) return PDS_ERR_CLOSED;
  const std::shared_lock<std::shared_mutex> alive(calls_);
  if (is_over_) return PDS_ERR_CLOSED;
  try {
    return body();
  } catch (const std::bad_alloc &) {
    return PDS_ERR_MEMORY;
  } catch (const Damaged &) {
    return PDS_ERR_FORMAT;
  }
}

// Calls body(now) with the lock. If the index contradicts itself, rebuilds it and calls body again.
// `close` ends waits for a lock that a stopped process holds.
template <typename Body>
int32_t Arena::with_lock(int64_t lock_timeout_ns, Body body) {
  Header &header = index_.header();
  const int64_t end = now_ns() + (lock_timeout_ns < 0 ? lock_timeout_ns_ : lock_timeout_ns);
  Locked locked;
  do {
    locked = lock(header, owner_, std::min(end, now_ns() + kLookForEnd));
  } while (locked == Locked::kNo && now_ns() < end && !is_over_);
  if (locked == Locked::kNo) return PDS_ERR_TIMEOUT;
  const Unlock at_end(header);
  if (locked == Locked::kAfterDeath) header.is_damaged = 1;
  for (int attempt = 0;; ++attempt) {
    if (header.is_damaged) {
      index_.rebuild();
      header.is_damaged = 0;
    }
    try {
      {
        const std::lock_guard<std::mutex> guard(mutex_);
        for (const Place &place : abandoned_) index_.free_if_reserved(place.slot, place.generation);
        abandoned_.clear();
      }
      body(now_ns());
      return PDS_OK;
    } catch (const Damaged &) {
      header.is_damaged = 1;
      if (attempt > 0) throw;
    }
  }
}

template <typename Body>
int32_t Arena::locked(int64_t lock_timeout_ns, Body body) {
  return while_open([&] { return with_lock(lock_timeout_ns, body); });
}

int32_t Arena::close() {
  const bool was_open = !is_over_.exchange(true);
  if (is_of_this_process()) {
    if (!was_open) return PDS_OK;
    ++index_.header().changes;
    futex_wake(index_.header().changes, INT_MAX);
    const std::unique_lock<std::shared_mutex> alone(calls_);
    try {
      with_lock(-1, [&](int64_t now) { index_.rest(Index::Whose::kOwn, now); });
    } catch (const std::bad_alloc &) {  // then others free the slots, as after a death
    } catch (const Damaged &) {
    }
  }
  if (file_ >= 0) ::close(file_);
  file_ = -1;
  return PDS_OK;
}

int32_t Arena::find(const Keys &keys, uint8_t *stored, int64_t lock_timeout_ns) {
  return locked(lock_timeout_ns, [&](int64_t now) {
    for (size_t i = 0; i < keys.size(); ++i) stored[i] = index_.find(keys[i], now) != kNone;
  });
}

int32_t Arena::match(const Keys &keys, int64_t unread_from, int64_t unread_since_ns,
                     uint8_t *stored, int64_t lock_timeout_ns) {
  std::vector<uint32_t> found;
  found.reserve(keys.size());
  return locked(lock_timeout_ns, [&](int64_t now) {
    std::fill_n(stored, keys.size(), 0);
    found.clear();
    for (const auto key : keys) {
      const uint32_t id = index_.find(key, now);
      if (id == kNone) break;
      stored[found.size()] = 1;
      found.push_back(id);
    }
    // the first block of a chain becomes the newest: one without those before it is worth nothing
    for (int64_t i = static_cast<int64_t>(found.size()); i-- > 0;) {
      const uint32_t id = found[static_cast<size_t>(i)];
      const bool gets_no_lease = i >= unread_from && index_.was_read_since(id, unread_since_ns);
      if (gets_no_lease) {
        index_.make_newest(id);
      } else {
        index_.touch(id, now);
      }
    }
  });
}

int32_t Arena::use(const Keys &keys) {
  return locked(-1, [&](int64_t now) {
    for (size_t i = keys.size(); i-- > 0;) {
      const uint32_t id = index_.find(keys[i], now);
      if (id != kNone) index_.use(id, now);
    }
  });
}

int32_t Arena::remove(const Keys &keys) {
  return locked(-1, [&](int64_t now) {
    for (const auto key : keys) {
      const uint32_t id = index_.find(key, now);
      if (id != kNone) index_.free(id);
    }
  });
}

int32_t Arena::clear(std::string_view prefix) {
  return locked(-1, [&](int64_t) {
    index_.for_each_slot([&](uint32_t id, const Slot &slot) {
      const bool fits = Index::key_of(slot).substr(0, prefix.size()) == prefix;
      if (slot.state == State::kStored && fits) index_.free(id);
    });
  });
}

int32_t Arena::reserve(const Keys &keys, const uint8_t *kinds, const int64_t *sizes, Places *places,
                       int64_t lock_timeout_ns) {
  places->clear();
  return while_open([&] {
    places->reserve(keys.size());
    int32_t code;
    bool can_continue;
    do {  // nothing goes for values whose memory the file system may refuse: it is asked before
      can_continue = false;
      const size_t num_backed = places->size();
      code = with_lock(lock_timeout_ns, [&](int64_t now) {
        while (places->size() > num_backed) {  // reserved before the index was rebuilt
          index_.free_if_reserved(places->back().slot, places->back().generation);
          places->pop_back();
        }
        can_continue = reserve_more(keys, kinds, sizes, places, now);
      });
      if (code == PDS_OK) code = back(places, num_backed, lock_timeout_ns, &can_continue);
    } while (code == PDS_OK && can_continue);
    if (code != PDS_OK) {
      abandon_later(*places);
      places->clear();
    }
    return code == PDS_OK && places->empty() && !keys.empty() ? int32_t{PDS_ERR_FULL} : code;
  });
}

// Reserves places for the keys that have none yet. True if it stopped because something would have
// to go, while there is a place that is not backed yet.
bool Arena::reserve_more(const Keys &keys, const uint8_t *kinds, const int64_t *sizes,
                         Places *places, int64_t now) {
  MayEvict may_evict = MayEvict::kYes;
  for (size_t i = places->size(); i < keys.size(); ++i) {
    Place place;
    if (index_.find(keys[i], now) == kNone) {
      const uint32_t id = index_.reserve(keys[i], Kind{kinds[i]}, sizes[i], now, may_evict);
      if (id == kNone) return may_evict == MayEvict::kNo;
      const Slot &slot = index_.slot(id);
      const int64_t unbacked = slot.is_backed ? 0 : index_.room_of(id);
      place = {id, slot.generation, index_.offset_of(id), unbacked};
      if (unbacked > 0) may_evict = MayEvict::kNo;
    }
    places->push_back(place);
  }
  return false;
}

int32_t Arena::make_room(const Keys &keys, const uint8_t *kinds, const int64_t *sizes) {
  constexpr int kTries = 8;  // others may change the arena while memory is allocated
  return while_open([&] {
    std::set<std::pair<int64_t, int64_t>> backed;
    Growth growth = Growth::kAny;
    for (int tries = 0; tries < kTries; ++tries) {
      Plan plan;
      bool has_room = false, is_done = false;
      const int32_t code = with_lock(-1, [&](int64_t now) {
        if (growth == Growth::kAny && index_.is_denied(now)) growth = Growth::kOtherSizes;
        has_room = index_.make_plan(missing_of(keys, kinds, sizes, now), growth, now, &plan);
        is_done = has_room && std::includes(backed.begin(), backed.end(), plan.unbacked.begin(),
                                            plan.unbacked.end());
        if (is_done) has_room = index_.carry_out(plan, now);
      });
      if (code != PDS_OK) return code;
      if (!has_room) break;
      if (is_done) return int32_t{PDS_OK};
      const auto is_refused = [&](const auto &range) {
        return fallocate(file_, 0, geometry_.data_at + range.first, range.second) != 0;
      };
      if (std::any_of(plan.unbacked.begin(), plan.unbacked.end(), is_refused)) {
        growth = growth == Growth::kAny ? Growth::kOtherSizes : Growth::kNone;
      } else {
        backed.insert(plan.unbacked.begin(), plan.unbacked.end());
      }
    }
    return int32_t{PDS_ERR_FULL};
  });
}

// The values that are not stored; leases the others, which count as used.
std::vector<NewValue> Arena::missing_of(const Keys &keys, const uint8_t *kinds,
                                        const int64_t *sizes, int64_t now) {
  std::vector<NewValue> missing;
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint32_t id = index_.find(keys[i], now);
    if (id == kNone) {
      missing.push_back({Kind{kinds[i]}, sizes[i]});
    } else {
      index_.touch(id, now);
    }
  }
  return missing;
}

// Has the file system allocate the memory of slots, else writing to them could raise SIGBUS. It
// allocates whole slots, because the next value in a slot may be longer. first: of the places that
// are not backed yet. Where it refuses, the places end, and can_continue becomes false.
int32_t Arena::back(Places *places, size_t first, int64_t lock_timeout_ns, bool *can_continue) {
  for (size_t i = first; i < places->size(); ++i) {
    const int64_t bytes = (*places)[i].unbacked, at = geometry_.data_at + (*places)[i].offset;
    if (bytes == 0 || fallocate(file_, 0, at, bytes) == 0) continue;
    const Places refused(places->begin() + i, places->end());
    const int32_t code = with_lock(lock_timeout_ns, [&](int64_t now) {
      const int64_t until = index_.deny(now);
      for (const auto &[slot, generation, offset, unbacked] : refused) {
        if (index_.is_reserved(slot, generation))
          index_.set_aside(static_cast<uint32_t>(slot), until);
      }
    });
    if (code != PDS_OK) abandon_later(refused);
    places->resize(i);
    *can_continue = false;
    return code;
  }
  return PDS_OK;
}

int32_t Arena::publish(const Places &places, int64_t *done, int64_t lock_timeout_ns) {
  *done = 0;
  bool any = false;
  const int32_t code = locked(lock_timeout_ns, [&](int64_t now) {
    for (; *done < static_cast<int64_t>(places.size()); ++*done) {
      const Place &place = places[*done];
      if (place.slot < 0) continue;
      if (!index_.is_reserved(place.slot, place.generation)) break;
      index_.publish(static_cast<uint32_t>(place.slot), now);
      any = true;
    }
  });
  if (any) futex_wake(index_.header().changes, INT_MAX);
  return code;
}

int32_t Arena::abandon(const Places &places, int64_t lock_timeout_ns) {
  const int32_t code = locked(lock_timeout_ns, [&](int64_t) {
    for (const Place &place : places) index_.free_if_reserved(place.slot, place.generation);
  });
  if (code == PDS_ERR_TIMEOUT) abandon_later(places);
  return code;
}

void Arena::abandon_later(const Places &places) {
  const std::lock_guard<std::mutex> guard(mutex_);
  abandoned_.insert(abandoned_.end(), places.begin(), places.end());
}

int32_t Arena::borrow(const Keys &keys, const int64_t *sizes, Places *places,
                      int64_t lock_timeout_ns, Leases leases) {
  bool fits = true;
  const int32_t code = locked(lock_timeout_ns, [&](int64_t now) {
    places->clear();
    fits = true;
    for (size_t i = 0; i < keys.size(); ++i) {
      const uint32_t id = index_.find(keys[i], now);
      if (id == kNone) return;
      const Slot &slot = index_.slot(id);
      fits = slot.bytes == sizes[i] && slot.bytes <= index_.room_of(id);
      if (!fits) return;
      if (leases == Leases::kEnd) index_.begin_read(id, now);
      places->push_back({id, slot.generation, index_.offset_of(id), 0});
    }
  });
  return code == PDS_OK && !fits ? PDS_ERR_LENGTH : code;
}

int64_t Arena::still_there(const Places &places) {
  // D: borrows slot 5, generation 8; copies its bytes                      asks here
  // P:                                put evicts the value, writes another
  // So D may have bytes of both, but the generation is 9 now: D takes none of them.
  after_reads();
  const auto is_gone = [&](const Place &place) {
    const Slot *slot = index_.unlocked(place.slot);
    return slot == nullptr || slot->generation != place.generation || slot->state != State::kStored;
  };
  return std::find_if(places.begin(), places.end(), is_gone) - places.begin();
}

int32_t Arena::wait_for_change(uint32_t seen, int64_t timeout_us, uint32_t *changes) {
  if (!is_of_this_process()) return PDS_ERR_CLOSED;
  std::atomic<uint32_t> &word = index_.header().changes;
  const int64_t end = now_ns() + std::min(timeout_us, int64_t{3'600'000'000}) * 1000;
  while (!is_over_ && word == seen) {
    const int64_t left = end - now_ns();
    if (left <= 0) break;
    futex_wait(word, seen, left);
  }
  *changes = word;
  return is_over_ ? PDS_ERR_CLOSED : PDS_OK;
}

int32_t Arena::count(pds_arena_counts *counts) {
  return locked(-1, [&](int64_t) { index_.count(counts); });
}

int32_t Arena::oldest_age(int64_t bytes, int64_t num_values, int64_t *age_ns) {
  return locked(-1, [&](int64_t now) { *age_ns = index_.oldest_age(bytes, num_values, now); });
}

int32_t Arena::list(int64_t *next, pds_arena_value *values, int64_t room, int64_t *count) {
  const int64_t first = *next;  // the body may run twice
  return locked(-1, [&](int64_t now) {
    *next = first;
    *count = index_.list(next, values, room, now);
  });
}

}  // namespace pds::arena
