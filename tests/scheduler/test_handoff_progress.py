"""HandoffProgress: D begins when P needs no longer than the load, and learns P's pace."""

from __future__ import annotations

import pytest

from pdstore.format.keys import PromptKeys
from pdstore.format.namespace import Namespace, Part
from pdstore.metrics import Metrics
from pdstore.scheduler.handoff_progress import HandoffProgress
from pdstore.scheduler.rates import PrefillRate
from tests.support.clock import Clock

FIRST, LAST = Part(0, 0), Part(1, 0)  # two layer ranges
NAMESPACE = Namespace({"n": 1}, (FIRST, LAST), block_tokens=64)
KEYS = PromptKeys(NAMESPACE).extend(range(1000))  # 16 blocks
LOAD_S = 1.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock) -> PrefillRate:
    return PrefillRate(clock)


def stored(part: Part, num_blocks: int) -> set[str]:
    return set(KEYS.store_keys([part])[:num_blocks])


def look(progress: HandoffProgress, found: set[str]) -> None:
    progress.note(found, set(progress.wanted()))


def test_d_begins_at_once_while_the_pace_or_the_load_is_not_known(clock, pace):
    assert HandoffProgress(KEYS, pace, LOAD_S, clock).why_begin() == "unknown"
    pace.note_step([(0, 1000)], 10.0)
    assert HandoffProgress(KEYS, pace, None, clock).why_begin() == "unknown"


def test_d_begins_when_p_needs_no_longer_than_the_load(clock, pace):
    pace.note_step([(0, 1000)], 10.0)
    progress = HandoffProgress(KEYS, pace, LOAD_S, clock)
    assert progress.why_begin() is None
    clock.now += 8
    assert progress.why_begin() is None
    clock.now += 1.1
    assert progress.why_begin() == "estimate"


def test_a_short_prompt_is_followed_at_once(clock, pace):
    """D hears of it when P has queued a part: the estimate, which counts from then, is too long."""
    pace.note_step([(0, 1000)], 0.045)
    assert HandoffProgress(KEYS, pace, 0.004, clock).why_begin() == "estimate"


def test_p_that_comes_to_the_last_block_early_is_followed_at_once(clock, pace):
    pace.note_step([(0, 1000)], 10.0)
    progress = HandoffProgress(KEYS, pace, LOAD_S, clock)
    look(progress, stored(FIRST, 15))
    assert progress.why_begin() is None
    look(progress, stored(FIRST, 16))
    assert progress.why_begin() == "last_block"


def test_what_p_has_stored_tells_how_far_it_is(clock, pace):
    pace.note_step([(0, 1000)], 10.0)
    progress = HandoffProgress(KEYS, pace, LOAD_S, clock)
    look(progress, set())
    clock.now += 1.0  # P is faster than it was
    look(progress, stored(LAST, 12))
    left_s = progress.remaining_s()
    assert left_s is not None
    assert 0 < left_s < 4


def test_the_pace_is_learned_from_one_hand_off_for_the_next(clock, pace):
    progress = HandoffProgress(KEYS, pace, LOAD_S, clock)
    for num_blocks in (0, 4, 8, 12, 16):
        look(progress, stored(LAST, num_blocks))
        clock.now += 2.0
    assert progress.is_over
    after = HandoffProgress(KEYS, pace, LOAD_S, clock).remaining_s()
    assert after == pytest.approx(8.0, rel=0.1)


def test_what_was_there_before_the_first_look_says_nothing_of_the_pace(clock, pace):
    progress = HandoffProgress(KEYS, pace, LOAD_S, clock)
    look(progress, stored(LAST, 8))
    assert pace.seconds(0, 500) is None
    clock.now += 5.0
    look(progress, stored(LAST, 16))
    assert pace.seconds(500, 1000) == pytest.approx(5.0, rel=0.2)


@pytest.mark.parametrize("heard", [4, 8])
def test_what_is_named_before_all_was_looked_for_says_nothing_of_the_pace(clock, pace, heard):
    """Another hand-off may have brought it long before."""
    progress = HandoffProgress(KEYS, pace, LOAD_S, clock)
    progress.note(stored(LAST, heard))
    clock.now += 0.1
    progress.note(stored(LAST, 8), set(progress.wanted()[:1]))  # some of it was looked for
    clock.now += 0.1
    look(progress, stored(LAST, 12))
    assert pace.seconds(0, 1000) is None
    clock.now += 5.0
    progress.note(stored(LAST, 16))
    assert pace.seconds(750, 1000) == pytest.approx(5.0, rel=0.2)


def test_a_prompt_of_windows_alone_is_followed_at_once(clock, pace):
    namespace = Namespace({"n": 1}, (FIRST,), block_tokens=64, windows={0: 128})
    progress = HandoffProgress(PromptKeys(namespace).extend(range(1000)), pace, LOAD_S, clock)
    assert (progress.wanted(), progress.why_begin()) == ([], "unknown")
    assert progress.is_over


def test_a_p_that_is_silent_for_long_is_forgotten(clock, pace):
    progress = HandoffProgress(KEYS, pace, LOAD_S, clock)
    assert not progress.is_over
    clock.now += 100
    assert progress.is_over


def test_a_beginning_is_counted_with_both_estimates(clock, pace):
    pace.note_step([(0, 1000)], 10.0)
    metrics = Metrics()
    HandoffProgress(KEYS, pace, LOAD_S, clock).count(metrics, "estimate")
    value = metrics.registry.get_sample_value
    assert value("pdstore_follows_total", {"because": "estimate"}) == 1
    assert value("pdstore_follow_estimate_seconds_sum", {"what": "load"}) == LOAD_S
    assert value("pdstore_follow_estimate_seconds_sum", {"what": "compute"}) == pytest.approx(10)
