// Values that are files, read under a sanitizer: by several threads that share a crew, while others
// write and delete them. What counts as right is compared, every byte.
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "pdstore.h"
#include "tests/rig.h"

namespace {

constexpr int kFiles = 24, kMost = 6, kStart = 56, kRounds = 50;

std::string value_of(int number) {
  return std::string(1000 + 17'000 * (number % 8), static_cast<char>('a' + number));
}

class Folder {
 public:
  Folder() { expect(mkdtemp(path_) != nullptr, "a folder"); }
  ~Folder() {
    for (int n = 0; n < kFiles; ++n) unlink(of(n).c_str());
    rmdir(path_);
  }
  std::string of(int number) const { return std::string(path_) + "/" + std::to_string(number); }

  void write(int number, int writer) const {
    std::string value = value_of(number);
    const auto address = reinterpret_cast<uint64_t>(value.data());
    const auto bytes = static_cast<int64_t>(value.size());
    const std::string paths = of(number) + '\0', temporary = of(1000 + writer);
    int64_t done = 0;
    int32_t why = 0;
    pds_write_files(temporary.c_str(), paths.data(), &address, &bytes, 1, &done, &why);
    expect(done == 1 && why == 0, "written");
  }

 private:
  char path_[64] = "/tmp/pdstore-files-stress-XXXXXX";
};

// Reads some values; with `wrong`, the last one's start is another one's.
int32_t read(const Folder &folder, pds_engine *engine, std::mt19937 &random, bool wrong) {
  const int count = 1 + random() % kMost, first = random() % kFiles;
  std::string paths, starts;
  std::vector<std::string> values;
  std::vector<uint64_t> addresses;
  std::vector<int64_t> sizes;
  for (int i = 0; i < count; ++i) {
    const int n = (first + i) % kFiles;
    paths += folder.of(n) + '\0';
    starts += value_of(n + (wrong && i == count - 1)).substr(0, kStart);
    values.emplace_back(value_of(n).size(), '?');
  }
  for (std::string &value : values) {
    addresses.push_back(reinterpret_cast<uint64_t>(value.data()));
    sizes.push_back(static_cast<int64_t>(value.size()));
  }
  const int32_t code =
      pds_read_values(engine, paths.data(), addresses.data(), sizes.data(), starts.data(), count);
  for (int i = 0; code == PDS_OK && i < count; ++i) {
    std::string wanted = value_of((first + i) % kFiles);
    std::memcpy(&wanted[kStart], &values[i][kStart], 8);  // its sum
    expect(values[i] == wanted, "a value's bytes");
  }
  return code;
}

void readers_beside_a_writer(const Folder &folder, pds_engine *engine) {
  std::atomic<int> num_right{0};
  std::vector<std::thread> threads;
  for (int reader = 0; reader < 4; ++reader) {
    threads.emplace_back([&, reader] {
      std::mt19937 random(reader);
      for (int round = 0; round < kRounds; ++round) {
        num_right += read(folder, engine, random, false) == PDS_OK;
        expect(read(folder, engine, random, true) == PDS_ERR_VALUE, "a wrong value");
      }
    });
  }
  std::mt19937 random(99);
  for (int round = 0; round < kRounds; ++round) {
    const int n = random() % kFiles;
    unlink(folder.of(n).c_str());
    folder.write(n, 0);
  }
  for (std::thread &thread : threads) thread.join();
  expect(num_right > 0, "some are read");
}

void arguments_that_do_not_fit(pds_engine *engine) {
  const std::string path = "/nowhere", start(kStart, 'x');
  const auto call = [&](uint64_t address, int64_t size, int64_t count) {
    return pds_read_values(engine, path.c_str(), &address, &size, start.data(), count);
  };
  std::vector<char> room(64);
  const auto address = reinterpret_cast<uint64_t>(room.data());
  expect(call(0, 64, 1) == PDS_ERR_ARGUMENT, "no address");
  expect(call(address, 63, 1) == PDS_ERR_ARGUMENT, "no header");
  expect(call(address, 64, -1) == PDS_ERR_ARGUMENT, "no count");
  expect(call(address, 64, 0) == PDS_OK, "nothing is right");
  expect(call(address, 64, 1) == PDS_ERR_VALUE, "no file");
}

}  // namespace

int main() {
  const Cache cache;
  pds_engine *engine = open_engine(cache, PDS_PATH_AUTO, PDS_TOKEN_MAJOR);
  const Folder folder;
  for (int n = 0; n < kFiles; ++n) folder.write(n, 0);
  arguments_that_do_not_fit(engine);
  readers_beside_a_writer(folder, engine);
  expect(pds_close(engine) == PDS_OK, "close");
  std::puts("fine");
  return 0;
}
