// The objects behind the handles of the C interface, and how its calls turn errors into codes.
#pragma once
#include <array>
#include <memory>
#include <new>

#include "arena.h"
#include "engine.h"

namespace pds {

// A value that is summed after its copy: its number in the call, and its header before the copy.
struct PendingSum {
  int64_t number, payload_bytes;
  std::array<char, 64> header;
};

inline int32_t report(const pds_error &error, pds_error *out) {
  if (out != nullptr) *out = error;
  return error.code;
}

// Runs `body`, which returns a code; no exception leaves the library.
template <typename Body>
int32_t guarded(pds_error *out, Body body) {
  try {
    return body();
  } catch (const Failure &failure) {
    return report(failure.error, out);
  } catch (const std::bad_alloc &) {
    return report(error_of(PDS_ERR_MEMORY, "out of host memory"), out);
  } catch (const std::exception &error) {
    return report(error_of(PDS_ERR_ARGUMENT, error.what()), out);
  }
}

}  // namespace pds

struct pds_engine : pds::Engine {
  using Engine::Engine;
};
struct pds_ticket {
  std::shared_ptr<pds::Ticket> ticket;
  pds::arena::Places places{};  // of an arena's values that are copied
  std::vector<pds::PendingSum> pending_sums{};
};
struct pds_arena {
  std::unique_ptr<pds::arena::Arena> arena;
};

namespace pds::arena {

// False if a key is empty or too long.
bool read_keys(const char *text, int64_t count, Keys *keys);
bool are_kinds(const uint8_t *kinds, int64_t count);
bool are_sizes(const int64_t *sizes, int64_t count, int64_t smallest);

}  // namespace pds::arena
