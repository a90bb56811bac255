"""NativeSwap: its plans, its refusals, its end."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from pdstore.errors import LayoutError, SwapError
from pdstore.format.identity import LayerSpec
from pdstore.native.library import address_of
from tests.support.kv import eventually
from tests.support.swap_case import PLAIN, Case, host_memory, layout_of, native_of, view_of


@pytest.mark.parametrize(
    ("changes", "shape", "path", "why"),
    [
        ({}, PLAIN, "STAGE", "small"),
        ({"layers": (LayerSpec(8, 128),) * 32}, PLAIN, "BATCH", "64 KiB"),
        ({"layers": (LayerSpec(8, 64),) * 64}, PLAIN, "STRIDED", "512 KiB"),
        ({"layers": (LayerSpec(8, 64),) * 64}, {**PLAIN, "heads_outer": True}, "STAGE", "order"),
        ({"layers": (LayerSpec(8, 64),) * 64, "num_shards": 2}, PLAIN, "STAGE", "order"),
        ({"layers": (LayerSpec(8, 64),) * 2}, {**PLAIN, "heads_outer": True}, "STAGE", "order"),
    ],
)
def test_the_plan_says_which_path_and_why(library, changes, shape, path, why):
    layout = layout_of(**changes)
    case = Case.of(layout, 4, "cpu", **shape)
    plan = native_of(library, case, "cpu").plan()
    assert (plan[0].path, plan[0].num_tokens) == (path, 32)
    assert why in plan[0].why
    assert plan[1].num_tokens == 1
    assert plan[1].path == "STAGE"


def test_large_copies_of_host_memory_are_shared_with_the_crew(library):
    """Starts its threads at the first copy that is worth it."""
    layout = layout_of(layers=(LayerSpec(8, 128),) * 32)
    case = Case.of(layout, 4, "cpu", **PLAIN)
    native, host = native_of(library, case, "cpu"), host_memory(case.host_bytes(2), "cpu")
    before = crew_threads()
    native.gather(case.copies([[0, 1]], 1, view_of(host)))
    assert crew_threads() <= before
    native.gather(case.copies([[0, 1], [2, 3]], 32, view_of(host)))
    eventually(lambda: crew_threads() - before)


def crew_threads() -> set[str]:
    """Returns the numbers of this process's threads that help with copies."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text() == "pdstore-crew\n":
                found.add(task.name)
    return found


@pytest.mark.parametrize(
    ("ids", "num_tokens", "first", "word"),
    [
        ([0, 9], 32, 0, "block id 9"),
        ([-1, 0], 32, 0, "block id -1"),
        ([0], 32, 0, "1 engine blocks"),
        ([2, 2], 32, 0, "block 2 twice"),
        ([2, 3], 32, 5, "first_token 5"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_moves(library, ids, num_tokens, first, word):
    """Ids are in the cache's range and as many as the tokens need, or nothing is copied."""
    layout = layout_of()
    case = Case.of(layout, 9, "cpu", **PLAIN)
    before = case.buffer.clone()
    native = native_of(library, case, "cpu")
    host = host_memory(case.host_bytes(2), "cpu")
    good = case.copies([[0, 1]], 32, view_of(host))
    bad = case.copies([ids], num_tokens, view_of(host), first)
    with pytest.raises(LayoutError, match=word):
        native.scatter([*good, *bad])
    assert torch.equal(case.buffer, before)


def test_a_payload_that_straddles_two_ranges_of_host_memory_is_refused(library):
    layout = layout_of()
    case = Case.of(layout, 9, "cpu", **PLAIN)
    native = native_of(library, case, "cpu")
    host = host_memory(case.host_bytes(2), "cpu")
    copies = case.copies([[0, 1]], 32, view_of(host))
    middle = address_of(copies[0].payload) + 100
    start = address_of(view_of(host))
    native.add_host(start, middle - start)
    native.add_host(middle, start + len(host) - middle)
    with pytest.raises(LayoutError, match="registered range"):
        native.gather(copies)


def test_a_closed_engine_refuses_and_may_be_closed_again(library):
    case = Case.of(layout_of(), 9, "cpu", **PLAIN)
    native = native_of(library, case, "cpu")
    native.close()
    native.close()
    with pytest.raises(SwapError, match="closed"):
        native.gather([])
