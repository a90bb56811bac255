// The objects behind the handles of the C interface.
#pragma once
#include <array>
#include <memory>
#include <string_view>
#include <vector>

#include "arena.h"
#include "engine.h"

struct pds_engine {
  std::unique_ptr<pds::Engine> engine;
};
namespace pds {

// A value that is summed after its copy, by its number in the call, with the header it had before.
struct Awaited {
  int64_t number, payload_bytes;
  std::array<char, 64> header;
};

}  // namespace pds

struct pds_ticket {
  std::shared_ptr<pds::Ticket> ticket;
  int64_t num_values = 0;
  std::vector<pds::Awaited> awaited{};
};
struct pds_arena {
  std::unique_ptr<pds::arena::Arena> arena;
};

namespace pds::arena {

// False for keys that are too long, or none.
bool read_keys(const char *text, int64_t count, Keys *keys);
bool are_kinds(const uint8_t *kinds, int64_t count);
bool are_sizes(const int64_t *sizes, int64_t count);

}  // namespace pds::arena
