// The C interface of the engine and of host memory.
#include "abi.h"

#include <sys/mman.h>

#include <cerrno>

namespace {

using pds::error_of, pds::guarded, pds::report;

// Calls body(device) on a device from a caller's thread.
template <typename Body>
int32_t on_device(int32_t index, const char *call, pds_error *error, Body body) {
  return guarded(error, [&] {
    const auto device = pds::open_device(index);
    if (device == nullptr) return report(error_of(PDS_ERR_NO_DEVICE, "no such device"), error);
    const pds::OnDevice scope(*device);
    const int code = scope.code() != 0 ? scope.code() : body(*device);
    if (code == 0) return report({}, error);
    return report(error_of(PDS_ERR_DEVICE, device->describe(code), code, call), error);
  });
}

}  // namespace

extern "C" int32_t pds_info(pds_info_t *info) {
  pds_live live;
  const bool has_faults = pds_test_live(&live) == PDS_OK;
  *info = {PDS_ABI, pds::built_with_cuda(), pds::count_cuda_devices(), has_faults};
  return PDS_OK;
}

extern "C" int32_t pds_open(const pds_options *options, const pds_part *parts,
                            const pds_region *regions, pds_engine **engine, pds_error *error) {
  return guarded(error, [&] {
    *error = {};
    auto made = pds::Engine::open(*options, parts, regions, error);
    if (made != nullptr) *engine = new pds_engine{std::move(made)};
    return error->code;
  });
}

extern "C" int32_t pds_close(pds_engine *engine) {
  if (!engine->engine->is_of_this_process()) return PDS_ERR_CLOSED;  // a fork has no such threads
  delete engine;
  return PDS_OK;
}

extern "C" int32_t pds_stop(pds_engine *engine) {
  if (!engine->engine->is_of_this_process()) return PDS_ERR_CLOSED;
  engine->engine->stop();
  return PDS_OK;
}

extern "C" int32_t pds_add_host(pds_engine *engine, uint64_t address, int64_t bytes) {
  return guarded(nullptr, [&] { return engine->engine->add_host(address, bytes); });
}

extern "C" int32_t pds_explain(const pds_engine *engine, int32_t direction, int32_t part,
                               int32_t num_tokens, pds_plan *plan) {
  pds_item item{};
  item.part = part, item.num_tokens = num_tokens;
  if (!engine->engine->layout().holds(item)) return PDS_ERR_ARGUMENT;
  *plan = engine->engine->explain(static_cast<pds::Direction>(direction), part, num_tokens);
  return PDS_OK;
}

extern "C" int32_t pds_submit(pds_engine *engine, int32_t direction, const pds_item *items,
                              int64_t num_items, const int64_t *ids, int64_t num_ids,
                              uint64_t stream, uint64_t ready, pds_ticket **ticket,
                              pds_error *error) {
  if (direction != PDS_OUT && direction != PDS_IN) {
    return report(error_of(PDS_ERR_ARGUMENT, "no such direction"), error);
  }
  return guarded(error, [&] {
    auto made = std::make_unique<pds_ticket>();
    const pds_error failed = engine->engine->submit(
        static_cast<pds::Direction>(direction), {items, items + num_items}, {ids, ids + num_ids},
        reinterpret_cast<pds::Stream>(stream), reinterpret_cast<pds::Event>(ready), &made->ticket);
    if (failed.code == PDS_OK) *ticket = made.release();
    return report(failed, error);
  });
}

extern "C" int32_t pds_wait(pds_ticket *ticket, int64_t timeout_us, pds_error *error) {
  return ticket->ticket->wait(timeout_us, error);
}

extern "C" int32_t pds_free_ticket(pds_ticket *ticket) {
  delete ticket;
  return PDS_OK;
}

extern "C" int32_t pds_register(int32_t device, uint64_t address, int64_t bytes, pds_error *error) {
  return on_device(device, "cudaHostRegister", error,
                   [&](pds::Device &d) { return d.register_host(address, bytes); });
}

extern "C" int32_t pds_unregister(int32_t device, uint64_t address, pds_error *error) {
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
  return pds::exchange_capture_mode(mode) == 0 ? PDS_OK : PDS_ERR_DEVICE;
}
