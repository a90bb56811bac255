// Values gathered into an arena and scattered from it under a sanitizer: threads, arguments that do
// not fit, processes killed anywhere, and both ends closed in the middle. Every byte is compared.
//
// Decision: a program, as stress.cpp is.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "pdstore.h"
#include "tests/rig.h"

#if defined(__SANITIZE_THREAD__)
constexpr int kKills = 0, kRounds = 300;  // kills are for one thread
constexpr bool kEvicts = false;           // who reads looks afterwards; a checker cannot know
#elif defined(__SANITIZE_ADDRESS__)
constexpr int kKills = 100, kRounds = 600;
constexpr bool kEvicts = true;
#else
constexpr int kKills = 500, kRounds = 4000;
constexpr bool kEvicts = true;
#endif

namespace {

constexpr int64_t kSlab = 64 << 10, kData = kEvicts ? 256 << 10 : 32 << 20;
constexpr int kValues = kBlocks / kPerBlock, kNames = kEvicts ? 4 : 12;
constexpr int kHeader = 64, kStart = 56, kMost = 6;

// Values of one call. Number n has the blocks 3n, 3n + 1 and 3n + 2 of P's cache, under any of its
// names; D loads it into three blocks of the caller's.
struct Values {
  std::vector<int> numbers;
  std::string keys, starts;
  std::vector<pds_item> items;
  std::vector<int64_t> sizes, ids;
  std::vector<uint8_t> kinds, is_new;

  explicit Values(std::mt19937 &random, int64_t first_id = -1) {
    const int name = random() % kNames, count = 1 + random() % kMost;
    for (int i = 0, n = random() % kValues; i < count; ++i, n = (n + 1) % kValues) {
      const int32_t tokens = n % 4 == 3 ? kTokens * kPerBlock - 5 : kTokens * kPerBlock;
      const int64_t id = first_id < 0 ? n * kPerBlock : first_id + i * kPerBlock;
      numbers.push_back(n);
      keys += "pds1:" + std::to_string(name) + ":" + std::to_string(n) + '\0';
      starts += std::string(kStart, static_cast<char>(n));
      items.push_back({0, 0, tokens, 0, kPerBlock});
      sizes.push_back(kHeader + kPayload / (kTokens * kPerBlock) * tokens);
      for (int b = 0; b < kPerBlock; ++b) ids.push_back(id + b);
    }
    kinds.assign(count, PDS_BLOCK), is_new.assign(count, 0);
  }
  int64_t count() const { return static_cast<int64_t>(numbers.size()); }

  pds_values of(const View &view) const {
    pds_values values{};
    values.keys = keys.data(), values.starts = starts.data(), values.sizes = sizes.data();
    values.ids = ids.data(), values.items = items.data(), values.count = count();
    values.num_ids = static_cast<int64_t>(ids.size()), values.lock_timeout_ns = -1;
    values.memory = view.address();
    return values;
  }

  // Saves the first value and the others as two batches, where it can.
  int32_t fill(View &view, pds_engine *engine) {
    pds_values batches[2] = {of(view), of(view)};
    const bool is_split = count() > 1 && ids.size() > kPerBlock;
    if (is_split) {
      batches[0].count = 1, batches[0].num_ids = kPerBlock;
      pds_values &rest = batches[1];
      rest.count -= 1, rest.num_ids -= kPerBlock, rest.keys += std::strlen(rest.keys) + 1;
      rest.starts += kStart, rest.sizes += 1, rest.ids += kPerBlock, rest.items += 1;
    }
    pds_error error;
    int64_t num_done = 0;
    return pds_arena_fill(view.arena, engine, batches, is_split ? 2 : 1, kinds.data(),
                          is_new.data(), &num_done, &error);
  }

  int32_t take(View &view, pds_engine *engine, pds_ticket **ticket) {
    const pds_values values = of(view);
    pds_error error;
    return pds_arena_take(view.arena, engine, &values, ticket, &error);
  }

