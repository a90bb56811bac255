#include "direct.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ring.h"

namespace pds {
namespace {

constexpr int64_t kMostThreads = 8;
constexpr useconds_t kPauseUs = 1000;

// What a ring may answer where a plain read or write would do: it was interrupted; or the kernel
// may not make the thread that would have carried it out, had no memory for it, or does not know
// it.
bool is_of_ring(int64_t moved) {
  return moved == -EINTR || moved == -EAGAIN || moved == -ECANCELED || moved == -ENOMEM ||
         moved == -EINVAL || moved == -EOPNOTSUPP;
}

struct Freed {
  void operator()(char *memory) const { std::free(memory); }
};

// A piece under way: the memory that the kernel reads or writes, of which pages of its own are a
// part where the piece's memory cannot be used.
class Moving {
 public:
  // Returns 0 or an errno.
  int32_t begin(const Piece &piece, bool is_write) {
    piece_ = piece, is_write_ = is_write;
    const bool is_aligned = reinterpret_cast<uint64_t>(piece.memory) % kPageBytes == 0;
    straight_ = is_aligned ? piece.bytes & -kPageBytes : 0;
    const int64_t others = in_pages(piece.bytes) - straight_;
    if (others > room_) {
      pages_.reset(static_cast<char *>(std::aligned_alloc(kPageBytes, others)));
      room_ = pages_ == nullptr ? 0 : others;
      if (pages_ == nullptr) return ENOMEM;
    }
    if (is_write && others > 0) std::memcpy(pages_.get(), piece.memory + straight_, others);
    set_parts(0);
    return 0;
  }

  void add_to(Ring *ring, uint64_t number) const {
    ring->add(is_write_, piece_.file, parts_, num_parts_, piece_.at, number);
  }

  // Ends what has moved so many bytes, or failed with a negative errno; moves what is left.
  int32_t end(int64_t moved) {
    if (is_of_ring(moved)) moved = 0;
    int64_t done = std::max<int64_t>(moved, 0);
    while (moved >= 0 && done < piece_.bytes) {
      set_parts(done & -kPageBytes);
      const int64_t at = piece_.at + (done & -kPageBytes);
      moved = is_write_ ? pwritev(piece_.file, parts_, num_parts_, at)
                        : preadv(piece_.file, parts_, num_parts_, at);
      if (moved < 0 && errno != EINTR) return errno;
      if (moved >= 0 && (done & -kPageBytes) + moved <= done) return is_write_ ? EIO : kShorter;
      moved = std::max<int64_t>(moved, 0);
      done = std::max(done, (done & -kPageBytes) + moved);
    }
    if (moved < 0) return static_cast<int32_t>(-moved);
    if (!is_write_ && piece_.bytes > straight_) {
      std::memcpy(piece_.memory + straight_, pages_.get(), piece_.bytes - straight_);
    }
    return 0;
  }

  const Piece &piece() const { return piece_; }

 private:
  // Lists the memory from a page of the piece on.
  void set_parts(int64_t from) {
    const int64_t end = in_pages(piece_.bytes);
    num_parts_ = 0;
    if (from < straight_) {
      parts_[num_parts_++] = {piece_.memory + from, static_cast<size_t>(straight_ - from)};
    }
    if (end > straight_) {
      const int64_t skipped = std::max<int64_t>(from - straight_, 0);
      parts_[num_parts_++] = {pages_.get() + skipped,
                              static_cast<size_t>(end - straight_ - skipped)};
    }
  }

  Piece piece_{};
  bool is_write_ = false;
  int64_t straight_ = 0;  // so many of the first bytes move from or to the piece's own memory
  int64_t room_ = 0;
  std::unique_ptr<char, Freed> pages_;
  iovec parts_[2];
  int32_t num_parts_ = 0;
};

void move_in_turn(DirectWork *work, std::mutex *mutex) {
  Moving moving;
  Piece piece;
  std::unique_lock<std::mutex> lock(*mutex);
  while (work->next(&piece)) {
    lock.unlock();
    int32_t why = moving.begin(piece, work->is_write());
    if (why == 0) why = moving.end(0);
    lock.lock();
    work->end(piece, why);
  }
}

void move_by_threads(DirectWork *work) {
  const int64_t num_threads = std::min(work->num_pieces(), kMostThreads);
  std::mutex mutex;
  std::vector<std::thread> threads;
  threads.reserve(num_threads);
  try {
    while (static_cast<int64_t>(threads.size()) < num_threads - 1) {
      threads.emplace_back([&] { move_in_turn(work, &mutex); });
    }
  } catch (const std::exception &) {  // there are no more: fewer will do
  }
  move_in_turn(work, &mutex);
  for (std::thread &thread : threads) thread.join();
}

// A work's pieces that a ring moves.
class RingMoves {
 public:
  RingMoves(DirectWork *work, Ring *ring)
      : work_(work), ring_(ring), moving_(std::min<int64_t>(work->num_pieces(), Ring::kDepth)) {
    for (size_t number = moving_.size(); number-- > 0;) free_.push_back(number);
    ended_.reserve(moving_.size());
  }

  void run() {
    while (fill() || num_under_way_ > 0) {
      if (num_under_way_ == 0) continue;  // the kernel took none
      await_one();
      take_ended();
      fill();  // before the work does its part with what has ended
      for (const Ended &each : ended_) work_->end(each.piece, each.why);
      ended_.clear();
    }
  }

 private:
  struct Ended {
    Piece piece;
    int32_t why;
  };

  // Starts pieces until the ring is full or the work has no more. Returns whether there were any.
  bool fill() {
    bool is_any = false;
    Piece piece;
    while (!free_.empty() && work_->next(&piece)) {
      is_any = true;
      const size_t number = free_.back();
      Moving &moving = moving_[number];
      int32_t why = moving.begin(piece, work_->is_write());
      uint32_t num_started = 0;
      if (why == 0) {
        moving.add_to(ring_, number);
        ring_->enter(0, &num_started);  // each at once: the next may have to be summed first
      }
      if (num_started == 1) {
        free_.pop_back(), ++num_under_way_;
        continue;
      }
      if (why == 0) why = moving.end(0);  // the kernel has no memory for it now
      work_->end(piece, why);
    }
    return is_any;
  }

  void await_one() {
    uint32_t none;
    if (ring_->enter(1, &none) != 0) usleep(kPauseUs);  // the kernel still writes to the memory
  }

  void take_ended() {
    uint64_t number;
    int32_t moved;
    while (ring_->take(&number, &moved)) {
      --num_under_way_;
      free_.push_back(number);
      ended_.push_back({moving_[number].piece(), moving_[number].end(moved)});
    }
  }

  DirectWork *work_;
  Ring *ring_;
  std::vector<Moving> moving_;
  std::vector<size_t> free_;
  std::vector<Ended> ended_;
  int64_t num_under_way_ = 0;
};

}  // namespace

void move_directly(DirectWork *work, DirectWay way) {
  int32_t why;
  Ring *ring = nullptr;
  const bool is_one = work->num_pieces() <= 1;  // which gains nothing by a ring
  if (way == DirectWay::kRing && !is_one) ring = Ring::of_thread(&why);
  if (ring == nullptr) return move_by_threads(work);
  RingMoves(work, ring).run();
}

}  // namespace pds
