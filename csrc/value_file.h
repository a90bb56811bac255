// Values that are files.
#pragma once
#include <vector>

#include "pdstore.h"

namespace pds {

// The beginnings of texts that lie behind each other, a zero after each.
std::vector<const char *> each_of(const char *texts, int64_t count);

// Reads a file of exactly so many bytes, and sums it on the way. 0, an errno, or PDS_OTHER_LENGTH.
int32_t read_value_file(const char *path, char *to, int64_t bytes, uint64_t *checksum);

}  // namespace pds
