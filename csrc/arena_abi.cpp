// The C interface of arenas, and values copied in and out by the processor.
#include <algorithm>
#include <cstring>
#include <new>

#include "handles.h"

namespace pds::arena {

bool read_keys(const char *text, int64_t count, Keys *keys) {
  if (text == nullptr || count < 0) return false;
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
  const auto is_kind = [](uint8_t kind) { return kind < kNumKinds; };
  return kinds != nullptr && std::all_of(kinds, kinds + count, is_kind);
}

bool are_sizes(const int64_t *sizes, int64_t count) {
  const auto is_size = [](int64_t size) { return size > 0; };
  return sizes != nullptr && std::all_of(sizes, sizes + count, is_size);
}

}  // namespace pds::arena

namespace {

using pds::arena::are_kinds, pds::arena::are_sizes, pds::arena::read_keys;
using pds::arena::Arena;
using pds::arena::Keys;
using pds::arena::Places;

constexpr int64_t kBatch = 64;  // values that are reserved or borrowed at a time

template <typename Body>
int32_t with_keys(pds_arena *arena, const char *text, int64_t count, Body body) {
  if (arena == nullptr) return PDS_ERR_ARGUMENT;
  try {
    Keys keys;
    if (!read_keys(text, count, &keys)) return PDS_ERR_ARGUMENT;
    return body(*arena->arena, keys);
  } catch (const std::bad_alloc &) {
    return PDS_ERR_MEMORY;
  }
}

// A slot may get another value while it is copied: its generation says so afterwards, and then the
// copy counts for nothing. A checker of races cannot know.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread"), noinline)) void copy(void *to, const void *from,
                                                           int64_t bytes) {
  auto *target = static_cast<volatile char *>(to);
  const auto *source = static_cast<const volatile char *>(from);
  for (int64_t i = 0; i < bytes; ++i) target[i] = source[i];
}
#else
void copy(void *to, const void *from, int64_t bytes) { std::memcpy(to, from, bytes); }
#endif

struct Batch {
  int64_t slots[kBatch];
  uint64_t generations[kBatch];
  int64_t offsets[kBatch];
  Places places() { return {slots, generations, offsets}; }
};

Keys part_of(const Keys &keys, int64_t start) {
  const int64_t end = std::min<int64_t>(keys.size(), start + kBatch);
  return Keys(keys.begin() + start, keys.begin() + end);
}

int32_t put_batch(Arena &arena, int64_t lock_ns, char *memory, const Keys &keys,
                  const uint8_t *kinds, const uint64_t *addresses, const int64_t *sizes,
                  int64_t *done) {
  Batch batch;
  int64_t covered = 0;
  const int32_t code = arena.reserve(keys, kinds, sizes, batch.places(), &covered, lock_ns);
  if (code != PDS_OK) return code;
  for (int64_t i = 0; i < covered; ++i) {
    if (batch.slots[i] < 0) continue;
    copy(memory + batch.offsets[i], reinterpret_cast<const void *>(addresses[i]), sizes[i]);
  }
  const int32_t failed = arena.publish(batch.places(), covered, done, lock_ns);
  if (failed != PDS_OK) {
    arena.owe(batch.places(), covered);  // the lock has just not been free
    return failed;
  }
  return *done < static_cast<int64_t>(keys.size()) ? PDS_ERR_FULL : PDS_OK;
}

int32_t get_batch(Arena &arena, const char *memory, const Keys &keys, const uint64_t *addresses,
                  const int64_t *sizes, int64_t *done) {
  Batch batch;
  int64_t found = 0;
  const int32_t code = arena.borrow(keys, sizes, batch.places(), &found, -1);
  if (code != PDS_OK && code != PDS_ERR_LENGTH) return code;
  for (int64_t i = 0; i < found; ++i) {
    copy(reinterpret_cast<void *>(addresses[i]), memory + batch.offsets[i], sizes[i]);
  }
  *done = arena.still_there(batch.places(), found);
  return *done == found ? code : PDS_OK;
}

}  // namespace

