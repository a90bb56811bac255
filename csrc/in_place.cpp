// Gathers values into an arena and scatters values from it, many in one call.
//
// If any value is missing, is wrong or finds no room, or if the lock is not free soon, the call
// ends with a code. The caller then goes step by step, to find out which value it was and why.
//
// Decision: a share of a save has many batches, each with its own event, and each is published as
// soon as it is sealed. So one call saves many values, and yet other instances hear of the first
// ones while the rest is copied.
// Decision: docs/decisions/018-in-place.md
//
// Decision: the device sums values in the paged cache, both those that it saves and those that it
// has loaded. Any process of this user may change an arena's byte before or after a copy; then the
// byte does not fit the sum.
// Decision: docs/decisions/040-arena-summed-after-the-copy.md
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "abi.h"
#include "checksum.h"

namespace {

using pds::Engine, pds::kHeaderBytes, pds::kSummedOfHeader;
using pds::arena::Arena, pds::arena::Keys, pds::arena::Places;

// The values of one batch, where they are in the arena, and their copies.
struct Batch {
  const pds_values &values;
  Keys keys{};
  Places places{};
  std::vector<int64_t> summed{};          // numbers of the values that the device sums
  std::shared_ptr<pds::Ticket> ticket{};  // null if nothing is to be copied

