// libpdstore: block copies between a paged KV cache and host slots. The plain C interface.
//
// Decision: arguments are addresses and numbers, so one library serves every Python, torch and
// engine. Every function returns 0 or a code below; some fill a pds_error, which says more. Structs
// are copied. No pointer may be null. Any thread may call; only pds_wait, pds_close and
// pds_register wait for the device. Decision: docs/decisions/021-block-copies.md
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#pragma GCC visibility push(default)
#endif

enum { PDS_ABI = 28 };

enum {
  PDS_OK = 0,
  PDS_PENDING = 1,        // the time was up and the copy still runs
  PDS_ERR_ARGUMENT = 2,   // an argument does not fit; nothing was copied
  PDS_ERR_DEVICE = 3,     // a device call failed: device_code, call and slice say which
  PDS_ERR_POISONED = 4,   // an earlier device error broke the device's context for good
  PDS_ERR_CLOSED = 5,     // the engine was closed, or belongs to the parent process
  PDS_ERR_CAPTURE = 6,    // the stream is being captured into a graph
  PDS_ERR_NO_DEVICE = 7,  // no such device, no driver, or a build without CUDA
  PDS_ERR_MEMORY = 8,     // host memory ran out
  PDS_ERR_TIMEOUT = 9,    // the arena's lock was not free in time
  PDS_ERR_FULL = 10,      // no room, and nothing that may be evicted
  PDS_ERR_FORMAT = 11,    // the file is no arena of this version and this boot
  PDS_ERR_SYSTEM = 12,    // the file system refuses, or its memory cannot be mapped
  PDS_ERR_LENGTH = 13,    // a value has another length
  PDS_ERR_VALUE = 14,     // a value is missing, or is not the one that was asked for
};

enum { PDS_OUT = 0, PDS_IN = 1 };  // paged cache -> slots, slots -> paged cache
enum { PDS_PATH_AUTO = 0, PDS_PATH_BATCH = 1, PDS_PATH_STRIDED = 2, PDS_PATH_STAGE = 3 };
enum { PDS_CPU = -1 };  // as a device: host memory, no GPU

typedef struct pds_engine pds_engine;
typedef struct pds_ticket pds_ticket;

typedef struct {
  int32_t code;         // one of the codes above
  int32_t device_code;  // CUDA's, or 0
  int64_t slice;        // the slice of the job that failed, or -1
  char call[40];        // the device call that failed, or empty
  char message[200];    // for people
} pds_error;

typedef struct {
  int32_t abi;
  int32_t has_cuda;     // built with CUDA
  int32_t num_devices;  // that can be used; 0 also without a driver
} pds_info_t;

// One cache tensor of one layer, at the part's first head. Strides and sizes in bytes.
typedef struct {
  uint64_t base;
  int64_t block_stride, token_stride, head_stride;
  int64_t width;  // contiguous bytes per token and head
  int64_t start;  // where they are in the payload's cell of a token and head
  int32_t layer;  // which layer of the payload
  int32_t part;
} pds_region;

// One kind of payload: [layer][token][head][cell].
typedef struct {
  int32_t num_layers, num_heads;
  int64_t cell;                      // bytes per token and head: K and V
  int64_t num_blocks;                // engine blocks in the caches of this part
  int32_t block_tokens, max_tokens;  // of an engine block, of a payload
} pds_part;

typedef struct {
  int32_t abi;     // PDS_ABI of the caller
  int32_t device;  // CUDA ordinal, or PDS_CPU
  int32_t path, num_parts, num_regions;
  int64_t copy_out_bytes, copy_in_bytes;    // a slice of the copy engines' paths; 0: the default
  int64_t stage_out_bytes, stage_in_bytes;  // a slice of the staged path: the device ring of a lane
} pds_options;

// One payload and the engine blocks that its tokens are in.
typedef struct {
  uint64_t payload;
  int32_t part;
  int32_t num_tokens;
  int32_t first_token;  // PDS_IN: tokens before it are not written
  int32_t num_ids;      // how many of the job's ids are this item's
} pds_item;

