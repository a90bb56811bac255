// Values that are files, under a sanitizer: threads that share a crew write, read and delete them,
// and writers are killed. What counts as right is compared, every byte.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "pdstore.h"
#include "tests/rig.h"

#if defined(__SANITIZE_THREAD__)
constexpr int kKills = 0;  // kills are for one thread
#else
constexpr int kKills = 40;
#endif

namespace {

constexpr int kFiles = 24, kMost = 6, kHeader = 64, kStart = 56, kRounds = 50;

std::string value_of(int number) {
  return std::string(1000 + 17'000 * (number % 8), static_cast<char>('a' + number));
}

// Some values, in memory that is theirs.
struct Values {
  std::vector<int> numbers;
  std::string paths, starts;
  std::vector<std::string> bytes;
  std::vector<uint64_t> addresses;
  std::vector<int64_t> sizes;

  explicit Values(std::mt19937 &random) {
    const int count = 1 + random() % kMost, first = random() % kFiles;
    for (int i = 0; i < count; ++i) numbers.push_back((first + i) % kFiles);
    for (const int n : numbers) {
      starts += value_of(n).substr(0, kStart);
      bytes.push_back(std::string(kHeader, '?') + value_of(n).substr(kHeader));
    }
    for (std::string &value : bytes) {
      addresses.push_back(reinterpret_cast<uint64_t>(value.data()));
      sizes.push_back(static_cast<int64_t>(value.size()));
    }
  }
  int64_t count() const { return static_cast<int64_t>(numbers.size()); }

  void expect_right(const char *what) const {
    for (int64_t i = 0; i < count(); ++i) {
      std::string wanted = value_of(numbers[i]);
      std::memcpy(&wanted[kStart], &bytes[i][kStart], kHeader - kStart);  // its sum
      expect(bytes[i] == wanted, what);
    }
  }
};

// Values lie in directories of this one, which are made by those who write.
class Folder {
 public:
  Folder() {
    expect(mkdtemp(path_) != nullptr, "a folder");
    const int file = open((std::string(path_) + "/probe").c_str(), O_RDWR | O_CREAT, 0600);
    is_direct_ = file >= 0 && fcntl(file, F_SETFL, O_DIRECT) == 0;
    close(file);
    unlink((std::string(path_) + "/probe").c_str());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string of(int number) const {
    return std::string(path_) + "/" + std::to_string(number % 3) + "/" + std::to_string(number);
  }

  // All ways of moving files in turn, where the file system has them.
  int32_t way_of(int number) const { return is_direct_ ? number % 3 : PDS_CACHED; }

  void put(Values *values, pds_engine *engine, int writer) const {
    const std::string temporary = std::string(path_) + "/new-" + std::to_string(writer);
    int64_t done = 0;
    int32_t why = 0;
    name(values);
    expect(pds_write_values(engine, way_of(writer), temporary.c_str(), values->paths.data(),
                            values->addresses.data(), values->sizes.data(), values->starts.data(),
                            values->count(), &done, &why) == PDS_OK,
           "a call to write");
    expect(done == values->count() && why == 0, "written");
  }

  int32_t get(Values *values, pds_engine *engine) const {
    name(values);
    return pds_read_values(engine, way_of(values->numbers[0]), values->paths.data(),
                           values->addresses.data(), values->sizes.data(), values->starts.data(),
                           values->count());
  }

  // Deletes a value, which others may do at the same time.
  void evict(int number) const {
    const std::string path = of(number);
    int64_t facts[3];
    int32_t why = 0;
    expect(pds_stat_files(path.c_str(), 1, facts) == PDS_OK, "a call to list");
    if (facts[0] < 0) return;
    expect(facts[0] == static_cast<int64_t>(value_of(number).size()), "a listed value is whole");
    expect(pds_delete_files(path.c_str(), 1, &facts[1], &why) == PDS_OK, "a call to delete");
    expect(why == 0 || why == ENOENT || why == EBUSY, "deleted, gone, or written again");
  }

  int num_unfinished() const {
    int found = 0;
    for (const auto &entry : std::filesystem::directory_iterator(path_))
      found += entry.is_regular_file();
    return found;
  }

 private:
  void name(Values *values) const {
    values->paths.clear();
    for (const int n : values->numbers) values->paths += of(n) + '\0';
  }

  bool is_direct_ = false;
  char path_[64] = "/tmp/pdstore-files-stress-XXXXXX";
};

// Each thread writes, reads and deletes; all write the same names.
void threads_write_and_read(const Folder &folder, pds_engine *engine) {
  std::atomic<int> num_right{0};
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) {
    threads.emplace_back([&, n] {
      std::mt19937 random(n);
      for (int round = 0; round < kRounds; ++round) {
        Values in(random), out(random), wrong(random);
        folder.put(&in, engine, n);
        if (folder.get(&out, engine) == PDS_OK) ++num_right, out.expect_right("bytes");
        wrong.starts.back() ^= 1;
        expect(folder.get(&wrong, engine) == PDS_ERR_VALUE, "another start");
        folder.evict(random() % kFiles);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  expect(num_right > 0, "some are read");
  expect(folder.num_unfinished() == 0, "nothing unfinished is left");
}

[[noreturn]] void write_for_ever(const Folder &folder, int writer) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::mt19937 random(writer);
  const Cache cache;
  pds_engine *engine = open_engine(cache, PDS_PATH_AUTO);
  for (;;) {
    Values values(random);
    folder.put(&values, engine, writer);
    folder.evict(random() % kFiles);
  }
}

// Whatever has a value's name then is that value, whole.
void writers_killed_anywhere() {
  const Folder folder;
  std::mt19937 random(1);
  for (int n = 0; n < kKills; ++n) {
    const pid_t child = fork();
    if (child == 0) write_for_ever(folder, n);
    usleep(2000 + random() % 5000);
    kill(child, SIGKILL);
    int status = 0;
    expect(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "killed in the middle");
  }
  const Cache cache;
  pds_engine *engine = open_engine(cache, PDS_PATH_AUTO);
  for (int n = 0; n < 400; ++n) {
    Values values(random);
    int64_t num_there = 0;
    for (const int number : values.numbers)
      num_there += access(folder.of(number).c_str(), F_OK) == 0;
    const int32_t code = folder.get(&values, engine);
    expect(code == (num_there == values.count() ? PDS_OK : PDS_ERR_VALUE),
           "what is there is right");
    if (code == PDS_OK) values.expect_right("bytes after kills");
  }
  expect(pds_close(engine) == PDS_OK, "close");
}

void arguments_that_do_not_fit(pds_engine *engine) {
  const std::string path = "/nowhere/at/all", start(kStart, 'x');
  std::vector<char> room(kHeader);
  const auto address = reinterpret_cast<uint64_t>(room.data());
  int64_t done = -1;
  int32_t why = -1;
  const auto read = [&](uint64_t to, int64_t size, int64_t count) {
    return pds_read_values(engine, PDS_CACHED, path.c_str(), &to, &size, start.data(), count);
  };
  const auto write = [&](uint64_t from, int64_t size, int64_t count) {
    return pds_write_values(engine, PDS_CACHED, "/tmp/pdstore-files-stress-new", path.c_str(),
                            &from, &size, start.data(), count, &done, &why);
  };
  expect(read(0, kHeader, 1) == PDS_ERR_ARGUMENT && write(0, kHeader, 1) == PDS_ERR_ARGUMENT,
         "no address");
  expect(read(address, 63, 1) == PDS_ERR_ARGUMENT && write(address, 63, 1) == PDS_ERR_ARGUMENT,
         "no header");
  expect(read(address, 64, -1) == PDS_ERR_ARGUMENT && write(address, 64, -1) == PDS_ERR_ARGUMENT,
         "no count");
  expect(read(address, 64, 0) == PDS_OK, "nothing is right");
  expect(write(address, 64, 0) == PDS_OK && done == 0 && why == 0, "nothing is written");
  expect(read(address, 64, 1) == PDS_ERR_VALUE, "no file");
  expect(write(address, 64, 1) == PDS_OK && done == 0 && why == ENOENT, "no directory above");
}

}  // namespace

int main() {
  writers_killed_anywhere();  // before there are threads
  const Cache cache;
  pds_engine *engine = open_engine(cache, PDS_PATH_AUTO);
  arguments_that_do_not_fit(engine);
  const Folder folder;
  threads_write_and_read(folder, engine);
  expect(pds_close(engine) == PDS_OK, "close");
  std::puts("fine");
  return 0;
}
