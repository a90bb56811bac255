// Where room for a value comes from, and how lists are made anew after a death.
//
// Decision: the value that was used longest ago goes first, whatever its size: either the oldest of
// the same size, or, where a slab of another size has not been used for longer than that, the whole
// slab changes its size. So a model that nobody asks any more leaves its room to the next.
// Decision: docs/decisions/026-markers-have-room.md
#include <fcntl.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "arena_index.h"

namespace pds::arena {
namespace {

constexpr int64_t kSweepEvery = 100'000'000, kDeniedFor = 1'000'000'000;
constexpr int64_t kFullFor = 20'000'000;  // a walk over what is kept is not repeated for every put

}  // namespace

// The class of a size; null when there are too many.
Class *Index::class_of(int64_t units) {
  for (Class &sized : header_->classes) {
    if (sized.units == units) return &sized;
    if (sized.units != 0) continue;
    sized = {units, {kNone, kNone}, {kNone, kNone}, 0};
    return &sized;
  }
  for (Class &sized : header_->classes) {  // the size of one that has no slab any more
    const auto has_it = [&](const Slab &slab) { return slab.units == sized.units; };
    if (std::any_of(slabs_, slabs_ + geometry_.num_slabs, has_it)) continue;
    sized = {units, {kNone, kNone}, {kNone, kNone}, 0};
    return &sized;
  }
  return nullptr;
}

Class &Index::class_of_slot(uint32_t id) {
  Class *sized = class_of(slabs_[slab_of(id)].units);
  if (sized == nullptr) throw Damaged();
  return *sized;
}

uint32_t Index::reserve_slot(Class &sized, Kind kind, int64_t now, MayEvict may_evict) {
  if (sized.free.newest == kNone && !add_slab(sized, now)) {
    if (may_evict == MayEvict::kNo) return kNone;
    sweep(now);
    const bool is_never_refused = kind != kBlock && sized.units == 1;  // a marker, a purge number
    if (!evict(sized, now) && !(is_never_refused && evict_kept(sized, now))) return kNone;
  }
  const uint32_t id = sized.free.newest;
  if (id == kNone || slot(id).state != State::kFree) throw Damaged();
  unlink(sized.free, id);
  return id;
}

bool Index::is_denied(int64_t now) const {
  return header_->denied_until > now && header_->denied_until <= now + kDeniedFor;
}

bool Index::add_slab(Class &sized, int64_t now) {
  if (is_denied(now)) return false;
  const auto is_unused = [](const Slab &slab) { return slab.units == 0; };
  const Slab *end = slabs_ + geometry_.num_slabs,
             *found = std::find_if(slabs_, slabs_ + geometry_.num_slabs, is_unused);
  if (found == end || !describe(found - slabs_, sized.units, now)) return false;
  cut(found - slabs_, sized, now);
  return true;
}

// Allocates descriptors for slots of a size. False if the file system has no memory for them.
bool Index::describe(int64_t slab, int64_t units, int64_t now) {
  const int64_t bytes = geometry_.slots_per_slab / units * static_cast<int64_t>(sizeof(Slot));
  const int64_t at = geometry_.slots_at + id_of(slab, 0) * static_cast<int64_t>(sizeof(Slot));
  if (fallocate(file_, 0, at, bytes) == 0) return true;
  deny(now);
  return false;
}

// Cuts a slab that is not in use into slots, which have descriptors.
void Index::cut(int64_t slab, Class &sized, int64_t now) {
  const int64_t count = geometry_.slots_per_slab / sized.units;
  for (int64_t i = 0; i < count; ++i) {
    Slot &made = slots_[id_of(slab, i)];
    ++made.generation;
    made.state = State::kFree, made.is_backed = 0;
  }
  slabs_[slab] = {sized.units, now, 0, 0, 0};
  for (int64_t i = 0; i < count; ++i) add_oldest(sized.free, id_of(slab, i));
}

// Gives a slab slots of another size. False, and nothing is lost, if the file system has no memory
// for their descriptors and for the first of them.
bool Index::resize(int64_t slab, Class &sized, int64_t now) {
  const int64_t at = geometry_.data_at + slab * geometry_.slab_bytes;
  if (!describe(slab, sized.units, now)) return false;
  if (fallocate(file_, 0, at, sized.units * kUnit) != 0) {
    deny(now);
    return false;
  }
  empty(slab);
  cut(slab, sized, now);
  slots_[id_of(slab, 0)].is_backed = 1;
  return true;
}

// The slab of another size that was used longest ago, of those that may go; or -1.
template <typename MayGo>
int64_t Index::coldest_slab(const Class &beside, MayGo may_go) const {
  int64_t coldest = -1;
  const auto age_of = [&](const Slab &slab) { return slab.num_used == 0 ? -1 : slab.used_at; };
  for (int64_t i = 0; i < geometry_.num_slabs; ++i) {
    const Slab &slab = slabs_[i];
    if (slab.units == 0 || slab.units == beside.units) continue;
    if (coldest >= 0 && age_of(slab) >= age_of(slabs_[coldest])) continue;
    if (may_go(i)) coldest = i;
  }
  return coldest;
}

Index::Oldest Index::oldest(Class &sized, int64_t now) {
  const uint32_t victim = oldest_unkept(sized, now);
  const int64_t slab = coldest_slab(sized, [&](int64_t i) {
    return slabs_[i].num_reserved == 0 && !is_ahead(slabs_[i].lease_end, now);
  });
  const auto is_older = [&] {
    return victim == kNone || slabs_[slab].num_used == 0 ||
           slabs_[slab].used_at < slots_[victim].used_at;
  };
  return {victim, slab >= 0 && is_older() ? slab : -1};
}

// Frees one slot of a class. False if all is kept.
bool Index::evict(Class &sized, int64_t now) {
  const auto [victim, slab] = oldest(sized, now);
  if (slab >= 0 && resize(slab, sized, now)) return true;
  if (victim == kNone) return false;
  free(victim);
  return true;
}

int64_t Index::oldest_age(int64_t bytes, int64_t count, int64_t now) {
  const int64_t units = units_of(bytes);
  Class *sized = units <= geometry_.slots_per_slab ? class_of(units) : nullptr;
  if (sized == nullptr) return -1;
  int64_t room = 0;
  for (uint32_t id = sized->free.newest; id != kNone && room < count; id = slot(id).older) ++room;
  for (int64_t i = 0; i < geometry_.num_slabs && room < count && !is_denied(now); ++i) {
    if (slabs_[i].units == 0) room += geometry_.slots_per_slab / units;
  }
  if (room >= count) return -1;
  const auto [victim, slab] = oldest(*sized, now);
  if (slab >= 0) return slabs_[slab].num_used == 0 ? -1 : since(slabs_[slab].used_at, now);
  return victim == kNone ? -1 : since(slots_[victim].used_at, now);
}

// Frees for a value that is never refused the oldest slot of its class although it is kept; where
// there is none, the slab of another size that was used longest ago.
bool Index::evict_kept(Class &sized, int64_t now) {
  const auto is_needed = [&](const Slot &slot) {
    return slot.state == State::kStored ? slot.kind == kForever : slot.state != State::kFree;
  };
  uint32_t older = kNone;
  for (uint32_t id = sized.used.oldest; id != kNone; older = id, id = slots_[id].newer) {
    if (slot(id).older != older) throw Damaged();
    if (is_needed(slots_[id])) continue;
    const int64_t full_until = sized.full_until;
    free(id);
    sized.full_until = full_until;  // the others are kept as before
    return true;
  }
  const int64_t coldest = coldest_slab(sized, [&](int64_t slab) {
    const Slot *first = &slots_[id_of(slab, 0)];
    return std::none_of(first, first + slots_of(slab), is_needed);
  });
  return coldest >= 0 && resize(coldest, sized, now);
}

bool Index::is_kept(const Slot &slot, int64_t now) const {
  return (slot.kind == kForever && slot.state == State::kStored) || is_ahead(slot.lease_end, now);
}

uint32_t Index::oldest_unkept(Class &sized, int64_t now) {
  if (now < sized.full_until && sized.full_until <= now + kFullFor) return kNone;
  int64_t soonest = now + kFullFor;
  uint32_t older = kNone;
  for (uint32_t id = sized.used.oldest; id != kNone; older = id, id = slots_[id].newer) {
    const Slot &used = slot(id);
    if (used.older != older) throw Damaged();  // so a ring of links cannot hold us
    if (!is_kept(used, now)) return id;
    soonest = std::min(soonest, used.lease_end);
  }
  sized.full_until = soonest;
  return kNone;
}

// Takes a slab out of use, with all that is in it.
void Index::empty(int64_t slab) {
  const int64_t count = slots_of(slab);
  if (count == 0) throw Damaged();
  Class &sized = class_of_slot(id_of(slab, 0));
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t id = id_of(slab, i);
    const State state = slots_[id].state;
    if (state == State::kReserved) throw Damaged();
    if (state == State::kStored) unchain(id);
    unlink(state == State::kFree ? sized.free : sized.used, id);
    give_up(slots_[id]);
  }
  slabs_[slab] = {};
}

