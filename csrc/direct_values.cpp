// Reads and writes values that are files past the page cache, many in one call.
//
// Decision: a value is summed in its order, as far as its pieces have come, while other pieces are
// under way. So one thread reads, sums and verifies; several callers keep a fast disk busy. The
// piece with the header, which holds the sum, is written last, and then the file gets its name.
// Decision: what does not fill a page at a value's end is written through the page cache, which
// waits for no disk. Cutting a file that was written in whole pages would read its last one.
// Decision: docs/decisions/049-direct-files.md
#include "direct_values.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "abi.h"
#include "checksum.h"
#include "direct.h"
#include "files.h"
#include "ring.h"

namespace pds {
namespace {

int64_t num_pieces_of(int64_t bytes) { return (bytes + kDirectPieceBytes - 1) / kDirectPieceBytes; }

// The sum of a value whose bytes become known from its beginning on.
class GrowingSum {
 public:
  // Adds the payload up to this end; a chunk that is cut off there is added with the next call.
  void add_until(const char *value, int64_t end, int64_t bytes) {
    if (at_ == 0) sum_.add_header(value), at_ = kHeaderBytes;
    if (end < bytes) end -= (end - kHeaderBytes) % kChunkBytes;
    sum_.add(value + at_, end - at_);
    at_ = end;
  }
  uint64_t digest() { return sum_.digest(); }

 private:
  Sum sum_;
  int64_t at_ = 0;
};

// Opens a regular file for moves past the page cache, and gives its length.
int32_t open_directly(const char *path, int flags, int *file, int64_t *bytes) {
  if (const int32_t why = open_regular(path, flags, file, bytes)) return why;
  if (fcntl(*file, F_SETFL, O_DIRECT) == 0) return 0;  // and no more O_NONBLOCK
  const int32_t why = errno;
  close(*file), *file = -1;
  if (flags & O_CREAT) unlink(path);
  return why;
}

// What reading and writing share: values in turn, until one fails.
class ValuesWork : public DirectWork {
 public:
  ValuesWork(const DirectValues &values, int64_t first, int64_t last)
      : values_(values), last_(last), current_(first), failed_(last) {}
  int64_t num_pieces() const final { return num_pieces_; }
  // The first value that failed, or the end of all; and why.
  int64_t failed() const { return failed_; }
  int32_t why() const { return why_; }

 protected:
  void fail(int64_t value, int32_t why) {
    if (value < failed_) failed_ = value, why_ = why;
  }
  bool is_over() const { return failed_ < last_ || current_ == last_; }
  char *memory_of(int64_t value) const {
    return reinterpret_cast<char *>(values_.addresses[value]);
  }
  // A piece of the first `end` bytes.
  Piece piece_of(int64_t value, int64_t number, int file, int64_t end) const {
    const int64_t at = number * kDirectPieceBytes;
    return {file, at, std::min(kDirectPieceBytes, end - at), memory_of(value) + at, value};
  }

  const DirectValues &values_;
  const int64_t last_;
  int64_t current_;  // the value whose pieces go next
  int64_t num_pieces_ = 0;

 private:
  int64_t failed_;
  int32_t why_ = 0;
};

class Reading final : public ValuesWork {
 public:
  Reading(const DirectValues &values, int64_t first, int64_t last)
      : ValuesWork(values, first, last), first_(first), files_(last - first) {
    for (int64_t i = first; i < last; ++i) {
      of(i).is_here.resize(num_pieces_of(values.sizes[i]));
      num_pieces_ += of(i).num_pieces();
    }
  }
  ~Reading() override {
    for (const File &file : files_) {
      if (file.file >= 0) close(file.file);
    }
  }
  bool is_write() const override { return false; }

  bool next(Piece *piece) override {
    if (is_over()) return false;
    File &file = of(current_);
    if (file.num_given == 0 && !open(current_)) return false;
    *piece = piece_of(current_, file.num_given++, file.file, values_.sizes[current_]);
    if (file.num_given == file.num_pieces()) ++current_;
    return true;
  }

