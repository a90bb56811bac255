// Device: the calls that the engine needs of a device, and where the bytes lie that it copies.
//
// Decision: the engine is written once, on this interface. The CPU form is a device whose streams
// do everything at once; a test build puts a device in front that fails the calls that a test
// names. Calls return 0 or the device's own error code, which the device then forgets. Only
// synchronize and drain wait.
//
// Decision: a copy consists of rows of contiguous bytes, at most one for each token and head. Rows
// that are adjacent on both sides are joined: to whole pieces if the cache has the payload's order,
// [layer][token][head]. The CPU form, the copy engines' descriptors and the kernel all use these
// functions, so they agree on every byte. They are constexpr so that the kernel can call them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ticket.h"

namespace pds {

// The strides and widths that the regions of a part share.
struct Shape {
  int64_t block_stride, token_stride, head_stride;
  int64_t width, start, cell;
  int32_t num_heads;
  bool heads_joined;   // a token's heads are one run
  bool tokens_joined;  // all tokens of a piece are one run
};

// One engine block of one payload: `count` tokens, the first of which is `first` of `num_tokens`.
struct Block {
  uint64_t payload;  // where the payload's first layer is or would be
  int32_t id;
  int32_t num_tokens, first, count;
};

struct Rows {
  int32_t tokens, heads;
  int64_t bytes;  // of one row
};

constexpr Shape join(Shape s) {
  s.heads_joined = s.width == s.cell && (s.num_heads == 1 || s.head_stride == s.cell);
  s.tokens_joined = s.heads_joined && s.token_stride == s.num_heads * s.cell;
  return s;
}

constexpr Rows rows_of(const Shape &s, const Block &b) {
  if (!s.heads_joined) return {b.count, s.num_heads, s.width};
  if (!s.tokens_joined) return {b.count, 1, s.num_heads * s.cell};
  return {1, 1, b.count * s.num_heads * s.cell};
}

constexpr int64_t cache_offset(const Shape &s, const Block &b, int32_t token, int32_t head) {
  return b.id * s.block_stride + token * s.token_stride + head * s.head_stride;
}

constexpr int64_t layer_bytes(const Shape &s, int32_t num_tokens) {
  return num_tokens * s.num_heads * s.cell;
}

constexpr int64_t payload_offset(const Shape &s, const Block &b, int32_t layer, int32_t token,
                                 int32_t head) {
  const int64_t cell = int64_t{b.first + token} * s.num_heads + head;
  return layer * layer_bytes(s, b.num_tokens) + cell * s.cell + s.start;
}

// All offsets and lengths of rows but the bases, OR-ed: the low zero bits tell which vectors fit.
constexpr uint64_t alignment_bits(const Shape &s) {
  uint64_t bits = s.block_stride | s.start | (s.num_heads * s.cell);
  if (!s.tokens_joined) bits |= s.token_stride;
  if (!s.heads_joined) bits |= s.head_stride | s.cell | s.width;
  return bits;
}

enum class Direction : int32_t { kOut = PDS_OUT, kIn = PDS_IN };

// Contiguous copies, as the copy engines take them.
struct Copies {
  std::vector<uint64_t> cache, host;
  std::vector<size_t> bytes;

  void clear() { cache.clear(), host.clear(), bytes.clear(); }
  void add(uint64_t in_cache, uint64_t in_host, int64_t num_bytes) {
    cache.push_back(in_cache), host.push_back(in_host), bytes.push_back(num_bytes);
  }
  size_t size() const { return bytes.size(); }
};

constexpr int64_t kMaxPitch = (int64_t{1} << 31) - 1;  // a 2D copy of a larger pitch is slow
// One piece of each of several layers.
struct Strided {
  uint64_t cache, host;
  int64_t bytes, layers;
  int64_t cache_step, host_step;  // from layer to layer
  int64_t block_stride;
};

constexpr int32_t kStageRegions = 256;
constexpr int32_t kStageBlocks = 1024;

// The parameter, passed by value, of one launch of the gather or scatter kernel.
struct StageParams {
  Shape shape;
  int32_t num_blocks, num_regions;
  uint64_t bases[kStageRegions];
  int32_t layers[kStageRegions];
  Block blocks[kStageBlocks];
};
static_assert(sizeof(StageParams) <= 32764, "kernel parameters have room for this much");

constexpr int32_t kSumShapes = 4, kSumRegions = 256, kSumItems = 512, kSumIds = 4096;

// A payload whose bytes are summed in the paged cache.
struct SumItem {
  uint32_t first_chunk, first_digest;  // among the launch's chunks; among all digests
  uint32_t first_id, num_tokens;
};

// The parameter, passed by value, of one launch of the kernel that sums payloads of one part.
struct SumParams {
  uint64_t start[8], secret[24], last[8], merge[8];  // XXH3's constants for a chunk
  Shape shapes[kSumShapes];                          // of the regions of a layer, by their starts
  int32_t num_shapes, num_layers, num_items;
  uint32_t block_tokens, num_chunks;
  uint64_t bases[kSumRegions];  // all layers of the first shape, then of the next
  SumItem items[kSumItems];
  int32_t ids[kSumIds];
};
static_assert(sizeof(SumParams) <= 32764, "kernel parameters have room for this much");

using Stream = void *;
using Event = void *;

class Device {
 public:
  virtual ~Device() = default;