void Index::sweep(int64_t now) {
  if (since(header_->swept_at, now) > kSweepEvery) rest(Whose::kDead, now);
}

void Index::rest(Whose whose, int64_t now) {
  header_->swept_at = now;
  for (int64_t slab = 0; slab < geometry_.num_slabs; ++slab) {
    const int64_t count = slabs_[slab].num_reserved > 0 ? slots_of(slab) : 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t id = id_of(slab, i);
      const Slot &given = slots_[id];
      if (given.state != State::kReserved) continue;
      const bool is_over =
          whose == Whose::kOwn ? given.owner == owner_.word() : !owner_.lives(given.owner);
      if (!is_over) continue;
      // P:      queues a copy into slot 3, dies            the GPU ends the copy
      // others:                                 a sweep here                    use slot 3
      // So the slot is set aside: a new value would be overwritten.
      set_aside(id, now + times_.orphan_timeout_ns);
    }
  }
}

int64_t Index::deny(int64_t now) { return header_->denied_until = now + kDeniedFor; }

void Index::count(pds_arena_counts *counts) {
  *counts = {};
  for_each_slot([&](uint32_t id, const Slot &slot) {
    const State state = slot.state;
    counts->slabs += id % geometry_.slots_per_slab == 0;
    counts->stored += state == State::kStored, counts->reserved += state == State::kReserved;
    counts->resting += state == State::kResting, counts->free += state == State::kFree;
  });
}