  bool is_summed(int64_t i) const { return std::binary_search(summed.begin(), summed.end(), i); }
  int64_t payload_bytes(int64_t i) const { return values.sizes[i] - kHeaderBytes; }
  char *value(int64_t i) const {
    return reinterpret_cast<char *>(values.memory + places[i].offset);
  }
  const char *start(int64_t i) const { return values.starts + i * kSummedOfHeader; }
};

// Chooses the values that the device sums: those that it can read in the cache as chunks.
void choose_summed(const pds::Layout &layout, Batch &batch) {
  int64_t room = pds::kMostDigests;
  for (int64_t i = 0; i < batch.values.count; ++i) {
    const pds_item &item = batch.values.items[i];
    if (batch.places[i].slot < 0) continue;
    room -= pds::num_chunks_of(batch.payload_bytes(i));
    if (room >= 0 && item.first_token == 0 && layout.holds(item) &&
        layout.parts[item.part].can_be_summed) {
      batch.summed.push_back(i);
    }
  }
}

// Starts the copies of the values that have a place, and their sums.
int32_t submit(Engine &engine, pds::Direction direction, Batch &batch) {
  const pds_values &values = batch.values;
  std::vector<pds_item> items;
  std::vector<int64_t> ids, summed;
  items.reserve(values.count), ids.reserve(values.num_ids);
  int64_t at = 0;
  for (int64_t i = 0; i < values.count; ++i) {
    pds_item item = values.items[i];
    const int64_t *first = values.ids + at;
    if (item.num_ids < 0 || item.num_ids > values.num_ids - at) return PDS_ERR_ARGUMENT;
    at += item.num_ids;
    if (batch.places[i].slot < 0) continue;
    const pds::Layout &layout = engine.layout();
    if (!layout.holds(item) || values.sizes[i] != kHeaderBytes + layout.payload_bytes(item)) {
      return PDS_ERR_ARGUMENT;
    }
    item.payload = values.memory + batch.places[i].offset + kHeaderBytes;
    if (batch.is_summed(i)) summed.push_back(static_cast<int64_t>(items.size()));
    items.push_back(item);
    ids.insert(ids.end(), first, first + item.num_ids);
  }
  if (items.empty() && values.count > 0) return PDS_OK;
  batch.ticket = engine.submit(direction, items, std::move(ids), nullptr,
                               reinterpret_cast<pds::Event>(values.ready), summed);
  return PDS_OK;
}

int32_t reserve(Arena &arena, Batch &batch, const uint8_t *kinds) {
  const pds_values &values = batch.values;
  const int32_t code =
      arena.reserve(batch.keys, kinds, values.sizes, &batch.places, values.lock_timeout_ns);
  const auto num_covered = static_cast<int64_t>(batch.places.size());
  return code == PDS_OK && num_covered < values.count ? int32_t{PDS_ERR_FULL} : code;
}

// Seals the values of a batch, whose copies have ended, and makes them findable.
int32_t seal_and_publish(Arena &arena, Engine &engine, const Batch &batch) {
  const pds_values &values = batch.values;
  const std::vector<uint64_t> &digests = batch.ticket->digests();
  std::vector<int64_t> others;
  for (int64_t i = 0, at = 0; i < values.count; ++i) {
    if (batch.is_summed(i)) {
      const int64_t end = at + pds::num_chunks_of(batch.payload_bytes(i));
      if (end > static_cast<int64_t>(digests.size())) return PDS_ERR_VALUE;
      pds::Sum sum;
      sum.add_header(batch.start(i));
      sum.add_payload(digests.data() + at, batch.payload_bytes(i));
      at = end;
      pds::set_header(batch.value(i), batch.start(i), sum.digest());
    } else if (batch.places[i].slot >= 0) {
      others.push_back(i);
    }
  }
  engine.crew().each(others.size(), [&](int64_t n) {
    const int64_t i = others[n];
    pds::Sum sum;
    sum.add_header(batch.start(i));
    sum.add(batch.value(i) + kHeaderBytes, batch.payload_bytes(i));
    pds::set_header(batch.value(i), batch.start(i), sum.digest());
  });
  int64_t done = 0;
  const int32_t code = arena.publish(batch.places, &done, values.lock_timeout_ns);
  return code == PDS_OK && done < values.count ? int32_t{PDS_ERR_VALUE} : code;
}

// All copies are queued before the first is waited for, each after the event of its batch. So the
// device computes the layers of a later batch while values of an earlier one are sealed. A step
// that runs out of memory must not end the call: copies may run, and places are held.
int32_t fill(Arena &arena, Engine &engine, std::vector<Batch> &batches, const uint8_t *kinds,
             int64_t *done, pds_error *error) {
  int32_t code = PDS_OK;
  const auto step = [&](auto body) {
    if (code == PDS_OK) code = pds::guarded(error, body);
  };
  for (Batch &batch : batches) {
    step([&] { return reserve(arena, batch, kinds); });
    kinds += batch.values.count;
  }
  for (Batch &batch : batches) {
    step([&] {
      choose_summed(engine.layout(), batch);
      return submit(engine, pds::Direction::kOut, batch);
    });
  }
  for (Batch &batch : batches) {
    if (batch.ticket != nullptr) {
      const pds_error end = batch.ticket->end();  // also after a failure: the device still writes
      step([&] { return pds::report(end, error); });
      step([&] { return seal_and_publish(arena, engine, batch); });
    }
    *done += code == PDS_OK;
  }
  for (size_t i = *done; i < batches.size(); ++i) {
    const Batch &left = batches[i];
    if (!left.places.empty()) arena.abandon(left.places, left.values.lock_timeout_ns);
  }
  return code;
}

// Keeps the headers of the values that the device sums after their copies.
int32_t expect_sums(const Batch &batch, std::vector<pds::PendingSum> *pending_sums) {
  for (const int64_t i : batch.summed) {
    pending_sums->push_back({i, batch.payload_bytes(i), {}});
    char *header = pending_sums->back().header.data();
    std::memcpy(header, batch.value(i), kHeaderBytes);
    if (std::memcmp(header, batch.start(i), kSummedOfHeader) != 0) return PDS_ERR_VALUE;
  }
  return PDS_OK;
}

int32_t start_scatter(Arena &arena, Engine &engine, Batch &batch,
                      std::vector<pds::PendingSum> *pending_sums) {
  const pds_values &values = batch.values;
  int32_t code = arena.borrow(batch.keys, values.sizes, &batch.places, values.lock_timeout_ns,
                              Arena::Leases::kEnd);
  if (code != PDS_OK) return code;
  if (static_cast<int64_t>(batch.places.size()) < values.count) return PDS_ERR_VALUE;
  choose_summed(engine.layout(), batch);
  code = expect_sums(batch, pending_sums);
  if (code != PDS_OK) return code;
  std::vector<int64_t> others;
  for (int64_t i = 0; i < values.count; ++i) {
    if (!batch.is_summed(i)) others.push_back(i);
  }
  std::atomic<bool> all_right{true};
  engine.crew().each(others.size(), [&](int64_t n) {
    const int64_t i = others[n];
    const auto is_right = [&] {
      const uint64_t sum = pds::sum_of(batch.value(i), values.sizes[i]);
      return pds::is_header(batch.value(i), batch.start(i), sum);
    };
    if (all_right && !is_right()) all_right = false;
  });
  return all_right ? submit(engine, pds::Direction::kIn, batch) : PDS_ERR_VALUE;
}

// Counts the leading values that were right when they were copied.
int64_t num_right(const pds_ticket &ticket) {
  const std::vector<uint64_t> &digests = ticket.ticket->digests();
  int64_t at = 0;
  for (const pds::PendingSum &value : ticket.pending_sums) {
    const int64_t end = at + pds::num_chunks_of(value.payload_bytes);
    if (end > static_cast<int64_t>(digests.size())) return value.number;
    pds::Sum sum;
    sum.add_header(value.header.data());
    sum.add_payload(digests.data() + at, value.payload_bytes);
    at = end;
    const char *header = value.header.data();
    if (!pds::is_header(header, header, sum.digest())) return value.number;
  }
  return ticket.places.size();
}

// Calls body(batches) if the arguments are valid.
template <typename Body>
int32_t with_batches(const pds_values *all, int64_t count, pds_error *error, Body body) {
  *error = {};
  return pds::guarded(error, [&] {
    std::vector<Batch> batches;
    for (const pds_values *values = all; values < all + count; ++values) {
      batches.push_back({*values});
      if (values->count < 0 || values->num_ids < 0 ||
          !pds::arena::are_sizes(values->sizes, values->count, kHeaderBytes) ||
          !pds::arena::read_keys(values->keys, values->count, &batches.back().keys)) {
        return int32_t{PDS_ERR_ARGUMENT};
      }
    }
    return body(batches);
  });
}

}  // namespace

