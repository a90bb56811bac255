// Crew: threads that help a caller whose work consists of many equal pieces.
//
// Decision: these threads sum values, not more threads of Python. So Python makes one call for many
// values, and takes the GIL from the engine only once. All pieces of the oldest caller come
// first: values that are summed first can be copied while the rest is summed.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pds {

class Crew {
 public:
  // Threads are started at their first use. 0 takes half of the processors that the caller may use,
  // at most 15: the other instance and the engine need some.
  explicit Crew(int32_t num_threads = 0);
  ~Crew();
  Crew(const Crew &) = delete;
  Crew &operator=(const Crew &) = delete;

  // Calls piece(0) to piece(count - 1), each once, on the caller's thread and the crew's, and
  // returns when all have returned. Any number of threads may call; `piece` must not throw.
  void each(int64_t count, const std::function<void(int64_t)> &piece);

 private:
  struct Task {
    const std::function<void(int64_t)> &piece;
    const int64_t count;
    std::atomic<int64_t> next{0};
    int32_t num_busy = 0;  // guarded by the crew's mutex

    bool is_taken() const { return next >= count; }
    void carry() {
      for (int64_t i = next++; i < count; i = next++) piece(i);
    }
  };

  void start();
  void loop();
  Task *oldest();

  int32_t num_threads_;
  std::mutex mutex_;  // guards all below
  std::condition_variable has_task_, has_left_;
  std::deque<Task *> tasks_;
  std::vector<std::thread> threads_;
  bool stopping_ = false, is_started_ = false;
};

}  // namespace pds
