// A slice on its way to the device: everything in one stream, so order needs no further events.
#include <algorithm>

#include "pump.h"

namespace pds {
namespace {

uint64_t address(void *pointer) { return reinterpret_cast<uint64_t>(pointer); }

}  // namespace

pds_error Pump::submit(Lane &lane, const Slice &slice, const Job &job) {
  if (job.ready != nullptr) {
    if (const int code = device_.wait(lane.stream, job.ready)) {
      return failed("cudaStreamWaitEvent", code, job.num_slices);
    }
  }
  const pds_error error =
      slice.path == Path::kStage ? stage(lane, slice, job) : copy(lane, slice, job);
  if (error.code != PDS_OK) return error;
  const int code = device_.record(lane.done, lane.stream);
  return code == 0 ? pds_error{} : failed("cudaEventRecord", code, job.num_slices);
}

pds_error Pump::copy(Lane &lane, const Slice &slice, const Job &job) {
  copies_.clear(), strided_.clear();
  for (const Segment &segment : slice.segments) {
    if (slice.path == Path::kBatch) {
      add_pieces(layout_, job.work, segment, &copies_);
    } else {
      add_strided(layout_, job.work, segment, &strided_);
    }
  }
  for (const Strided &strided : strided_) {
    if (const int code = device_.copy_strided(lane.stream, direction_, strided)) {
      return failed("cudaMemcpy3DAsync", code, job.num_slices);
    }
  }
  return batch(lane, job.num_slices);
}

pds_error Pump::batch(Lane &lane, int64_t slice) {
  if (copies_.size() == 0) return {};
  const int code = device_.copy_batch(lane.stream, direction_, copies_);
  return code == 0 ? pds_error{} : failed("cuMemcpyBatchAsync", code, slice);
}

// Gather, then DMA out; or DMA in, then scatter. The ring holds each segment's bytes as its payload
// does, so a segment is one DMA.
pds_error Pump::stage(Lane &lane, const Slice &slice, const Job &job) {
  std::vector<uint64_t> rings;  // where each segment's payload would begin
  int64_t used = 0;
  copies_.clear();
  for (const Segment &segment : slice.segments) {
    int64_t offset = 0, bytes = 0;
    span_of(layout_, job.work, segment, &offset, &bytes);
    const uint64_t ring = address(lane.ring) + used;
    copies_.add(ring, job.work.items[segment.item].payload + offset, bytes);
    rings.push_back(ring - offset);
    used += in_ring(bytes);
  }
  if (direction_ == Direction::kIn) {
    if (const pds_error error = batch(lane, job.num_slices); error.code != PDS_OK) return error;
  }
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
    const pds_error error = launch(lane, job, slice, begin, end, rings);
    if (error.code != PDS_OK) return error;
  }
  return direction_ == Direction::kOut ? batch(lane, job.num_slices) : pds_error{};
}

// The kernels of segments that have one part and one range of layers.
pds_error Pump::launch(Lane &lane, const Job &job, const Slice &slice, size_t begin, size_t end,
                       const std::vector<uint64_t> &rings) {
  const Segment &range = slice.segments[begin];
  const Part &part = layout_.part(job.work.items[range.item].part);
  std::vector<Block> blocks;
  for (size_t i = begin; i < end; ++i) {
    Item item = job.work.items[slice.segments[i].item];
    item.payload = rings[i];
    int32_t first = 0, last = 0;
    layout_.blocks_of(item, &first, &last);
    for (int32_t n = first; n < last; ++n) {
      blocks.push_back(layout_.block_of(item, n, job.work.ids[item.first_id + n]));
    }
  }
  StageParams &p = *params_;
  for (const RegionClass &regions : part.classes) {
    size_t region = 0, last = 0;
    regions.range(range.layer0, range.layer1, &region, &last);
    for (; region < last; region += kStageRegions) {
      p.shape = regions.shape;
      p.num_regions = static_cast<int32_t>(std::min<size_t>(kStageRegions, last - region));
      std::copy_n(&regions.bases[region], p.num_regions, p.bases);
      std::copy_n(&regions.layers[region], p.num_regions, p.layers);
      for (size_t block = 0; block < blocks.size(); block += kStageBlocks) {
        p.num_blocks = static_cast<int32_t>(std::min<size_t>(kStageBlocks, blocks.size() - block));
        std::copy_n(&blocks[block], p.num_blocks, p.blocks);
        if (const int code = device_.stage(lane.stream, direction_, p)) {
          return failed("gather or scatter kernel", code, job.num_slices);
        }
      }
    }
  }
  return {};
}

// Behind a job's last slice: the sums of what all of its slices have copied.
pds_error Pump::sum(Lane &lane, const Job &job) {
  const auto failure = [&](const char *call, int code) {
    return failed(call, code, job.num_slices - 1);
  };
  for (const Lane &other : lanes_) {
    if (&other == &lane || other.owner == nullptr) continue;
    const int code = device_.wait(lane.stream, other.done);
    if (code != 0) return failure("cudaStreamWaitEvent", code);
  }
  for (int32_t part = 0; part < layout_.num_parts(); ++part) {
    for (size_t next = 0; next < job.work.sums.size();) {
      next = add_sums(layout_, job.work, part, next, sum_params_.get());
      if (sum_params_->num_items == 0) continue;
      const int code = device_.sum(lane.stream, *sum_params_, lane.digests);
      if (code != 0) return failure("sum kernel", code);
    }
  }
  copies_.clear();
  copies_.add(address(lane.digests), address(lane.digests_here),
              job.work.num_digests * sizeof(uint64_t));
  if (const int code = device_.copy_batch(lane.stream, Direction::kOut, copies_)) {
    return failure("cudaMemcpyAsync", code);
  }
  const int code = device_.record(lane.done, lane.stream);
  return code == 0 ? pds_error{} : failure("cudaEventRecord", code);
}

}  // namespace pds
