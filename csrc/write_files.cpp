// Values that become files: summed and written in one pass over memory, the header last.
//
// Decision: each piece is summed right before it is written, so that the write finds it in the
// core's own cache. A sum of the whole value before costs a pass of its own over memory. The header
// holds the sum, so it is written at the end, and the file has its name only then.
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "checksum.h"
#include "pdstore.h"

using pds::kHeaderBytes, pds::kSummedOfHeader, pds::Sum;

namespace {

constexpr int64_t kPieceBytes = 256 << 10;  // what a core's own cache holds

// 0 or an errno.
int32_t write_piece(int file, const char *from, int64_t bytes, int64_t at) {
  while (bytes > 0) {
    const ssize_t done = pwrite(file, from, bytes, at);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    from += done, at += done, bytes -= done;
  }
  return 0;
}

// Writes the payload and, with its sum, the header; the sum stays in the value. 0 or an errno.
int32_t write_value(int file, char *value, int64_t bytes) {
  Sum sum;
  sum.add(value, 0, std::min(bytes, kHeaderBytes));
  int64_t at = kHeaderBytes;
  for (int64_t end = 0; at < bytes; at = end) {
    end = std::min(end + kPieceBytes, bytes);  // at whole pages
    sum.add(value, at, end);
    if (const int32_t why = write_piece(file, value + at, end - at, at)) return why;
  }
  const uint64_t digest = sum.digest();  // little-endian, as every machine this is built for
  std::memcpy(value + kSummedOfHeader, &digest, sizeof digest);
  return write_piece(file, value, kHeaderBytes, 0);
}

int32_t open_new(const char *path, int *file) {
  do {
    *file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  } while (*file < 0 && errno == EINTR);
  return *file < 0 ? errno : 0;
}

// 0 or an errno; `was_stored`: there is a file of this name, and it stays.
int32_t write_path(const char *temporary, const char *path, char *value, int64_t bytes,
                   bool *was_stored) {
  int file;
  if (const int32_t why = open_new(temporary, &file)) return why;
  int32_t why = write_value(file, value, bytes);
  if (close(file) != 0 && why == 0 && errno != EINTR) why = errno;
  // A link and not a rename, which would replace what is stored.
  if (why == 0 && link(temporary, path) != 0) why = errno;
  *was_stored = why == EEXIST;
  unlink(temporary);
  return *was_stored ? 0 : why;
}

}  // namespace

extern "C" int32_t pds_write_files(const char *temporary, const char *paths,
                                   const uint64_t *addresses, const int64_t *sizes,
                                   int64_t num_files, int64_t *num_written, int32_t *why) {
  if (!temporary || !paths || !addresses || !sizes || !num_written || !why) return PDS_ERR_ARGUMENT;
  *num_written = 0, *why = 0;
  bool was_stored = false;  // where one was, the next may be: a look is cheaper than a write
  for (int64_t i = 0; i < num_files; ++i, paths += std::strlen(paths) + 1) {
    if (addresses[i] == 0 || sizes[i] < kHeaderBytes) return PDS_ERR_ARGUMENT;
    was_stored = was_stored && access(paths, F_OK) == 0;
    if (!was_stored) {
      char *value = reinterpret_cast<char *>(addresses[i]);
      *why = write_path(temporary, paths, value, sizes[i], &was_stored);
      if (*why != 0) break;
    }
    ++*num_written;
  }
  return PDS_OK;
}
