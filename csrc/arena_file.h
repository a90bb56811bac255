// An arena's file: made, recognized, mapped.
#pragma once
#include "arena_layout.h"

namespace pds::arena {

// Makes an empty file an arena. A code of pdstore.h.
int32_t format(int file, int64_t data_bytes, int64_t slab_bytes, uint64_t seed);

// Reads the geometry from a header. False for a file that is no arena of this version and this
// boot, or not as long as its header says.
bool read_geometry(int file, Geometry *geometry);

// The first bytes of a file; null if they cannot be mapped.
char *map(int file, int64_t bytes);

// Opens a file once more. Locks end with the last reference to an open file, and a mapping, which a
// forked child has too, is one: so the one for locks is never mapped. Negative if it cannot.
int reopen(int file);

}  // namespace pds::arena
