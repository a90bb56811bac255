// Ring: a thread's reads and writes of files that the kernel carries out meanwhile, by io_uring.
//
// Decision: raw system calls, not liburing. Two calls and three structs are all that is needed.
// A library would have to be in each wheel and on each machine that builds from a checkout, and a
// kernel's header that knows io_uring is not there with the old glibc that wheels are built for.
// Decision: docs/decisions/049-direct-files.md
#pragma once
#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace pds {

struct RingEntry;   // a read or write, as the kernel takes it
struct RingResult;  // its end, as the kernel gives it

class Ring {
 public:
  static constexpr uint32_t kDepth = 32;  // so many reads and writes may be under way

  // Returns the calling thread's ring. If the kernel or a sandbox refuses one, returns null, and
  // `why` gets the errno.
  static Ring *of_thread(int32_t *why);
  Ring();
  ~Ring();
  Ring(const Ring &) = delete;
  Ring &operator=(const Ring &) = delete;

  // Adds a read or write at `at` of a file; `parts` must stay until its end. At most kDepth may be
  // added and not ended. `number` comes back with the result.
  void add(bool is_write, int file, const iovec *parts, int32_t num_parts, int64_t at,
           uint64_t number);
  // Starts what was added and waits until so many have ended. Returns 0, or an errno; then what was
  // not started never will be, and `num_started` says how many of the added were.
  int32_t enter(uint32_t num_awaited, uint32_t *num_started);
  // Takes an ended one: the bytes that it moved, or a negative errno. False if none has ended.
  bool take(uint64_t *number, int32_t *moved);

 private:
  bool is_open() const { return why_ == 0; }
  // False if somebody has closed the file, and its number may be another file's.
  bool has_file() const;
  int32_t open();
  int32_t check();
  void push(const RingEntry &entry);

  const pid_t process_;
  int file_ = -1;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  int32_t why_ = 0;  // why it is not open
  uint32_t num_added_ = 0;
  void *rings_ = nullptr;
  size_t rings_bytes_ = 0, entries_bytes_ = 0;
  RingEntry *entries_ = nullptr;
  RingResult *results_ = nullptr;
  uint32_t *added_tail_ = nullptr, *added_mask_ = nullptr, *places_ = nullptr;
  uint32_t *ended_head_ = nullptr, *ended_tail_ = nullptr, *ended_mask_ = nullptr;
};

}  // namespace pds
