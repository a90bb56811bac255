// Calls of test builds (-DPDSTORE_TESTING=ON), by which device calls can be made to fail.
#pragma once
#include <stdint.h>

#pragma GCC visibility push(default)
extern "C" {

enum {
  PDS_CALL_ALLOCATE,
  PDS_CALL_STREAM,
  PDS_CALL_EVENT,
  PDS_CALL_RECORD,
  PDS_CALL_WAIT,
  PDS_CALL_SYNCHRONIZE,
  PDS_CALL_DRAIN,
  PDS_CALL_BATCH,
  PDS_CALL_STRIDED,
  PDS_CALL_STAGE,
  PDS_CALL_ENTER,
  PDS_CALL_CAPTURING,
  PDS_CALL_PUSH,
  PDS_CALL_REGISTER,
  PDS_CALL_UNREGISTER,
  PDS_CALL_QUERY,
  PDS_CALL_SUM,
  PDS_NUM_CALLS
};
typedef struct {
  int64_t allocations, streams, events;  // that live now
} pds_live;
// The nth call (from 0, counted from now) of this kind fails; sticky: and every later call of any
// kind. Several kinds can be told at once; a negative call takes all of it back.
int32_t pds_test_fail(int32_t call, int64_t nth, int32_t device_code, int32_t sticky);
// Every batch, strided or stage call takes this much longer; a way to have work queued.
int32_t pds_test_delay(int64_t microseconds);
// The next copy to this range of host memory has another first byte just after it; 0 bytes take it
// back.
int32_t pds_test_change(uint64_t address, int64_t bytes);
int32_t pds_test_live(pds_live *live);
}
#pragma GCC visibility pop
