// The C interface of arenas, and values copied in and out by the processor.
#include <algorithm>
#include <cstring>

#include "abi.h"

namespace pds::arena {

bool read_keys(const char *text, int64_t count, Keys *keys) {
  keys->reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    const size_t bytes = strnlen(text, kMaxKeyBytes + 1);
    if (bytes == 0 || bytes > kMaxKeyBytes) return false;
    keys->emplace_back(text, bytes);
    text += bytes + 1;
  }
  return true;
}

bool are_kinds(const uint8_t *kinds, int64_t count) {
  return std::all_of(kinds, kinds + count, [](uint8_t kind) { return kind < kNumKinds; });
}

bool are_sizes(const int64_t *sizes, int64_t count, int64_t smallest) {
  return std::all_of(sizes, sizes + count, [&](int64_t size) { return size >= smallest; });
}

}  // namespace pds::arena

namespace {

using pds::arena::Arena;
using pds::arena::Keys;
using pds::arena::Places;

constexpr int64_t kBatch = 64;  // values that are reserved or borrowed at a time

template <typename Body>
int32_t with_keys(pds_arena *arena, const char *text, int64_t count, Body body) {
  return pds::guarded(nullptr, [&] {
    Keys keys;
    const bool fits = pds::arena::read_keys(text, count, &keys);
    return fits ? body(*arena->arena, keys) : int32_t{PDS_ERR_ARGUMENT};
  });
}

// A slot may get another value while it is copied: its generation tells that afterwards, and the
// copy is not used. Thread sanitizers cannot know that.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread"), noinline)) void copy(char *to, const char *from,
                                                           int64_t bytes) {
  volatile char *target = to;
  const volatile char *source = from;
  for (int64_t i = 0; i < bytes; ++i) target[i] = source[i];
}
#else
void copy(char *to, const char *from, int64_t bytes) { std::memcpy(to, from, bytes); }
#endif

char *pointer(uint64_t address) { return reinterpret_cast<char *>(address); }

int32_t put_batch(Arena &arena, int64_t lock_timeout_ns, uint64_t memory, const Keys &keys,
                  const uint8_t *kinds, const uint64_t *addresses, const int64_t *sizes,
                  int64_t *done) {
  Places places;
  const int32_t code = arena.reserve(keys, kinds, sizes, &places, lock_timeout_ns);
  if (code != PDS_OK) return code;
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i].slot < 0) continue;
    copy(pointer(memory + places[i].offset), pointer(addresses[i]), sizes[i]);
  }
  const int32_t failed = arena.publish(places, done, lock_timeout_ns);
  if (failed != PDS_OK) {
    arena.abandon_later(places);  // the lock was not free just now
    return failed;
  }
  return *done < static_cast<int64_t>(keys.size()) ? PDS_ERR_FULL : PDS_OK;
}

int32_t get_batch(Arena &arena, uint64_t memory, const Keys &keys, const uint64_t *addresses,
                  const int64_t *sizes, Arena::Leases leases, int64_t *done) {
  Places places;
  const int32_t code = arena.borrow(keys, sizes, &places, -1, leases);
  if (code != PDS_OK && code != PDS_ERR_LENGTH) return code;
  for (size_t i = 0; i < places.size(); ++i) {
    copy(pointer(addresses[i]), pointer(memory + places[i].offset), sizes[i]);
  }
  *done = arena.still_there(places);
  return *done == static_cast<int64_t>(places.size()) ? code : PDS_OK;
}

// Calls body(arena, keys, first, &done) for each batch, until one fails or is not done whole.
template <typename Body>
int32_t in_batches(pds_arena *arena, const char *text, int64_t count, int64_t *done, Body body) {
  *done = 0;
  return with_keys(arena, text, count, [&](Arena &a, const Keys &keys) {
    int32_t code = PDS_OK;
    for (int64_t i = 0; i < count && code == PDS_OK && *done == i; i += kBatch) {
      const Keys some(keys.begin() + i, keys.begin() + std::min(count, i + kBatch));
      int64_t more = 0;
      code = body(a, some, i, &more);
      *done += more;
    }
    return code;
  });
}

}  // namespace

extern "C" int32_t pds_arena_format(int32_t file, int64_t data_bytes, int64_t slab_bytes,
                                    uint64_t seed) {
  return pds::arena::format(file, data_bytes, slab_bytes, seed);
}

extern "C" int32_t pds_arena_open(int32_t file, const pds_arena_options *options, pds_arena **arena,
                                  pds_arena_info *info) {
  if (std::min({options->lease_ns, options->fresh_ns, options->short_lived_ns,
                options->orphan_timeout_ns, options->lock_timeout_ns}) < 0) {
    return PDS_ERR_ARGUMENT;
  }
  return pds::guarded(nullptr, [&] {
    auto made = std::make_unique<pds_arena>();
    const int32_t code = Arena::open(file, *options, &made->arena);
    if (code != PDS_OK) return code;
    const pds::arena::Geometry &geometry = made->arena->geometry();
    *info = {geometry.data_at, geometry.data_bytes, geometry.slab_bytes};
    *arena = made.release();
    return code;
  });
}

