// Arenas under a sanitizer: threads, processes killed anywhere, and random bytes over the index.
//
// Decision: a program, as stress.cpp is. A process that is killed every millisecond, a thousand
// times, sees the few instructions between two writes of a descriptor more often than any test in
// Python can.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "abi.h"
#include "tests/rig.h"

#if defined(__SANITIZE_THREAD__)
constexpr int kKills = 0, kScribbles = 0, kRounds = 400;  // those are for one thread
#elif defined(__SANITIZE_ADDRESS__)
constexpr int kKills = 150, kScribbles = 1000, kRounds = 400;  // a fork takes 20 ms
#else
constexpr int kKills = 2000, kScribbles = 3000, kRounds = 2000;
#endif

namespace {

constexpr int64_t kSlab = 256 << 10, kData = 2 << 20;
constexpr int kKeys = 48;
constexpr int64_t kSizes[] = {100, 4096, 9'000, 20'000};

int64_t size_of(int key) { return kSizes[key % 4]; }

// The one right value of each key.
const std::vector<std::vector<uint8_t>> kValues = [] {
  std::vector<std::vector<uint8_t>> values;
  for (int key = 0; key < kKeys; ++key) {
    values.emplace_back(size_of(key));
    for (int64_t i = 0; i < size_of(key); ++i) {
      values[key][i] = static_cast<uint8_t>(key * 31 + i * 7 + (i >> 8));
    }
  }
  return values;
}();

// A batch of some keys, with room for their values.
struct Batch {
  std::vector<int> numbers;
  std::string keys;
  std::vector<uint8_t> kinds;
  std::vector<int64_t> sizes;
  std::vector<std::vector<uint8_t>> values;

  Batch(std::mt19937 &random, int count) {
    std::vector<int> all(kKeys);
    for (int i = 0; i < kKeys; ++i) all[i] = i;
    std::shuffle(all.begin(), all.end(), random);
    all.resize(count);
    for (const int key : all) add(key);
  }
  void add(int key) {
    numbers.push_back(key);
    keys += "pds1:key" + std::to_string(key) + '\0';
    kinds.push_back(key % 5 == 0 ? PDS_SHORT_LIVED : PDS_BLOCK);
    sizes.push_back(size_of(key));
    values.emplace_back(size_of(key));
  }
  std::vector<uint64_t> addresses() const {
    std::vector<uint64_t> all;
    for (const auto &value : values) all.push_back(reinterpret_cast<uint64_t>(value.data()));
    return all;
  }
  int64_t count() const { return static_cast<int64_t>(numbers.size()); }
  void fill() {
    for (int64_t n = 0; n < count(); ++n) values[n] = kValues[numbers[n]];
  }
  bool is_right(int64_t n) const { return values[n] == kValues[numbers[n]]; }
};

void put(View &view, Batch &batch) {
  int64_t done;
  batch.fill();
  const int64_t lock_timeout_ns = batch.count() % 2 != 0 ? -1 : 5'000;  // some give up
  pds_arena_put(view.arena, lock_timeout_ns, view.address(), batch.keys.data(), batch.kinds.data(),
                batch.addresses().data(), batch.sizes.data(), batch.count(), &done);
}

void get(View &view, Batch &batch, bool bytes_count) {
  int64_t done;
  pds_arena_get(view.arena, view.address(), batch.keys.data(), batch.addresses().data(),
                batch.sizes.data(), batch.count(), batch.count() % 2, &done);
  expect(done >= 0 && done <= batch.count(), "a count");
  for (int64_t n = 0; bytes_count && n < done; ++n) expect(batch.is_right(n), "a value's bytes");
}

// Reserves, publishes some, gives the others back: without their bytes, which nobody else reads.
void reserve(View &view, Batch &batch, bool bytes_count) {
  int64_t done;
  pds::arena::Keys keys;
  pds::arena::Places places;
  pds::arena::Arena &arena = *view.arena->arena;
  expect(pds::arena::read_keys(batch.keys.data(), batch.count(), &keys), "keys");
  if (batch.count() % 3 == 0) arena.make_room(keys, batch.kinds.data(), batch.sizes.data());
  if (arena.reserve(keys, batch.kinds.data(), batch.sizes.data(), &places, -1) != PDS_OK) return;
  batch.fill();
  for (size_t n = 0; n < places.size(); ++n) {
    const int64_t offset = places[n].offset;
    if (places[n].slot < 0) continue;
    expect(offset >= 0 && offset + batch.sizes[n] <= kData, "a slot lies in the memory");
    if (bytes_count) std::memcpy(view.memory + offset, batch.values[n].data(), batch.sizes[n]);
  }
  const pds::arena::Places half(places.begin(), places.begin() + places.size() / 2);
  if (bytes_count) arena.publish(half, &done, -1);
  arena.abandon(places);
}

void act(View &view, std::mt19937 &random, bool reserves, bool bytes_count) {
  Batch batch(random, 1 + random() % 12);
  std::vector<uint8_t> stored(batch.count());
  switch (random() % 8) {
    case 0:
    case 1: return put(view, batch);
    case 2:
    case 3: return get(view, batch, bytes_count);
    case 4: return reserves ? reserve(view, batch, bytes_count) : void();
    case 5:
      pds_arena_use(view.arena, batch.keys.data(), batch.count());
      pds_arena_remove(view.arena, batch.keys.data(), batch.count());
      return;
    case 6:
      for (const int32_t lease : {0, 1}) {
        const int64_t from = static_cast<int64_t>(random() % 12);
        pds_arena_find(view.arena, -1, batch.keys.data(), batch.count(), lease, from, 0,
                       stored.data());
      }
      return;
    default:
      if (random() % 20 == 0) pds_arena_clear(view.arena, "pds1:key1");
      if (random() % 4 != 0) return;
      pds_arena_make_room(view.arena, batch.keys.data(), batch.kinds.data(), batch.sizes.data(),
                          batch.count());
  }
}

void threads_and_a_close_in_the_middle() {
  const int file = new_arena(kData, kSlab);
  View shared(file), other(file);
  std::vector<std::thread> threads;
  std::atomic<bool> over{false};
  for (int n = 0; n < 6; ++n) {
    threads.emplace_back([&, n] {
      std::mt19937 random(n);
      for (int round = 0; round < kRounds; ++round) {
        act(n % 3 == 0 ? other : shared, random, false, true);
      }
    });
  }
  std::thread waiter([&] {
    uint32_t changes = 0;
    while (pds_arena_wait(other.arena, changes, 1'000'000, &changes) == PDS_OK && !over) {
    }
  });
  for (size_t n = 3; n < threads.size(); ++n) threads[n].join();
  pds_arena_close(shared.arena);  // some still use it
  for (int n = 0; n < 3; ++n) threads[n].join();
  over = true;
  pds_arena_close(other.arena);
  waiter.join();
  close(file);
}

[[noreturn]] void act_for_ever(int file, unsigned seed) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::mt19937 random(seed);
  View view(file);
  for (;;) act(view, random, true, true);
}

