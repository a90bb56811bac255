// A small paged cache, its engine, and an arena: what the programs under a sanitizer need.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "pdstore.h"

constexpr int32_t kLayers = 5, kHeads = 2, kTokens = 4, kPerBlock = 3;
constexpr int64_t kCell = 32, kBlocks = 96,
                  kPayload = kLayers * kHeads * kTokens * kPerBlock * kCell;
constexpr int64_t kBlock = kHeads * kTokens * kCell + 16;  // with a gap behind

inline void expect(bool fine, const char *what) {
  if (fine) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::_Exit(1);
}

struct Cache {
  std::vector<uint8_t> bytes = std::vector<uint8_t>(kLayers * kBlocks * kBlock);
  uint64_t address() const { return reinterpret_cast<uint64_t>(bytes.data()); }
};

inline pds_engine *open_engine(const Cache &cache, int32_t path) {
  std::vector<pds_region> regions;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    regions.push_back({cache.address() + layer * kBlocks * kBlock, kBlock, kHeads * kCell, kCell,
                       kCell, 0, layer, 0});
  }
  const pds_part part{kLayers, kHeads, kCell, kBlocks, kTokens, kTokens * kPerBlock};
  pds_options options{};
  options.abi = PDS_ABI, options.device = PDS_CPU;
  options.path = path, options.num_parts = 1;
  options.num_regions = kLayers, options.copy_out_bytes = 4096;
  options.copy_in_bytes = 6000;
  options.stage_out_bytes = 4096, options.stage_in_bytes = 8192;
  pds_engine *engine = nullptr;
  pds_error error;
  expect(pds_open(&options, &part, regions.data(), &engine, &error) == PDS_OK, error.message);
  return engine;
}

// One process's view: an open arena and the mapped memory.
class View {
 public:
  explicit View(int file, int64_t lock_timeout_ns = 5'000'000'000) {
    const pds_arena_options options{1'000'000, 0, 60'000'000'000, 5'000'000, lock_timeout_ns};
    expect(pds_arena_open(file, &options, &arena, &info) == PDS_OK, "open");
    void *mapped =
        mmap(nullptr, info.data_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, info.data_at);
    expect(mapped != MAP_FAILED, "mmap");
    memory = static_cast<char *>(mapped);
  }
  ~View() {
    pds_arena_close(arena);
    pds_arena_free(arena);
    munmap(memory, info.data_bytes);
  }
  uint64_t address() const { return reinterpret_cast<uint64_t>(memory); }

  pds_arena *arena = nullptr;
  pds_arena_info info;
  char *memory;
};

inline int new_arena(int64_t data, int64_t slab) {
  const int file = memfd_create("arena", MFD_CLOEXEC);
  expect(file >= 0 && pds_arena_format(file, data, slab, 42) == PDS_OK, "format");
  return file;
}
