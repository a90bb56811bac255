#include "pump.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <future>

namespace pds {
namespace {

constexpr std::chrono::microseconds kAskAgain{100};  // whether the model has come far enough
constexpr int64_t kBytesPerUs = 55'000;              // of a link; a slower one is waited for longer

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

int64_t duration_ns(int64_t bytes) { return bytes * 1000 / kBytesPerUs; }

uint64_t address(void *pointer) { return reinterpret_cast<uint64_t>(pointer); }

}  // namespace

void Pump::start() {
  const auto started = std::make_shared<std::promise<pds_error>>();
  thread_ = std::thread([this, started] {
    pthread_setname_np(pthread_self(),
                       direction_ == Direction::kOut ? "pdstore-out" : "pdstore-in");
    try {
      open_lanes();
      started->set_value({});
      loop();
    } catch (const Failure &failure) {  // of open_lanes
      started->set_value(failure.error);
    }
    close_lanes();
  });
  const pds_error error = started->get_future().get();
  if (error.code != PDS_OK) throw Failure{error};
}

void Pump::open_lanes() {
  check("cudaSetDevice", device_.enter());
  for (Lane &lane : lanes_) {
    check("cudaStreamCreate", device_.open_stream(&lane.stream));
    check("cudaEventCreate", device_.open_event(&lane.done, true));
    check("cudaMalloc", device_.allocate(options_.stage_bytes, &lane.ring));
    constexpr size_t kBytes = kMostDigests * sizeof(uint64_t);
    void **digests = reinterpret_cast<void **>(&lane.digests);
    void **here = reinterpret_cast<void **>(&lane.digests_here);
    check("cudaMalloc", device_.allocate(kBytes, digests));
    check("cudaHostAlloc", device_.allocate_host(kBytes, here));
  }
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

bool Pump::is_busy() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const Lane &lane) { return lane.owner != nullptr; });
}

// True if a job need not wait for the model any more, or can only fail. The device is asked once
// for each event: many jobs may wait for one event, and each question keeps the driver from the
// model.
bool Pump::is_due(Job &job) {
  if (job.ready == nullptr || stopping_ || poisoned_) return true;
  if (std::find(late_.begin(), late_.end(), job.ready) != late_.end()) return false;
  bool over = false;
  if (const int code = device_.query(job.ready, &over)) {
    fail(job, device_error(device_, "cudaEventQuery", code, 0));
    return true;
  }
  if (!over) late_.push_back(job.ready);
  return over;
}

// Returns the first job that is due; null if none is and a lane is busy, or at the end. A job that
// waits for the model stays queued: in a lane it would hold up the jobs after it.
JobPtr Pump::next_due() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (!is_busy()) changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    late_.clear();
    const auto due = std::find_if(queue_.begin(), queue_.end(),
                                  [this](const JobPtr &job) { return is_due(*job); });
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
    if (JobPtr job = next_due()) {
      run(job);
    } else if (is_busy()) {
      settle_oldest();
    } else {
      return;
    }
  }
}

void Pump::run(const JobPtr &job) {
  SliceWalk walk(layout_, job->work, options_, device_.has_batch());
  Slice slice;
  while (job->error.code == PDS_OK && walk.next(&slice)) {
    Lane &lane = lanes_[turn_++ % lanes_.size()];
    settle(lane);
    if (job->error.code == PDS_OK) run_slice(lane, job, slice);
  }
  if (direction_ == Direction::kIn && job->error.code == PDS_OK && job->in_flight > 0) {
    sum_copied(lanes_[(turn_ + lanes_.size() - 1) % lanes_.size()], *job);  // of the last slice
  }
  job->submitted = true;
  if (job->in_flight == 0) finish(job);
}

