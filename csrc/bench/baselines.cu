// Other ways to move the same bytes, to compare with. Only benchmark builds contain them.
//
// Decision: they are written anew after the mechanisms of other programs: a copy for each piece;
// one batch for everything; a thread block for each KV block, which stores to host memory itself;
// two persistent thread blocks that do so. They are timed in the same run, so that the numbers
// compare mechanisms on one machine.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../pdstore.h"

namespace {

constexpr int kSeedThreads = 512;
constexpr int kThreads = 1024;
constexpr int64_t kTile = 4096;

__global__ void block_per_block(const uint64_t *to, const uint64_t *from, int64_t bytes,
                                int64_t per_block) {
  for (int64_t piece = blockIdx.x * per_block; piece < (blockIdx.x + 1) * per_block; ++piece) {
    const auto *source = reinterpret_cast<const uint4 *>(from[piece]);
    auto *target = reinterpret_cast<uint4 *>(to[piece]);
    for (int64_t i = threadIdx.x; i < bytes / 16; i += blockDim.x) target[i] = source[i];
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    persistent(const uint64_t *to, const uint64_t *from, int64_t n, int64_t bytes) {
  const int64_t tiles = (bytes + kTile - 1) / kTile;
  const int64_t warps = gridDim.x * (kThreads / 32);
  const int lane = threadIdx.x % 32;
  for (int64_t t = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; t < n * tiles; t += warps) {
    const int64_t piece = t / tiles, at = (t - piece * tiles) * kTile;
    const auto *source = reinterpret_cast<const uint4 *>(from[piece] + at) + lane;
    auto *target = reinterpret_cast<uint4 *>(to[piece] + at) + lane;
    const int64_t left = (bytes - at) / 16 - lane;
    uint4 held[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      if (u * 32 < left) held[u] = __ldcs(source + u * 32);
    }
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      if (u * 32 < left) __stcs(target + u * 32, held[u]);
    }
  }
}

int32_t one_batch(const uint64_t *to, const uint64_t *from, int64_t n, int64_t bytes,
                  cudaStream_t stream) {
  using Batch = CUresult (*)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *,
                             size_t *, size_t, size_t *, CUstream);
  void *found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", &found, 12080, cudaEnableDefault,
                                       &result) != cudaSuccess ||
      found == nullptr) {
    return PDS_ERR_NO_DEVICE;
  }
  size_t *sizes = new size_t[n];
  for (int64_t i = 0; i < n; ++i) sizes[i] = bytes;
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  size_t first = 0, failed = 0;
  const CUresult code =
      reinterpret_cast<Batch>(found)(reinterpret_cast<CUdeviceptr *>(const_cast<uint64_t *>(to)),
                                     reinterpret_cast<CUdeviceptr *>(const_cast<uint64_t *>(from)),
                                     sizes, n, &attributes, &first, 1, &failed, stream);
  delete[] sizes;
  return code;
}

}  // namespace

// method 0: a copy per piece; 1: one batch; 2: a thread block per KV block; 3: two thread blocks.
// Tables of addresses are host memory for 0 and 1, device memory for 2 and 3.
extern "C" __attribute__((visibility("default"))) int32_t
pds_bench_copy(int32_t method, const uint64_t *to, const uint64_t *from, int64_t n, int64_t bytes,
               int64_t per_block, uint64_t stream_handle) {
  const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
  if (method == 1) return one_batch(to, from, n, bytes, stream);
  if (method == 2) {
    block_per_block<<<static_cast<unsigned>(n / per_block), kSeedThreads, 0, stream>>>(
        to, from, bytes, per_block);
    return cudaGetLastError();
  }
  if (method == 3) {
    persistent<<<2, kThreads, 0, stream>>>(to, from, n, bytes);
    return cudaGetLastError();
  }
  for (int64_t i = 0; i < n; ++i) {
    const cudaError_t code =
        cudaMemcpyAsync(reinterpret_cast<void *>(to[i]), reinterpret_cast<void *>(from[i]), bytes,
                        cudaMemcpyDefault, stream);
    if (code != cudaSuccess) return code;
  }
  return 0;
}