typedef struct {
  int32_t path;
  int32_t num_pieces;   // contiguous pieces of an engine block
  int64_t piece_bytes;  // the smallest of them
  int64_t block_bytes;  // of an engine block
  char why[104];
} pds_plan;

int32_t pds_info(pds_info_t *info);

int32_t pds_open(const pds_options *options, const pds_part *parts, const pds_region *regions,
                 pds_engine **engine, pds_error *error);
// Fails queued copies with PDS_ERR_CLOSED, waits for the device, frees everything.
int32_t pds_close(pds_engine *engine);
// The first half of pds_close: other threads may still be in calls with this engine, which end.
int32_t pds_stop(pds_engine *engine);
// A payload must lie in one such range, on a GPU in a registered one; the CPU form needs no range.
int32_t pds_add_host(pds_engine *engine, uint64_t address, int64_t bytes);
int32_t pds_explain(const pds_engine *engine, int32_t direction, int32_t part, int32_t num_tokens,
                    pds_plan *plan);

// Starts a copy. It touches the cache after `ready`, a cudaEvent_t that must live until the ticket
// is done; if `ready` is 0, after what `stream` holds now; if both are 0, at once. A later copy
// that has nothing to wait for may overtake it.
int32_t pds_submit(pds_engine *engine, int32_t direction, const pds_item *items, int64_t num_items,
                   const int64_t *ids, int64_t num_ids, uint64_t stream, uint64_t ready,
                   pds_ticket **ticket, pds_error *error);
// Returns 0 if the copy is done, PDS_PENDING if the time is up, else why it failed. A negative
// timeout counts as 0. After any code but PDS_PENDING no device touches the copy's memory any more.
int32_t pds_wait(pds_ticket *ticket, int64_t timeout_us, pds_error *error);
int32_t pds_free_ticket(pds_ticket *ticket);

// Pins host memory for a device's copies, in one piece. Does nothing for PDS_CPU.
int32_t pds_register(int32_t device, uint64_t address, int64_t bytes, pds_error *error);
int32_t pds_unregister(int32_t device, uint64_t address, pds_error *error);
// Makes the pages of a range present, so that registering them is quick.
int32_t pds_populate(uint64_t address, int64_t bytes);
// Sets the calling thread's capture mode and gives the previous one. With PDS_RELAXED the thread's
// calls do not disturb graph captures of other threads.
enum { PDS_RELAXED = 2 };
int32_t pds_exchange_capture_mode(int32_t *mode);

// Values that are files; each path ends with a zero byte.
// How their bytes are moved: through the page cache; or past it (O_DIRECT), by io_uring, or where
// that is refused by threads; or past it by threads in any case.
enum { PDS_CACHED = 0, PDS_DIRECT = 1, PDS_DIRECT_BY_THREADS = 2 };
// Reads each value to its address and verifies it; the engine's threads help. `starts`: the first
// 56 bytes of each. PDS_ERR_VALUE: a value cannot be read or is not right.
int32_t pds_read_values(pds_engine *engine, int32_t way, const char *paths,
                        const uint64_t *addresses, const int64_t *sizes, const char *starts,
                        int64_t count);
// Checksums (checksum.h) of values in memory, of at least 64 bytes each.
int32_t pds_sum_values(const uint64_t *addresses, const int64_t *sizes, int64_t count,
                       uint64_t *checksums);

// Writes values to files; the engine's threads help. Each gets its start and its sum, in memory,
// too. A file gets its name when it is whole; one that exists counts as written. `temporary` begins
// the names of unfinished files. Gives how many leading files are written, and the next one's
// errno.
int32_t pds_write_values(pds_engine *engine, int32_t way, const char *temporary, const char *paths,
                         const uint64_t *addresses, const int64_t *sizes, const char *starts,
                         int64_t count, int64_t *num_written, int32_t *why);

