#include "pump.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <future>

namespace pds {
namespace {

constexpr int64_t kAwakeBytes = 4 << 20;             // a small copy is worth waiting for awake
constexpr std::chrono::microseconds kAskAgain{100};  // whether the model has come far enough
constexpr std::chrono::microseconds kLightSleep{200};
constexpr int64_t kBytesPerUs = 55'000;  // of a link; what is slower is waited for longer

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

int64_t twice(int64_t number) { return number > INT64_MAX / 2 ? number : 2 * number; }

int64_t duration_ns(int64_t bytes) { return bytes * 1000 / kBytesPerUs; }

}  // namespace

pds_error Pump::start() {
  std::promise<pds_error> started;
  auto result = started.get_future();
  thread_ = std::thread([this, &started] {
    pthread_setname_np(pthread_self(),
                       direction_ == Direction::kOut ? "pdstore-out" : "pdstore-in");
    const pds_error error = open_lanes();
    started.set_value(error);
    if (error.code == PDS_OK) loop();
    close_lanes();
  });
  const pds_error error = result.get();
  if (error.code != PDS_OK) thread_.join();
  return error;
}

pds_error Pump::open_lanes() {
  if (const int code = device_.enter()) return failed("cudaSetDevice", code, -1);
  for (Lane &lane : lanes_) {
    if (const int code = device_.open_stream(&lane.stream)) {
      return failed("cudaStreamCreate", code, -1);
    }
    if (const int code = device_.open_event(&lane.done, true)) {
      return failed("cudaEventCreate", code, -1);
    }
    if (const int code = device_.allocate(sizes_.stage_bytes, &lane.ring)) {
      return failed("cudaMalloc", code, -1);
    }
    if (direction_ == Direction::kOut) continue;
    constexpr size_t kBytes = kMostDigests * sizeof(uint64_t);
    if (const int code = device_.allocate(kBytes, reinterpret_cast<void **>(&lane.digests))) {
      return failed("cudaMalloc", code, -1);
    }
    void **here = reinterpret_cast<void **>(&lane.digests_here);
    if (const int code = device_.allocate_host(kBytes, here)) {
      return failed("cudaHostAlloc", code, -1);
    }
  }
  return {};
}

void Pump::close_lanes() {
  for (Lane &lane : lanes_) {
    if (lane.stream != nullptr) device_.drain(lane.stream);
    if (lane.ring != nullptr) device_.release(lane.ring);
    if (lane.digests != nullptr) device_.release(lane.digests);
    if (lane.digests_here != nullptr) device_.release_host(lane.digests_here);
    if (lane.done != nullptr) device_.close_event(lane.done);
    if (lane.stream != nullptr) device_.close_stream(lane.stream);
    lane = Lane{};
  }
}

bool Pump::push(const JobPtr &job) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return false;
    queue_.push_back(job);
  }
  changed_.notify_one();
  return true;
}

void Pump::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

pds_stats Pump::stats() {
  pds_stats stats{bytes_.load(), slices_.load(), 0};
  clockid_t clock;
  timespec time{};
  if (thread_.joinable() && pthread_getcpuclockid(thread_.native_handle(), &clock) == 0 &&
      clock_gettime(clock, &time) == 0) {
    stats.cpu_ns = int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  }
  return stats;
}

bool Pump::is_busy() const {
  for (const Lane &lane : lanes_) {
    if (lane.owner != nullptr) return true;
  }
  return false;
}

// True if a job need not wait for the model any more; nor need one that can only fail.
bool Pump::is_due(Job &job) {
  if (job.ready == nullptr || stopping_ || poisoned_) return true;
  bool over = false;
  if (const int code = device_.query(job.ready, &over)) {
    fail(job, failed("cudaEventQuery", code, 0));
    return true;
  }
  return over;
}

// Waits for something to do.
void Pump::rest(std::unique_lock<std::mutex> *lock) {
  const auto awaited = [this] { return stopping_ || !queue_.empty(); };
  const int64_t until = now_ns() + 1000 * linger_us_;
  while (!awaited() && now_ns() < until) changed_.wait_for(*lock, kLightSleep);
  changed_.wait(*lock, awaited);
}

// The first job that is due; null when there is none and a lane is in flight, or at the end. What
// waits for the model stays here: in a lane it would hold up those behind it.
JobPtr Pump::take() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (!is_busy()) rest(&lock);
    Event waited_for = nullptr;  // by the job before: neighbours follow one event
    const auto due = std::find_if(queue_.begin(), queue_.end(), [&](const JobPtr &job) {
      if (waited_for != nullptr && job->ready == waited_for) return false;
      if (is_due(*job)) return true;
      waited_for = job->ready;
      return false;
    });
    if (due != queue_.end()) {
      JobPtr job = std::move(*due);
      queue_.erase(due);
      return job;
    }
    if (queue_.empty() || is_busy()) return nullptr;
    changed_.wait_for(lock, kAskAgain);
  }
}

