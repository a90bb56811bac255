// The swap engine of one device and one layout: checks a job, then gives it to a pump.
//
// Decision: everything a copy needs belongs to this object and is freed with it: two threads and a
// crew, four streams, and for each a device ring and room for digests. A caller's arguments are
// copied before the call returns. Ids and addresses are checked before anything moves.
#pragma once
#include <unistd.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "crew.h"
#include "pump.h"

namespace pds {

class Engine {
 public:
  // Throws a Failure, like all functions below that can refuse something.
  Engine(const pds_options &options, const pds_part *parts, const pds_region *regions);
  ~Engine();

  void start();
  // Fails queued jobs, waits for the device; later jobs are refused. May be called twice.
  void stop();

  void add_host(uint64_t address, int64_t bytes);
  // summed: numbers of items whose digests the ticket gets, in this order.
  std::shared_ptr<Ticket> submit(Direction direction, const std::vector<pds_item> &items,
                                 std::vector<int64_t> ids, Stream stream, Event ready,
                                 const std::vector<int64_t> &summed = {});
  pds_plan explain(Direction direction, int32_t part, int32_t num_tokens) const {
    return layout_.plan_of(direction, part, num_tokens, device_->has_batch());
  }
  const Layout &layout() const { return layout_; }
  // The threads that help callers; a child of a fork has none of them.
  Crew &crew() {
    check_process();
    return crew_;
  }

 private:
  std::unique_ptr<Pump> &pump(Direction direction) {
    return direction == Direction::kOut ? out_ : in_;
  }
  void check_process() const;
  void check(const JobItems &job, const std::vector<pds_item> &items) const;
  void check_ids(const JobItems &job, const pds_item &item, const Item &place,
                 std::vector<std::vector<bool>> *taken) const;
  bool is_host(uint64_t address, int64_t bytes) const;
  void order(Job *job, Stream stream, Event ready);

  const int32_t process_ = getpid();
  Layout layout_;
  Crew crew_;  // outlives the device, which it copies for
  std::unique_ptr<Device> device_;
  std::unique_ptr<Pump> out_, in_;
  std::atomic<bool> poisoned_{false};
  mutable std::mutex mutex_;                          // guards hosts_
  std::vector<std::pair<uint64_t, uint64_t>> hosts_;  // registered ranges, sorted by begin
};

}  // namespace pds
