// The CPU form under a sanitizer: threads that copy, fail, and close, with every byte compared.
//
// Decision: a program, not Python with a preloaded runtime, so that a checker sees all of it.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "crew.h"
#include "pdstore.h"
#include "tests/faults.h"
#include "tests/rig.h"

namespace {

struct Work {
  std::vector<uint8_t> host;
  std::vector<pds_item> items;
  std::vector<int64_t> ids;

  // Blocks first, first + 1, ... in payloads of three, the last of them with a tail.
  Work(int64_t first, int num_items) : host(num_items * kPayload) {
    for (int i = 0; i < num_items; ++i) {
      const int32_t tokens = i + 1 < num_items ? kTokens * kPerBlock : kTokens * kPerBlock - 5;
      items.push_back(
          {reinterpret_cast<uint64_t>(host.data()) + i * kPayload, 0, tokens, 0, kPerBlock});
      for (int b = 0; b < kPerBlock; ++b) ids.push_back(first + i * kPerBlock + b);
    }
  }

  int32_t run(pds_engine *engine, int32_t direction) {
    pds_ticket *ticket = nullptr;
    pds_error error;
    int32_t code = pds_submit(engine, direction, items.data(), items.size(), ids.data(), ids.size(),
                              0, 0, &ticket, &error);
    if (code != PDS_OK) return code;
    while ((code = pds_wait(ticket, 1'000'000, &error)) == PDS_PENDING) {
    }
    pds_free_ticket(ticket);
    return code;
  }
};

void copies_from_many_threads(int32_t path) {
  Cache cache;
  std::mt19937 random(7);
  for (auto &byte : cache.bytes) byte = static_cast<uint8_t>(random());
  const Cache before = cache;
  pds_engine *engine = open_engine(cache, path);
  std::vector<std::thread> threads;
  for (int64_t n = 0; n < 8; ++n) {
    threads.emplace_back([&, n] {
      Work work(n * 12, 4);
      std::vector<uint8_t> first;
      for (int round = 0; round < 100; ++round) {
        expect(work.run(engine, PDS_OUT) == PDS_OK, "save");
        if (first.empty()) first = work.host;
        expect(first == work.host, "a save's bytes");
        expect(work.run(engine, PDS_IN) == PDS_OK, "load");
      }
    });
  }
  for (auto &thread : threads) thread.join();
  expect(cache.bytes == before.bytes, "the cache's bytes");
  expect(pds_close(engine) == PDS_OK, "close");
}

void failures_and_a_close_in_the_middle(int32_t path) {
  for (int round = 0; round < 40; ++round) {
    Cache cache;
    pds_engine *engine = open_engine(cache, path);
    pds_test_fail(round % PDS_NUM_CALLS, 5 + round, 719, round % 3 == 0);
    std::vector<Work> works;
    std::vector<pds_ticket *> tickets;
    for (int64_t n = 0; n < 8; ++n) works.emplace_back(n * 12, 4);
    for (int turn = 0; turn < 10; ++turn) {
      for (size_t n = 0; n < works.size(); ++n) {
        Work &work = works[n];  // a block is only saved or only loaded
        pds_ticket *ticket = nullptr;
        pds_error error;
        if (pds_submit(engine, n % 2, work.items.data(), work.items.size(), work.ids.data(),
                       work.ids.size(), 0, 0, &ticket, &error) == PDS_OK) {
          tickets.push_back(ticket);
        }
      }
    }
    expect(pds_close(engine) == PDS_OK, "close with work queued");
    for (pds_ticket *ticket : tickets) {
      pds_error error;
      expect(pds_wait(ticket, 0, &error) != PDS_PENDING, "every ticket has ended");
      pds_free_ticket(ticket);
    }
    pds_test_fail(-1, 0, 0, 0);
    pds_live live;
    pds_test_live(&live);
    expect(live.allocations == 0 && live.streams == 0 && live.events == 0, "nothing leaks");
  }
}

void a_crew_does_each_piece_once() {
  pds::Crew crew(3);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&crew, caller] {
      for (int round = 0; round < 300; ++round) {
        std::vector<int> done((caller + round) % 17);  // no lock: each piece is one thread's
        crew.each(done.size(), [&](int64_t i) { ++done[i]; });
        expect(done == std::vector<int>(done.size(), 1), "a piece was not done once");
      }
    });
  }
  for (std::thread &caller : callers) caller.join();
}

}  // namespace

int main() {
  a_crew_does_each_piece_once();
  for (const int32_t path : {PDS_PATH_AUTO, PDS_PATH_BATCH, PDS_PATH_STRIDED, PDS_PATH_STAGE}) {
    copies_from_many_threads(path);
    failures_and_a_close_in_the_middle(path);
  }
  std::puts("fine");
  return 0;
}
