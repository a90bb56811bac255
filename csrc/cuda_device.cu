// A GPU as a Device: streams, events, copy engines, registered host memory.
//
// Decision: the CUDA runtime is linked statically, and driver functions are looked up, so the
// library loads without a driver and says that there is no device. A caller's thread is put on the
// device by pushing its primary context, and put back by popping it: unlike cudaSetDevice, this
// makes no context on the device that the thread was on. During a call a thread is in relaxed
// capture mode, so graph captures of other threads stay valid. An error that a CUDA call leaves
// behind is cleared, so that nobody else meets it.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "device.h"

namespace pds {
namespace {

constexpr int64_t kEarlyNs = 15'000;
constexpr int64_t kShortestNs = 12'000, kLongestNs = 100'000;
constexpr int64_t kLatestNs = 5'000'000;

int checked(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
  return static_cast<int>(code);
}

void *pointer(uint64_t address) { return reinterpret_cast<void *>(address); }

// cuMemcpyBatchAsync as CUDA 12.8 made it; later headers rename it.
struct BatchAttributes {
  int source_order;
  CUmemLocation source_hint, destination_hint;
  unsigned int flags;
};
constexpr int kSourceInStreamOrder = 1;
using BatchCopy = CUresult (*)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, BatchAttributes *,
                               size_t *, size_t, size_t *, CUstream);

template <typename Function>
Function driver(const char *name, unsigned version) {
  void *found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t code =
      cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
  if (checked(code) != 0 || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Function>(found);
}

struct Driver {
  CUresult (*retain)(CUcontext *, CUdevice) = nullptr;
  CUresult (*release)(CUdevice) = nullptr;
  CUresult (*push)(CUcontext) = nullptr;
  CUresult (*pop)(CUcontext *) = nullptr;
  BatchCopy batch = nullptr;

  bool load() {
    retain = driver<decltype(retain)>("cuDevicePrimaryCtxRetain", 7000);
    release = driver<decltype(release)>("cuDevicePrimaryCtxRelease", 11000);
    push = driver<decltype(push)>("cuCtxPushCurrent", 4000);
    pop = driver<decltype(pop)>("cuCtxPopCurrent", 4000);
    batch = driver<BatchCopy>("cuMemcpyBatchAsync", 12080);
    return retain && release && push && pop;
  }
};

thread_local cudaStreamCaptureMode previous_mode = cudaStreamCaptureModeGlobal;

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int32_t index) : index_(index) {}
  ~CudaDevice() override {
    if (context_ != nullptr) driver_.release(index_);
  }
  bool open() { return driver_.load() && driver_.retain(&context_, index_) == CUDA_SUCCESS; }

  int enter() override {
    prctl(PR_SET_TIMERSLACK, 1000);  // nanoseconds; this thread's short sleeps shall be short
    if (const int code = checked(cudaSetDevice(index_))) return code;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    return checked(cudaThreadExchangeStreamCaptureMode(&mode));
  }
  int push() override {
    if (const CUresult code = driver_.push(context_); code != CUDA_SUCCESS) return code;
    previous_mode = cudaStreamCaptureModeRelaxed;
    return checked(cudaThreadExchangeStreamCaptureMode(&previous_mode));
  }
  void pop() override {
    cudaThreadExchangeStreamCaptureMode(&previous_mode);
    CUcontext ours;
    driver_.pop(&ours);
  }

  int allocate(size_t bytes, void **memory) override { return checked(cudaMalloc(memory, bytes)); }
  void release(void *memory) override { checked(cudaFree(memory)); }
  int allocate_host(size_t bytes, void **memory) override {
    return checked(cudaHostAlloc(memory, bytes, cudaHostAllocPortable));
  }
  void release_host(void *memory) override { checked(cudaFreeHost(memory)); }
  // A copy's kernels are small, and its slices wait for them. Without priority they waited for all
  // blocks of the model's kernels that were queued before: a save's sums then delayed D by 3 ms.
  int open_stream(Stream *stream) override {
    int lowest = 0, highest = 0;
    const int code = checked(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    if (code != 0) return code;
    return checked(cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t *>(stream),
                                                cudaStreamNonBlocking, highest));
  }
  void close_stream(Stream stream) override { checked(cudaStreamDestroy(of(stream))); }
  int open_event(Event *event, bool for_host) override {
    const unsigned flags = cudaEventDisableTiming | (for_host ? cudaEventBlockingSync : 0);
    return checked(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t *>(event), flags));
  }
  void close_event(Event event) override { checked(cudaEventDestroy(event_of(event))); }

  int record(Event event, Stream stream) override {
    return checked(cudaEventRecord(event_of(event), of(stream)));
  }
  int wait(Stream stream, Event event) override {
    return checked(cudaStreamWaitEvent(of(stream), event_of(event), 0));
  }
  int query(Event event, bool *over) override {
    const cudaError_t code = cudaEventQuery(event_of(event));
    *over = code != cudaErrorNotReady;
    return *over ? checked(code) : 0;
  }
  int synchronize(Event event, int64_t expected_ns) override;
  int drain(Stream stream) override { return checked(cudaStreamSynchronize(of(stream))); }
  int is_capturing(Stream stream, bool *capturing) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t code = cudaStreamIsCapturing(of(stream), &status);
    *capturing = status != cudaStreamCaptureStatusNone || code == cudaErrorStreamCaptureImplicit;
    return *capturing ? (cudaGetLastError(), 0) : checked(code);
  }

  bool has_batch() const override { return driver_.batch != nullptr; }
  bool needs_registered_host() const override { return true; }
  int copy_batch(Stream stream, Direction direction, const Copies &copies) override;
  int copy_strided(Stream stream, Direction direction, const Strided &strided) override;
  int stage(Stream stream, Direction direction, const StageParams &params) override {
    return checked(static_cast<cudaError_t>(launch_stage(stream, direction, params)));
  }
  int sum(Stream stream, const SumParams &params, uint64_t *digests) override {
    return checked(static_cast<cudaError_t>(launch_sum(stream, params, digests)));
  }

  const char *describe(int code) const override {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
  }

  int register_host(uint64_t address, size_t bytes) override {
    return checked(cudaHostRegister(pointer(address), bytes, cudaHostRegisterPortable));
  }
  int unregister_host(uint64_t address) override {
    return checked(cudaHostUnregister(pointer(address)));
  }

 private:
  static cudaStream_t of(Stream stream) { return static_cast<cudaStream_t>(stream); }
  static cudaEvent_t event_of(Event event) { return static_cast<cudaEvent_t>(event); }

  const int32_t index_;
  CUcontext context_ = nullptr;
  Driver driver_;
};