void Pump::run_slice(Lane &lane, const JobPtr &job, const Slice &slice) {
  bool stopping;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping = stopping_;
  }
  if (poisoned_) return fail(*job, poisoned_error());
  if (stopping) return fail(*job, error_of(PDS_ERR_CLOSED, "the engine was closed"));
  slice_ = job->num_slices;
  try {
    submit(lane, slice, *job);
  } catch (const Failure &failure) {
    fail(*job, failure.error);
    return recover(failure.error);
  }
  set_due(lane, slice.bytes);
  lane.owner = job;
  if (sums_first(*job)) lane.num_digests = job->work.num_digests;
  ++job->in_flight, ++job->num_slices;
}

// Waits for the slice in flight on a lane.
void Pump::settle(Lane &lane) {
  if (lane.owner == nullptr) return;
  const JobPtr job = std::move(lane.owner);
  lane.owner = nullptr;
  const int64_t expected = std::max<int64_t>(0, lane.due_ns - now_ns());
  const int code = device_.synchronize(lane.done, expected);
  if (code != 0) {
    const int64_t slice = job->num_slices - job->in_flight;
    const pds_error cause = device_error(device_, "cudaEventSynchronize", code, slice);
    fail(*job, cause);
    recover(cause);
  } else if (lane.num_digests > 0) {
    job->digests.assign(lane.digests_here, lane.digests_here + lane.num_digests);
  }
  lane.num_digests = 0;
  for (Lane &other : lanes_) {
    if (other.owner != nullptr) other.due_ns = now_ns() + duration_ns(other.bytes);
  }
  if (--job->in_flight == 0 && job->submitted) finish(job);
}