void Pump::loop() {
  for (;;) {
    if (JobPtr job = take()) {
      run(job);
    } else if (is_busy()) {
      settle_oldest();
    } else {
      return;
    }
  }
}

void Pump::run(const JobPtr &job) {
  SliceWalk walk(layout_, job->work, sizes_, device_.has_batch());
  Slice slice;
  int64_t most = is_busy() ? INT64_MAX : sizes_.first_bytes;
  for (; job->error.code == PDS_OK && walk.next(&slice, most); most = twice(most)) {
    Lane &lane = lanes_[turn_++ % lanes_.size()];
    settle(lane);
    bool stopping;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping = stopping_;
    }
    if (job->error.code != PDS_OK) break;
    if (poisoned_) {
      fail(*job, error_of(PDS_ERR_POISONED, "an earlier device error broke the device's context"));
    } else if (stopping) {
      fail(*job, error_of(PDS_ERR_CLOSED, "the engine was closed"));
    } else if (const pds_error error = submit(lane, slice, *job); error.code != PDS_OK) {
      fail(*job, error);
      recover(error);
    } else {
      expect(lane, slice.bytes);
      lane.owner = job;
      ++job->in_flight, ++job->num_slices;
      bytes_ += slice.bytes, ++slices_;
    }
  }
  if (job->error.code == PDS_OK && job->in_flight > 0 && job->work.num_digests > 0) {
    Lane &lane = lanes_[(turn_ + lanes_.size() - 1) % lanes_.size()];  // of the last slice
    lane.num_digests = job->work.num_digests;
    if (const pds_error error = sum(lane, *job); error.code != PDS_OK) {
      fail(*job, error);
      recover(error);
    }
  }
  job->submitted = true;
  if (job->in_flight == 0) finish(job);
}

// Waits for the slice in flight on a lane.
void Pump::settle(Lane &lane) {
  if (lane.owner == nullptr) return;
  const JobPtr job = std::move(lane.owner);
  lane.owner = nullptr;
  const bool is_last = job->submitted && job->in_flight == 1;
  const bool awake = is_last || (lane.bytes <= kAwakeBytes && job->submitted);
  const int64_t expected = std::max<int64_t>(0, lane.due_ns - now_ns());
  if (is_last && job->num_slices > 1) {
    using std::chrono::steady_clock;
    job->ticket->expect(steady_clock::now() + std::chrono::nanoseconds(expected));
  }
  const int code = device_.synchronize(lane.done, expected, awake);
  if (code != 0) {
    const pds_error error = failed("cudaEventSynchronize", code, job->num_slices - job->in_flight);
    fail(*job, error);
    recover(error);
  } else if (lane.num_digests > 0) {
    job->digests.assign(lane.digests_here, lane.digests_here + lane.num_digests);
  }
  lane.num_digests = 0;
  for (Lane &other : lanes_) {
    if (other.owner != nullptr) other.due_ns = now_ns() + duration_ns(other.bytes);
  }
  if (--job->in_flight == 0 && job->submitted) finish(job);
}

// A slice begins when those of the other lanes are done.
void Pump::expect(Lane &lane, int64_t bytes) {
  int64_t begin = now_ns();
  for (const Lane &other : lanes_) {
    if (other.owner != nullptr) begin = std::max(begin, other.due_ns);
  }
  lane.bytes = bytes, lane.due_ns = begin + duration_ns(bytes);
}

void Pump::settle_oldest() {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Lane &lane = lanes_[(turn_ + i) % lanes_.size()];
    if (lane.owner != nullptr) return settle(lane);
  }
}

pds_error Pump::failed(const char *call, int code, int64_t slice) const {
  return error_of(PDS_ERR_DEVICE, device_.describe(code), code, call, slice);
}

void Pump::fail(Job &job, const pds_error &error) {
  if (job.error.code == PDS_OK) job.error = error;
}

// After a failure: nothing of this pump is in flight any more, or the device is known to be lost.
void Pump::recover(const pds_error &cause) {
  for (Lane &lane : lanes_) {
    const int first = device_.drain(lane.stream);
    const int again = first == 0 ? 0 : device_.drain(lane.stream);
    if (again != 0 || device_.recover(lane.stream) != 0) poisoned_ = true;
  }
  if (!poisoned_) return;
  for (Lane &lane : lanes_) {
    if (lane.owner == nullptr) continue;
    const JobPtr job = std::move(lane.owner);
    lane.owner = nullptr;
    fail(*job, cause);
    if (--job->in_flight == 0 && job->submitted) finish(job);
  }
}

void Pump::finish(const JobPtr &job) {
  if (job->owns_ready) device_.close_event(job->ready);
  job->owns_ready = false;
  const auto ticket = std::move(job->ticket);
  job->work = JobItems{};
  if (job->error.code != PDS_OK) job->digests.clear();
  ticket->end(job->error, std::move(job->digests));
}

}  // namespace pds
