"""abi: the structs and constants are those of csrc/pdstore.h."""

from __future__ import annotations

import ctypes
import re

import pytest

from pdstore.errors import DeviceError, LayoutError, SwapError
from pdstore.native import abi
from tests.support import native_kit

HEADER = native_kit.SOURCES / "pdstore.h"


WIDTHS = {"int32_t": 4, "int64_t": 8, "uint64_t": 8}
STRUCTS = {
    "pds_region": abi.Region,
    "pds_part": abi.PartShape,
    "pds_options": abi.Options,
    "pds_item": abi.Item,
    "pds_error": abi.Error,
    "pds_plan": abi.Plan,
    "pds_arena_options": abi.ArenaOptions,
    "pds_arena_info": abi.ArenaInfo,
    "pds_arena_counts": abi.SlotCounts,
    "pds_arena_value": abi.ArenaValue,
    "pds_live": native_kit.Live,
    "pds_values": abi.Values,
    "pds_info_t": abi.Info,
}


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_those_of_the_header(name):
    text = re.sub(r"//.*", "", HEADER.read_text())
    text = re.sub(r"const \w+ \*", "uint64_t *", text)  # an address, as wide
    [body] = re.findall(rf"typedef struct \{{([^}}]*)\}} {name};", text)
    expected = []
    for line in filter(str.strip, body.split(";")):
        kind, names = line.split(None, 1)
        for field in names.split(","):
            array = re.fullmatch(r"(\w+)\[(\d+)\]", field.strip())
            one = (field.strip(" *\n"), WIDTHS.get(kind, 1))
            expected.append((array[1], int(array[2])) if array else one)
    fields = STRUCTS[name]._fields_
    assert [(field, ctypes.sizeof(kind)) for field, kind in fields] == expected


def test_the_calls_that_can_fail_are_those_of_the_header():
    names = re.findall(r"PDS_CALL_(\w+)", HEADER.read_text())
    assert tuple(name.lower() for name in names) == native_kit.CALLS


def test_the_abi_number_is_that_of_the_header():
    [number] = re.findall(r"PDS_ABI = (\d+)", HEADER.read_text())
    assert int(number) == abi.ABI


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (abi.Code.ARGUMENT, LayoutError),
        (abi.Code.NO_DEVICE, DeviceError),
        (abi.Code.DEVICE, SwapError),
        (abi.Code.POISONED, SwapError),
        (abi.Code.CLOSED, SwapError),
    ],
)
def test_a_code_is_raised_as_its_exception_with_the_message(code, error):
    with pytest.raises(error, match="the reason"):
        abi.raise_error(abi.Error(code=code, message=b"the reason"))


def test_a_device_error_names_the_call_and_the_slice_and_ok_is_none():
    abi.raise_error(abi.Error(code=abi.Code.OK))
    error = abi.Error(code=abi.Code.DEVICE, device_code=719, slice=3, call=b"cudaMemcpy")
    with pytest.raises(SwapError, match="error 719 of cudaMemcpy, slice 3") as caught:
        abi.raise_error(error)
    assert (caught.value.device_code, caught.value.slice_number) == (719, 3)
