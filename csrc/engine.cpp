#include "engine.h"

#include <algorithm>
#include <cstdio>

#include "checksum.h"

namespace pds {
namespace {

constexpr int64_t kCopyOut = 9 << 20;  // another copy to the host waits for two of these slices
constexpr int64_t kCopyIn = 32 << 20;  // another copy to the device waits for none
constexpr int64_t kStageOut = 16 << 20;
constexpr int64_t kStageIn = 32 << 20;  // larger: beside long kernels each scatter waits for a turn

PumpOptions pump_options_of(const pds_options &options, Direction direction, const Layout &layout) {
  const auto or_default = [](int64_t asked, int64_t other) { return asked > 0 ? asked : other; };
  int64_t layer_bytes = 0;  // of the largest layer, which a ring must hold
  for (const Part &part : layout.parts) {
    layer_bytes = std::max(layer_bytes, part.token_bytes * part.max_tokens);
  }
  const bool out = direction == Direction::kOut;
  const int64_t stage = out ? or_default(options.stage_out_bytes, kStageOut)
                            : or_default(options.stage_in_bytes, kStageIn);
  const bool has_link = out && options.device != PDS_CPU;  // which others use as well
  const int64_t copy = or_default(out ? options.copy_out_bytes : options.copy_in_bytes,
                                  has_link ? kCopyOut : kCopyIn);
  return {copy, in_ring(std::max(stage, layer_bytes))};
}

// Refuses a job by a sentence with numbers in it.
template <typename... Numbers>
[[noreturn]] void refuse_job(const char *format, Numbers... numbers) {
  char line[200];
  std::snprintf(line, sizeof line, format, static_cast<long long>(numbers)...);
  refuse(line);
}

}  // namespace

Engine::Engine(const pds_options &options, const pds_part *parts, const pds_region *regions) {
  if (options.abi != PDS_ABI) refuse("another ABI version");
  layout_.assign(options, parts, regions);
  device_ = open_device(options.device, &crew_);
  for (const Direction direction : {Direction::kOut, Direction::kIn}) {
    pump(direction) = std::make_unique<Pump>(
        *device_, layout_, direction, pump_options_of(options, direction, layout_), poisoned_);
  }
}

void Engine::start() {
  out_->start();
  in_->start();
}

Engine::~Engine() { stop(); }

void Engine::stop() {
  out_->stop();
  in_->stop();
}

void Engine::check_process() const {
  if (process_ == getpid()) return;
  throw Failure{error_of(PDS_ERR_CLOSED, "the engine belongs to the parent process")};
}

void Engine::add_host(uint64_t address, int64_t bytes) {
  if (address == 0 || bytes < 1) refuse("no memory");
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::pair<uint64_t, uint64_t> range{address, address + bytes};
  hosts_.insert(std::upper_bound(hosts_.begin(), hosts_.end(), range), range);
}

// True if the bytes are in one registered range. The caller holds the mutex.
bool Engine::is_host(uint64_t address, int64_t bytes) const {
  if (hosts_.empty()) return !device_->needs_registered_host();
  auto after = std::upper_bound(hosts_.begin(), hosts_.end(), std::make_pair(address, UINT64_MAX));
  return after != hosts_.begin() && address + bytes <= (--after)->second;
}

void Engine::check_ids(const JobItems &job, const pds_item &item, const Item &place,
                       std::vector<std::vector<bool>> *taken) const {
  const int64_t num_blocks = layout_.parts[item.part].num_blocks;
  const int64_t *ids = job.ids.data() + place.first_id;
  for (int32_t n = 0; n < item.num_ids; ++n) {
    if (ids[n] >= 0 && ids[n] < num_blocks) continue;
    refuse_job("block id %lld is outside the cache of %lld blocks", ids[n], num_blocks);
  }
  if (job.direction == Direction::kOut) return;
  std::vector<bool> &is_taken = (*taken)[item.part];
  is_taken.resize(num_blocks);
  const auto [begin, end] = layout_.blocks_of(place);
  for (int32_t n = begin; n < end; ++n) {
    if (is_taken[ids[n]]) refuse_job("a load names block %lld twice", ids[n]);
    is_taken[ids[n]] = true;
  }
}

void Engine::check(const JobItems &job, const std::vector<pds_item> &items) const {
  const auto num_ids = static_cast<int64_t>(job.ids.size());
  const bool is_load = job.direction == Direction::kIn;
  std::vector<std::vector<bool>> taken(is_load ? layout_.parts.size() : 0);  // blocks, by part
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < items.size(); ++i) {
    const pds_item &item = items[i];
    const Item &place = job.items[i];
    if (!layout_.holds(item) || item.num_ids < 0) {
      refuse_job("a payload of %lld tokens of part %lld is not one of this layout", item.num_tokens,
                 item.part);
    }
    if (place.first_id + item.num_ids > num_ids) refuse("fewer ids than the items say");
    const int32_t step = layout_.parts[item.part].block_tokens;
    if (int64_t{item.num_ids} * step < item.num_tokens) {
      refuse_job("%lld engine blocks cannot hold %lld tokens", item.num_ids, item.num_tokens);
    }
    if (item.first_token < 0 || item.first_token % step != 0 ||
        item.first_token > item.num_tokens) {
      refuse_job("first_token %lld is not on an engine block of %lld", item.first_token, step);
    }
    if (item.first_token != 0 && !is_load) refuse("a save of a part of a block");
    if (item.payload == 0 || !is_host(item.payload, layout_.payload_bytes(item))) {
      refuse("a payload is not inside one registered range of host memory");
    }
    check_ids(job, item, place, &taken);
  }
}

