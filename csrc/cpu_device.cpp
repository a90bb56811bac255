// The CPU form: a device whose memory is the host's and whose streams do everything at once.
//
// Decision: no GPU is needed to test validation, the walk over slices, descriptors of all paths,
// tickets, order and errors; hosts without a GPU use the same engine. The crew helps to copy a
// batch: an engine may keep its paged cache in host memory, and one thread copies 5 GB/s, far less
// than the memory allows, and even less into pages that nobody has touched.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>

#include "checksum.h"
#include "crew.h"
#include "sums.h"

namespace pds {
namespace {

constexpr size_t kShare = 512 << 10;  // less is not worth waking a thread

void *pointer(uint64_t address) { return reinterpret_cast<void *>(address); }

void copy(Direction direction, uint64_t cache, uint64_t host, size_t bytes) {
  if (direction == Direction::kOut) {
    std::memcpy(pointer(host), pointer(cache), bytes);
  } else {
    std::memcpy(pointer(cache), pointer(host), bytes);
  }
}

// Copies the bytes from `begin` to `end` of all pieces, counted as if they lay in a row.
void copy_share(Direction direction, const Copies &copies, size_t begin, size_t end) {
  for (size_t i = 0, at = 0; i < copies.size() && at < end; at += copies.bytes[i++]) {
    const size_t first = std::max(begin, at), last = std::min(end, at + copies.bytes[i]);
    if (first >= last) continue;
    copy(direction, copies.cache[i] + (first - at), copies.host[i] + (first - at), last - first);
  }
}

void stage_piece(Direction direction, const Shape &shape, const Block &block, uint64_t base,
                 int32_t layer) {
  const Rows rows = rows_of(shape, block);
  for (int32_t token = 0; token < rows.tokens; ++token) {
    for (int32_t head = 0; head < rows.heads; ++head) {
      copy(direction, base + cache_offset(shape, block, token, head),
           block.payload + payload_offset(shape, block, layer, token, head), rows.bytes);
    }
  }
}

void sum_chunk(const SumParams &p, uint32_t chunk, uint64_t *digests) {
  const SumItem &item = item_of(p, chunk);
  const uint32_t number = chunk - item.first_chunk;
  uint32_t word = number * kChunkWords;
  const uint32_t end = std::min(words_of(p, item), word + kChunkWords);
  char bytes[kChunkBytes] = {};
  for (char *to = bytes; word < end;) {
    const Place place = place_of(p, item, word);
    const uint32_t words = std::min(place.words, end - word);
    std::memcpy(to, pointer(place.address), words * kWordBytes);
    word += words, to += words * kWordBytes;
  }
  digests[item.first_digest + number] = digest_of_chunk(bytes);
}

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(Crew *crew) : crew_(crew) {}

  int enter() override { return 0; }
  int push() override { return 0; }
  void pop() override {}

  int allocate(size_t bytes, void **memory) override {
    *memory = std::malloc(bytes);
    return *memory == nullptr ? PDS_ERR_MEMORY : 0;
  }
  void release(void *memory) override { std::free(memory); }
  int allocate_host(size_t bytes, void **memory) override { return allocate(bytes, memory); }
  void release_host(void *memory) override { release(memory); }
  int open_stream(Stream *stream) override { return *stream = this, 0; }
  void close_stream(Stream) override {}
  int open_event(Event *event, bool) override { return *event = this, 0; }
  void close_event(Event) override {}

  int record(Event, Stream) override { return 0; }
  int wait(Stream, Event) override { return 0; }
  int query(Event, bool *over) override { return *over = true, 0; }
  int synchronize(Event, int64_t) override { return 0; }
  int drain(Stream) override { return 0; }
  int is_capturing(Stream, bool *capturing) override { return *capturing = false, 0; }

  bool has_batch() const override { return true; }
  bool needs_registered_host() const override { return false; }

  int copy_batch(Stream, Direction direction, const Copies &copies) override {
    const size_t bytes = std::accumulate(copies.bytes.begin(), copies.bytes.end(), size_t{0});
    const auto shares = static_cast<int64_t>(std::max<size_t>(1, bytes / kShare));
    crew_->each(shares, [&](int64_t i) {
      copy_share(direction, copies, i * kShare, i + 1 == shares ? bytes : (i + 1) * kShare);
    });
    return 0;
  }

  int copy_strided(Stream stream, Direction direction, const Strided &s) override {
    Copies copies;
    for (int64_t i = 0; i < s.layers; ++i) {
      copies.add(s.cache + i * s.cache_step, s.host + i * s.host_step, s.bytes);
    }
    return copy_batch(stream, direction, copies);
  }

  int stage(Stream, Direction direction, const StageParams &p) override {
    for (int32_t b = 0; b < p.num_blocks; ++b) {
      for (int32_t r = 0; r < p.num_regions; ++r) {
        stage_piece(direction, p.shape, p.blocks[b], p.bases[r], p.layers[r]);
      }
    }
    return 0;
  }

  int sum(Stream, const SumParams &p, uint64_t *digests) override {
    constexpr uint32_t kAtOnce = kShare / kChunkBytes;
    crew_->each((p.num_chunks + kAtOnce - 1) / kAtOnce, [&](int64_t i) {
      const uint32_t first = static_cast<uint32_t>(i) * kAtOnce;
      const uint32_t end = std::min(first + kAtOnce, p.num_chunks);
      for (uint32_t chunk = first; chunk < end; ++chunk) sum_chunk(p, chunk, digests);
    });
    return 0;
  }

  const char *describe(int) const override { return "injected"; }
  int register_host(uint64_t, size_t) override { return 0; }
  int unregister_host(uint64_t) override { return 0; }

 private:
  Crew *const crew_;
};

}  // namespace

#ifndef PDSTORE_TESTING  // a test build has it in tests/faults.cpp
std::unique_ptr<Device> with_faults(std::unique_ptr<Device> device) { return device; }
#endif
#ifndef PDSTORE_HAS_CUDA
std::unique_ptr<Device> open_cuda_device(int32_t) { return nullptr; }
int exchange_capture_mode(int32_t *) { return 0; }
int32_t count_cuda_devices() { return 0; }
bool built_with_cuda() { return false; }
#endif

std::unique_ptr<Device> open_device(int32_t index, Crew *crew) {
  std::unique_ptr<Device> device;
  if (index == PDS_CPU) {
    device = std::make_unique<CpuDevice>(crew);
  } else if (index >= 0 && index < count_cuda_devices()) {
    device = open_cuda_device(index);
  }
  if (device != nullptr) return with_faults(std::move(device));
  const std::string why = "there is no CUDA device " + std::to_string(index) + " that can be used";
  throw Failure{error_of(PDS_ERR_NO_DEVICE, why)};
}

}  // namespace pds
