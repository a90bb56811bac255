// Values that are files, looked for and leased, many in one call. A lease is a modification time in
// the future.
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "pdstore.h"

namespace {

constexpr int64_t kNs = 1000000000;

timespec time_of(int64_t ns) {
  return {static_cast<time_t>(ns / kNs), static_cast<long>(ns % kNs)};
}

}  // namespace

extern "C" int32_t pds_find_files(const char *paths, int64_t num_files, uint8_t *is_there) {
  if (!paths || !is_there) return PDS_ERR_ARGUMENT;
  for (int64_t i = 0; i < num_files; ++i, paths += std::strlen(paths) + 1)
    is_there[i] = access(paths, F_OK) == 0;
  return PDS_OK;
}

extern "C" int32_t pds_lease_files(const char *paths, int64_t num_files, int64_t used_ns,
                                   int64_t until_ns, int64_t *num_leased, int32_t *why) {
  if (!paths || !num_leased || !why || used_ns < 0 || until_ns < 0) return PDS_ERR_ARGUMENT;
  const timespec times[2] = {time_of(used_ns), time_of(until_ns)};
  *num_leased = 0, *why = 0;
  for (int64_t i = 0; i < num_files; ++i, paths += std::strlen(paths) + 1) {
    if (utimensat(AT_FDCWD, paths, times, AT_SYMLINK_NOFOLLOW) != 0) {
      *why = errno;
      break;
    }
    ++*num_leased;
  }
  return PDS_OK;
}
