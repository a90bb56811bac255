// The swap engine of one device and one layout: checks a job, then gives it to a pump.
//
// Decision: everything a copy needs belongs to this object and is freed with it: two threads and a
// crew, four streams, four device rings of a fixed size. What a caller gave is copied before the
// call returns. Ids and addresses are checked before anything moves.
#pragma once
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "crew.h"
#include "pump.h"

namespace pds {

class Engine {
 public:
  // Null, and `error` says why.
  static std::unique_ptr<Engine> open(const pds_options &options, const pds_part *parts,
                                      const pds_region *regions, pds_error *error);
  ~Engine();

  // Ends what is queued, waits for the device; later jobs are refused. Twice is fine.
  void stop();

  int32_t add_host(uint64_t address, int64_t bytes);
  // summed: numbers of items whose digests the ticket gets, in this order.
  pds_error submit(Direction direction, const std::vector<pds_item> &items,
                   std::vector<int64_t> ids, Stream stream, Event ready,
                   std::shared_ptr<Ticket> *ticket, const std::vector<int64_t> &summed = {});
  pds_plan explain(Direction direction, int32_t part, int32_t num_tokens) const {
    return layout_.plan_of(direction, part, num_tokens, device_->has_batch());
  }
  const Layout &layout() const { return layout_; }
  Crew &crew() { return crew_; }
  bool is_of_this_process() const;

 private:
  Engine() = default;
  std::string check(const JobItems &job, const std::vector<pds_item> &items) const;
  std::string check_ids(const JobItems &job, const pds_item &item, const Item &place,
                        std::vector<bool> *taken) const;
  bool is_host(uint64_t address, int64_t bytes) const;
  pds_error order(Job *job, Stream stream, Event ready);

  Layout layout_;
  Crew crew_;  // outlives the device, which it copies for
  std::unique_ptr<Device> device_;
  std::unique_ptr<Pump> out_, in_;
  std::atomic<bool> poisoned_{false};
  mutable std::mutex mutex_;                          // guards hosts_
  std::vector<std::pair<uint64_t, uint64_t>> hosts_;  // registered ranges, sorted by begin
  int32_t process_ = 0;
};

}  // namespace pds
