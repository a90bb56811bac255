// Which values go for those of a hand-off: all are chosen before the first one goes.
//
// Decision: a slab has slots of one size. A slab of which everything may go is *whole*, it could
// have any size; of another slab only its own slots count, which are *loose*. New values of several
// sizes have room if the whole slabs suffice for what the loose slots of each size leave over.
// Every choice keeps that so: if no whole slab is to spare, a size that has loose slots enough
// takes none of a whole slab. So a plan that is begun finds room for all values, and what cannot
// have room is refused before anything goes. Decision: docs/decisions/041-admission.md
#include <algorithm>
#include <functional>
#include <map>

#include "arena_index.h"

namespace pds::arena {

class Planner {
 public:
  Planner(Index &index, Growth growth, int64_t now, Plan *plan)
      : index_(index), growth_(growth), now_(now), plan_(plan) {}

  bool plan(const std::vector<NewValue> &values) {
    for (const NewValue &value : values) {
      const int64_t units = index_.units_for(value.kind, value.bytes);
      if (units > index_.geometry_.slots_per_slab || index_.class_of(units) == nullptr)
        return false;
      ++wanted_[units].wanted;
    }
    look_at_slabs();
    for (const auto &[units, size] : wanted_) num_spare_ -= num_needed(units, size);
    if (num_spare_ < 0) return false;
    for (auto &[units, size] : wanted_) choose(units, size);
    return true;
  }

 private:
  // The slots of one size: how many are still wanted, and how many are loose and not yet taken.
  struct Size {
    int64_t wanted = 0, loose = 0;
  };

  // The slots of a size by when they go. Of each, the first goes first.
  struct Slots {
    std::vector<uint32_t> free, unkept, kept;
  };

  int64_t per_slab(int64_t units) const { return index_.geometry_.slots_per_slab / units; }

  // The whole slabs that a size cannot do without.
  int64_t num_needed(int64_t units, const Size &size) const {
    const int64_t missing = std::max(int64_t{0}, size.wanted - size.loose);
    return (missing + per_slab(units) - 1) / per_slab(units);
  }

  bool may_go(const Slot &slot) const {
    const State state = slot.state;
    if (state == State::kReserved) return false;  // a copy into it may run
    if (growth_ != Growth::kAny && !slot.is_backed) return false;
    if (state == State::kFree) return true;
    if (state == State::kResting) return !is_ahead(slot.lease_end, now_);
    const bool is_over = since(slot.used_at, now_) >= index_.times_.short_lived_ns;
    return slot.kind != kForever && slot.used_at < now_ && (!is_marker(slot) || is_over);
  }

  void look_at_slabs() {
    is_whole_.assign(static_cast<size_t>(index_.geometry_.num_slabs), false);
    for (int64_t slab = 0; slab < index_.geometry_.num_slabs; ++slab) {
      const int64_t count = index_.slots_of(slab);
      const Slot *first = &index_.slots_[index_.id_of(slab, 0)];
      const int64_t num_going =
          std::count_if(first, first + count, [&](const Slot &slot) { return may_go(slot); });
      const bool may_change = count == 0 ? growth_ == Growth::kAny : growth_ != Growth::kNone;
      if (num_going == count && may_change) {
        is_whole_[static_cast<size_t>(slab)] = true;
        ++num_spare_;
        (count == 0 ? unused_ : used_).push_back(slab);
      } else if (const auto found = wanted_.find(index_.slabs_[slab].units);
                 count > 0 && found != wanted_.end()) {
        found->second.loose += num_going;
      }
    }
    std::stable_sort(used_.begin(), used_.end(),
                     [&](int64_t a, int64_t b) { return used_at(a) < used_at(b); });
  }

  int64_t used_at(int64_t slab) const {
    return index_.slabs_[slab].num_used == 0 ? -1 : index_.slabs_[slab].used_at;
  }

  // A list that is not what it should be is found out, and a ring of links cannot hold us.
  template <typename Body>
  void walk(uint32_t first, uint32_t Slot::*next, uint32_t Slot::*back, Body body) {
    uint32_t last = kNone;
    for (uint32_t id = first; id != kNone; last = id, id = index_.slots_[id].*next) {
      if (index_.slot(id).*back != last) throw Damaged();
      body(id, index_.slots_[id]);
    }
  }

  Slots slots_of(int64_t units) {
    Slots found;
    const Class &sized = *index_.class_of(units);
    walk(sized.free.newest, &Slot::older, &Slot::newer, [&](uint32_t id, const Slot &slot) {
      if (may_go(slot)) found.free.push_back(id);
    });
    walk(sized.used.oldest, &Slot::newer, &Slot::older, [&](uint32_t id, const Slot &slot) {
      if (may_go(slot)) (index_.is_kept(slot, now_) ? found.kept : found.unkept).push_back(id);
    });
    return found;
  }

  bool may_break_a_slab(int64_t units, const Size &size) const {
    return num_spare_ > 0 || num_needed(units, size) > 0;
  }

  void break_slab(int64_t slab, int64_t units, Size &size) {
    is_whole_[static_cast<size_t>(slab)] = false;
    if (num_needed(units, size) == 0) --num_spare_;
    size.loose += per_slab(units);
  }