  void end(const Piece &piece, int32_t why) override {
    File &file = of(piece.value);
    ++file.num_ended;
    if (why != 0) {
      fail(piece.value, why);
    } else {
      file.is_here[piece.at / kDirectPieceBytes] = true;
      sum(piece.value);
    }
    if (file.num_ended < file.num_pieces()) return;
    close(file.file), file.file = -1;
    const char *start = values_.start(piece.value);
    if (why == 0 && start != nullptr && file.num_summed == file.num_pieces() &&
        !is_header(memory_of(piece.value), start, file.sum.digest())) {
      fail(piece.value, EBADMSG);
    }
  }

 private:
  struct File {
    int file = -1;
    int64_t num_given = 0, num_ended = 0, num_summed = 0;
    std::vector<bool> is_here;  // for each piece
    GrowingSum sum;
    int64_t num_pieces() const { return static_cast<int64_t>(is_here.size()); }
  };

  File &of(int64_t value) { return files_[value - first_]; }

  bool open(int64_t value) {
    int64_t bytes = 0;
    int32_t why = open_directly(values_.paths[value], O_RDONLY, &of(value).file, &bytes);
    if (why == 0 && bytes != values_.sizes[value]) why = kShorter;
    if (why != 0) fail(value, why);
    return why == 0;
  }

  // Adds the pieces that are here and follow those that were added.
  void sum(int64_t value) {
    File &file = of(value);
    if (values_.start(value) == nullptr) return;
    const int64_t before = file.num_summed;
    while (file.num_summed < file.num_pieces() && file.is_here[file.num_summed]) ++file.num_summed;
    if (file.num_summed == before) return;
    const int64_t bytes = values_.sizes[value];
    const int64_t end = std::min(file.num_summed * kDirectPieceBytes, bytes);
    file.sum.add_until(memory_of(value), end, bytes);
  }

  const int64_t first_;
  std::vector<File> files_;
};

class Writing final : public ValuesWork {
 public:
  Writing(const DirectValues &values, const char *temporary, int64_t first, int64_t last)
      : ValuesWork(values, first, last), first_(first), files_(last - first) {
    for (int64_t i = first; i < last; ++i) {
      of(i).name = std::string(temporary) + '-' + std::to_string(i);
      num_pieces_ += num_to_move(i);
    }
  }
  ~Writing() override {
    for (const File &file : files_) {
      if (file.file >= 0) close(file.file), unlink(file.name.c_str());
    }
  }
  bool is_write() const override { return true; }

  bool next(Piece *piece) override {
    while (!is_over()) {
      File &file = of(current_);
      if (file.num_given == 0 && access(values_.paths[current_], F_OK) == 0) {
        ++current_;
        continue;
      }
      if (file.num_given == 0 && !open(current_)) return false;
      const int64_t count = std::max<int64_t>(num_to_move(current_), 1);
      const int64_t number = ++file.num_given % count;  // the first piece last
      seal(current_, number, count);
      const int64_t value = current_;
      if (number == 0) ++current_;
      *piece = piece_of(value, number, file.file, in_whole_pages(value));
      if (piece->bytes > 0) return true;
      if (const int32_t why = finish(value)) fail(value, why);  // it has less than a page
    }
    return false;
  }

  void end(const Piece &piece, int32_t why) override {
    File &file = of(piece.value);
    if (why != 0) fail(piece.value, why), file.has_failed = true;
    if (++file.num_ended < num_to_move(piece.value) || file.has_failed) return;
    if (const int32_t problem = finish(piece.value)) fail(piece.value, problem);
  }

 private:
  struct File {
    std::string name;  // while it is not whole
    int file = -1;
    bool has_failed = false;
    int64_t num_given = 0, num_ended = 0;
    GrowingSum sum;
  };

