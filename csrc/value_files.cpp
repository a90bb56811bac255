// Writes, reads, verifies, finds, leases and deletes values that are files, many in one call; and
// sums values in memory.
//
// Decision: each piece is summed right before it is written, or right after it was read, while the
// core's own cache has it. A sum of the whole value would read memory once more, which limits loads
// from a memory-backed directory: they reach 32 GB/s instead of 20 (11 threads, 16 virtual CPUs).
// The crew helps the caller, because each file is moved by one thread. The header holds the sum, so
// it is written last, and only then does the file get its name. After a failed read the caller
// reads again, step by step, to find out which value is not right.
// Decision: docs/decisions/019-files-in-one-call.md
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "abi.h"
#include "checksum.h"
#include "direct_values.h"
#include "files.h"

using pds::are_values, pds::each_of, pds::link_to, pds::open_file, pds::write_piece;
using pds::kHeaderBytes, pds::kPieceBytes, pds::kSummedOfHeader, pds::Sum;

namespace {

// Reads so many bytes, fewer only at the end of the file. Returns the number; negative if it fails.
int64_t read_piece(int file, char *to, int64_t bytes) {
  int64_t done = 0;
  while (done < bytes) {
    const ssize_t more = read(file, to + done, bytes - done);
    if (more < 0 && errno == EINTR) continue;
    if (more < 0) return -1;
    if (more == 0) break;
    done += more;
  }
  return done;
}

// Reads all of an open file. False if that fails or the file has not exactly so many bytes.
bool read_value(int file, char *to, int64_t bytes, Sum *sum) {
  if (read_piece(file, to, kHeaderBytes) != kHeaderBytes) return false;
  sum->add_header(to);
  for (int64_t at = kHeaderBytes; at < bytes; at += kPieceBytes) {
    const int64_t wanted = std::min(kPieceBytes, bytes - at);
    if (read_piece(file, to + at, wanted) != wanted) return false;
    sum->add(to + at, wanted);
  }
  char more;
  return read_piece(file, &more, 1) == 0;
}

// Reads a file. True if its length and checksum are right and its header begins with `start`.
bool read_right(const char *path, char *to, int64_t bytes, const char *start) {
  int file;
  Sum sum;
  if (open_file(path, O_RDONLY, &file) != 0) return false;
  const bool is_read = read_value(file, to, bytes, &sum);
  close(file);
  return is_read && pds::is_header(to, start, sum.digest());
}

// Reads a file as it is. Gives 0, an errno, or kShorter for another length.
int32_t read_path(const char *path, char *to, int64_t bytes) {
  int file;
  int64_t length;
  if (const int32_t why = pds::open_regular(path, O_RDONLY, &file, &length)) return why;
  int32_t why = length == bytes ? 0 : pds::kShorter;
  if (why == 0) {
    const int64_t done = read_piece(file, to, bytes);
    if (done != bytes) why = done < 0 ? errno : pds::kShorter;
  }
  close(file);
  return why;
}

// Completes the header in memory if there is a start; writes the payload, and then the header.
int32_t write_value(int file, char *value, int64_t bytes, const char *start) {
  if (start == nullptr) return write_piece(file, value, bytes, 0);
  std::memcpy(value, start, kSummedOfHeader);
  Sum sum;
  sum.add_header(value);
  for (int64_t at = kHeaderBytes, begin = at; at < bytes; at += kPieceBytes) {
    sum.add(value + at, std::min(kPieceBytes, bytes - at));
    const bool is_last = at + kPieceBytes >= bytes;
    const int64_t end = is_last ? bytes : at + kPieceBytes - kHeaderBytes;  // at a page's end
    if (const int32_t why = write_piece(file, value + begin, end - begin, begin)) return why;
    begin = end;
  }
  pds::set_header(value, start, sum.digest());
  return write_piece(file, value, kHeaderBytes, 0);
}

// Writes a value to a path; a file that is there stays.
int32_t write_path(const char *temporary, const char *path, char *value, int64_t bytes,
                   const char *start) {
  if (access(path, F_OK) == 0) return 0;
  int file;
  if (const int32_t why = open_file(temporary, O_WRONLY | O_CREAT | O_EXCL, &file)) return why;
  int32_t why = write_value(file, value, bytes, start);
  futimens(file, nullptr);  // both times are when it is whole, however long the writing took
  if (close(file) != 0 && why == 0 && errno != EINTR) why = errno;
  if (why == 0) why = link_to(temporary, path);
  unlink(temporary);
  return why == EEXIST ? 0 : why;
}

// Moves values in turn until one fails; returns how many are done. `move` gives 0 or what is wrong.
template <typename Move>
int64_t num_moved(const Move &move, int64_t count, int32_t *why) {
  int64_t done = 0;
  while (done < count && (*why = move(done)) == 0) ++done;
  return done;
}

constexpr int64_t kNs = 1000000000;  // nanoseconds of a second

timespec time_of(int64_t ns) {
  return {static_cast<time_t>(ns / kNs), static_cast<long>(ns % kNs)};
}

int64_t ns_of(const timespec &time) { return time.tv_sec * kNs + time.tv_nsec; }

// Returns 0 or an errno, and a file's modification time as its server has it now: a client of a
// network file system may keep an old one for a minute, and with it a lease that was renewed since.
int32_t changed_at(const char *path, int64_t *ns) {
  struct statx status;
  const int flags = AT_SYMLINK_NOFOLLOW | AT_STATX_FORCE_SYNC;
  if (statx(AT_FDCWD, path, flags, STATX_MTIME, &status) == 0) {
    *ns = status.stx_mtime.tv_sec * kNs + status.stx_mtime.tv_nsec;
    return 0;
  }
  struct stat old;
  if (errno != ENOSYS) return errno;
  if (lstat(path, &old) != 0) return errno;  // a kernel or a sandbox without statx
  *ns = ns_of(old.st_mtim);
  return 0;
}

}  // namespace

