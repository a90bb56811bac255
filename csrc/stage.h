// The launchers of the kernels.
#pragma once
#include <cuda_runtime_api.h>

#include "device.h"

namespace pds {

cudaError_t launch_stage(cudaStream_t stream, Direction direction, const StageParams &params);
cudaError_t launch_sum(cudaStream_t stream, const SumParams &params, uint64_t *digests);

}  // namespace pds