  File &of(int64_t value) { return files_[value - first_]; }

  int64_t in_whole_pages(int64_t value) const { return values_.sizes[value] & -kPageBytes; }
  int64_t num_to_move(int64_t value) const { return num_pieces_of(in_whole_pages(value)); }

  // Makes a file with all of its room, so that its pieces can be written at the same time.
  bool open(int64_t value) {
    File &file = of(value);
    int64_t none = 0;
    const int flags = O_WRONLY | O_CREAT | O_EXCL;
    int32_t why = open_directly(file.name.c_str(), flags, &file.file, &none);
    if (why == 0) why = reserve(file.file, values_.sizes[value]);
    if (why != 0) fail(value, why);
    return why == 0;
  }

  static int32_t reserve(int file, int64_t bytes) {
    int failed;
    do {
      failed = fallocate(file, 0, 0, bytes);
    } while (failed != 0 && errno == EINTR);
    if (failed != 0 && errno == EOPNOTSUPP) failed = ftruncate(file, bytes);
    return failed == 0 ? 0 : errno;
  }

  // Adds a piece to the sum before it is written, with the last one what follows it; completes the
  // header before the first one is.
  void seal(int64_t value, int64_t number, int64_t count) {
    const char *start = values_.start(value);
    if (start == nullptr) return;
    File &file = of(value);
    char *memory = memory_of(value);
    const int64_t bytes = values_.sizes[value];
    if (file.num_given == 1) std::memcpy(memory, start, kSummedOfHeader);
    if (number > 0 || count == 1) {
      const int64_t end = number == count - 1 ? bytes : (number + 1) * kDirectPieceBytes;
      file.sum.add_until(memory, end, bytes);
    }
    if (number == 0) set_header(memory, start, file.sum.digest());
  }

  int32_t finish(int64_t value) {
    File &file = of(value);
    int32_t why = write_rest(file.file, value);
    futimens(file.file, nullptr);  // both times are when it is whole, however long it took
    if (close(file.file) != 0 && why == 0 && errno != EINTR) why = errno;
    file.file = -1;
    if (why == 0) why = link_to(file.name.c_str(), values_.paths[value]);
    unlink(file.name.c_str());
    return why == EEXIST ? 0 : why;
  }

  // Writes what does not fill a page.
  int32_t write_rest(int file, int64_t value) {
    const int64_t at = in_whole_pages(value), bytes = values_.sizes[value] - at;
    if (bytes == 0) return 0;
    if (fcntl(file, F_SETFL, 0) != 0) return errno;  // no more O_DIRECT
    return write_piece(file, memory_of(value) + at, bytes, at);
  }

  const int64_t first_;
  std::vector<File> files_;
};

}  // namespace

int64_t read_directly(const DirectValues &values, DirectWay way, int32_t *why) {
  const auto read = [&](int64_t first, int64_t last) {
    Reading reading(values, first, last);
    move_directly(&reading, way);
    *why = reading.why();
    return reading.failed();
  };
  int64_t done = read(0, values.count);
  if (*why != EMFILE && *why != ENFILE) return done;
  while (done < values.count && read(done, done + 1) > done) ++done;  // one file open at a time
  return done;
}

int64_t write_directly(const DirectValues &values, const char *temporary, DirectWay way,
                       int32_t *why) {
  const auto write = [&](int64_t first, int64_t last) {
    Writing writing(values, temporary, first, last);
    move_directly(&writing, way);
    *why = writing.why();
    return writing.failed();
  };
  int64_t done = write(0, values.count);
  if (*why == 0) return done;
  // Again in turn: to find the first that fails, and without the room that all at once took.
  while (done < values.count && write(done, done + 1) > done) ++done;
  return done;
}

}  // namespace pds

extern "C" int32_t pds_try_ring(int32_t *why) {
  return pds::guarded(nullptr, [&] {
    pds::Ring::of_thread(why);
    return PDS_OK;
  });
}
