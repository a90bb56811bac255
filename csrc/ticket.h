// Ticket: the end of a copy that was submitted. It ends once, with 0 or an error; any thread may
// wait for it.
//
// Decision: who waits for a long copy is woken shortly before its end and then stays awake. A
// thread that slept for longer than a millisecond is itself woken some 0.2 ms late in a virtual
// machine.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
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

  // The end is expected then; not later than about a millisecond from now.
  void expect(std::chrono::steady_clock::time_point due) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      due_ = due;
      ends_soon_ = true;
    }
    changed_.notify_all();
  }

  int32_t wait(int64_t timeout_us, pds_error *error) {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::chrono::microseconds timeout{timeout_us};
    // The system clock: a condition that waits on it is one that thread checkers understand.
    const auto until = std::chrono::system_clock::now() + timeout;
    const auto limit = std::chrono::steady_clock::now() + timeout;
    changed_.wait_until(lock, until, [this] { return done_ || ends_soon_; });
    if (timeout_us > kAwakeUs && ends_soon_ && !done_) stay_awake(&lock, limit);
    if (!changed_.wait_until(lock, until, [this] { return done_.load(); })) return PDS_PENDING;
    if (error != nullptr) *error = error_;
    return error_.code;
  }

  // Waits for the end, whatever it takes, and says how it ended.
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
  static constexpr int64_t kAwakeUs = 100;  // before and after the expected end

  void stay_awake(std::unique_lock<std::mutex> *lock, std::chrono::steady_clock::time_point limit) {
    const std::chrono::microseconds awake{kAwakeUs};
    const auto due = std::min(due_, limit - awake);
    lock->unlock();
    std::this_thread::sleep_until(due - awake);
    while (!done_ && std::chrono::steady_clock::now() < due + awake) std::this_thread::yield();
    lock->lock();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_{false};
  bool ends_soon_ = false;
  std::chrono::steady_clock::time_point due_;
  pds_error error_{};
  std::vector<uint64_t> digests_;  // as they are once done_ is set
};

}  // namespace pds
