// Values that are gathered into an arena or scattered from it, a call for many of them.
//
// Decision: whoever calls from Python holds its lock between calls, and takes it from the engine
// after each. So all that is done with the values of one share of a save is one call, and all but
// the wait for the copies of a share of a load. Only what goes well is done here: if any value is
// missing, wrong or has no room, or the lock is not free soon, then the call ends with a code, and
// the caller goes step by step to find out which and why.
//
// Decision: a share of a save is many batches, each with an event of its own, and each is published
// as soon as it is sealed: few calls for much, and yet whoever loads the values hears of them while
// the rest is copied.
// Decision: docs/decisions/018-in-place.md
#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
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
                   std::shared_ptr<pds::Ticket> *ticket,
                   const std::vector<int64_t> &summed = {}) const {
    return engine.submit(direction, items_.data(), items_.size(), ids_.data(), ids_.size(), nullptr,
                         reinterpret_cast<pds::Event>(values_.ready), ticket, summed);
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

// One batch of a call.
struct Part {
  const pds_values &values;
  Keys keys;
  const uint8_t *kinds;  // null where nothing is reserved
  Places places;
  std::shared_ptr<pds::Ticket> ticket{};  // of its copies; null if nothing is to be copied
};

int32_t reserve(Arena &arena, Part &part) {
  const pds_values &values = part.values;
  int64_t covered = 0;
  const int32_t code =
      arena.reserve(part.keys, part.kinds, values.sizes, part.places, &covered, values.lock_ns);
  if (code != PDS_OK || covered == values.count) return code;
  arena.abandon(part.places, covered, -1);
  return PDS_ERR_FULL;
}

int32_t submit(pds::Engine &engine, Part &part, pds_error *error) {
  Copies copies(part.values, part.places);
  if (!copies.add_all(engine.layout())) return PDS_ERR_ARGUMENT;
  if (copies.empty()) return PDS_OK;
  std::shared_ptr<pds::Ticket> ticket;  // nobody ends it if the copies are refused
  *error = copies.submit(engine, pds::Direction::kOut, &ticket);
  if (error->code == PDS_OK) part.ticket = std::move(ticket);
  return error->code;
}

// Makes the values findable whose copies have ended.
int32_t seal_and_publish(Arena &arena, pds::Engine &engine, const Part &part) {
  const pds_values &values = part.values;
  engine.crew().each(values.count, [&](int64_t i) {
    if (part.places.slots[i] < 0) return;
    seal(pointer(values.memory) + part.places.offsets[i], values.sizes[i],
         values.starts + i * kSummedOfHeader);
  });
  std::vector<int64_t> slots(part.places.slots, part.places.slots + values.count);
  Places places = part.places;
  places.slots = slots.data();
  int64_t done = 0;
  const int32_t code = arena.publish(places, values.count, &done, values.lock_ns);
  return code == PDS_OK && done < values.count ? int32_t{PDS_ERR_VALUE} : code;
}

// The code of a step that finds no memory: copies may be under way, and places are held.
template <typename Step>
int32_t without_memory(Step step) {
  try {
    return step();
  } catch (const std::bad_alloc &) {
    return PDS_ERR_MEMORY;
  }
}

// All copies are queued before the first is waited for, each behind the event of its batch. So the
// device computes the layers of a later batch while those of an earlier one are summed.
int32_t fill(Arena &arena, pds::Engine &engine, std::vector<Part> &parts, int64_t *done,
             pds_error *error) {
  size_t num_reserved = 0;
  int32_t code = PDS_OK;
  for (; num_reserved < parts.size() && code == PDS_OK; num_reserved += code == PDS_OK) {
    code = without_memory([&] { return reserve(arena, parts[num_reserved]); });
  }
  for (size_t i = 0; i < parts.size() && code == PDS_OK; ++i) {
    code = without_memory([&] { return submit(engine, parts[i], error); });
  }
  for (Part &part : parts) {
    if (part.ticket != nullptr) {
      const pds_error end = ended(*part.ticket);  // also after a failure: the device still writes
      if (code == PDS_OK && end.code != PDS_OK) *error = end, code = end.code;
      if (code == PDS_OK) {
        code = without_memory([&] { return seal_and_publish(arena, engine, part); });
      }
    }
    *done += code == PDS_OK;
  }
  for (size_t i = *done; i < num_reserved; ++i) {
    arena.abandon(parts[i].places, parts[i].values.count, -1);
  }
  return code;
}

// The numbers of the values that the device sums after their copies.
std::vector<int64_t> to_be_summed(const pds::Layout &layout, const pds_values &values) {
  std::vector<int64_t> summed;
  int64_t room = pds::kMostDigests;
  for (int64_t i = 0; i < values.count; ++i) {
    const pds_item &item = values.items[i];
    room -= pds::num_chunks_of(values.sizes[i] - kHeaderBytes);
    if (room >= 0 && item.part >= 0 && item.part < layout.num_parts() && item.first_token == 0 &&
        layout.part(item.part).can_be_summed) {
      summed.push_back(i);
    }
  }
  return summed;
}

int32_t take(Arena &arena, pds::Engine &engine, Part &part, std::vector<pds::Awaited> *awaited,
             pds_error *error) {
  const pds_values &values = part.values;
  const Places places = part.places;
  int64_t found = 0;
  const int32_t code = arena.borrow(part.keys, values.sizes, places, &found, values.lock_ns);
  if (code != PDS_OK) return code;
  if (found < values.count) return PDS_ERR_VALUE;
  const std::vector<int64_t> summed = to_be_summed(engine.layout(), values);
  for (const int64_t i : summed) {
    awaited->push_back({i, values.sizes[i] - kHeaderBytes, {}});
    std::memcpy(awaited->back().header.data(), pointer(values.memory) + places.offsets[i],
                kHeaderBytes);
    if (std::memcmp(awaited->back().header.data(), values.starts + i * kSummedOfHeader,
                    kSummedOfHeader) != 0) {
      return PDS_ERR_VALUE;
    }
  }
  std::atomic<bool> all_right{true};
  const auto verify = [&](int64_t i) {
    if (!all_right || std::binary_search(summed.begin(), summed.end(), i) ||
        is_right(pointer(values.memory) + places.offsets[i], values.sizes[i],
                 values.starts + i * kSummedOfHeader)) {
      return;
    }
    all_right = false;
  };
  if (static_cast<int64_t>(summed.size()) < values.count) {
    engine.crew().each(values.count, verify);
  }
  if (!all_right) return PDS_ERR_VALUE;
  Copies copies(values, places);
  if (!copies.add_all(engine.layout())) return PDS_ERR_ARGUMENT;
  *error = copies.submit(engine, pds::Direction::kIn, &part.ticket, summed);
  return error->code;
}

bool can_be(const pds_values &values) {
  if (!values.memory || !values.starts || !values.items || values.num_ids < 0 ||
      (values.num_ids > 0 && !values.ids) || !pds::arena::are_sizes(values.sizes, values.count)) {
    return false;
  }
  return std::all_of(values.sizes, values.sizes + values.count,
                     [](int64_t size) { return size >= kHeaderBytes; });
}

// Counts the first values that were right when they were copied.
int64_t num_right(const pds_ticket &ticket) {
  const std::vector<uint64_t> &digests = ticket.ticket->digests();
  int64_t at = 0;
  for (const pds::Awaited &value : ticket.awaited) {
    const int64_t end = at + pds::num_chunks_of(value.payload_bytes);
    if (end > static_cast<int64_t>(digests.size())) return value.number;
    pds::Sum sum;
    sum.add(value.header.data(), 0, kHeaderBytes);
    sum.add_payload(digests.data() + at, value.payload_bytes);
    at = end;
    const uint64_t digest = sum.digest();
    if (std::memcmp(value.header.data() + kSummedOfHeader, &digest, sizeof digest) != 0) {
      return value.number;
    }
  }
  return ticket.slots.size();
}

// Where the values of a call are in the arena.
struct Held {
  explicit Held(int64_t count) : slots(count, -1), generations(count), offsets(count) {}
  std::vector<int64_t> slots;
  std::vector<uint64_t> generations;
  std::vector<int64_t> offsets;
};

// Calls body(arena, engine, parts, held) if the arguments can be what they should be.
template <typename Body>
int32_t with_parts(pds_arena *arena, pds_engine *engine, const pds_values *batches,
                   int64_t num_batches, pds_error *error, Body body) {
  if (!arena || !engine || !batches || num_batches < 1 || !error) return PDS_ERR_ARGUMENT;
  *error = {};
  if (!engine->engine->is_of_this_process()) return PDS_ERR_CLOSED;  // nor is its crew
  try {
    int64_t count = 0;
    for (const pds_values *values = batches; values < batches + num_batches; ++values) {
      if (!can_be(*values)) return PDS_ERR_ARGUMENT;
      count += values->count;
    }
    Held held(count);
    Places places{held.slots.data(), held.generations.data(), held.offsets.data()};
    std::vector<Part> parts;
    for (const pds_values *values = batches; values < batches + num_batches; ++values) {
      parts.push_back({*values, {}, nullptr, places});
      if (!pds::arena::read_keys(values->keys, values->count, &parts.back().keys)) {
        return PDS_ERR_ARGUMENT;
      }
      places = places.from(values->count);
    }
    return body(*arena->arena, *engine->engine, parts, held);
  } catch (const std::bad_alloc &) {
    return PDS_ERR_MEMORY;
  }
}

}  // namespace

