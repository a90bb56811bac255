#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "checksum.h"

namespace pds {
namespace {

constexpr int32_t kLanes = 2;
constexpr int64_t kCopyOut = 9 << 20;  // somebody else's copy to the host waits behind two of them
constexpr int64_t kCopyIn = 32 << 20;  // and to the device behind none
constexpr int64_t kStageOut = 16 << 20;
constexpr int64_t kStageIn = 32 << 20;  // larger: a scatter beside long kernels waits for a turn
constexpr int64_t kFirst = 4 << 20;
constexpr int64_t kMaxPieces = 256;  // a batch call keeps the driver from everybody else meanwhile
constexpr int64_t kLingerUs = 50'000;  // engines save and load again with their next step

template <typename Number>
Number or_default(Number asked, Number otherwise) {
  return asked > 0 ? asked : otherwise;
}

PumpOptions pump_options_of(const pds_options &options, Direction direction, const Layout &layout) {
  int64_t layer_bytes = 0;  // the largest: it has room in a ring
  for (const Part &part : layout.parts) {
    layer_bytes = std::max(layer_bytes, part.token_bytes * layout.max_tokens);
  }
  const bool out = direction == Direction::kOut;
  const int64_t stage = out ? or_default(options.stage_out_bytes, kStageOut)
                            : or_default(options.stage_in_bytes, kStageIn);
  const bool by_crew = options.device == PDS_CPU;  // there is no link to keep free or to fill
  const int64_t copy = out ? or_default(options.copy_out_bytes, by_crew ? kCopyIn : kCopyOut)
                           : or_default(options.copy_in_bytes, kCopyIn);
  const SliceSizes sizes{copy, in_ring(std::max(stage, layer_bytes)),
                         or_default(options.first_bytes, by_crew ? copy : kFirst),
                         or_default(options.max_pieces, kMaxPieces)};
  return {sizes, or_default(options.num_lanes, kLanes), or_default(options.linger_us, kLingerUs)};
}

// A sentence with numbers in it.
template <typename... Numbers>
std::string text(const char *format, Numbers... numbers) {
  char line[200];
  std::snprintf(line, sizeof line, format, static_cast<long long>(numbers)...);
  return line;
}

}  // namespace

std::unique_ptr<Engine> Engine::open(const pds_options &options, const pds_part *parts,
                                     const pds_region *regions, pds_error *error) {
  std::unique_ptr<Engine> engine(new Engine);
  engine->process_ = getpid();
  if (options.abi != PDS_ABI) {
    *error = error_of(PDS_ERR_ARGUMENT, "another ABI version");
    return nullptr;
  }
  const std::string why = engine->layout_.assign(options, parts, regions);
  if (!why.empty()) {
    *error = error_of(PDS_ERR_ARGUMENT, why);
    return nullptr;
  }
  engine->device_ = open_device(options.device, &engine->crew_);
  if (engine->device_ == nullptr) {
    *error = error_of(PDS_ERR_NO_DEVICE, text("there is no CUDA device %lld", options.device));
    return nullptr;
  }
  for (const Direction direction : {Direction::kOut, Direction::kIn}) {
    const PumpOptions chosen = pump_options_of(options, direction, engine->layout_);
    auto &pump = direction == Direction::kOut ? engine->out_ : engine->in_;
    pump = std::make_unique<Pump>(*engine->device_, engine->layout_, direction, chosen,
                                  engine->poisoned_);
    *error = pump->start();
    if (error->code != PDS_OK) return nullptr;
  }
  return engine;
}

Engine::~Engine() { stop(); }

void Engine::stop() {
  if (out_ != nullptr) out_->stop();
  if (in_ != nullptr) in_->stop();
}

bool Engine::is_of_this_process() const { return process_ == getpid(); }

int32_t Engine::add_host(uint64_t address, int64_t bytes) {
  if (address == 0 || bytes < 1) return PDS_ERR_ARGUMENT;
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::pair<uint64_t, uint64_t> range{address, address + bytes};
  hosts_.insert(std::upper_bound(hosts_.begin(), hosts_.end(), range), range);
  return PDS_OK;
}

// True if the bytes are in one registered range. The caller holds the mutex.
bool Engine::is_host(uint64_t address, int64_t bytes) const {
  if (hosts_.empty()) return !device_->needs_registered_host();
  auto after = std::upper_bound(hosts_.begin(), hosts_.end(), std::make_pair(address, UINT64_MAX));
  return after != hosts_.begin() && address + bytes <= (--after)->second;
}

std::string Engine::check_ids(const JobItems &job, const pds_item &item, const Item &place,
                              std::vector<bool> *taken) const {
  const int64_t num_blocks = layout_.num_blocks;
  const int64_t *ids = job.ids.data() + place.first_id;
  for (int32_t n = 0; n < item.num_ids; ++n) {
    if (ids[n] >= 0 && ids[n] < num_blocks) continue;
    return text("block id %lld is outside the cache of %lld blocks", ids[n], num_blocks);
  }
  if (job.direction == Direction::kOut) return "";
  const auto [begin, end] = layout_.blocks_of(place);
  for (int32_t n = begin; n < end; ++n) {
    const int64_t bit = item.part * num_blocks + ids[n];
    if ((*taken)[bit]) return text("a load names block %lld twice", ids[n]);
    (*taken)[bit] = true;
  }
  return "";
}

// Empty, or what is wrong with a job.
std::string Engine::check(const JobItems &job, const std::vector<pds_item> &items) const {
  const int32_t step = layout_.block_tokens;
  const auto num_ids = static_cast<int64_t>(job.ids.size());
  const bool is_load = job.direction == Direction::kIn;
  std::vector<bool> taken(is_load ? layout_.parts.size() * layout_.num_blocks : 0);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < items.size(); ++i) {
    const pds_item &item = items[i];
    const Item &place = job.items[i];
    if (!layout_.holds(item) || item.num_ids < 0) {
      return text("a payload of %lld tokens of part %lld is not one of this layout",
                  item.num_tokens, item.part);
    }
    if (place.first_id + item.num_ids > num_ids) return "fewer ids than the items say";
    if (int64_t{item.num_ids} * step < item.num_tokens) {
      return text("%lld engine blocks cannot hold %lld tokens", item.num_ids, item.num_tokens);
    }
    if (item.first_token < 0 || item.first_token % step != 0 ||
        item.first_token > item.num_tokens) {
      return text("first_token %lld is not on an engine block of %lld", item.first_token, step);
    }
    if (item.first_token != 0 && !is_load) return "a save of a part of a block";
    if (item.payload == 0 || !is_host(item.payload, layout_.payload_bytes(item))) {
      return "a payload is not inside one registered range of host memory";
    }
    const std::string why = check_ids(job, item, place, &taken);
    if (!why.empty()) return why;
  }
  return "";
}