void processes_killed_anywhere() {
  const int file = new_arena(kData, kSlab);
  View view(file);
  std::mt19937 random(1);
  pid_t alive[2] = {-1, -1};
  for (int n = 0; n < kKills; ++n) {
    pid_t &child = alive[n % 2];
    if (child > 0) {
      usleep(random() % 2000);
      kill(child, SIGKILL);
      int status = 0;
      expect(waitpid(child, &status, 0) == child && WIFSIGNALED(status),
             "a child read right bytes");
    }
    child = fork();
    if (child == 0) act_for_ever(file, n);
    Batch batch(random, 4);
    std::vector<uint8_t> stored(batch.count());
    get(view, batch, true);
    const int32_t code = pds_arena_find(view.arena, -1, batch.keys.data(), batch.count(), 1, 0,
                                        INT64_MAX, stored.data());
    expect(code == PDS_OK, "the lock of a dead process can be taken");
  }
  for (const pid_t child : alive) {
    if (child > 0) kill(child, SIGKILL), waitpid(child, nullptr, 0);
  }
  expect(pds_arena_clear(view.arena, "pds1:") == PDS_OK, "clear");
  usleep(20'000);  // what the dead had reserved rests
  std::string text;
  std::vector<uint8_t> kinds(kData / kSlab, PDS_BLOCK);
  std::vector<int64_t> sizes(kinds.size(), kSlab);
  for (size_t n = 0; n < kinds.size(); ++n) text += "all" + std::to_string(n) + '\0';
  pds::arena::Keys keys;
  expect(pds::arena::read_keys(text.data(), kinds.size(), &keys), "keys");
  pds::arena::Places places;
  pds::arena::Arena &arena = *view.arena->arena;
  for (int tries = 0; tries < 100 && places.size() < kinds.size(); ++tries) {
    arena.reserve(keys, kinds.data(), sizes.data(), &places, -1);
    arena.abandon(places);
    usleep(10'000);
  }
  expect(places.size() == kinds.size(), "every slot comes back");
  close(file);
}

// Another process's mistake, or malice: every part of the index is overwritten, some bytes at a
// time. Values may be wrong, which whoever reads them verifies; no call may crash or hang.
void random_bytes_over_the_index() {
  std::mt19937 random(5);
  for (int round = 0; round < kScribbles / 100; ++round) {
    const int file = new_arena(kData, kSlab);
    {
      View view(file, 50'000'000);
      pds_arena_info info;
      const pds_arena_options options{};
      pds_arena *second = nullptr;
      expect(pds_arena_open(file, &options, &second, &info) == PDS_OK, "open");
      char *index = static_cast<char *>(
          mmap(nullptr, info.data_at, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
      for (int n = 0; n < 40; ++n) act(view, random, true, true);
      for (int n = 0; n < 100; ++n) {
        const int64_t where[] = {64, 11'000, 20'000, 80'000, info.data_at};
        const int64_t end = where[random() % 5];
        int64_t at = random() % end;
        for (int bytes = 1 + random() % 16; bytes > 0 && at < info.data_at; --bytes) {
          index[at++] = static_cast<char>(random() % 3 == 0 ? 255 : random());
        }
        for (int k = 0; k < 6; ++k) act(view, random, true, false);
      }
      munmap(index, info.data_at);
      pds_arena_close(second);
      pds_arena_free(second);
    }
    close(file);
  }
}

}  // namespace

int main() {
  processes_killed_anywhere();  // before there are threads
  random_bytes_over_the_index();
  threads_and_a_close_in_the_middle();
  std::puts("fine");
  return 0;
}
