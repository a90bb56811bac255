// Answers of a build without CUDA that is asked for a GPU.
#include "device.h"

namespace pds {

std::unique_ptr<Device> open_cuda_device(int32_t) { return nullptr; }
int exchange_capture_mode(int32_t *) { return 0; }
int32_t count_cuda_devices() { return 0; }
bool built_with_cuda() { return false; }

}  // namespace pds