extern "C" int32_t pds_arena_fill(pds_arena *arena, pds_engine *engine, const pds_values *batches,
                                  int64_t num_batches, const uint8_t *kinds, uint8_t *is_new,
                                  int64_t *done, pds_error *error) {
  *done = 0;
  return with_batches(batches, num_batches, error, [&](std::vector<Batch> &parts) {
    int64_t count = 0;
    for (const Batch &part : parts) count += part.values.count;
    if (!pds::arena::are_kinds(kinds, count)) return int32_t{PDS_ERR_ARGUMENT};
    const int32_t code = fill(*arena->arena, *engine, parts, kinds, done, error);
    for (int64_t i = 0; i < *done; ++i) {
      for (const auto &place : parts[i].places) *is_new++ = place.slot >= 0;
    }
    return code;
  });
}

extern "C" int32_t pds_arena_take(pds_arena *arena, pds_engine *engine, const pds_values *values,
                                  pds_ticket **ticket, pds_error *error) {
  return with_batches(values, 1, error, [&](std::vector<Batch> &batches) {
    auto made = std::make_unique<pds_ticket>();
    Batch &batch = batches.front();
    const int32_t code = start_scatter(*arena->arena, *engine, batch, &made->pending_sums);
    if (code == PDS_OK) {
      made->places = std::move(batch.places);
      made->ticket = std::move(batch.ticket);
      *ticket = made.release();
    }
    return code;
  });
}

extern "C" int32_t pds_arena_confirm(pds_arena *arena, const pds_ticket *ticket, int64_t *there,
                                     int64_t *right) {
  *right = num_right(*ticket);
  *there = arena->arena->still_there(ticket->places);
  return PDS_OK;
}
