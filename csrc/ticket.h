// How a copy that was submitted ends: once, with 0 or an error; anybody may wait for it.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

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

class Ticket {
 public:
  void end(const pds_error &error) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      error_ = error;
      done_ = true;
    }
    changed_.notify_all();
  }

  int32_t wait(int64_t timeout_us, pds_error *error) {
    std::unique_lock<std::mutex> lock(mutex_);
    // The system clock: a condition that waits on it is one that thread checkers understand.
    const auto until = std::chrono::system_clock::now() + std::chrono::microseconds(timeout_us);
    if (!changed_.wait_until(lock, until, [this] { return done_; })) return PDS_PENDING;
    if (error != nullptr) *error = error_;
    return error_.code;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  pds_error error_{};
};

}  // namespace pds
