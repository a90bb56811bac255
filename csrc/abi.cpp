// The C interface of the engine and of host memory.
#include "abi.h"

#include <sys/mman.h>

#include <cerrno>

namespace {

using pds::guarded, pds::report;

// Calls body(device) while the caller's thread is on that device.
template <typename Body>
int32_t on_device(int32_t index, const char *call, pds_error *error, Body body) {
  return guarded(error, [&] {
    const auto device = pds::open_device(index);
    const pds::OnDevice scope(*device);
    pds::check(*device, call, body(*device));
    return report({}, error);
  });
}

}  // namespace

extern "C" int32_t pds_info(pds_info_t *info) {
  *info = {PDS_ABI, pds::built_with_cuda(), pds::count_cuda_devices()};
  return PDS_OK;
}

extern "C" int32_t pds_open(const pds_options *options, const pds_part *parts,
                            const pds_region *regions, pds_engine **engine, pds_error *error) {
  return guarded(error, [&] {
    auto made = std::make_unique<pds_engine>(*options, parts, regions);
    made->start();
    *engine = made.release();
    return report({}, error);
  });
}

extern "C" int32_t pds_close(pds_engine *engine) {
  delete engine;
  return PDS_OK;
}

extern "C" int32_t pds_stop(pds_engine *engine) {
  engine->stop();
  return PDS_OK;
}

extern "C" int32_t pds_add_host(pds_engine *engine, uint64_t address, int64_t bytes) {
  return guarded(nullptr, [&] {
    engine->add_host(address, bytes);
    return PDS_OK;
  });
}

extern "C" int32_t pds_explain(const pds_engine *engine, int32_t direction, int32_t part,
                               int32_t num_tokens, pds_plan *plan) {
  pds_item item{};
  item.part = part, item.num_tokens = num_tokens;
  if (!engine->layout().holds(item)) return PDS_ERR_ARGUMENT;
  *plan = engine->explain(static_cast<pds::Direction>(direction), part, num_tokens);
  return PDS_OK;
}

extern "C" int32_t pds_submit(pds_engine *engine, int32_t direction, const pds_item *items,
                              int64_t num_items, const int64_t *ids, int64_t num_ids,
                              uint64_t stream, uint64_t ready, pds_ticket **ticket,
                              pds_error *error) {
  return guarded(error, [&] {
    if (direction != PDS_OUT && direction != PDS_IN) pds::refuse("no such direction");
    auto made = std::make_unique<pds_ticket>();
    made->ticket = engine->submit(
        static_cast<pds::Direction>(direction), {items, items + num_items}, {ids, ids + num_ids},
        reinterpret_cast<pds::Stream>(stream), reinterpret_cast<pds::Event>(ready));
    *ticket = made.release();
    return report({}, error);
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
    if (errno != EINVAL) return PDS_ERR_MEMORY;  // touching it would raise SIGBUS
  }
  // Atomic, so that what others write to the same memory meanwhile is not undone.
  auto *memory = reinterpret_cast<char *>(address);
  for (int64_t at = 0; at < bytes; at += kPage) __atomic_fetch_or(memory + at, 0, __ATOMIC_RELAXED);
  __atomic_fetch_or(memory + bytes - 1, 0, __ATOMIC_RELAXED);
  return PDS_OK;
}

extern "C" int32_t pds_exchange_capture_mode(int32_t *mode) {
  return pds::exchange_capture_mode(mode) == 0 ? PDS_OK : PDS_ERR_DEVICE;
}