  void expect_same(const Cache &from, const Cache &to) const {
    for (int64_t i = 0; i < count(); ++i) {
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        for (int32_t token = 0; token < items[i].num_tokens; ++token) {
          const auto at = [&](int64_t first) {
            const int64_t block = layer * kBlocks + first + token / kTokens;
            return block * kBlock + token % kTokens * kHeads * kCell;
          };
          expect(std::memcmp(&from.bytes[at(numbers[i] * kPerBlock)],
                             &to.bytes[at(ids[i * kPerBlock])], kHeads * kCell) == 0,
                 "a loaded value's bytes");
        }
      }
    }
  }
};

// Saves as P does.
void save(View &view, pds_engine *engine, std::mt19937 &random) {
  Values(random).fill(view, engine);
}

// Loads as D does, into blocks of its own. True if all of the values were there to the end.
bool load(View &view, pds_engine *engine, std::mt19937 &random, int64_t first_id, const Cache &from,
          const Cache &to) {
  Values values(random, first_id);
  pds_ticket *ticket = nullptr;
  if (values.take(view, engine, &ticket) != PDS_OK) return false;
  pds_error error;
  int32_t code;
  while ((code = pds_wait(ticket, 1'000'000, &error)) == PDS_PENDING) continue;
  int64_t still = 0, right = 0;
  pds_arena_confirm(view.arena, ticket, &still, &right);
  pds_free_ticket(ticket);
  if (code != PDS_OK || still < values.count()) return false;
  expect(right == values.count(), "what has stayed was right when it was copied");
  values.expect_same(from, to);
  return true;
}

Cache random_cache() {
  Cache cache;
  std::mt19937 random(7);
  for (auto &byte : cache.bytes) byte = static_cast<uint8_t>(random());
  return cache;
}

int64_t num_reserved(View &view) {
  pds_arena_counts counts{};
  expect(pds_arena_count(view.arena, &counts) == PDS_OK, "count");
  return counts.reserved;
}

void threads_save_and_load() {
  const int file = new_arena(kData, kSlab);
  const Cache from = random_cache();
  Cache to;
  pds_engine *p = open_engine(from, PDS_PATH_AUTO);
  pds_engine *d = open_engine(to, PDS_PATH_AUTO);
  View view(file);
  std::atomic<int> num_loaded{0};
  std::vector<std::thread> threads;
  for (int n = 0; n < 6; ++n) {
    threads.emplace_back([&, n] {
      std::mt19937 random(n);
      for (int round = 0; round < kRounds; ++round) {
        if (n < 2) {
          save(view, p, random);
        } else {
          num_loaded += load(view, d, random, (n - 2) * kMost * kPerBlock, from, to);
        }
      }
    });
  }
  for (auto &thread : threads) thread.join();
  expect(num_loaded > kRounds / 20, "values are loaded");
  expect(num_reserved(view) == 0, "every slot came back");
  expect(pds_close(p) == PDS_OK && pds_close(d) == PDS_OK, "close");
  close(file);
}

void arguments_that_do_not_fit() {
  const int file = new_arena(kData, kSlab);
  const Cache from = random_cache();
  pds_engine *engine = open_engine(from, PDS_PATH_AUTO);
  View view(file);
  const auto refuses = [&](auto change, const char *what) {
    std::mt19937 random(3);
    Values values(random);
    pds_ticket *ticket = nullptr;
    change(values);
    expect(values.fill(view, engine) != PDS_OK, what);
    expect(values.take(view, engine, &ticket) != PDS_OK && ticket == nullptr, what);
    expect(num_reserved(view) == 0, what);
  };
  refuses([](Values &v) { v.sizes[0] += 8; }, "another size");
  refuses([](Values &v) { v.sizes[0] = 63; }, "less than a header");
  refuses([](Values &v) { v.sizes[0] = -1; }, "a negative size");
  refuses([](Values &v) { v.ids[1] = kBlocks; }, "a block outside the cache");
  refuses([](Values &v) { v.ids.pop_back(); }, "fewer ids");
  refuses([](Values &v) { v.items[0].num_ids = -1; }, "a negative count");
  refuses([](Values &v) { v.items[0].num_ids = INT32_MAX; }, "a large count");
  refuses([](Values &v) { v.items[0].part = 1; }, "no such part");
  refuses([](Values &v) { v.items[0].num_tokens = 0; }, "no tokens");
  refuses([](Values &v) { v.items[0].num_tokens = INT32_MAX; }, "many tokens");
  refuses([](Values &v) { v.keys = std::string(4096, 'k'); }, "a long key");
  expect(pds_close(engine) == PDS_OK, "close");
  close(file);
}

