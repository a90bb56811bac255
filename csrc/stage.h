// The launcher of the gather and scatter kernels.
#pragma once
#include <cuda_runtime_api.h>

#include "device.h"

namespace pds {

cudaError_t launch_stage(cudaStream_t stream, Direction direction, const StageParams &params);

}  // namespace pds
