// Checksums of values that lie in memory.
//
// Decision: many values in one call. A call for each gives Python's lock up and waits for it again
// for every value, beside workers and an engine that want it too.
#include "checksum.h"
#include "pdstore.h"

extern "C" int32_t pds_sum_values(const uint64_t *addresses, const int64_t *sizes, int64_t count,
                                  uint64_t *checksums) {
  for (int64_t i = 0; i < count; ++i) {
    if (addresses[i] == 0 || sizes[i] < pds::kHeaderBytes) return PDS_ERR_ARGUMENT;
  }
  for (int64_t i = 0; i < count; ++i) {
    pds::Sum sum;
    sum.add(reinterpret_cast<const char *>(addresses[i]), 0, sizes[i]);
    checksums[i] = sum.digest();
  }
  return PDS_OK;
}