extern "C" int32_t pds_arena_close(pds_arena *arena) { return arena->arena->close(); }

extern "C" int32_t pds_arena_free(pds_arena *arena) {
  delete arena;
  return PDS_OK;
}

extern "C" int32_t pds_arena_find(pds_arena *arena, int64_t lock_timeout_ns, const char *keys,
                                  int64_t num_keys, int32_t lease, int64_t unread_from,
                                  int64_t unread_since_ns, uint8_t *stored) {
  return with_keys(arena, keys, num_keys, [&](Arena &a, const Keys &all) {
    return lease == 0 ? a.find(all, stored, lock_timeout_ns)
                      : a.match(all, unread_from, unread_since_ns, stored, lock_timeout_ns);
  });
}

extern "C" int32_t pds_arena_use(pds_arena *arena, const char *keys, int64_t num_keys) {
  return with_keys(arena, keys, num_keys, [&](Arena &a, const Keys &all) { return a.use(all); });
}

extern "C" int32_t pds_arena_remove(pds_arena *arena, const char *keys, int64_t num_keys) {
  return with_keys(arena, keys, num_keys, [&](Arena &a, const Keys &all) { return a.remove(all); });
}

extern "C" int32_t pds_arena_clear(pds_arena *arena, const char *prefix) {
  return *prefix == 0 ? int32_t{PDS_ERR_ARGUMENT} : arena->arena->clear(prefix);
}

extern "C" int32_t pds_arena_count(pds_arena *arena, pds_arena_counts *counts) {
  return arena->arena->count(counts);
}

extern "C" int32_t pds_arena_oldest(pds_arena *arena, int64_t bytes, int64_t num_values,
                                    int64_t *age_ns) {
  if (bytes < 1) return PDS_ERR_ARGUMENT;
  return arena->arena->oldest_age(bytes, num_values, age_ns);
}

extern "C" int32_t pds_arena_make_room(pds_arena *arena, const char *keys, const uint8_t *kinds,
                                       const int64_t *sizes, int64_t num_keys) {
  if (!pds::arena::are_kinds(kinds, num_keys) || !pds::arena::are_sizes(sizes, num_keys, 1)) {
    return PDS_ERR_ARGUMENT;
  }
  const auto make = [&](Arena &a, const Keys &all) { return a.make_room(all, kinds, sizes); };
  return with_keys(arena, keys, num_keys, make);
}

extern "C" int32_t pds_arena_list(pds_arena *arena, int64_t *next, pds_arena_value *values,
                                  int64_t room, int64_t *count) {
  if (*next < 0 || room < 1) return PDS_ERR_ARGUMENT;
  return arena->arena->list(next, values, room, count);
}

extern "C" int32_t pds_arena_put(pds_arena *arena, int64_t lock_timeout_ns, uint64_t memory,
                                 const char *keys, const uint8_t *kinds, const uint64_t *addresses,
                                 const int64_t *sizes, int64_t num_keys, int64_t *done) {
  if (!pds::arena::are_kinds(kinds, num_keys) || !pds::arena::are_sizes(sizes, num_keys, 1)) {
    return PDS_ERR_ARGUMENT;
  }
  const auto put = [&](Arena &a, const Keys &some, int64_t i, int64_t *more) {
    return put_batch(a, lock_timeout_ns, memory, some, kinds + i, addresses + i, sizes + i, more);
  };
  return in_batches(arena, keys, num_keys, done, put);
}

extern "C" int32_t pds_arena_get(pds_arena *arena, uint64_t memory, const char *keys,
                                 const uint64_t *addresses, const int64_t *sizes, int64_t num_keys,
                                 int32_t keeps_leases, int64_t *done) {
  if (!pds::arena::are_sizes(sizes, num_keys, 1)) return PDS_ERR_ARGUMENT;
  const auto leases = keeps_leases != 0 ? Arena::Leases::kStay : Arena::Leases::kEnd;
  const auto get = [&](Arena &a, const Keys &some, int64_t i, int64_t *more) {
    return get_batch(a, memory, some, addresses + i, sizes + i, leases, more);
  };
  return in_batches(arena, keys, num_keys, done, get);
}

extern "C" int32_t pds_arena_wait(pds_arena *arena, uint32_t seen, int64_t timeout_us,
                                  uint32_t *changes) {
  return arena->arena->wait_for_change(seen, timeout_us, changes);
}
