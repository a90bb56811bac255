// Answers of a build that is not for tests and is asked for faults.
#include "device.h"

namespace pds {

std::unique_ptr<Device> with_faults(std::unique_ptr<Device> device) { return device; }

}  // namespace pds

extern "C" int32_t pds_test_fail(int32_t, int64_t, int32_t, int32_t) { return PDS_ERR_ARGUMENT; }
extern "C" int32_t pds_test_delay(int64_t) { return PDS_ERR_ARGUMENT; }
extern "C" int32_t pds_test_live(pds_live *) { return PDS_ERR_ARGUMENT; }