extern "C" int32_t pds_sum_values(const uint64_t *addresses, const int64_t *sizes, int64_t count,
                                  uint64_t *checksums) {
  if (!are_values(addresses, sizes, count)) return PDS_ERR_ARGUMENT;
  for (int64_t i = 0; i < count; ++i) {
    checksums[i] = pds::sum_of(reinterpret_cast<const char *>(addresses[i]), sizes[i]);
  }
  return PDS_OK;
}

extern "C" int32_t pds_read_values(pds_engine *engine, int32_t way, const char *paths,
                                   const uint64_t *addresses, const int64_t *sizes,
                                   const char *starts, int64_t count) {
  if (!are_values(addresses, sizes, count)) return PDS_ERR_ARGUMENT;
  return pds::guarded(nullptr, [&] {
    const std::vector<const char *> path = each_of(paths, count);
    if (way != PDS_CACHED) {
      int32_t why = 0;
      const pds::DirectValues values{path, addresses, sizes, starts, count};
      pds::read_directly(values, pds::direct_way_of(way), &why);
      return why == 0 ? PDS_OK : PDS_ERR_VALUE;
    }
    std::atomic<bool> all_right{true};
    engine->crew().each(count, [&](int64_t i) {
      char *to = reinterpret_cast<char *>(addresses[i]);
      if (all_right && !read_right(path[i], to, sizes[i], starts + i * kSummedOfHeader)) {
        all_right = false;
      }
    });
    return all_right ? PDS_OK : PDS_ERR_VALUE;
  });
}

extern "C" int32_t pds_write_values(pds_engine *engine, int32_t way, const char *temporary,
                                    const char *paths, const uint64_t *addresses,
                                    const int64_t *sizes, const char *starts, int64_t count,
                                    int64_t *num_written, int32_t *why) {
  if (!are_values(addresses, sizes, count)) return PDS_ERR_ARGUMENT;
  *num_written = 0, *why = 0;
  return pds::guarded(nullptr, [&] {
    const std::vector<const char *> path = each_of(paths, count);
    if (way != PDS_CACHED) {
      const pds::DirectValues values{path, addresses, sizes, starts, count};
      *num_written = pds::write_directly(values, temporary, pds::direct_way_of(way), why);
      return PDS_OK;
    }
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
    engine->crew().each(count, [&](int64_t i) {
      if (all_written && write(i) != 0) all_written = false;
    });
    if (all_written) {
      *num_written = count;
      return PDS_OK;
    }
    // Again in turn: to find the first that fails, and without the room that all at once took.
    *num_written = num_moved(write, count, why);
    return PDS_OK;
  });
}

