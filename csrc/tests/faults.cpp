// A device in front of another that fails the call it was told to, and counts what lives.
//
// Decision: another process that writes to an arena is one that writes just after a copy to it: in
// a test the window between a copy and what follows is open once, and surely.
//
// Decision: the table is the seam, so every call of the engine can fail in a test, with or without
// a GPU, and the engine itself knows nothing of tests. Only test builds contain this file.
#include "tests/faults.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "device.h"

namespace pds {
namespace {

struct Fault {
  std::atomic<int64_t> calls_left{-1};  // until the one that fails; negative: none will
  std::atomic<int32_t> code{0}, sticky{0};
};

Fault faults[PDS_NUM_CALLS];
std::atomic<int64_t> delay_us{0};
std::atomic<uint64_t> changed_begin{0}, changed_end{0};  // where a copied byte is to change
std::atomic<int64_t> allocations{0}, streams{0}, events{0};
std::atomic<int32_t> broken{0};  // what every call fails with after a sticky fault

// The code that a call has to fail with, or 0.
int fault(int32_t call) {
  Fault &armed = faults[call];
  if (broken) return broken;
  if (armed.calls_left < 0 || armed.calls_left.fetch_sub(1) != 0) return 0;
  if (armed.sticky) broken = armed.code.load();
  return armed.code;
}

void delay() {
  const int64_t us = delay_us;
  if (us > 0) usleep(us);
}

class FaultyDevice final : public Device {
 public:
  explicit FaultyDevice(std::unique_ptr<Device> device) : device_(std::move(device)) {}

  int enter() override { return fault(PDS_CALL_ENTER) ?: device_->enter(); }
  int push() override { return fault(PDS_CALL_PUSH) ?: device_->push(); }
  void pop() override { device_->pop(); }
  int allocate(size_t bytes, void **memory) override {
    return counted(fault(PDS_CALL_ALLOCATE) ?: device_->allocate(bytes, memory), allocations);
  }
  void release(void *memory) override { --allocations, device_->release(memory); }
  int allocate_host(size_t bytes, void **memory) override {
    return counted(fault(PDS_CALL_ALLOCATE) ?: device_->allocate_host(bytes, memory), allocations);
  }
  void release_host(void *memory) override { --allocations, device_->release_host(memory); }
  int open_stream(Stream *stream) override {
    return counted(fault(PDS_CALL_STREAM) ?: device_->open_stream(stream), streams);
  }
  void close_stream(Stream stream) override { --streams, device_->close_stream(stream); }
  int open_event(Event *event, bool for_host) override {
    return counted(fault(PDS_CALL_EVENT) ?: device_->open_event(event, for_host), events);
  }
  void close_event(Event event) override { --events, device_->close_event(event); }
  int record(Event event, Stream stream) override {
    return fault(PDS_CALL_RECORD) ?: device_->record(event, stream);
  }
  int wait(Stream stream, Event event) override {
    return fault(PDS_CALL_WAIT) ?: device_->wait(stream, event);
  }
  int query(Event event, bool *over) override {
    return fault(PDS_CALL_QUERY) ?: device_->query(event, over);
  }
  int synchronize(Event event, int64_t expected_ns) override {
    return fault(PDS_CALL_SYNCHRONIZE) ?: device_->synchronize(event, expected_ns);
  }
  int drain(Stream stream) override { return fault(PDS_CALL_DRAIN) ?: device_->drain(stream); }
  int is_capturing(Stream stream, bool *capturing) override {
    return fault(PDS_CALL_CAPTURING) ?: device_->is_capturing(stream, capturing);
  }
  bool has_batch() const override { return device_->has_batch(); }
  bool needs_registered_host() const override { return device_->needs_registered_host(); }
  int copy_batch(Stream stream, Direction direction, const Copies &copies) override {
    delay();
    const int code = fault(PDS_CALL_BATCH) ?: device_->copy_batch(stream, direction, copies);
    if (code != 0 || direction == Direction::kIn) return code;
    return change(stream, copies.host.data(), copies.host.data() + copies.size());
  }
  int copy_strided(Stream stream, Direction direction, const Strided &strided) override {
    delay();
    const int code = fault(PDS_CALL_STRIDED) ?: device_->copy_strided(stream, direction, strided);
    if (code != 0 || direction == Direction::kIn) return code;
    return change(stream, &strided.host, &strided.host + 1);
  }
  int stage(Stream stream, Direction direction, const StageParams &params) override {
    delay();
    return fault(PDS_CALL_STAGE) ?: device_->stage(stream, direction, params);
  }
  int sum(Stream stream, const SumParams &params, uint64_t *digests) override {
    return fault(PDS_CALL_SUM) ?: device_->sum(stream, params, digests);
  }
  const char *describe(int code) const override { return device_->describe(code); }
  int register_host(uint64_t address, size_t bytes) override {
    return fault(PDS_CALL_REGISTER) ?: device_->register_host(address, bytes);
  }
  int unregister_host(uint64_t address) override {
    return fault(PDS_CALL_UNREGISTER) ?: device_->unregister_host(address);
  }

 private:
  // Changes the first byte of one of these copies, if it is to change, when the copy is over.
  int change(Stream stream, const uint64_t *begin, const uint64_t *end) {
    const auto is_wanted = [](uint64_t at) { return at >= changed_begin && at < changed_end; };
    const uint64_t *found = std::find_if(begin, end, is_wanted);
    if (found == end) return 0;
    changed_end = 0;
    if (const int code = device_->drain(stream)) return code;
    *reinterpret_cast<volatile uint8_t *>(*found) ^= 0x41;
    return 0;
  }
  static int counted(int code, std::atomic<int64_t> &count) {
    if (code == 0) ++count;
    return code;
  }

  std::unique_ptr<Device> device_;
};

}  // namespace

std::unique_ptr<Device> with_faults(std::unique_ptr<Device> device) {
  return std::make_unique<FaultyDevice>(std::move(device));
}

}  // namespace pds

extern "C" int32_t pds_test_fail(int32_t call, int64_t nth, int32_t device_code, int32_t sticky) {
  pds::broken = 0;
  if (call >= PDS_NUM_CALLS) return PDS_ERR_ARGUMENT;
  if (call < 0) {
    for (pds::Fault &armed : pds::faults) armed.calls_left = -1;
    return PDS_OK;
  }
  pds::Fault &armed = pds::faults[call];
  armed.code = device_code, armed.sticky = sticky;
  armed.calls_left = nth;
  return PDS_OK;
}

extern "C" int32_t pds_test_delay(int64_t microseconds) {
  return pds::delay_us = microseconds, PDS_OK;
}

extern "C" int32_t pds_test_change(uint64_t address, int64_t bytes) {
  return pds::changed_begin = address, pds::changed_end = address + bytes, PDS_OK;
}

extern "C" int32_t pds_test_live(pds_live *live) {
  *live = {pds::allocations, pds::streams, pds::events};
  return PDS_OK;
}
