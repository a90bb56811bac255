"""abi: the structs and constants are those of csrc/pdstore.h."""

from __future__ import annotations

import ctypes
import re

import pytest

from pdstore.errors import DeviceError, LayoutError, SwapError
from pdstore.native import abi
from tests.support import native_kit

HEADER = native_kit.SOURCES / "pdstore.h"


@pytest.mark.parametrize(
    ("name", "struct"),
    [
        ("pds_region", abi.Region),
        ("pds_part", abi.PartShape),
        ("pds_options", abi.Options),
        ("pds_item", abi.Item),
        ("pds_error", abi.Error),
        ("pds_plan", abi.Plan),
        ("pds_arena_value", abi.ArenaValue),
        ("pds_live", native_kit.Live),
        ("pds_values", abi.Values),
        ("pds_info_t", abi.Info),
    ],
)
def test_structs_are_those_of_the_header(name, struct):
    text = re.sub(r"//.*", "", HEADER.read_text())
    text = re.sub(r"const \w+ \*(\w+)", r"uint64_t \1", text)  # an address, as wide
    body = next(
        m.group(1)
        for m in re.finditer(r"typedef struct \{(.*?)\} (\w+);", text, re.S)
        if m.group(2) == name
    )
    fields = []
    for line in filter(str.strip, body.split(";")):
        kind, names = line.split(None, 1)
        fields += [(kind, n.strip(" *")) for n in names.split(",")]
    widths = {"int32_t": 4, "int64_t": 8, "uint64_t": 8}
    seen = []
    for field, kind in struct._fields_:
        size = ctypes.sizeof(kind)
        seen.append((field, size))
    expected = []
    for kind, field in fields:
        array = re.fullmatch(r"(\w+)\[(\d+)\]", field)
        expected.append((array[1], int(array[2])) if array else (field, widths[kind]))
    assert seen == expected


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


def test_a_device_error_names_the_call_and_the_slice():
    error = abi.Error(code=abi.Code.DEVICE, device_code=719, slice=3, call=b"cudaMemcpy")
    with pytest.raises(SwapError, match="error 719 of cudaMemcpy, slice 3") as caught:
        abi.raise_error(error)
    assert (caught.value.device_code, caught.value.slice_number) == (719, 3)


def test_ok_raises_nothing():
    abi.raise_error(abi.Error(code=abi.Code.OK))
