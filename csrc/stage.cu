// The kernels gather and scatter, between the paged cache and a device ring that holds payloads.
//
// Decision: only the copy engines use the link: they move whole payloads at 98 % of its speed,
// whatever the piece size. The kernel only rearranges device memory, in short bursts on at most 32
// multiprocessors. Descriptors are passed by value as its parameter, so no table must outlive a
// launch. A vector is the widest that fits every row's start and length, so no row has a rest; each
// lane of a warp has several vectors in flight.
// Decision: docs/decisions/022-no-kernel-writes-host.md
#include <cuda_runtime_api.h>

#include <algorithm>

#include "device.h"

namespace pds {
namespace {

constexpr int kThreads = 1024;
constexpr int kMaxGrid = 32;
constexpr int kWarp = 32;

// Vectors of one region of one block, row after row.
struct Vectors {
  uint32_t per_row, heads, count;
};

template <typename V>
__host__ __device__ Vectors vectors_of(const Shape &shape, const Block &block) {
  const Rows rows = rows_of(shape, block);
  const uint32_t per_row = static_cast<uint32_t>(rows.bytes / sizeof(V));
  return {per_row, static_cast<uint32_t>(rows.heads),
          per_row * static_cast<uint32_t>(rows.heads) * static_cast<uint32_t>(rows.tokens)};
}

// A warp moves kUnroll vectors per lane of one (block, region) at a time.
template <typename V, int kUnroll, bool kOneRow, bool kGather>
__global__ void __launch_bounds__(kThreads, 1)
    move_kernel(const __grid_constant__ StageParams p, const uint32_t tiles) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t num_warps = gridDim.x * (kThreads / kWarp);
  const uint64_t per_block = static_cast<uint64_t>(p.num_regions) * tiles;
  const uint64_t total = p.num_blocks * per_block;
  for (uint64_t t = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp; t < total;
       t += num_warps) {
    const uint32_t b = static_cast<uint32_t>(t / per_block);
    const uint32_t rest = static_cast<uint32_t>(t - b * per_block);
    const uint32_t region = rest / tiles;
    const Block &block = p.blocks[b];
    const Vectors vectors = vectors_of<V>(p.shape, block);
    const uint32_t first = (rest - region * tiles) * (kWarp * kUnroll) + lane;
    V *from[kUnroll], *to[kUnroll];
    V held[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t index = first + u * kWarp;
      uint32_t row = 0, column = index;
      if (!kOneRow) row = index / vectors.per_row, column = index - row * vectors.per_row;
      const int32_t token = row / vectors.heads;
      const int32_t head = row - token * vectors.heads;
      const uint64_t in_cache =
          p.bases[region] + cache_offset(p.shape, block, token, head) + column * sizeof(V);
      const uint64_t in_ring = block.payload +
                               payload_offset(p.shape, block, p.layers[region], token, head) +
                               column * sizeof(V);
      from[u] = reinterpret_cast<V *>(kGather ? in_cache : in_ring);
      to[u] = reinterpret_cast<V *>(kGather ? in_ring : in_cache);
      if (index < vectors.count) held[u] = __ldcs(from[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kWarp < vectors.count) __stcs(to[u], held[u]);
    }
  }
}

// The widest vector, in bytes, whose size divides every address and length; at most 16.
uint64_t widest_vector(const StageParams &p) {
  uint64_t bits = alignment_bits(p.shape) | 16;
  for (int32_t i = 0; i < p.num_regions; ++i) bits |= p.bases[i];
  for (int32_t i = 0; i < p.num_blocks; ++i) bits |= p.blocks[i].payload;
  return bits & (~bits + 1);
}

template <typename V, int kUnroll, bool kOneRow>
cudaError_t launch(Stream stream, Direction direction, const StageParams &p) {
  uint32_t largest = 0;
  for (int32_t i = 0; i < p.num_blocks; ++i) {
    largest = std::max(largest, vectors_of<V>(p.shape, p.blocks[i]).count);
  }
  uint32_t tiles = (largest + kWarp * kUnroll - 1) / (kWarp * kUnroll);
  const uint64_t work = static_cast<uint64_t>(p.num_blocks) * p.num_regions * tiles;
  constexpr uint64_t kWarps = kThreads / kWarp;
  const auto grid =
      static_cast<unsigned>(std::min<uint64_t>(kMaxGrid, (work + kWarps - 1) / kWarps));
  if (grid == 0) return cudaSuccess;
  const void *kernel =
      direction == Direction::kOut
          ? reinterpret_cast<const void *>(move_kernel<V, kUnroll, kOneRow, true>)
          : reinterpret_cast<const void *>(move_kernel<V, kUnroll, kOneRow, false>);
  void *arguments[] = {const_cast<StageParams *>(&p), &tiles};
  return cudaLaunchKernel(kernel, dim3(grid), dim3(kThreads), arguments, 0,
                          static_cast<cudaStream_t>(stream));
}

template <typename V>
cudaError_t launch_rows(Stream stream, Direction direction, const StageParams &p) {
  for (int32_t i = 0; i < p.num_blocks; ++i) {
    const Rows rows = rows_of(p.shape, p.blocks[i]);
    if (rows.tokens * rows.heads != 1) return launch<V, 2, false>(stream, direction, p);
  }
  return launch<V, 4, true>(stream, direction, p);
}

}  // namespace

int launch_stage(Stream stream, Direction direction, const StageParams &params) {
  switch (widest_vector(params)) {
    case 16: return launch_rows<uint4>(stream, direction, params);
    case 8: return launch_rows<uint2>(stream, direction, params);
    case 4: return launch_rows<unsigned int>(stream, direction, params);
    case 2: return launch_rows<unsigned short>(stream, direction, params);
    default: return launch_rows<unsigned char>(stream, direction, params);
  }
}

}  // namespace pds