extern "C" int32_t pds_read_files(int32_t way, const char *paths, const uint64_t *addresses,
                                  const int64_t *sizes, int64_t count, int64_t *num_read,
                                  int32_t *why) {
  if (count < 0) return PDS_ERR_ARGUMENT;
  *num_read = 0, *why = 0;
  return pds::guarded(nullptr, [&] {
    const std::vector<const char *> path = each_of(paths, count);
    if (way != PDS_CACHED) {
      const pds::DirectValues values{path, addresses, sizes, nullptr, count};
      *num_read = pds::read_directly(values, pds::direct_way_of(way), why);
      return PDS_OK;
    }
    const auto read = [&](int64_t i) {
      return read_path(path[i], reinterpret_cast<char *>(addresses[i]), sizes[i]);
    };
    *num_read = num_moved(read, count, why);
    return PDS_OK;
  });
}

extern "C" int32_t pds_write_files(int32_t way, const char *temporary, const char *paths,
                                   const uint64_t *addresses, const int64_t *sizes, int64_t count,
                                   int64_t *num_written, int32_t *why) {
  if (count < 0) return PDS_ERR_ARGUMENT;
  *num_written = 0, *why = 0;
  return pds::guarded(nullptr, [&] {
    const std::vector<const char *> path = each_of(paths, count);
    if (way != PDS_CACHED) {
      const pds::DirectValues values{path, addresses, sizes, nullptr, count};
      *num_written = pds::write_directly(values, temporary, pds::direct_way_of(way), why);
      return PDS_OK;
    }
    const auto write = [&](int64_t i) {
      char *value = reinterpret_cast<char *>(addresses[i]);
      return write_path(temporary, path[i], value, sizes[i], nullptr);
    };
    *num_written = num_moved(write, count, why);
    return PDS_OK;
  });
}

extern "C" int32_t pds_find_files(const char *paths, int64_t num_files, uint8_t *is_there) {
  for (int64_t i = 0; i < num_files; ++i, paths += std::strlen(paths) + 1)
    is_there[i] = access(paths, F_OK) == 0;
  return PDS_OK;
}

extern "C" int32_t pds_stat_files(const char *paths, int64_t num_files, int64_t *facts) {
  for (int64_t i = 0; i < num_files; ++i, paths += std::strlen(paths) + 1, facts += 3) {
    struct stat status;
    const int why = lstat(paths, &status) == 0 ? 0 : errno;
    if (why == 0 && !S_ISDIR(status.st_mode)) {
      facts[0] = status.st_size;
      facts[1] = ns_of(status.st_mtim), facts[2] = ns_of(status.st_atim);
    } else {
      facts[0] = -1, facts[2] = 0;
      facts[1] = why == ENOENT || why == ENOTDIR ? 0 : why;
    }
  }
  return PDS_OK;
}

extern "C" int32_t pds_delete_files(const char *paths, int64_t num_files, const int64_t *changed_ns,
                                    int32_t *why) {
  for (int64_t i = 0; i < num_files; ++i, paths += std::strlen(paths) + 1) {
    int64_t ns = 0;
    why[i] = changed_at(paths, &ns);
    if (why[i] == 0 && ns != changed_ns[i]) {
      why[i] = EBUSY;
    } else if (why[i] == 0 && unlink(paths) != 0) {
      why[i] = errno;
    }
  }
  return PDS_OK;
}

extern "C" int32_t pds_lease_files(const char *paths, int64_t num_files, int64_t used_ns,
                                   int64_t until_ns, int64_t *num_leased, int32_t *why) {
  if (used_ns < 0 || until_ns < num_files) return PDS_ERR_ARGUMENT;
  *num_leased = 0, *why = 0;
  for (int64_t i = 0; i < num_files; ++i, paths += std::strlen(paths) + 1) {
    const timespec times[2] = {time_of(used_ns), time_of(until_ns - i)};
    if (utimensat(AT_FDCWD, paths, times, AT_SYMLINK_NOFOLLOW) != 0) {
      *why = errno;
      break;
    }
    ++*num_leased;
  }
  return PDS_OK;
}
