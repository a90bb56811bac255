// Pump: a thread for one direction, which keeps two lanes of the device filled.
//
// Decision: a lane is a stream with at most one slice in flight. A stream that never drains starves
// every other copy of the process (the readback of a token waited a second for it); two lanes of 9
// MiB reach 97 % of the link and let other copies in after 0.3 ms. The thread sleeps until the
// older lane is nearly done, so it takes a few percent of a core. Only it touches its lanes.
//
// Decision: a load's sums follow its last slice, a save's come before its first. A save's bytes are
// in the cache from the start, and digests that are read back after the copies would wait behind
// the other lane's slice, which goes the same way over the link: the link would then stand still.
// Decision: docs/decisions/023-pump.md
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "sums.h"

namespace pds {

// A submitted copy. `ticket` ends after everything else of the copy is freed.
struct Job {
  JobItems work;
  std::shared_ptr<Ticket> ticket;
  Event ready = nullptr;
  bool owns_ready = false;
  bool submitted = false;  // all slices are on the device, or never will be
  int64_t num_slices = 0, in_flight = 0;
  std::vector<uint64_t> digests{};
  pds_error error{};
};
using JobPtr = std::shared_ptr<Job>;

// The most digests that a lane has room for: those of 512 MiB.
constexpr int64_t kMostDigests = 128 << 10;

class Pump {
 public:
  Pump(Device &device, const Layout &layout, Direction direction, const PumpOptions &options,
       std::atomic<bool> &poisoned)
      : device_(device),
        layout_(layout),
        direction_(direction),
        options_(options),
        poisoned_(poisoned) {
    set_keys(&sum_params_);
  }

  // Starts the thread. Throws a Failure if its lanes cannot be made; call `stop` also then.
  void start();
  // False when the pump is stopping: then the job is not taken.
  bool push(const JobPtr &job);
  // Fails queued jobs, waits for the device, joins the thread.
  void stop();

 private:
  struct Lane {
    Stream stream = nullptr;
    Event done = nullptr;
    void *ring = nullptr;
    uint64_t *digests = nullptr, *digests_here = nullptr;  // on the device, in host memory
    int64_t bytes = 0;                                     // of the slice in flight
    int64_t due_ns = 0;                                    // when it is expected to be done
    int64_t num_digests = 0;                               // that this slice brings to its job
    JobPtr owner;
  };

  void loop();
  void open_lanes();
  void close_lanes();
  JobPtr next_due();
  bool is_due(Job &job);
  bool is_busy() const;
  void run(const JobPtr &job);
  void run_slice(Lane &lane, const JobPtr &job, const Slice &slice);
  void settle(Lane &lane);
  void settle_oldest();
  void set_due(Lane &lane, int64_t bytes);
  void submit(Lane &lane, const Slice &slice, const Job &job);
  void copy(Lane &lane, const Slice &slice, const Job &job);
  void stage(Lane &lane, const Slice &slice, const Job &job);
  void launch(Lane &lane, const Job &job, const Slice &slice, size_t begin, size_t end,
              const std::vector<uint64_t> &rings);
  void batch(Lane &lane, Direction direction);
  bool sums_first(const Job &job) const {
    return direction_ == Direction::kOut && job.num_slices == 0 && job.work.num_digests > 0;
  }
  void sum_copied(Lane &lane, Job &job);
  void sum(Lane &lane, const Job &job);
  void check(const char *call, int code) const;
  void fail(Job &job, const pds_error &error);
  void recover(const pds_error &cause);
  void finish(const JobPtr &job);

  Device &device_;
  const Layout &layout_;
  const Direction direction_;
  const PumpOptions options_;
  std::atomic<bool> &poisoned_;

  std::mutex mutex_;  // guards queue_ and stopping_
  std::condition_variable changed_;
  std::deque<JobPtr> queue_;
  std::vector<Event> late_;  // of this look at the queue: those that have not fired
  bool stopping_ = false;

  std::array<Lane, 2> lanes_;
  size_t turn_ = 0;
  Copies copies_;
  std::vector<Strided> strided_;
  StageParams params_{};
  SumParams sum_params_{};
  int64_t slice_ = -1;  // that is being submitted
  std::thread thread_;
};

}  // namespace pds