extern "C" int32_t pds_arena_fill(pds_arena *arena, pds_engine *engine, const pds_values *batches,
                                  int64_t num_batches, const uint8_t *kinds, uint8_t *is_new,
                                  int64_t *done, pds_error *error) {
  if (!done || !is_new) return PDS_ERR_ARGUMENT;
  *done = 0;
  const auto body = [&](Arena &a, pds::Engine &e, std::vector<Part> &parts, const Held &held) {
    for (Part &part : parts) {
      const int64_t count = part.values.count;
      if (!pds::arena::are_kinds(kinds, count)) return int32_t{PDS_ERR_ARGUMENT};
      part.kinds = kinds;
      kinds += count;
    }
    const int32_t code = fill(a, e, parts, done, error);
    std::transform(held.slots.begin(), held.slots.end(), is_new,
                   [](int64_t slot) { return slot >= 0; });
    return code;
  };
  return with_parts(arena, engine, batches, num_batches, error, body);
}

extern "C" int32_t pds_arena_take(pds_arena *arena, pds_engine *engine, const pds_values *values,
                                  pds_ticket **ticket, pds_error *error) {
  if (!ticket) return PDS_ERR_ARGUMENT;
  const auto body = [&](Arena &a, pds::Engine &e, std::vector<Part> &parts, Held &held) {
    auto made = std::make_unique<pds_ticket>();
    const int32_t code = take(a, e, parts.front(), &made->awaited, error);
    if (code == PDS_OK) {
      made->slots = std::move(held.slots), made->generations = std::move(held.generations);
      made->ticket = std::move(parts.front().ticket);
      *ticket = made.release();
    }
    return code;
  };
  return with_parts(arena, engine, values, 1, error, body);
}

extern "C" int32_t pds_arena_confirm(pds_arena *arena, const pds_ticket *ticket, int64_t *there,
                                     int64_t *right) {
  if (!arena || !ticket || !there || !right) return PDS_ERR_ARGUMENT;
  *right = num_right(*ticket);
  const int64_t count = ticket->slots.size();
  std::vector<int64_t> slots = ticket->slots;
  std::vector<uint64_t> generations = ticket->generations;
  *there = arena->arena->still_there({slots.data(), generations.data(), nullptr}, count);
  return PDS_OK;
}