int64_t Index::list(int64_t *next, pds_arena_value *values, int64_t room, int64_t now) {
  int64_t count = 0, slab = *next / geometry_.slots_per_slab, i = *next % geometry_.slots_per_slab;
  for (; slab < geometry_.num_slabs; ++slab, i = 0) {
    for (const int64_t end = slots_of(slab); i < end; ++i) {
      const Slot &slot = slots_[id_of(slab, i)];
      const int64_t age = since(slot.used_at, now);
      const bool is_over = slot.kind == kShortLived && age >= times_.short_lived_ns;
      if (slot.state != State::kStored || is_over) continue;
      if (count == room) {
        *next = id_of(slab, i);
        return count;
      }
      pds_arena_value &value = values[count++];
      value = {slot.bytes, age == std::numeric_limits<int64_t>::max() ? -1 : age, {}};
      const std::string_view key = key_of(slot);
      std::copy(key.begin(), key.end(), value.key);
    }
  }
  *next = -1;
  return count;
}

void Index::rebuild() {
  const int64_t now = now_ns();
  for (Class &sized : header_->classes) sized = {};
  std::fill(heads_, heads_ + geometry_.num_heads, kNone);
  std::vector<std::pair<int64_t, uint32_t>> used;
  for (int64_t slab = 0; slab < geometry_.num_slabs; ++slab) {
    Class *sized = slots_of(slab) > 0 ? class_of(slabs_[slab].units) : nullptr;
    slabs_[slab] = {sized != nullptr ? sized->units : 0, 0, 0, 0, 0};
    for (int64_t i = 0; i < slots_of(slab); ++i) {
      const uint32_t id = id_of(slab, i);
      mend(slots_[id], sized->units, now);
      const State state = slots_[id].state;
      if (state == State::kFree) {
        add_oldest(sized->free, id);
        continue;
      }
      ++slabs_[slab].num_used;
      if (state == State::kReserved) {
        ++slabs_[slab].num_reserved;
      } else {
        used.emplace_back(slots_[id].used_at, id);
      }
    }
  }
  std::sort(used.begin(), used.end());
  for (const auto &[used_at, id] : used) list_again(id, now);
  ++header_->changes;  // the dead may have published something that nobody was woken for
}

// A descriptor that no writer leaves behind is freed.
void Index::mend(Slot &slot, int64_t units, int64_t now) {
  const State state = slot.state;
  if (state == State::kFree) return;
  slot.used_at = std::min(slot.used_at, now);
  if (!is_ahead(slot.lease_end, now)) slot.lease_end = 0;
  if (state == State::kResting) return;
  const bool is_whole = (state == State::kStored || state == State::kReserved) &&
                        slot.kind < kNumKinds && slot.key_bytes >= 1 &&
                        slot.key_bytes <= kMaxKeyBytes && slot.bytes >= 1 &&
                        slot.bytes <= units * kUnit && slot.hash == hash_of(key_of(slot));
  if (!is_whole) give_up(slot);
}

// Puts a slot that holds something back into its list, and what is stored into its chain.
void Index::list_again(uint32_t id, int64_t now) {
  Slot &held = slots_[id];
  Slab &slab = slabs_[slab_of(id)];
  Class &sized = class_of_slot(id);
  const bool is_stored = held.state == State::kStored;
  if (is_stored && find(key_of(held), now) != kNone) {  // a second one cannot be right
    give_up(held);
    --slab.num_used;
    add_newest(sized.free, id);
    return;
  }
  slab.used_at = std::max(slab.used_at, held.used_at);
  slab.lease_end = std::max(slab.lease_end, held.lease_end);
  if (is_stored) chain(id);
  add_newest(sized.used, id);
}

}  // namespace pds::arena
