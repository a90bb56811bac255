// A value that is a file.
#pragma once
#include "pdstore.h"

namespace pds {

// Reads a file of exactly so many bytes, and sums it on the way. 0, an errno, or PDS_OTHER_LENGTH.
int32_t read_value_file(const char *path, char *to, int64_t bytes, uint64_t *checksum);

}  // namespace pds
