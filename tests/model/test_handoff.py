"""The hand-off in every order of events: D takes nothing that is not whole, and never waits on.

P's jobs and D's waits and loads are the package's own; `World` decides what the store answers.
"""

from __future__ import annotations

import logging
import re

import pytest

from pdstore.format.keys import BlockKey
from tests.model.actors import Shape
from tests.model.watch import Rules
from tests.model.world import World, WrongState

WAITS, FOLLOWS = Shape(), Shape(follows=True)
BOTH_AT_ONCE = Shape(follows=True, relayed=False)
BEATS, FOLLOWS_BEAT = Shape(num_beats=2), Shape(num_beats=1, follows=True)
TWO_RANKS, TWO_RANGES = Shape(num_ranks=2), Shape(num_ranges=2, follows=True)
STATES, FOLLOWS_STATES = Shape(num_states=1), Shape(num_states=1, follows=True)
STEPS = Shape(num_tokens=3, follows=True, num_steps=16)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Logs nothing: each damaged value would have its line, in thousands of states."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize(
    ("shape", "num_faults", "least"),
    [
        (WAITS, 1, 10_000),
        (Shape(num_tokens=3), 0, 4_000),
        (FOLLOWS, 1, 30_000),
        (BOTH_AT_ONCE, 0, 10_000),
        (BEATS, 0, 40_000),
        (FOLLOWS_BEAT, 0, 20_000),
        (STATES, 1, 100_000),
        (FOLLOWS_STATES, 0, 30_000),
        (Shape(num_tokens=3, num_states=1), 0, 20_000),
        (Shape(num_tokens=3, has_pages=True), 0, 40_000),
        (Shape(has_draft=True), 0, 4_000),
        (Shape(has_draft=True, follows=True), 0, 8_000),
    ],
)
def test_no_state_is_wrong(shape, num_faults, least):
    world = World(shape, Rules(), num_faults)
    assert world.explore() > least
    reasons = {"handoff_late", "handoff_failed"}
    if num_faults:
        reasons |= {"store_down", "corrupt", "lost", "absent"}
    if shape.num_beats:
        reasons |= {"handoff_dead", "handoff_gone"}
    assert world.endings.keys() == {"whole", *reasons}, "each kind of fault was tried"


@pytest.mark.parametrize(
    "shape",
    [
        STEPS,
        pytest.param(Shape(num_ranges=2, follows=True, num_steps=27), marks=pytest.mark.nightly),
    ],
)
def test_no_step_of_the_follower_between_two_of_the_worker_makes_a_state_wrong(shape):
    world = World(shape, Rules(), 0)
    assert world.explore() > 1_200
    assert world.endings.keys() == {"whole"}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("shape", "num_faults"),
    [
        (WAITS, 2),
        (FOLLOWS, 2),
        (Shape(num_tokens=3), 1),
        (Shape(num_tokens=3, follows=True), 0),
        (BOTH_AT_ONCE, 1),
        (TWO_RANKS, 0),
        (TWO_RANGES, 0),
        (Shape(num_ranks=2, follows=True), 0),
        (Shape(num_beats=3), 0),
        (Shape(num_beats=1), 1),
        (FOLLOWS_BEAT, 1),
        (FOLLOWS_STATES, 1),
        (Shape(num_states=2), 1),
        (Shape(num_states=2, num_ranges=2, follows=True), 0),
        (Shape(num_states=1, num_ranks=2), 0),
        (Shape(has_pages=True, follows=True), 1),
        (Shape(has_draft=True), 1),
    ],
)
def test_no_state_of_a_larger_handoff_is_wrong(shape, num_faults):
    assert World(shape, Rules(), num_faults).explore() > 30_000


def blind_to(marker: str):
    """Markers whose keys end so are not seen."""
    return lambda found: {key for key in found if not key.endswith(marker)}


def one_done_is_enough(found: set[BlockKey]) -> set[BlockKey]:
    """The first shard's `done` is taken for all shards'."""
    others = {re.sub(r":0:done$", ":1:done", key) for key in found}
    return found | others


@pytest.mark.parametrize(
    ("rules", "shape", "num_faults", "words"),
    [
        (Rules(checks_chain=False), WAITS, 0, "cannot be seen"),
        (Rules(checks_chain=False), FOLLOWS, 0, "cannot be seen"),
        (Rules(verifies=False), WAITS, 1, "not P's"),
        (Rules(verifies=False), FOLLOWS, 1, "not P's"),
        (Rules(tells_failure=False), WAITS, 0, "although P has ended"),
        (Rules(tells_failure=False), FOLLOWS, 1, "although P has ended"),
        (Rules(sees=blind_to(":failed")), FOLLOWS, 1, "although P has ended"),
        (Rules(sees=blind_to(":failed")), WAITS, 0, "although P has ended"),
        (Rules(sees=blind_to(":done")), WAITS, 0, "although P has ended"),
        (Rules(sees=one_done_is_enough), TWO_RANKS, 0, "of a hand-off that is whole"),
        (Rules(beats=False), BEATS, 0, "a P that lives"),
        (Rules(beats=False), FOLLOWS_BEAT, 0, "a P that lives"),
        (Rules(sees=blind_to(":beat")), BEATS, 0, "a P that lives"),
        (Rules(listens=False), BEATS, 0, "a P that is dead"),
        (Rules(listens=False), FOLLOWS_BEAT, 0, "a P that is dead"),
        (Rules(minds_time=False), WAITS, 0, "for ever"),
        (Rules(minds_time=False), FOLLOWS, 0, "for ever"),
        (Rules(saves_states=False), STATES, 0, "cannot be seen"),
        (Rules(takes_states=False), STATES, 0, "not P's"),
        (Rules(takes_states=False), FOLLOWS_STATES, 0, "not P's"),
        (Rules(asks_once=False), STEPS, 0, "of a hand-off that is whole"),
    ],
)
def test_the_model_fails_without_a_rule(rules, shape, num_faults, words):
    with pytest.raises(WrongState, match=words):
        World(shape, rules, num_faults).explore()
