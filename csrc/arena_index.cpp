#include "arena_index.h"

#include <algorithm>
#include <cstring>

#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

namespace pds::arena {
namespace {

constexpr int kLongestChain = 4096;

int64_t units_of(int64_t bytes) { return (bytes + kUnit - 1) / kUnit; }

// Tails have as many sizes as a block has tokens: they share slots of 1, 2, 3, 4, 6, 8, 12, ...
int64_t rounded(int64_t units) {
  int64_t power = 1;
  while (power < units) power *= 2;
  return power >= 4 && power / 4 * 3 >= units ? power / 4 * 3 : power;
}

}  // namespace

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
  return units >= 1 && units <= geometry_.units_per_slab() ? geometry_.units_per_slab() / units : 0;
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

void Index::touch(uint32_t id, int64_t now) {
  Slot &used = slot(id);
  Slab &slab = slabs_[slab_of(id)];
  Class &sized = class_of_slot(id);
  unlink(sized.used, id);
  add_newest(sized.used, id);
  used.used_at = slab.used_at = now;
  used.lease_end = std::max(used.lease_end, now + times_.lease_ns);
  slab.lease_end = std::max(slab.lease_end, used.lease_end);
}

uint32_t Index::reserve(std::string_view key, Kind kind, int64_t bytes, int64_t now) {
  int64_t units = units_of(bytes);
  if (kind == kShortLived) units = std::min(rounded(units), geometry_.units_per_slab());
  if (units > geometry_.units_per_slab()) return kNone;
  Class *sized = class_of(units);
  if (sized == nullptr) return kNone;
  const uint32_t id = reserve_slot(*sized, kind, now);
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

void Index::set_aside_if_reserved(int64_t id, uint64_t generation, int64_t until) {
  if (is_reserved(id, generation)) set_aside(static_cast<uint32_t>(id), until);
}

}  // namespace pds::arena