extern "C" int32_t pds_arena_format(int32_t file, int64_t data_bytes, int64_t slab_bytes,
                                    uint64_t seed) {
  return pds::arena::format(file, data_bytes, slab_bytes, seed);
}

extern "C" int32_t pds_arena_open(int32_t file, const pds_arena_options *options, pds_arena **arena,
                                  pds_arena_info *info) {
  if (!options || !arena || !info ||
      std::min({options->lease_ns, options->fresh_ns, options->short_lived_ns, options->rest_ns,
                options->lock_timeout_ns}) < 0) {
    return PDS_ERR_ARGUMENT;
  }
  try {
    auto made = std::make_unique<pds_arena>();
    const int32_t code = Arena::open(file, *options, &made->arena);
    if (code != PDS_OK) return code;
    const pds::arena::Geometry &geometry = made->arena->geometry();
    *info = {geometry.data_at, geometry.data_bytes, geometry.slab_bytes};
    *arena = made.release();
    return PDS_OK;
  } catch (const std::bad_alloc &) {
    return PDS_ERR_MEMORY;
  }
}

extern "C" int32_t pds_arena_close(pds_arena *arena) {
  return arena == nullptr ? int32_t{PDS_ERR_ARGUMENT} : arena->arena->close();
}

extern "C" int32_t pds_arena_forget(pds_arena *arena) {
  if (arena == nullptr) return PDS_ERR_ARGUMENT;
  arena->arena->forget();
  return PDS_OK;
}

extern "C" int32_t pds_arena_free(pds_arena *arena) {
  delete arena;
  return PDS_OK;
}

extern "C" int32_t pds_arena_match(pds_arena *arena, int64_t lock_ns, const char *keys,
                                   int64_t num_keys, int64_t *found) {
  if (found == nullptr) return PDS_ERR_ARGUMENT;
  *found = 0;
  return with_keys(arena, keys, num_keys,
                   [&](Arena &a, const Keys &all) { return a.match(all, found, lock_ns); });
}

extern "C" int32_t pds_arena_which(pds_arena *arena, int64_t lock_ns, const char *keys,
                                   int64_t num_keys, uint8_t *stored) {
  if (stored == nullptr) return PDS_ERR_ARGUMENT;
  return with_keys(arena, keys, num_keys,
                   [&](Arena &a, const Keys &all) { return a.which(all, stored, lock_ns); });
}

extern "C" int32_t pds_arena_remove(pds_arena *arena, const char *keys, int64_t num_keys) {
  return with_keys(arena, keys, num_keys, [&](Arena &a, const Keys &all) { return a.remove(all); });
}

extern "C" int32_t pds_arena_clear(pds_arena *arena, const char *prefix) {
  if (!arena || !prefix || *prefix == 0) return PDS_ERR_ARGUMENT;
  return arena->arena->clear(prefix);
}

extern "C" int32_t pds_arena_count(pds_arena *arena, pds_arena_counts *counts) {
  if (!arena || !counts) return PDS_ERR_ARGUMENT;
  return arena->arena->count(counts);
}

extern "C" int32_t pds_arena_list(pds_arena *arena, int64_t *next, pds_arena_value *values,
                                  int64_t room, int64_t *count) {
  if (!arena || !next || *next < 0 || !values || room < 1 || !count) return PDS_ERR_ARGUMENT;
  return arena->arena->list(next, values, room, count);
}

extern "C" int32_t pds_arena_reserve(pds_arena *arena, const char *keys, const uint8_t *kinds,
                                     const int64_t *sizes, int64_t num_keys, int64_t *slots,
                                     uint64_t *generations, int64_t *offsets, int64_t *covered) {
  if (!slots || !generations || !offsets || !covered) return PDS_ERR_ARGUMENT;
  if (!are_kinds(kinds, num_keys) || !are_sizes(sizes, num_keys)) return PDS_ERR_ARGUMENT;
  return with_keys(arena, keys, num_keys, [&](Arena &a, const Keys &all) {
    return a.reserve(all, kinds, sizes, {slots, generations, offsets}, covered, -1);
  });
}