// Sleeps until the event is nearly due, then queries it often, and later less and less often. In a
// virtual machine, an interrupt would wake this thread 0.2 ms late: longer than a slice takes.
int CudaDevice::synchronize(Event event, int64_t expected_ns) {
  using std::chrono::nanoseconds;
  const auto due = std::chrono::steady_clock::now() + nanoseconds(expected_ns);
  if (expected_ns > kEarlyNs) std::this_thread::sleep_for(nanoseconds(expected_ns - kEarlyNs));
  for (;;) {
    const cudaError_t code = cudaEventQuery(event_of(event));
    if (code != cudaErrorNotReady) return checked(code);
    const int64_t late = nanoseconds(std::chrono::steady_clock::now() - due).count();
    if (late > kLatestNs) return checked(cudaEventSynchronize(event_of(event)));
    std::this_thread::sleep_for(nanoseconds(std::clamp(late / 8, kShortestNs, kLongestNs)));
  }
}

// Sources are read in stream order in both directions: the model writes what is copied out.
int CudaDevice::copy_batch(Stream stream, Direction direction, const Copies &copies) {
  const bool out = direction == Direction::kOut;
  auto *to = const_cast<uint64_t *>(out ? copies.host.data() : copies.cache.data());
  auto *from = const_cast<uint64_t *>(out ? copies.cache.data() : copies.host.data());
  auto *bytes = const_cast<size_t *>(copies.bytes.data());
  if (driver_.batch != nullptr && copies.size() > 1) {
    BatchAttributes attributes{kSourceInStreamOrder, {}, {}, 0};
    size_t first = 0, failed = 0;
    static_assert(sizeof(CUdeviceptr) == sizeof(uint64_t));
    return driver_.batch(reinterpret_cast<CUdeviceptr *>(to), reinterpret_cast<CUdeviceptr *>(from),
                         bytes, copies.size(), &attributes, &first, 1, &failed, of(stream));
  }
  const cudaMemcpyKind kind = out ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  for (size_t i = 0; i < copies.size(); ++i) {
    const cudaError_t code =
        cudaMemcpyAsync(pointer(to[i]), pointer(from[i]), bytes[i], kind, of(stream));
    if (code != cudaSuccess) return checked(code);
  }
  return 0;
}

int CudaDevice::copy_strided(Stream stream, Direction direction, const Strided &s) {
  const bool out = direction == Direction::kOut;
  const cudaMemcpyKind kind = out ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  if (s.layers > 1 && (s.cache_step % s.block_stride != 0 || s.block_stride > kMaxPitch)) {
    return checked(
        cudaMemcpy2DAsync(pointer(out ? s.host : s.cache), out ? s.host_step : s.cache_step,
                          pointer(out ? s.cache : s.host), out ? s.cache_step : s.host_step,
                          s.bytes, s.layers, kind, of(stream)));
  }
  // Layers are the copy's depth: so the pitch is a block's stride, however far apart layers lie.
  const size_t height = s.layers > 1 ? s.cache_step / s.block_stride : 1;
  const cudaPitchedPtr cache =
      make_cudaPitchedPtr(pointer(s.cache), s.block_stride, s.block_stride, height);
  const cudaPitchedPtr host = make_cudaPitchedPtr(pointer(s.host), s.host_step, s.host_step, 1);
  cudaMemcpy3DParms copy{};
  copy.srcPtr = out ? cache : host;
  copy.dstPtr = out ? host : cache;
  copy.extent = make_cudaExtent(s.bytes, 1, s.layers);
  copy.kind = kind;
  return checked(cudaMemcpy3DAsync(&copy, of(stream)));
}

}  // namespace

std::unique_ptr<Device> open_cuda_device(int32_t index) {
  auto device = std::make_unique<CudaDevice>(index);
  return device->open() ? std::move(device) : nullptr;
}

int exchange_capture_mode(int32_t *mode) {
  auto wanted = static_cast<cudaStreamCaptureMode>(*mode);
  const int code = checked(cudaThreadExchangeStreamCaptureMode(&wanted));
  *mode = wanted;
  return code;
}

int32_t count_cuda_devices() {
  int count = 0;
  return checked(cudaGetDeviceCount(&count)) == 0 ? count : 0;
}

bool built_with_cuda() { return true; }

}  // namespace pds
