// The C interface: no exception leaves it, no null pointer enters.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "handles.h"

namespace {

using pds::error_of;

int32_t say(const pds_error &error, pds_error *out) {
  if (out != nullptr) *out = error;
  return error.code;
}

int32_t bad(const char *why, pds_error *out) { return say(error_of(PDS_ERR_ARGUMENT, why), out); }

// Runs `body`, which returns a code; running out of memory is a code too.
template <typename Body>
int32_t guarded(pds_error *out, Body body) {
  try {
    return body();
  } catch (const std::bad_alloc &) {
    return say(error_of(PDS_ERR_MEMORY, "out of host memory"), out);
  } catch (const std::exception &error) {
    return say(error_of(PDS_ERR_ARGUMENT, error.what()), out);
  }
}

bool is_direction(int32_t direction) { return direction == PDS_OUT || direction == PDS_IN; }

// Calls body(device) on a device from a caller's thread.
template <typename Body>
int32_t on_device(int32_t index, const char *call, pds_error *error, Body body) {
  return guarded(error, [&] {
    if (index < PDS_CPU || index >= pds::count_cuda_devices()) {
      return say(error_of(PDS_ERR_NO_DEVICE, "no such device"), error);
    }
    const auto device = pds::open_device(index);
    if (device == nullptr) return say(error_of(PDS_ERR_NO_DEVICE, "no such device"), error);
    const pds::OnDevice scope(*device);
    const int code = scope.code() != 0 ? scope.code() : body(*device);
    if (code == 0) return say({}, error);
    return say(error_of(PDS_ERR_DEVICE, device->describe(code), code, call), error);
  });
}

}  // namespace

extern "C" int32_t pds_info(pds_info_t *info) {
  if (info == nullptr) return PDS_ERR_ARGUMENT;
  pds_live live;
  const bool has_faults = pds_test_live(&live) == PDS_OK;
  *info = {PDS_ABI, pds::built_with_cuda(), pds::count_cuda_devices(), has_faults};
  return PDS_OK;
}

extern "C" int32_t pds_open(const pds_options *options, const pds_part *parts,
                            const pds_region *regions, pds_engine **engine, pds_error *error) {
  if (!options || !parts || !regions || !engine || !error) return bad("a null pointer", error);
  return guarded(error, [&] {
    *error = {};
    auto made = pds::Engine::open(*options, parts, regions, error);
    if (made == nullptr) return error->code;
    *engine = new pds_engine{std::move(made)};
    return int32_t{PDS_OK};
  });
}

extern "C" int32_t pds_close(pds_engine *engine) {
  if (engine == nullptr) return PDS_ERR_ARGUMENT;
  if (!engine->engine->is_of_this_process()) return PDS_ERR_CLOSED;  // a fork has no such threads
  delete engine;
  return PDS_OK;
}

extern "C" int32_t pds_stop(pds_engine *engine) {
  if (engine == nullptr) return PDS_ERR_ARGUMENT;
  if (!engine->engine->is_of_this_process()) return PDS_ERR_CLOSED;
  engine->engine->stop();
  return PDS_OK;
}

extern "C" int32_t pds_add_host(pds_engine *engine, uint64_t address, int64_t bytes) {
  if (engine == nullptr) return PDS_ERR_ARGUMENT;
  return guarded(nullptr, [&] { return engine->engine->add_host(address, bytes); });
}

extern "C" int32_t pds_explain(const pds_engine *engine, int32_t direction, int32_t part,
                               int32_t num_tokens, pds_plan *plan) {
  if (!engine || !plan || !is_direction(direction) || part < 0 ||
      part >= engine->engine->layout().num_parts() || num_tokens < 1) {
    return PDS_ERR_ARGUMENT;
  }
  return guarded(nullptr, [&] {
    const pds::Plan found =
        engine->engine->explain(static_cast<pds::Direction>(direction), part, num_tokens);
    *plan = {static_cast<int32_t>(found.path),
             found.num_pieces,
             found.piece_bytes,
             found.block_bytes,
             {}};
    std::snprintf(plan->why, sizeof plan->why, "%s", found.why.c_str());
    return int32_t{PDS_OK};
  });
}

extern "C" int32_t pds_get_stats(pds_engine *engine, int32_t direction, pds_stats *stats) {
  if (!engine || !stats || !is_direction(direction)) return PDS_ERR_ARGUMENT;
  *stats = engine->engine->stats(static_cast<pds::Direction>(direction));
  return PDS_OK;
}

extern "C" int32_t pds_submit(pds_engine *engine, int32_t direction, const pds_item *items,
                              int64_t num_items, const int64_t *ids, int64_t num_ids,
                              uint64_t stream, uint64_t ready, pds_ticket **ticket,
                              pds_error *error) {
  if (!engine || !ticket || !is_direction(direction)) return bad("a null pointer", error);
  if (num_items < 0 || num_ids < 0 || (num_items > 0 && !items) || (num_ids > 0 && !ids)) {
    return bad("no items or ids", error);
  }
  return guarded(error, [&] {
    auto made = std::make_unique<pds_ticket>();
    const pds_error failed = engine->engine->submit(
        static_cast<pds::Direction>(direction), items, num_items, ids, num_ids,
        reinterpret_cast<pds::Stream>(stream), reinterpret_cast<pds::Event>(ready), &made->ticket);
    if (failed.code == PDS_OK) *ticket = made.release();
    return say(failed, error);
  });
}

extern "C" int32_t pds_wait(pds_ticket *ticket, int64_t timeout_us, pds_error *error) {
  if (ticket == nullptr) return bad("a null pointer", error);
  return ticket->ticket->wait(timeout_us, error);
}

extern "C" int32_t pds_free_ticket(pds_ticket *ticket) {
  delete ticket;
  return PDS_OK;
}

extern "C" int32_t pds_register(int32_t device, uint64_t address, int64_t bytes, pds_error *error) {
  if (address == 0 || bytes < 1) return bad("no memory", error);
  return on_device(device, "cudaHostRegister", error,
                   [&](pds::Device &d) { return d.register_host(address, bytes); });
}

extern "C" int32_t pds_unregister(int32_t device, uint64_t address, pds_error *error) {
  if (address == 0) return bad("no memory", error);
  return on_device(device, "cudaHostUnregister", error,
                   [&](pds::Device &d) { return d.unregister_host(address); });
}

extern "C" int32_t pds_populate(uint64_t address, int64_t bytes) {
  constexpr int64_t kPage = 4096;
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14
  if (address == 0 || bytes < 1) return PDS_ERR_ARGUMENT;
  if (address % kPage == 0) {
    if (madvise(reinterpret_cast<void *>(address), bytes, kPopulateWrite) == 0) return PDS_OK;
    if (errno != EINVAL) return PDS_ERR_MEMORY;  // a touch would be a SIGBUS
  }
  // In one step: what others write to the same memory meanwhile is not undone.
  auto *memory = reinterpret_cast<char *>(address);
  for (int64_t at = 0; at < bytes; at += kPage) __atomic_fetch_or(memory + at, 0, __ATOMIC_RELAXED);
  __atomic_fetch_or(memory + bytes - 1, 0, __ATOMIC_RELAXED);
  return PDS_OK;
}

extern "C" int32_t pds_exchange_capture_mode(int32_t *mode) {
  if (mode == nullptr || *mode < 0 || *mode > PDS_RELAXED) return PDS_ERR_ARGUMENT;
  return pds::exchange_capture_mode(mode) == 0 ? PDS_OK : PDS_ERR_DEVICE;
}