extern "C" int32_t pds_arena_publish(pds_arena *arena, int64_t lock_ns, int64_t *slots,
                                     uint64_t *generations, int64_t count, int64_t *done) {
  if (!arena || !slots || !generations || !done || count < 0) return PDS_ERR_ARGUMENT;
  return arena->arena->publish({slots, generations, nullptr}, count, done, lock_ns);
}

extern "C" int32_t pds_arena_abandon(pds_arena *arena, int64_t lock_ns, int64_t *slots,
                                     uint64_t *generations, int64_t count) {
  if (!arena || !slots || !generations || count < 0) return PDS_ERR_ARGUMENT;
  return arena->arena->abandon({slots, generations, nullptr}, count, lock_ns);
}

extern "C" int32_t pds_arena_borrow(pds_arena *arena, int64_t lock_ns, const char *keys,
                                    const int64_t *sizes, int64_t num_keys, int64_t *slots,
                                    uint64_t *generations, int64_t *offsets, int64_t *found) {
  if (!slots || !generations || !offsets || !found) return PDS_ERR_ARGUMENT;
  if (!are_sizes(sizes, num_keys)) return PDS_ERR_ARGUMENT;
  return with_keys(arena, keys, num_keys, [&](Arena &a, const Keys &all) {
    return a.borrow(all, sizes, {slots, generations, offsets}, found, lock_ns);
  });
}

extern "C" int32_t pds_arena_still_there(pds_arena *arena, int64_t *slots, uint64_t *generations,
                                         int64_t count, int64_t *still) {
  if (!arena || !slots || !generations || !still || count < 0) return PDS_ERR_ARGUMENT;
  *still = arena->arena->still_there({slots, generations, nullptr}, count);
  return PDS_OK;
}

extern "C" int32_t pds_arena_put(pds_arena *arena, int64_t lock_ns, uint64_t memory,
                                 const char *keys, const uint8_t *kinds, const uint64_t *addresses,
                                 const int64_t *sizes, int64_t num_keys, int64_t *done) {
  if (!memory || !addresses || !done || !are_kinds(kinds, num_keys) ||
      !are_sizes(sizes, num_keys)) {
    return PDS_ERR_ARGUMENT;
  }
  *done = 0;
  return with_keys(arena, keys, num_keys, [&](Arena &a, const Keys &all) {
    int32_t code = PDS_OK;
    for (int64_t i = 0; i < num_keys && code == PDS_OK; i += kBatch) {
      int64_t more = 0;
      code = put_batch(a, lock_ns, reinterpret_cast<char *>(memory), part_of(all, i), kinds + i,
                       addresses + i, sizes + i, &more);
      *done += more;
    }
    return code;
  });
}

extern "C" int32_t pds_arena_get(pds_arena *arena, uint64_t memory, const char *keys,
                                 const uint64_t *addresses, const int64_t *sizes, int64_t num_keys,
                                 int64_t *done) {
  if (!memory || !addresses || !done || !are_sizes(sizes, num_keys)) return PDS_ERR_ARGUMENT;
  *done = 0;
  return with_keys(arena, keys, num_keys, [&](Arena &a, const Keys &all) {
    int32_t code = PDS_OK;
    for (int64_t i = 0; i < num_keys && code == PDS_OK && *done == i; i += kBatch) {
      int64_t more = 0;
      code = get_batch(a, reinterpret_cast<const char *>(memory), part_of(all, i), addresses + i,
                       sizes + i, &more);
      *done += more;
    }
    return code;
  });
}

extern "C" int32_t pds_arena_wait(pds_arena *arena, uint32_t seen, int64_t timeout_us,
                                  uint32_t *changes) {
  if (!arena || !changes) return PDS_ERR_ARGUMENT;
  return arena->arena->wait(seen, timeout_us, changes);
}