// The same for bytes as they are, of any length (above 0 past the page cache), without an engine;
// in turn where they go through the page cache. Gives how many leading files are done and what is
// wrong with the next one: an errno, or -1 for another length.
int32_t pds_read_files(int32_t way, const char *paths, const uint64_t *addresses,
                       const int64_t *sizes, int64_t count, int64_t *num_read, int32_t *why);
int32_t pds_write_files(int32_t way, const char *temporary, const char *paths,
                        const uint64_t *addresses, const int64_t *sizes, int64_t count,
                        int64_t *num_written, int32_t *why);
// Gives 0 if the calling thread can use io_uring, else the errno with which it is refused.
int32_t pds_try_ring(int32_t *why);

// Says for each path whether a file is there; links are followed.
int32_t pds_find_files(const char *paths, int64_t num_files, uint8_t *is_there);
// Gives three numbers for each file: its bytes, and its modification and access times (ns). Follows
// no link. A missing file and a directory have -1, 0, 0; a file that fails has -1, its errno, 0.
int32_t pds_stat_files(const char *paths, int64_t num_files, int64_t *facts);
// Deletes the files that still have these modification times (ns). Gives an errno, or 0, for each;
// EBUSY: it has another time. Follows no link.
int32_t pds_delete_files(const char *paths, int64_t num_files, const int64_t *changed_ns,
                         int32_t *why);
// Sets files' access and modification times (ns) in turn, until one fails; follows no link. Each
// modification time is 1 ns before that of the file before it, so the last file is the oldest.
int32_t pds_lease_files(const char *paths, int64_t num_files, int64_t used_ns, int64_t until_ns,
                        int64_t *num_leased, int32_t *why);

// An arena: values by key in a file that several processes map. The file holds an index and, from
// data_at on, data_bytes of memory for values. Keys are one text, a zero byte after each.
typedef struct pds_arena pds_arena;
typedef struct {
  int64_t lease_ns;        // of the lease that a find gives
  int64_t fresh_ns;        // nobody evicts a value so soon after its publication or a read's begin
  int64_t short_lived_ns;  // the life of a PDS_SHORT_LIVED value after its last use
  int64_t orphan_timeout_ns;  // how long a dead process's device may write to its slots
  int64_t lock_timeout_ns;    // calls that wait longer fail with PDS_ERR_TIMEOUT
} pds_arena_options;
typedef struct {
  int64_t data_at, data_bytes, slab_bytes;  // no value lies in two slabs
} pds_arena_info;
typedef struct {
  int64_t stored, reserved, resting, free, slabs;  // slots; slabs that are in use
} pds_arena_counts;
typedef struct {
  int64_t bytes, age_ns;  // since its last use; negative: unknown
  char key[208];          // a zero after it
} pds_arena_value;
enum { PDS_BLOCK = 0, PDS_SHORT_LIVED = 1, PDS_FOREVER = 2 };  // kinds of values

// Turns an empty file into an arena; nobody else may have it open. data_bytes is a multiple of
// slab_bytes, which is one of 4096. The caller closes the descriptor, here and in pds_arena_open.
int32_t pds_arena_format(int32_t file, int64_t data_bytes, int64_t slab_bytes, uint64_t seed);
int32_t pds_arena_open(int32_t file, const pds_arena_options *options, pds_arena **arena,
                       pds_arena_info *info);
// Waits for running calls; later calls give PDS_ERR_CLOSED. May be called twice. The child of a
// fork must close its parent's arenas, which stay open for the parent.
int32_t pds_arena_close(pds_arena *arena);
int32_t pds_arena_free(pds_arena *arena);  // nobody may be in a call
// lock_timeout_ns: how long a call waits for the lock; negative: for as long as the options say. A
// call that did not get it has done nothing. stored[i]: whether the i-th key is stored. lease: if
// not 0, the leading stored keys get a lease and count as used, and keys after the first missing
// one are not looked for. But of the keys from `unread_from` on, a value gets no lease that was
// published or leased last at `unread_since_ns` of the monotonic clock or later, and was read
// since.
int32_t pds_arena_find(pds_arena *arena, int64_t lock_timeout_ns, const char *keys,
                       int64_t num_keys, int32_t lease, int64_t unread_from,
                       int64_t unread_since_ns, uint8_t *stored);
