"""The C interface of libpdstore (csrc/pdstore.h) in ctypes: structs, codes, signatures."""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_char, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import NamedTuple

from pdstore.errors import DeviceError, LayoutError, SwapError

ABI = 18
CPU = -1
RELAXED = 2
"""The capture mode in which a thread's calls do not disturb graph captures of other threads."""


class CopyPath(enum.IntEnum):
    """The way a payload's bytes move; AUTO lets the engine choose."""

    AUTO = 0
    BATCH = 1
    STRIDED = 2
    STAGE = 3


class Code(enum.IntEnum):
    OK = 0
    PENDING = 1
    ARGUMENT = 2
    DEVICE = 3
    POISONED = 4
    CLOSED = 5
    CAPTURE = 6
    NO_DEVICE = 7
    MEMORY = 8
    TIMEOUT = 9
    FULL = 10
    FORMAT = 11
    SYSTEM = 12
    LENGTH = 13
    VALUE = 14


class CopyPlan(NamedTuple):
    """The path that a payload takes, and the reason."""

    path: str
    num_pieces: int  # contiguous pieces of an engine block
    piece_bytes: int  # the smallest of them
    block_bytes: int  # of an engine block
    why: str


_KINDS = {"i32": c_int32, "i64": c_int64, "u64": c_uint64, "bytes": c_char_p}


def _struct(name: str, fields: str) -> type[ctypes.Structure]:
    """Makes a struct of pdstore.h from fields written `name:type`; a number is a text's length."""
    pairs = [word.split(":") for word in fields.split()]
    kinds = [(n, c_char * int(k) if k.isdigit() else _KINDS[k]) for n, k in pairs]
    return type(name, (ctypes.Structure,), {"_fields_": kinds})


Region = _struct(
    "Region",
    "base:u64 block_stride:i64 token_stride:i64 head_stride:i64 width:i64 start:i64 layer:i32"
    " part:i32",
)
PartShape = _struct("PartShape", "num_layers:i32 num_heads:i32 cell:i64")
Options = _struct(
    "Options",
    "abi:i32 device:i32 num_blocks:i64 block_tokens:i32 max_tokens:i32 path:i32"
    " num_parts:i32 num_regions:i32 copy_out_bytes:i64 copy_in_bytes:i64"
    " stage_out_bytes:i64 stage_in_bytes:i64 first_bytes:i64"
    " linger_us:i64",
)
Item = _struct("Item", "payload:u64 part:i32 num_tokens:i32 first_token:i32 num_ids:i32")
Error = _struct("Error", "code:i32 device_code:i32 slice:i64 call:40 message:200")
Info = _struct("Info", "abi:i32 has_cuda:i32 num_devices:i32 has_faults:i32")
Plan = _struct("Plan", "path:i32 num_pieces:i32 piece_bytes:i64 block_bytes:i64 why:104")

ArenaOptions = _struct(
    "ArenaOptions", "lease_ns:i64 fresh_ns:i64 short_lived_ns:i64 rest_ns:i64 lock_timeout_ns:i64"
)
ArenaInfo = _struct("ArenaInfo", "data_at:i64 data_bytes:i64 slab_bytes:i64")
ArenaValue = _struct("ArenaValue", "bytes:i64 age_ns:i64 key:208")
SlotCounts = _struct("SlotCounts", "stored:i64 reserved:i64 resting:i64 free:i64 slabs:i64")

Values = _struct(
    "Values",
    "keys:bytes starts:bytes sizes:bytes ids:bytes items:bytes count:i64 num_ids:i64 lock_ns:i64"
    " memory:u64 ready:u64",
)

_P = c_void_p
SIGNATURES: dict[str, list[object]] = {
    "pds_info": [_P],
    "pds_open": [_P, _P, _P, _P, _P],
    "pds_close": [_P],
    "pds_stop": [_P],
    "pds_add_host": [_P, c_uint64, c_int64],
    "pds_explain": [_P, c_int32, c_int32, c_int32, _P],
    "pds_submit": [_P, c_int32, _P, c_int64, _P, c_int64, c_uint64, c_uint64, _P, _P],
    "pds_wait": [_P, c_int64, _P],
    "pds_free_ticket": [_P],
    "pds_register": [c_int32, c_uint64, c_int64, _P],
    "pds_unregister": [c_int32, c_uint64, _P],
    "pds_populate": [c_uint64, c_int64],
    "pds_exchange_capture_mode": [_P],
    "pds_read_values": [_P, c_char_p, c_char_p, c_char_p, c_char_p, c_int64],
    "pds_sum_values": [_P, _P, c_int64, _P],
    "pds_write_values": [
        *(_P, c_char_p, c_char_p, c_char_p, c_char_p, c_char_p, c_int64),
        *(_P, _P),
    ],
    "pds_find_files": [c_char_p, c_int64, _P],
    "pds_lease_files": [c_char_p, c_int64, c_int64, c_int64, _P, _P],
    "pds_arena_format": [c_int32, c_int64, c_int64, c_uint64],
    "pds_arena_open": [c_int32, _P, _P, _P],
    "pds_arena_close": [_P],
    "pds_arena_free": [_P],
    "pds_arena_find": [_P, c_int64, c_char_p, c_int64, c_int32, _P],
    "pds_arena_remove": [_P, c_char_p, c_int64],
    "pds_arena_clear": [_P, c_char_p],
    "pds_arena_count": [_P, _P],
    "pds_arena_list": [_P, _P, _P, c_int64, _P],
    "pds_arena_put": [_P, c_int64, c_uint64, c_char_p, c_char_p, _P, _P, c_int64, _P],
    "pds_arena_get": [_P, c_uint64, c_char_p, _P, _P, c_int64, _P],
    "pds_arena_fill": [_P, _P, _P, c_int64, c_char_p, _P, _P, _P],
    "pds_arena_take": [_P, _P, _P, _P, _P],
    "pds_arena_confirm": [_P, _P, _P, _P],
    "pds_arena_wait": [_P, c_uint32, c_int64, _P],
}


def raise_error(error: ctypes.Structure) -> None:
    """Raises the exception for an `Error`; returns if its code is OK."""
    code, message = Code(error.code), error.message.decode(errors="replace")
    if code is Code.OK:
        return
    if code is Code.ARGUMENT:
        raise LayoutError(message)
    if code is Code.NO_DEVICE:
        raise DeviceError(message)
    call = error.call.decode()
    place = f" (error {error.device_code} of {call}, slice {error.slice})" if call else ""
    raise SwapError(
        message + place,
        device_code=error.device_code,
        call=call,
        slice_number=error.slice,
        poisoned=code is Code.POISONED,
    )
