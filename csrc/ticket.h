// Ticket: tells the end of a submitted copy. It ends once, with 0 or an error; any thread may wait
// for the end.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "pdstore.h"

namespace pds {

inline pds_error error_of(int32_t code, const std::string &message, int32_t device_code = 0,
                          const char *call = "", int64_t slice = -1) {
  pds_error error{};
  error.code = code, error.device_code = device_code, error.slice = slice;
  std::snprintf(error.call, sizeof error.call, "%s", call);
  std::snprintf(error.message, sizeof error.message, "%s", message.c_str());
  return error;
}

// Thrown where a call cannot go on.
struct Failure {
  pds_error error;
};

[[noreturn]] inline void refuse(const std::string &why) {
  throw Failure{error_of(PDS_ERR_ARGUMENT, why)};
}

inline pds_error poisoned_error() {
  return error_of(PDS_ERR_POISONED, "an earlier device error broke the device's context");
}

class Ticket {
 public:
  // digests: of the payloads that were to be summed.
  void finish(const pds_error &error, std::vector<uint64_t> digests) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      error_ = error;
      digests_ = std::move(digests);
      done_ = true;
    }
    changed_.notify_all();
  }

  int32_t wait(int64_t timeout_us, pds_error *error) {
    std::unique_lock<std::mutex> lock(mutex_);
    // The system clock, because thread sanitizers know only the wait that uses it.
    const auto until = std::chrono::system_clock::now() + std::chrono::microseconds{timeout_us};
    if (!changed_.wait_until(lock, until, [this] { return done_.load(); })) return PDS_PENDING;
    if (error != nullptr) *error = error_;
    return error_.code;
  }

  // Waits for the end, without a time limit, and returns the error.
  pds_error end() {
    constexpr int64_t kLongUs = 60'000'000;
    pds_error error{};
    while (wait(kLongUs, &error) == PDS_PENDING) continue;
    return error;
  }

  // None before the end, or after a failure.
  const std::vector<uint64_t> &digests() const {
    static const std::vector<uint64_t> none;
    return done_ ? digests_ : none;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_{false};
  pds_error error_{};
  std::vector<uint64_t> digests_;  // not changed once done_ is set
};

}  // namespace pds