  // For a thread of the engine: puts it on the device for good.
  virtual int enter() = 0;
  // For a caller's thread: puts it on the device, and back on the device that it was on.
  virtual int push() = 0;
  virtual void pop() = 0;

  virtual int allocate(size_t bytes, void **memory) = 0;
  virtual void release(void *memory) = 0;
  // Allocates host memory that the device's copies can reach.
  virtual int allocate_host(size_t bytes, void **memory) = 0;
  virtual void release_host(void *memory) = 0;
  virtual int open_stream(Stream *stream) = 0;
  virtual void close_stream(Stream stream) = 0;
  virtual int open_event(Event *event, bool for_host) = 0;
  virtual void close_event(Event event) = 0;

  virtual int record(Event event, Stream stream) = 0;
  virtual int wait(Stream stream, Event event) = 0;
  // Sets `over` to whether all work that was queued before the event is done.
  virtual int query(Event event, bool *over) = 0;
  // Waits for an event that is expected after this many nanoseconds.
  virtual int synchronize(Event event, int64_t expected_ns) = 0;
  virtual int drain(Stream stream) = 0;
  virtual int is_capturing(Stream stream, bool *capturing) = 0;

  virtual bool has_batch() const = 0;
  virtual bool needs_registered_host() const = 0;
  virtual int copy_batch(Stream stream, Direction direction, const Copies &copies) = 0;
  virtual int copy_strided(Stream stream, Direction direction, const Strided &strided) = 0;
  virtual int stage(Stream stream, Direction direction, const StageParams &params) = 0;
  // Writes the digests of chunks to the device's memory.
  virtual int sum(Stream stream, const SumParams &params, uint64_t *digests) = 0;

  virtual const char *describe(int code) const = 0;

  virtual int register_host(uint64_t address, size_t bytes) = 0;
  virtual int unregister_host(uint64_t address) = 0;
};

inline pds_error device_error(const Device &device, const char *call, int code, int64_t slice) {
  return error_of(PDS_ERR_DEVICE, device.describe(code), code, call, slice);
}

// Throws a Failure for a code that is not 0.
inline void check(const Device &device, const char *call, int code, int64_t slice = -1) {
  if (code != 0) throw Failure{device_error(device, call, code, slice)};
}

// Puts a caller's thread on the device for as long as this lives.
class OnDevice {
 public:
  explicit OnDevice(Device &device) : device_(device) {
    check(device, "cuCtxPushCurrent", device.push());
  }
  ~OnDevice() { device_.pop(); }
  OnDevice(const OnDevice &) = delete;
  OnDevice &operator=(const OnDevice &) = delete;

 private:
  Device &device_;
};

class Crew;

// Throws a Failure if there is no such device. In a test build it can be told to fail.
// crew: its threads copy for the CPU form; null if nothing is to be copied.
std::unique_ptr<Device> open_device(int32_t index, Crew *crew = nullptr);
std::unique_ptr<Device> open_cuda_device(int32_t index);  // null if it cannot be used
std::unique_ptr<Device> with_faults(std::unique_ptr<Device> device);
// The launchers of the kernels.
int launch_stage(Stream stream, Direction direction, const StageParams &params);
int launch_sum(Stream stream, const SumParams &params, uint64_t *digests);
int exchange_capture_mode(int32_t *mode);
int32_t count_cuda_devices();
bool built_with_cuda();

}  // namespace pds