// Counts a use of those of the keys that are stored, of the last first; leases nothing.
int32_t pds_arena_use(pds_arena *arena, const char *keys, int64_t num_keys);
int32_t pds_arena_remove(pds_arena *arena, const char *keys, int64_t num_keys);
int32_t pds_arena_clear(pds_arena *arena, const char *prefix);
int32_t pds_arena_count(pds_arena *arena, pds_arena_counts *counts);
// Gives the age of the value that goes first for `num_values` new ones of `bytes` each, in ns since
// its last use; -1 if none has to go, or none may.
int32_t pds_arena_oldest(pds_arena *arena, int64_t bytes, int64_t num_values, int64_t *age_ns);
// Evicts blocks and tails, leased ones too, until all of these values have room; the stored ones of
// them get a lease and stay. PDS_ERR_FULL: not even then, and nothing was evicted.
int32_t pds_arena_make_room(pds_arena *arena, const char *keys, const uint8_t *kinds,
                            const int64_t *sizes, int64_t num_keys);
// Gives up to `room` values, in no order, and their count. `next`: 0 at first; set to what the next
// call takes, or -1 after the last. A value that is stored or removed between calls may be missing.
int32_t pds_arena_list(pds_arena *arena, int64_t *next, pds_arena_value *values, int64_t room,
                       int64_t *count);

// Copies values in and out; `memory`: where the values are mapped. `done`: how many leading ones.
int32_t pds_arena_put(pds_arena *arena, int64_t lock_timeout_ns, uint64_t memory, const char *keys,
                      const uint8_t *kinds, const uint64_t *addresses, const int64_t *sizes,
                      int64_t num_keys, int64_t *done);
// keeps_leases: if 0, the values' leases end soon, as whoever waited for them has read them.
int32_t pds_arena_get(pds_arena *arena, uint64_t memory, const char *keys,
                      const uint64_t *addresses, const int64_t *sizes, int64_t num_keys,
                      int32_t keeps_leases, int64_t *done);

// Values of an arena and their copies. After a failure no slot stays reserved; `error`: the
// engine's.
typedef struct {
  const char *keys, *starts;  // starts: 56 bytes each, a header without its sum
  const int64_t *sizes, *ids;
  const pds_item *items;  // the library sets their payloads
  int64_t count, num_ids, lock_timeout_ns;
  uint64_t memory, ready;  // memory: where the values' memory is mapped
} pds_values;
// Gathers, seals and publishes what is not stored, batch by batch; `done`: how many batches, also
// after a failure. `kinds`: of all values; `is_new`: of done batches' values, if stored now. The
// device sums values in the cache if it can read them there as chunks; all others are summed in the
// arena, after their copies.
int32_t pds_arena_fill(pds_arena *arena, pds_engine *engine, const pds_values *batches,
                       int64_t num_batches, const uint8_t *kinds, uint8_t *is_new, int64_t *done,
                       pds_error *error);
// Starts to scatter values. The device sums values after their copy, in the cache, if it can read
// them there as chunks; all others are summed in the arena before.
int32_t pds_arena_take(pds_arena *arena, pds_engine *engine, const pds_values *values,
                       pds_ticket **ticket, pds_error *error);
// To be called after pds_wait: gives how many leading values stayed in their places all the time,
// and how many leading values were right when they were copied.
int32_t pds_arena_confirm(pds_arena *arena, const pds_ticket *ticket, int64_t *there,
                          int64_t *right);
// Waits until the count of publications is not `seen`, or the time is up; gives the count.
int32_t pds_arena_wait(pds_arena *arena, uint32_t seen, int64_t timeout_us, uint32_t *changes);

#ifdef __cplusplus
#pragma GCC visibility pop
}
#endif
