// Values that become files: headed, summed and written in one pass over memory, many in one call.
//
// Decision: each piece is summed right before it is written, so that the write finds it in the
// core's own cache. A sum of the whole value before costs a pass of its own over memory. The header
// holds the sum, so it is written at the end, and the file has its name only then. The crew writes
// beside the caller, because each file is written by one thread.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "checksum.h"
#include "handles.h"
#include "value_file.h"

using pds::kHeaderBytes, pds::kPieceBytes, pds::kSummedOfHeader, pds::Sum;

namespace {

// Below, what returns an int32_t gives 0 or an errno.

int32_t write_piece(int file, const char *from, int64_t bytes, int64_t at) {
  while (bytes > 0) {
    const ssize_t done = pwrite(file, from, bytes, at);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    from += done, at += done, bytes -= done;
  }
  return 0;
}

// Completes the header in memory and writes the payload and then it.
int32_t write_value(int file, char *value, int64_t bytes, const char *start) {
  std::memcpy(value, start, kSummedOfHeader);
  Sum sum;
  sum.add(value, 0, kHeaderBytes);
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

// Gives a whole file its name, and makes the directory for it at its first use.
int32_t link_to(const char *temporary, const char *path) {
  // A link and not a rename, which would replace what is stored.
  if (link(temporary, path) == 0) return 0;
  if (errno != ENOENT) return errno;
  char place[PATH_MAX] = {};
  const char *name = std::strrchr(path, '/');
  if (name == nullptr || name - path >= PATH_MAX) return ENOENT;
  std::memcpy(place, path, name - path);
  if (mkdir(place, 0700) != 0 && errno != EEXIST) return errno;
  return link(temporary, path) == 0 ? 0 : errno;
}

// A file that is there stays.
int32_t write_path(const char *temporary, const char *path, char *value, int64_t bytes,
                   const char *start) {
  if (access(path, F_OK) == 0) return 0;
  int file;
  if (const int32_t why = open_new(temporary, &file)) return why;
  int32_t why = write_value(file, value, bytes, start);
  if (close(file) != 0 && why == 0 && errno != EINTR) why = errno;
  if (why == 0) why = link_to(temporary, path);
  unlink(temporary);
  return why == EEXIST ? 0 : why;
}

}  // namespace

extern "C" int32_t pds_write_values(pds_engine *engine, const char *temporary, const char *paths,
                                    const uint64_t *addresses, const int64_t *sizes,
                                    const char *starts, int64_t count, int64_t *num_written,
                                    int32_t *why) {
  if (!engine || !temporary || !paths || !addresses || !sizes || !starts || count < 0 ||
      !num_written || !why) {
    return PDS_ERR_ARGUMENT;
  }
  if (!engine->engine->is_of_this_process()) return PDS_ERR_CLOSED;  // nor is its crew
  for (int64_t i = 0; i < count; ++i) {
    if (addresses[i] == 0 || sizes[i] < kHeaderBytes) return PDS_ERR_ARGUMENT;
  }
  *num_written = 0, *why = 0;
  try {
    const std::vector<const char *> path = pds::each_of(paths, count);
    std::vector<std::string> unfinished;
    for (int64_t i = 0; i < count; ++i) {
      unfinished.push_back(std::string(temporary) + '-' + std::to_string(i));
    }
    const auto write = [&](int64_t i) {
      char *value = reinterpret_cast<char *>(addresses[i]);
      return write_path(unfinished[i].c_str(), path[i], value, sizes[i],
                        starts + i * kSummedOfHeader);
    };
    std::atomic<bool> all_written{true};
    engine->engine->crew().each(count, [&](int64_t i) {
      if (all_written && write(i) != 0) all_written = false;
    });
    if (all_written) return *num_written = count, PDS_OK;
    // Again in turn: which is the first, and room that unfinished values took beside each other.
    for (; *num_written < count && (*why = write(*num_written)) == 0; ++*num_written) continue;
    return PDS_OK;
  } catch (const std::bad_alloc &) {
    return PDS_ERR_MEMORY;
  }
}
