// Values that are files, read and verified in one call for many of them.
//
// Decision: the crew reads beside the caller, because each file is read by one thread. Only what
// goes well is done here; the caller reads again step by step to find out which value is not right.
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "checksum.h"
#include "handles.h"
#include "value_file.h"

namespace {

using pds::kSummedOfHeader;

bool read_right(const char *path, char *to, int64_t bytes, const char *start) {
  uint64_t digest = 0;  // little-endian, as every machine this is built for
  return pds::read_value_file(path, to, bytes, &digest) == 0 &&
         std::memcmp(to, start, kSummedOfHeader) == 0 &&
         std::memcmp(to + kSummedOfHeader, &digest, sizeof digest) == 0;
}

}  // namespace

std::vector<const char *> pds::each_of(const char *texts, int64_t count) {
  std::vector<const char *> found;
  found.reserve(count);
  for (int64_t i = 0; i < count; ++i, texts += std::strlen(texts) + 1) found.push_back(texts);
  return found;
}

extern "C" int32_t pds_read_values(pds_engine *engine, const char *paths, const uint64_t *addresses,
                                   const int64_t *sizes, const char *starts, int64_t count) {
  if (!engine || !paths || !addresses || !sizes || !starts || count < 0) return PDS_ERR_ARGUMENT;
  if (!engine->engine->is_of_this_process()) return PDS_ERR_CLOSED;  // nor is its crew
  for (int64_t i = 0; i < count; ++i) {
    if (addresses[i] == 0 || sizes[i] < pds::kHeaderBytes) return PDS_ERR_ARGUMENT;
  }
  try {
    const std::vector<const char *> path = pds::each_of(paths, count);
    std::atomic<bool> all_right{true};
    engine->engine->crew().each(count, [&](int64_t i) {
      char *to = reinterpret_cast<char *>(addresses[i]);
      if (all_right && !read_right(path[i], to, sizes[i], starts + i * kSummedOfHeader)) {
        all_right = false;
      }
    });
    return all_right ? PDS_OK : PDS_ERR_VALUE;
  } catch (const std::bad_alloc &) {
    return PDS_ERR_MEMORY;
  }
}