// Makes the copy follow the caller's event, or one that is recorded now.
pds_error Engine::order(Job *job, Stream stream, Event ready) {
  job->ready = ready;
  if (stream == nullptr) return {};
  const OnDevice scope(*device_);
  const auto failed = [&](const char *call, int code) {
    return error_of(PDS_ERR_DEVICE, device_->describe(code), code, call);
  };
  if (scope.code() != 0) return failed("cuCtxPushCurrent", scope.code());
  bool capturing = false;
  if (const int code = device_->is_capturing(stream, &capturing)) {
    return failed("cudaStreamIsCapturing", code);
  }
  if (capturing) return error_of(PDS_ERR_CAPTURE, "the stream is being captured into a graph");
  if (ready != nullptr) return {};
  if (const int code = device_->open_event(&job->ready, false)) {
    return failed("cudaEventCreate", code);
  }
  if (const int code = device_->record(job->ready, stream)) {
    device_->close_event(job->ready);
    return failed("cudaEventRecord", code);
  }
  job->owns_ready = true;
  return {};
}

pds_error Engine::submit(Direction direction, const std::vector<pds_item> &items,
                         std::vector<int64_t> ids, Stream stream, Event ready,
                         std::shared_ptr<Ticket> *ticket, const std::vector<int64_t> &summed) {
  if (!is_of_this_process()) {
    return error_of(PDS_ERR_CLOSED, "the engine belongs to the parent process");
  }
  if (poisoned_) return poisoned_error();
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
  const std::string why = check(job->work, items);
  if (!why.empty()) return error_of(PDS_ERR_ARGUMENT, why);
  for (const int64_t i : summed) {
    job->work.sums.push_back({i, static_cast<uint32_t>(job->work.num_digests)});
    job->work.num_digests += num_chunks_of(layout_.payload_bytes(items[i]));
  }
  const pds_error error = order(job.get(), stream, ready);
  if (error.code != PDS_OK) return error;
  job->ticket = *ticket = std::make_shared<Ticket>();
  Pump &pump = direction == Direction::kOut ? *out_ : *in_;
  if (pump.push(job)) return {};
  if (job->owns_ready) device_->close_event(job->ready);
  return error_of(PDS_ERR_CLOSED, "the engine was closed");
}

}  // namespace pds
