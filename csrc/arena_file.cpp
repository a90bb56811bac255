#include "arena_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "pdstore.h"

namespace pds::arena {
namespace {

void read_boot(char (&boot)[40]) {
  std::memset(boot, 0, sizeof boot);
  const int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  if (read(file, boot, sizeof boot - 1) < 0) boot[0] = 0;
  close(file);
}

}  // namespace

char *map(int file, int64_t bytes) {
  void *mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<char *>(mapped);
}

bool read_geometry(int file, Geometry *geometry) {
  struct stat status;
  if (fstat(file, &status) != 0 || status.st_size < static_cast<off_t>(sizeof(Header)))
    return false;
  char *base = map(file, sizeof(Header));
  if (base == nullptr) return false;
  const auto *header = reinterpret_cast<const Header *>(base);
  char boot[40];
  read_boot(boot);
  const bool fits = header->magic == kMagic && header->version == kVersion &&
                    std::memcmp(header->boot, boot, sizeof boot) == 0 &&
                    geometry->make(header->data_bytes, header->slab_bytes) &&
                    geometry->file_bytes() == status.st_size;
  munmap(base, sizeof(Header));
  return fits;
}

int reopen(int file) {
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  return ::open(path.c_str(), O_RDWR | O_CLOEXEC);
}

int32_t format(int file, int64_t data_bytes, int64_t slab_bytes, uint64_t seed) {
  Geometry geometry;
  if (!geometry.make(data_bytes, slab_bytes)) return PDS_ERR_ARGUMENT;
  if (ftruncate(file, geometry.file_bytes()) != 0) return PDS_ERR_SYSTEM;
  if (fallocate(file, 0, 0, geometry.slots_at) != 0) return PDS_ERR_SYSTEM;
  char *base = map(file, geometry.slots_at);
  if (base == nullptr) return PDS_ERR_SYSTEM;
  auto *header = new (base) Header{};
  header->version = kVersion, header->seed = seed;
  header->data_bytes = data_bytes, header->slab_bytes = slab_bytes;
  read_boot(header->boot);
  auto *heads = reinterpret_cast<uint32_t *>(base + geometry.heads_at);
  std::fill(heads, heads + geometry.num_heads, kNone);
  header->magic = kMagic;
  munmap(base, geometry.slots_at);
  return PDS_OK;
}

}  // namespace pds::arena
