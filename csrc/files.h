// What values that are files share, however their bytes are moved: opening, naming, arguments.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "checksum.h"

namespace pds {

// Functions that return an int32_t give 0 or an errno.

// Opens a file, never through a link; a pipe in its place cannot block the open.
inline int32_t open_file(const char *path, int flags, int *file) {
  do {
    *file = open(path, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
  } while (*file < 0 && errno == EINTR);
  return *file < 0 ? errno : 0;
}

// Opens a regular file and gives its length.
inline int32_t open_regular(const char *path, int flags, int *file, int64_t *bytes) {
  if (const int32_t why = open_file(path, flags, file)) return why;
  struct stat status{};
  int32_t why = 0;
  if (fstat(*file, &status) != 0) {
    why = errno;
  } else if (!S_ISREG(status.st_mode)) {
    why = S_ISDIR(status.st_mode) ? EISDIR : ENXIO;
  }
  *bytes = status.st_size;
  if (why == 0) return 0;
  close(*file), *file = -1;
  if (flags & O_CREAT) unlink(path);
  return why;
}

inline int32_t write_piece(int file, const char *from, int64_t bytes, int64_t at) {
  while (bytes > 0) {
    const ssize_t done = pwrite(file, from, bytes, at);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    from += done, at += done, bytes -= done;
  }
  return 0;
}

// Gives a whole file its name, and makes the directory for it at its first use.
inline int32_t link_to(const char *temporary, const char *path) {
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

// Finds the beginnings of paths in a text that has a zero byte after each.
inline std::vector<const char *> each_of(const char *paths, int64_t count) {
  std::vector<const char *> found;
  found.reserve(count);
  for (int64_t i = 0; i < count; ++i, paths += std::strlen(paths) + 1) found.push_back(paths);
  return found;
}

inline bool are_values(const uint64_t *addresses, const int64_t *sizes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (addresses[i] == 0 || sizes[i] < kHeaderBytes) return false;
  }
  return count >= 0;
}

}  // namespace pds
