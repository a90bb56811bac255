"""ValueRun: what is made when it is looked at is what a list would hold."""

from __future__ import annotations

import pytest

from pdstore.worker.block_range import BlockRange
from pdstore.worker.value_run import ValueRun
from pdstore.worker.values import counted_tokens, whole_blocks
from tests.support.values_kit import prompt_of

CASES = [{}, {"layer_ranges": 2}, {"layer_ranges": 2, "kv_shards": 2}]


@pytest.fixture(params=CASES, ids=str)
def prompt(request):
    return prompt_of(**request.param)


@pytest.mark.parametrize("layer_range", [None, 0])
def test_its_values_are_those_of_a_list_in_every_slice(prompt, layer_range):
    run = prompt.values(BlockRange(1, 3), layer_range)
    assert isinstance(run, ValueRun)
    values = list(run)
    assert {value.number for value in values} == {1, 2}
    assert len(run) == len(values)
    for first in range(len(values) + 1):
        for stop in range(len(values) + 1):
            part = run[first:stop]
            assert list(part) == values[first:stop]
            assert len(part) == len(values[first:stop])
            assert counted_tokens(part) == counted_tokens(values[first:stop])
    assert run[-1] == values[-1]
    assert [run[i] for i in range(len(run))] == values
    assert list(run[::2]) == values[::2]


def test_whole_blocks_of_a_run_are_those_of_the_list(prompt):
    run = prompt.values(BlockRange(0, 3))
    values = list(run)
    for count in range(len(values) + 1):
        assert whole_blocks(run, count) == whole_blocks(values, count)


def test_a_tail_is_no_run(prompt):
    assert not isinstance(prompt.values(BlockRange(0, 4)), ValueRun)
    assert not isinstance(prompt.values(BlockRange(3, 4)), ValueRun)


def test_a_value_that_is_not_there_is_an_index_error(prompt):
    run = prompt.values(BlockRange(0, 2))
    with pytest.raises(IndexError):
        run[len(run)]
