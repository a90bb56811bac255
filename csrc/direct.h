// Direct: moves pieces between files and memory past the page cache (O_DIRECT).
//
// Decision: the pieces of many files are under way together, by the thread's ring, or where that is
// refused by threads of this call. What is done about a piece, such as its checksum, is done by one
// thread at a time while other pieces move. Decision: docs/decisions/049-direct-files.md
#pragma once
#include <cstdint>

namespace pds {

constexpr int64_t kPageBytes = 4096;            // the grain of all addresses, places and lengths
constexpr int64_t kDirectPieceBytes = 1 << 20;  // smaller ones halve a ring's rate
constexpr int32_t kShorter = -1;                // stands for an errno: the file is too short

constexpr int64_t in_pages(int64_t bytes) { return (bytes + kPageBytes - 1) & -kPageBytes; }

// At most kDirectPieceBytes of an open file, from a multiple of kPageBytes on; a write has whole
// pages. A read moves no byte behind `bytes` into memory. Any address will do: what is not aligned
// moves through other memory.
struct Piece {
  int file;
  int64_t at, bytes;
  char *memory;
  int64_t value;  // a number for the work
};

// Files whose pieces are moved. One thread at a time calls it; nothing may be thrown.
class DirectWork {
 public:
  virtual ~DirectWork() = default;
  virtual bool is_write() const = 0;
  // The number of pieces, if all are moved.
  virtual int64_t num_pieces() const = 0;
  // Gives the next piece to move; false if there is none.
  virtual bool next(Piece *piece) = 0;
  // A piece has moved, or not: `why` is 0, an errno or kShorter.
  virtual void end(const Piece &piece, int32_t why) = 0;
};

enum class DirectWay { kRing, kThreads };

// Moves all pieces of a work, and returns when nothing moves any more.
void move_directly(DirectWork *work, DirectWay way);

}  // namespace pds