  // True if a slot may be taken for its own size.
  bool is_allowed(uint32_t id, int64_t units, const Size &size) const {
    const int64_t slab = index_.slab_of(id);
    if (is_cut_.count(slab) != 0) return false;
    return !is_whole_[static_cast<size_t>(slab)] || may_break_a_slab(units, size);
  }

  void take_slot(uint32_t id, int64_t units, Size &size) {
    const int64_t slab = index_.slab_of(id);
    if (is_whole_[static_cast<size_t>(slab)]) break_slab(slab, units, size);
    --size.loose, --size.wanted;
    plan_->slots.push_back(id);
    if (!index_.slots_[id].is_backed)
      plan_->unbacked.emplace(index_.offset_of(id), index_.room_of(id));
  }

  void take_slots(const std::vector<uint32_t> &ids, int64_t units, Size &size) {
    for (const uint32_t id : ids) {
      if (size.wanted == 0) return;
      if (is_allowed(id, units, size)) take_slot(id, units, size);
    }
  }

  void take_slab(int64_t slab, int64_t units, Size &size) {
    break_slab(slab, units, size);
    is_cut_.insert(slab);
    const int64_t count = std::min(size.wanted, per_slab(units));
    size.loose -= count, size.wanted -= count;
    plan_->cuts.push_back({slab, units, count});
    plan_->unbacked.emplace(slab * index_.geometry_.slab_bytes, count * units * kUnit);
  }

  // The slab of another size that goes first, or -1. kept: also one in which something is kept.
  int64_t coldest_slab(int64_t units, bool kept) const {
    const auto found = std::find_if(used_.begin(), used_.end(), [&](int64_t slab) {
      const Slab &used = index_.slabs_[slab];
      return is_whole_[static_cast<size_t>(slab)] && used.units != units &&
             (kept || !is_ahead(used.lease_end, now_));
    });
    return found == used_.end() ? -1 : *found;
  }

  void take_unkept(const std::vector<uint32_t> &ids, int64_t units, Size &size) {
    auto next = ids.begin();
    int64_t slab = coldest_slab(units, false);
    while (size.wanted > 0) {
      next =
          std::find_if(next, ids.end(), [&](uint32_t id) { return is_allowed(id, units, size); });
      const bool is_there = next != ids.end();
      const bool may_change = slab >= 0 && may_break_a_slab(units, size);
      if (may_change && (!is_there || used_at(slab) < index_.slots_[*next].used_at)) {
        take_slab(slab, units, size);
        slab = coldest_slab(units, false);
      } else if (is_there) {
        take_slot(*next++, units, size);
      } else {
        return;
      }
    }
  }

  void choose(int64_t units, Size &size) {
    const Slots slots = slots_of(units);
    take_slots(slots.free, units, size);
    while (size.wanted > 0 && !unused_.empty() && may_break_a_slab(units, size)) {
      take_slab(unused_.front(), units, size);
      unused_.erase(unused_.begin());
    }
    take_unkept(slots.unkept, units, size);
    take_slots(slots.kept, units, size);
    while (size.wanted > 0) {
      const int64_t slab = coldest_slab(units, true);
      if (slab < 0 || !may_break_a_slab(units, size))
        throw Damaged();  // lists and descriptors disagree
      take_slab(slab, units, size);
    }
  }

  Index &index_;
  const Growth growth_;
  const int64_t now_;
  Plan *plan_;
  // By their units, the largest first: else a small one could break the slab that is to go whole.
  std::map<int64_t, Size, std::greater<>> wanted_;
  std::vector<bool> is_whole_;          // of each slab
  std::set<int64_t> is_cut_;            // slabs that get another size
  std::vector<int64_t> unused_, used_;  // whole slabs; the used ones by age
  int64_t num_spare_ = 0;               // whole slabs that no size needs
};

bool Index::make_plan(const std::vector<NewValue> &values, Growth growth, int64_t now, Plan *plan) {
  sweep(now);
  *plan = {};
  return Planner(*this, growth, now, plan).plan(values);
}

bool Index::carry_out(const Plan &plan, int64_t now) {
  const auto is_described = [&](const Plan::Cut &cut) {
    return describe(cut.slab, cut.units, now);
  };
  if (!std::all_of(plan.cuts.begin(), plan.cuts.end(), is_described)) return false;
  const auto take_first = [&](uint32_t id) {  // of its size, before what is not backed
    List &unused = class_of_slot(id).free;
    unlink(unused, id);
    add_newest(unused, id);
    slots_[id].is_backed = 1;
  };
  for (const uint32_t id : plan.slots) {
    free(id);
    take_first(id);
  }
  for (const auto &[slab, units, count] : plan.cuts) {
    if (slabs_[slab].units != 0) empty(slab);
    Class *sized = class_of(units);
    if (sized == nullptr) throw Damaged();
    cut(slab, *sized, now);
    for (int64_t i = 0; i < count; ++i) take_first(id_of(slab, i));
  }
  return true;
}

}  // namespace pds::arena