// Makes the copy wait for the caller's event, or for one that is recorded on the stream now.
void Engine::order(Job *job, Stream stream, Event ready) {
  job->ready = ready;
  if (stream == nullptr) return;
  const OnDevice scope(*device_);
  bool capturing = false;
  pds::check(*device_, "cudaStreamIsCapturing", device_->is_capturing(stream, &capturing));
  if (capturing) {
    throw Failure{error_of(PDS_ERR_CAPTURE, "the stream is being captured into a graph")};
  }
  if (ready != nullptr) return;
  pds::check(*device_, "cudaEventCreate", device_->open_event(&job->ready, false));
  const int code = device_->record(job->ready, stream);
  if (code != 0) device_->close_event(job->ready);
  pds::check(*device_, "cudaEventRecord", code);
  job->owns_ready = true;
}

std::shared_ptr<Ticket> Engine::submit(Direction direction, const std::vector<pds_item> &items,
                                       std::vector<int64_t> ids, Stream stream, Event ready,
                                       const std::vector<int64_t> &summed) {
  check_process();
  if (poisoned_) throw Failure{poisoned_error()};
  const auto job = std::make_shared<Job>();
  job->work.direction = direction;
  job->work.ids = std::move(ids);
  job->work.items.reserve(items.size());
  int64_t first_id = 0;
  for (const pds_item &item : items) {
    job->work.items.push_back(
        {item.payload, item.part, item.num_tokens, item.first_token, first_id});
    first_id += std::max(item.num_ids, 0);
  }
  check(job->work, items);
  for (const int64_t i : summed) {
    job->work.sums.push_back({i, static_cast<uint32_t>(job->work.num_digests)});
    job->work.num_digests += num_chunks_of(layout_.payload_bytes(items[i]));
  }
  order(job.get(), stream, ready);
  const auto ticket = job->ticket = std::make_shared<Ticket>();
  if (pump(direction)->push(job)) return ticket;
  if (job->owns_ready) device_->close_event(job->ready);
  throw Failure{error_of(PDS_ERR_CLOSED, "the engine was closed")};
}

}  // namespace pds
