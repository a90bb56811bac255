#include "crew.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <system_error>

namespace pds {

constexpr int32_t kMostThreads = 15;

// Returns how many processors the calling thread may use; the machine may have more.
static int32_t num_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int32_t>(std::thread::hardware_concurrency());
}

Crew::Crew(int32_t num_threads) : num_threads_(num_threads) {
  if (num_threads == 0) num_threads_ = std::clamp(num_processors() / 2, 1, kMostThreads);
}

Crew::~Crew() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  has_task_.notify_all();
  for (std::thread &thread : threads_) thread.join();
}

void Crew::each(int64_t count, const std::function<void(int64_t)> &piece) {
  Task task{piece, count};
  if (count > 1) {
    const std::lock_guard<std::mutex> lock(mutex_);
    start();
    tasks_.push_back(&task);
  }
  const int64_t num_wanted = std::min<int64_t>(count - 1, num_threads_);
  for (int64_t i = 0; i < num_wanted; ++i) has_task_.notify_one();
  task.carry();
  if (count <= 1) return;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto place = std::find(tasks_.begin(), tasks_.end(), &task);
  if (place != tasks_.end()) tasks_.erase(place);
  has_left_.wait(lock, [&] { return task.num_busy == 0; });
}

// If the system refuses a thread, callers do more of their work themselves.
void Crew::start() {
  if (is_started_) return;
  is_started_ = true;
  try {
    for (int32_t i = 0; i < num_threads_; ++i) threads_.emplace_back([this] { loop(); });
  } catch (const std::system_error &) {
    return;
  }
}

// Returns the oldest task with pieces that nobody has taken; tasks without leave the queue.
Crew::Task *Crew::oldest() {
  while (!tasks_.empty() && tasks_.front()->is_taken()) tasks_.pop_front();
  return tasks_.empty() ? nullptr : tasks_.front();
}

void Crew::loop() {
  pthread_setname_np(pthread_self(), "pdstore-crew");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    Task *task = nullptr;
    has_task_.wait(lock, [&] { return (task = oldest()) != nullptr || stopping_; });
    if (task == nullptr) return;
    ++task->num_busy;
    lock.unlock();
    task->carry();
    lock.lock();
    if (--task->num_busy == 0) has_left_.notify_all();
  }
}

}  // namespace pds