void both_ends_close_in_the_middle() {
  for (int round = 0; round < 20; ++round) {
    const int file = new_arena(kData, kSlab);
    const Cache from = random_cache();
    Cache to;
    pds_engine *p = open_engine(from, PDS_PATH_AUTO);
    pds_engine *d = open_engine(to, PDS_PATH_AUTO);
    View view(file);
    std::vector<std::thread> threads;
    for (int n = 0; n < 4; ++n) {
      threads.emplace_back([&, n] {
        std::mt19937 random(round * 4 + n);
        for (int turn = 0; turn < 50; ++turn) {
          if (n < 2) {
            save(view, p, random);
          } else {
            load(view, d, random, (n - 2) * kMost * kPerBlock, from, to);
          }
        }
      });
    }
    usleep(round * 200);
    if (round % 2 == 0) pds_arena_close(view.arena);
    expect(pds_stop(round % 3 == 0 ? p : d) == PDS_OK, "stop");
    for (auto &thread : threads) thread.join();
    expect(pds_close(p) == PDS_OK && pds_close(d) == PDS_OK, "close");
    close(file);
  }
}

[[noreturn]] void save_and_load_for_ever(int file, unsigned seed) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::mt19937 random(seed);
  const Cache from = random_cache();
  Cache to;
  pds_engine *p = open_engine(from, PDS_PATH_AUTO);
  pds_engine *d = open_engine(to, PDS_PATH_AUTO);
  View view(file);
  for (;;) save(view, p, random), load(view, d, random, 0, from, to);
}

void processes_killed_anywhere() {
  if (kKills == 0) return;
  const int file = new_arena(kData, kSlab);
  std::mt19937 random(1);
  pid_t alive[2] = {-1, -1};
  for (int n = 0; n < kKills; ++n) {
    pid_t &child = alive[n % 2];
    if (child > 0) {
      usleep(random() % 5000);
      kill(child, SIGKILL);
      int status = 0;
      expect(waitpid(child, &status, 0) == child && WIFSIGNALED(status),
             "no wrong byte in a child");
    }
    child = fork();
    if (child == 0) save_and_load_for_ever(file, n);
  }
  for (const pid_t child : alive) kill(child, SIGKILL), waitpid(child, nullptr, 0);
  const Cache from = random_cache();
  Cache to;
  pds_engine *p = open_engine(from, PDS_PATH_AUTO);
  pds_engine *d = open_engine(to, PDS_PATH_AUTO);
  View view(file);
  int num_loaded = 0;
  for (int n = 0; n < 4000 && num_loaded < 20; ++n) {
    save(view, p, random);
    num_loaded += load(view, d, random, 0, from, to);
  }
  expect(num_loaded == 20, "the others go on");
  expect(pds_close(p) == PDS_OK && pds_close(d) == PDS_OK, "close");
  close(file);
}

}  // namespace

int main() {
  processes_killed_anywhere();  // before there are threads
  arguments_that_do_not_fit();
  threads_save_and_load();
  both_ends_close_in_the_middle();
  std::puts("fine");
  return 0;
}
