// Values that are gathered into an arena or scattered from it, a call for many of them.
//
// Decision: whoever calls from Python holds its lock between calls, and takes it from the engine
// after each. So all that is done with the values of one share of a save is one call, and all but
// the wait for the copies of a share of a load. Only what goes well is done here: if any value is
// missing, wrong or has no room, or the lock is not free soon, then nothing is done, and the caller
// goes step by step to find out which and why.
//
// Decision: a share of a save is published here, and then its caller may rest for a moment. P's
// answer comes soon after the copies of its last layers, and must not wait for the lock that the
// workers' Python takes; whoever loads the values has heard of them by then.
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "checksum.h"
#include "handles.h"

namespace {

using pds::kHeaderBytes, pds::kSummedOfHeader;
using pds::arena::Arena;
using pds::arena::Keys;
using pds::arena::Places;

char *pointer(uint64_t address) { return reinterpret_cast<char *>(address); }

// A copy of the items with their payloads' places, and what else the engine takes.
class Copies {
 public:
  Copies(const pds_values &values, Places places) : values_(values), places_(places) {
    items_.reserve(values.count), ids_.reserve(values.num_ids);
  }

  // Adds the i-th value's copy; `ids`: its first. False if it does not fit the value.
  bool add(const pds::Layout &layout, int64_t i, const int64_t *ids) {
    pds_item item = values_.items[i];
    if (item.part < 0 || item.part >= layout.num_parts() || item.num_tokens < 1 ||
        item.num_tokens > layout.max_tokens()) {
      return false;
    }
    if (values_.sizes[i] != kHeaderBytes + layout.payload_bytes(item.part, item.num_tokens)) {
      return false;
    }
    item.payload = values_.memory + places_.offsets[i] + kHeaderBytes;
    items_.push_back(item);
    ids_.insert(ids_.end(), ids, ids + item.num_ids);
    return true;
  }

  // Adds all values that have a place.
  bool add_all(const pds::Layout &layout) {
    int64_t at = 0;
    for (int64_t i = 0; i < values_.count; ++i) {
      const int32_t num_ids = values_.items[i].num_ids;
      if (num_ids < 0 || at + num_ids > values_.num_ids) return false;
      if (places_.slots[i] >= 0 && !add(layout, i, values_.ids + at)) return false;
      at += num_ids;
    }
    return true;
  }

  pds_error submit(pds::Engine &engine, pds::Direction direction,
                   std::shared_ptr<pds::Ticket> *ticket) const {
    return engine.submit(direction, items_.data(), items_.size(), ids_.data(), ids_.size(), nullptr,
                         reinterpret_cast<pds::Event>(values_.ready), ticket);
  }
  bool empty() const { return items_.empty(); }

