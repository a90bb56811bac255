// The kernel that sums payloads where they lie in the paged cache.
//
// Decision: four threads sum a chunk, each with two of XXH3's lanes: they read 64 bytes side by
// side and exchange nothing until the end. A block range has work for every thread of this grid.
// Thread blocks are small: one of 1,024 threads waits until the model leaves a multiprocessor.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "sums.h"

namespace pds {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxGrid = 128;
constexpr int kQuarters = 4;
constexpr int kUnroll = 8;   // words that a thread reads at once
constexpr int kRounds = 16;  // until the lanes are scrambled; four times in a chunk

__device__ uint64_t product_of(uint64_t x, uint64_t y) { return x * y ^ __umul64hi(x, y); }

__global__ void __launch_bounds__(kThreads)
    sum_kernel(const __grid_constant__ SumParams p, uint64_t *digests) {
  __shared__ uint64_t secret[24];
  if (threadIdx.x < 24) secret[threadIdx.x] = p.secret[threadIdx.x];
  __syncthreads();
  const uint32_t quarter = threadIdx.x % kQuarters;
  const uint32_t group = 0xfu << (threadIdx.x % 32 - quarter);
  const uint64_t *keys = secret + 2 * quarter;
  const uint32_t step = gridDim.x * (kThreads / kQuarters);
  for (uint32_t chunk = (blockIdx.x * kThreads + threadIdx.x) / kQuarters; chunk < p.num_chunks;
       chunk += step) {
    const SumItem &item = item_of(p, chunk);
    const uint32_t number = chunk - item.first_chunk, end = words_of(p, item);
    uint32_t word = number * kChunkWords + quarter;
    Quarter state{p.start[2 * quarter], p.start[2 * quarter + 1]};
    Place place{0, 0};
    for (int round = 0; round < 4 * kRounds; round += kUnroll) {
      uint4 held[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u, word += kQuarters) {
        held[u] = {0, 0, 0, 0};
        if (word >= end) continue;
        if (place.words > kQuarters) {
          place.words -= kQuarters, place.address += kQuarters * kWordBytes;
        } else {
          place = place_of(p, item, word);
        }
        held[u] = __ldcs(reinterpret_cast<const uint4 *>(place.address));
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const bool is_last = round + u == 4 * kRounds - 1;
        const int n = (round + u) % kRounds;
        state.add(held[u].x | uint64_t{held[u].y} << 32, held[u].z | uint64_t{held[u].w} << 32,
                  is_last ? p.last[2 * quarter] : keys[n],
                  is_last ? p.last[2 * quarter + 1] : keys[n + 1]);
      }
      if (round % kRounds == kRounds - kUnroll && round < 3 * kRounds) {
        state.scramble(keys[kRounds], keys[kRounds + 1]);
      }
    }
    uint64_t sum = product_of(state.a ^ p.merge[2 * quarter], state.b ^ p.merge[2 * quarter + 1]);
    sum += __shfl_xor_sync(group, sum, 1);
    sum += __shfl_xor_sync(group, sum, 2);
    if (quarter == 0) digests[item.first_digest + number] = end_of_chunk(sum);
  }
}

}  // namespace

int launch_sum(Stream stream, const SumParams &params, uint64_t *digests) {
  constexpr uint32_t kChunks = kThreads / kQuarters;
  const uint32_t grid = std::min<uint32_t>(kMaxGrid, (params.num_chunks + kChunks - 1) / kChunks);
  if (grid == 0) return cudaSuccess;
  void *arguments[] = {const_cast<SumParams *>(&params), &digests};
  return cudaLaunchKernel(reinterpret_cast<const void *>(sum_kernel), dim3(grid), dim3(kThreads),
                          arguments, 0, static_cast<cudaStream_t>(stream));
}

}  // namespace pds