// Sets when a slice is expected to be done: it begins when the slices of other lanes are done.
void Pump::set_due(Lane &lane, int64_t bytes) {
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

void Pump::check(const char *call, int code) const { pds::check(device_, call, code, slice_); }

void Pump::fail(Job &job, const pds_error &error) {
  if (job.error.code == PDS_OK) job.error = error;
}

// Cleans up after a failure: then nothing of this pump is in flight, or the device is lost.
void Pump::recover(const pds_error &cause) {
  for (Lane &lane : lanes_) {
    if (device_.drain(lane.stream) != 0 && device_.drain(lane.stream) != 0) poisoned_ = true;
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
  ticket->finish(job->error, std::move(job->digests));
}

// A slice goes to the device in one stream, so order needs no further events.
void Pump::submit(Lane &lane, const Slice &slice, const Job &job) {
  if (job.ready != nullptr) check("cudaStreamWaitEvent", device_.wait(lane.stream, job.ready));
  if (sums_first(job)) sum(lane, job);
  if (slice.path == PDS_PATH_STAGE) {
    stage(lane, slice, job);
  } else {
    copy(lane, slice, job);
  }
  check("cudaEventRecord", device_.record(lane.done, lane.stream));
}

void Pump::copy(Lane &lane, const Slice &slice, const Job &job) {
  copies_.clear(), strided_.clear();
  for (const Segment &segment : slice.segments) {
    if (slice.path == PDS_PATH_BATCH) {
      add_pieces(layout_, job.work, segment, &copies_);
    } else {
      add_strided(layout_, job.work, segment, &strided_);
    }
  }
  for (const Strided &strided : strided_) {
    check("cudaMemcpy3DAsync", device_.copy_strided(lane.stream, direction_, strided));
  }
  batch(lane, direction_);
}

void Pump::batch(Lane &lane, Direction direction) {
  if (copies_.size() == 0) return;
  check("cuMemcpyBatchAsync", device_.copy_batch(lane.stream, direction, copies_));
}

// Gathers, then copies out by DMA; or copies in, then scatters. The ring holds each segment's bytes
// in the payload's order, so a segment is one DMA.
void Pump::stage(Lane &lane, const Slice &slice, const Job &job) {
  std::vector<uint64_t> rings;  // where each segment's payload would begin
  int64_t used = 0;
  copies_.clear();
  for (const Segment &segment : slice.segments) {
    const Item &item = job.work.items[segment.item];
    const int64_t per_layer = layout_.parts[item.part].token_bytes * item.num_tokens;
    const int64_t offset = segment.layer0 * per_layer;
    const int64_t bytes = (segment.layer1 - segment.layer0) * per_layer;
    const uint64_t ring = address(lane.ring) + used;
    copies_.add(ring, item.payload + offset, bytes);
    rings.push_back(ring - offset);
    used += in_ring(bytes);
  }
  if (direction_ == Direction::kIn) batch(lane, direction_);
  for (size_t begin = 0, end = 0; begin < slice.segments.size(); begin = end) {
    const Segment &first = slice.segments[begin];
    const int32_t part = job.work.items[first.item].part;
    for (end = begin + 1; end < slice.segments.size(); ++end) {
      const Segment &s = slice.segments[end];
      if (job.work.items[s.item].part != part || s.layer0 != first.layer0 ||
          s.layer1 != first.layer1) {
        break;
      }
    }
    launch(lane, job, slice, begin, end, rings);
  }
  if (direction_ == Direction::kOut) batch(lane, direction_);
}

// Launches the kernels for segments of one part and one range of layers.
void Pump::launch(Lane &lane, const Job &job, const Slice &slice, size_t begin, size_t end,
                  const std::vector<uint64_t> &rings) {
  const Segment &range = slice.segments[begin];
  const Part &part = layout_.parts[job.work.items[range.item].part];
  std::vector<Block> blocks;
  for (size_t i = begin; i < end; ++i) {
    Item item = job.work.items[slice.segments[i].item];
    item.payload = rings[i];
    const auto [first, last] = layout_.blocks_of(item);
    for (int32_t n = first; n < last; ++n) {
      blocks.push_back(layout_.block_of(item, n, job.work.ids[item.first_id + n]));
    }
  }
  StageParams &p = params_;
  for (const RegionClass &regions : part.classes) {
    const auto [first, last] = regions.range(range.layer0, range.layer1);
    for (size_t region = first; region < last; region += kStageRegions) {
      p.shape = regions.shape;
      p.num_regions = static_cast<int32_t>(std::min<size_t>(kStageRegions, last - region));
      std::copy_n(&regions.bases[region], p.num_regions, p.bases);
      std::copy_n(&regions.layers[region], p.num_regions, p.layers);
      for (size_t block = 0; block < blocks.size(); block += kStageBlocks) {
        p.num_blocks = static_cast<int32_t>(std::min<size_t>(kStageBlocks, blocks.size() - block));
        std::copy_n(&blocks[block], p.num_blocks, p.blocks);
        check("gather or scatter kernel", device_.stage(lane.stream, direction_, p));
      }
    }
  }
}

// Queues, after a load's last slice, the sums of what all of its slices have copied.
void Pump::sum_copied(Lane &lane, Job &job) {
  if (job.work.num_digests == 0) return;
  lane.num_digests = job.work.num_digests;
  try {
    for (const Lane &other : lanes_) {
      if (&other == &lane || other.owner == nullptr) continue;
      check("cudaStreamWaitEvent", device_.wait(lane.stream, other.done));
    }
    sum(lane, job);
    check("cudaEventRecord", device_.record(lane.done, lane.stream));
  } catch (const Failure &failure) {
    fail(job, failure.error);
    recover(failure.error);
  }
}

// Queues the sums of a job's payloads where they lie in the paged cache.
void Pump::sum(Lane &lane, const Job &job) {
  for (size_t part = 0; part < layout_.parts.size(); ++part) {
    for (size_t next = 0; next < job.work.sums.size();) {
      next = add_sums(layout_, job.work, static_cast<int32_t>(part), next, &sum_params_);
      if (sum_params_.num_items == 0) continue;
      check("sum kernel", device_.sum(lane.stream, sum_params_, lane.digests));
    }
  }
  copies_.clear();
  copies_.add(address(lane.digests), address(lane.digests_here),
              job.work.num_digests * sizeof(uint64_t));
  batch(lane, Direction::kOut);
}

}  // namespace pds