 private:
  const pds_values &values_;
  Places places_;
  std::vector<pds_item> items_;
  std::vector<int64_t> ids_;
};

uint64_t sum_of(const char *value, int64_t bytes) {
  pds::Sum sum;
  sum.add(value, 0, bytes);
  return sum.digest();
}

void seal(char *value, int64_t bytes, const char *start) {
  std::memcpy(value, start, kSummedOfHeader);
  const uint64_t digest = sum_of(value, bytes);  // little-endian, as every machine we build for
  std::memcpy(value + kSummedOfHeader, &digest, sizeof digest);
}

bool is_right(const char *value, int64_t bytes, const char *start) {
  if (std::memcmp(value, start, kSummedOfHeader) != 0) return false;
  const uint64_t digest = sum_of(value, bytes);
  return std::memcmp(value + kSummedOfHeader, &digest, sizeof digest) == 0;
}

// Until the end the device may write to the payloads, so there is no limit.
pds_error ended(pds::Ticket &ticket) {
  constexpr int64_t kLongUs = 60'000'000;
  pds_error error{};
  while (ticket.wait(kLongUs, &error) == PDS_PENDING) continue;
  return error;
}

// True if all values with a slot were published; `places` keeps their slots.
bool publish(Arena &arena, const pds_values &values, Places places) {
  std::vector<int64_t> slots(places.slots, places.slots + values.count);
  int64_t done = 0;
  places.slots = slots.data();
  return arena.publish(places, values.count, &done, values.lock_ns) == PDS_OK &&
         done == values.count;
}

int32_t fill(Arena &arena, pds::Engine &engine, const pds_values &values, const Keys &keys,
             const uint8_t *kinds, int64_t rest_ns, Places places, int32_t *is_published,
             pds_error *error) {
  int64_t covered = 0;
  const int32_t code = arena.reserve(keys, kinds, values.sizes, places, &covered, values.lock_ns);
  if (code != PDS_OK) return code;
  const auto refuse = [&](int32_t why) {
    arena.abandon(places, covered, -1);
    return why;
  };
  if (covered < values.count) return refuse(PDS_ERR_FULL);
  Copies copies(values, places);
  if (!copies.add_all(engine.layout())) return refuse(PDS_ERR_ARGUMENT);
  if (copies.empty()) return PDS_OK;
  std::shared_ptr<pds::Ticket> ticket;
  *error = copies.submit(engine, pds::Direction::kOut, &ticket);
  if (error->code == PDS_OK) *error = ended(*ticket);
  if (error->code != PDS_OK) return refuse(error->code);
  engine.crew().each(values.count, [&](int64_t i) {
    if (places.slots[i] < 0) return;
    seal(pointer(values.memory) + places.offsets[i], values.sizes[i],
         values.starts + i * kSummedOfHeader);
  });
  if (rest_ns >= 0 && publish(arena, values, places)) {
    *is_published = 1;
    std::this_thread::sleep_for(std::chrono::nanoseconds(rest_ns));
  }
  return PDS_OK;
}

int32_t take(Arena &arena, pds::Engine &engine, const pds_values &values, const Keys &keys,
             Places places, std::shared_ptr<pds::Ticket> *ticket, pds_error *error) {
  int64_t found = 0;
  const int32_t code = arena.borrow(keys, values.sizes, places, &found, values.lock_ns);
  if (code != PDS_OK) return code;
  if (found < values.count) return PDS_ERR_VALUE;
  std::atomic<bool> all_right{true};
  engine.crew().each(values.count, [&](int64_t i) {
    if (!all_right || is_right(pointer(values.memory) + places.offsets[i], values.sizes[i],
                               values.starts + i * kSummedOfHeader)) {
      return;
    }
    all_right = false;
  });
  if (!all_right) return PDS_ERR_VALUE;
  Copies copies(values, places);
  if (!copies.add_all(engine.layout())) return PDS_ERR_ARGUMENT;
  *error = copies.submit(engine, pds::Direction::kIn, ticket);
  return error->code;
}

// Calls body(arena, engine, keys) if the arguments can be what they should be.
template <typename Body>
int32_t with_values(pds_arena *arena, pds_engine *engine, const pds_values *values,
                    pds_error *error, Body body) {
  if (!arena || !engine || !values || !error) return PDS_ERR_ARGUMENT;
  *error = {};
  if (!engine->engine->is_of_this_process()) return PDS_ERR_CLOSED;  // nor is its crew
  if (!values->memory || !values->starts || !values->items || values->num_ids < 0 ||
      (values->num_ids > 0 && !values->ids) ||
      !pds::arena::are_sizes(values->sizes, values->count)) {
    return PDS_ERR_ARGUMENT;
  }
  for (int64_t i = 0; i < values->count; ++i) {
    if (values->sizes[i] < kHeaderBytes) return PDS_ERR_ARGUMENT;
  }
  try {
    Keys keys;
    if (!pds::arena::read_keys(values->keys, values->count, &keys)) return PDS_ERR_ARGUMENT;
    return body(*arena->arena, *engine->engine, keys);
  } catch (const std::bad_alloc &) {
    return PDS_ERR_MEMORY;
  }
}

}  // namespace

extern "C" int32_t pds_arena_fill(pds_arena *arena, pds_engine *engine, const pds_values *values,
                                  const uint8_t *kinds, int64_t rest_ns, int64_t *slots,
                                  uint64_t *generations, int64_t *offsets, int32_t *is_published,
                                  pds_error *error) {
  if (!slots || !generations || !offsets || !is_published) return PDS_ERR_ARGUMENT;
  *is_published = 0;
  return with_values(arena, engine, values, error, [&](Arena &a, pds::Engine &e, const Keys &keys) {
    if (!pds::arena::are_kinds(kinds, values->count)) return int32_t{PDS_ERR_ARGUMENT};
    return fill(a, e, *values, keys, kinds, rest_ns, {slots, generations, offsets}, is_published,
                error);
  });
}

extern "C" int32_t pds_arena_take(pds_arena *arena, pds_engine *engine, const pds_values *values,
                                  int64_t *slots, uint64_t *generations, int64_t *offsets,
                                  pds_ticket **ticket, pds_error *error) {
  if (!slots || !generations || !offsets || !ticket) return PDS_ERR_ARGUMENT;
  return with_values(arena, engine, values, error, [&](Arena &a, pds::Engine &e, const Keys &keys) {
    auto made = std::make_unique<pds_ticket>();
    const int32_t code =
        take(a, e, *values, keys, {slots, generations, offsets}, &made->ticket, error);
    if (code == PDS_OK) *ticket = made.release();
    return code;
  });
}
