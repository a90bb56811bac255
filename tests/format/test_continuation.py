"""Continuation: which blocks are needed, from where an engine can go on, and which gaps are bad."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdstore.errors import LayoutError
from pdstore.format.continuation import NO_BLOCK, Continuation, needs_of
from pdstore.format.identity import LayerSpec
from pdstore.format.layout import Layout
from pdstore.settings import read_settings

BLOCK = 4
FULL, SLIDING, STATE = 0, 1, 2
EACH = Continuation(BLOCK, {SLIDING: 6, STATE: 1})


@given(num_tokens=st.integers(0, 100), need=st.integers(1, 100))
def test_a_block_is_needed_if_it_has_one_of_the_last_tokens(num_tokens, need):
    tokens = range(max(0, num_tokens - need), num_tokens)
    some = Continuation(BLOCK, {SLIDING: need})
    assert list(some.blocks(SLIDING, num_tokens)) == sorted({n // BLOCK for n in tokens})
    assert list(some.blocks(FULL, num_tokens)) == sorted({n // BLOCK for n in range(num_tokens)})


def test_full_attention_a_window_and_a_state_need_all_some_and_the_last_block():
    assert [EACH.blocks(of, 21) for of in (FULL, SLIDING, STATE)] == [
        range(6),
        range(3, 6),
        range(5, 6),
    ]


@given(
    first_there=st.lists(st.integers(0, 25), min_size=2, max_size=2),
    end=st.integers(0, 100),
    start_block=st.integers(0, 25),
    steps=st.lists(st.sampled_from([1, 2, 3]), min_size=3, max_size=3),
)
def test_an_engine_goes_on_from_the_last_end_before_which_all_needed_blocks_are_there(
    first_there, end, start_block, steps
):
    """Compared with each token looked at alone, for tables whose first blocks were given back.

    steps: how many entries of each table make a block of the pool.
    """
    start = start_block * BLOCK
    gone = {SLIDING: first_there[0], STATE: first_there[1]}
    tables = [[7] * 25 * step for step in steps]
    for of, count in gone.items():
        step = steps[of]
        tables[of][: count * step] = [NO_BLOCK] * min(count * step, 25 * step)

    def can_go_on(stop: int) -> bool:
        return all(
            n // BLOCK >= gone[of]
            for of, need in EACH.needs.items()
            for n in range(max(0, stop - need), stop)
        )

    stops = [n for n in range(start + 1, end + 1) if n % BLOCK == 0 and can_go_on(n)]
    asked = Continuation(BLOCK, EACH.needs, dict(enumerate(steps)))
    assert asked.usable_end(tables, end, start) == max(stops, default=start)


def test_an_engine_that_does_not_need_all_computes_the_last_token_with_what_it_needs():
    assert Continuation(BLOCK).most_present(21) == 21
    assert EACH.most_present(21) == 20


def test_a_table_needs_what_each_of_its_layers_needs():
    layers = [(FULL, None), (SLIDING, 6), (SLIDING, 9), (STATE, 1), (3, 6), (3, None), (4, None)]
    assert needs_of([*layers, (4, 6)]) == {SLIDING: 9, STATE: 1}


def test_a_block_that_is_there_in_part_is_refused():
    pairs = Continuation(BLOCK, {SLIDING: 6}, block_entries={FULL: 1, SLIDING: 2})
    for num_gone in (0, 2, 4):
        pairs.check_gaps([[7] * 3, [NO_BLOCK] * num_gone + [7] * (6 - num_gone)])
    for num_gone in (1, 3, 5):
        with pytest.raises(LayoutError, match=r"block of 4 tokens: the pool's .* engine's, of 2"):
            pairs.check_gaps([[7] * 3, [NO_BLOCK] * num_gone + [7] * (6 - num_gone)])


def test_the_need_of_a_layer_is_its_tables_and_its_groups():
    layers = [
        LayerSpec(2, 8),
        LayerSpec(2, 8, window=40, table=1),
        LayerSpec.state(100, "f", table=2),
    ]
    settings = read_settings(block_tokens=64)
    made = Layout.of(settings, dtype="float32", layers=layers, engine_block_tokens=16, rope="")
    for continuation in (
        made.continuation,
        made.namespace(settings, weights="w").continuation,
    ):
        assert continuation.needs == {1: 40, 2: 1}
        assert continuation.states == {2}
        assert continuation.is_exact
        assert not continuation.needs_all
    assert made.continuation.block_entries == {0: 4, 1: 4}
    assert not Continuation(BLOCK, {SLIDING: 6}).is_exact, "the last token can be computed again"


@given(
    ends=st.sets(st.integers(1, 25)),
    first_there=st.integers(0, 25),
    end=st.integers(0, 100),
    start_block=st.integers(0, 25),
)
def test_an_engine_goes_on_from_the_last_end_that_has_a_state(ends, first_there, end, start_block):
    """A window too must be there before it; no other end will do."""
    start = start_block * BLOCK
    window = [NO_BLOCK] * first_there + [7] * (25 - first_there)
    tables = [[7] * 25, window, {stop * BLOCK: 3 for stop in ends}]
    can_go_on = (
        stop * BLOCK
        for stop in ends
        if start < stop * BLOCK <= end and max(0, stop * BLOCK - 6) // BLOCK >= first_there
    )
    exact = Continuation(BLOCK, EACH.needs, {0: 1, 1: 1}, frozenset({STATE}))
    assert exact.usable_end(tables, end, start) == max(can_go_on, default=start)
    exact.check_gaps(tables)


def test_a_table_that_lacks_the_state_at_the_end_is_refused_with_those_that_it_has():
    exact = Continuation(BLOCK, {2: 1, 3: 1}, states=frozenset({3, 2}))
    exact.check_states([[], [], {9: 1}, {4: 1, 9: 2}], 9)
    exact.check_states([[], [], {}, {}], 0)
    with pytest.raises(
        LayoutError, match=r"table 2 has no state after 8 .* has those after 4, 9\)"
    ):
        exact.check_states([[], [], {9: 1, 4: 2}, {}], 8)
    with pytest.raises(LayoutError, match=r"table 3 has no state after 8 tokens \(it has none\)"):
        exact.check_states([[], [], {8: 1}, {}], 8)
