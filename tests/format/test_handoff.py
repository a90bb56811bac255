"""Hand-offs: what one instance writes, another reads; a beat is news, and silence is noticed."""

from __future__ import annotations

import pytest

from pdstore.format.handoff import Handoff, HandoffId, Pulse, beat_key
from pdstore.format.keys import Namespace, Part, PromptKeys
from tests.support.clock import Clock

NAMESPACE = Namespace({"format": 1}, (Part(0, 0),), 64)
INSTANCE = "ab" * 16
BEAT_TIMEOUT_S = 1.5


def test_parameters_come_back_as_they_went():
    handoff = Handoff(
        HandoffId.new("ef" * 16),
        1503,
        NAMESPACE.hex,
        "0" * 32,
        {"dtype": '"float32"'},
        last_block="12" * 16,
        last_save="store_full",
        weights_files="sha256:0123",
        weights_update="34" * 16,
        is_exact=True,
    )
    assert Handoff.of(handoff.params()) == handoff


@pytest.mark.parametrize(
    ("num_tokens", "last_block", "is_of"),
    [
        (None, None, True),  # a router's own id
        (100, None, True),  # an older P
        (99, None, False),
        (100, "ours", True),
        (100, "12" * 16, False),
    ],
)
def test_a_handoff_is_of_a_prompt_with_the_same_tokens(num_tokens, last_block, is_of):
    keys = PromptKeys(NAMESPACE).extend(range(100))
    named = keys.hash_of(1).hex() if last_block == "ours" else last_block
    handoff = Handoff(HandoffId.new(), num_tokens, last_block=named)
    assert handoff.is_of(keys) is is_of


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {"pdstore": None}])
def test_others_parameters_are_no_handoff(params):
    assert Handoff.of(params) is None


def nested(depth):
    """A list in a list: some depths can be read as JSON and not be printed."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ("text", "object"),
        ({}, "attempt"),
        ({"attempt": 5}, "attempt"),
        ({"attempt": "A" * 32}, "attempt"),
        ({"attempt": "0" * 31}, "attempt"),
        ({"attempt": "0" * 32, "namespace": "../.."}, "namespace"),
        ({"attempt": "0" * 32, "pool_id": "x"}, "pool_id"),
        ({"attempt": "0" * 32, "instance": "x"}, "instance"),
        ({"attempt": "0" * 32, "num_tokens": -1}, "num_tokens"),
        ({"attempt": "0" * 32, "num_tokens": "7"}, "num_tokens"),
        ({"attempt": "0" * 32, "num_tokens": True}, "num_tokens"),
        ({"attempt": "0" * 32, "fields": [1]}, "fields"),
        ({"attempt": "0" * 32, "fields": {"dtype": nested(980)}}, "fields"),
        ({"attempt": "0" * 32, "last_save": nested(980)}, "last_save"),
        ({"attempt": "0" * 32, "weights_files": nested(980)}, "weights_files"),
        ({"attempt": "0" * 32, "last_block": "x"}, "last_block"),
        ({"attempt": "0" * 32, "is_exact": 1}, "is_exact"),
        ({"attempt": "0" * 32, "fields": {str(i): "" for i in range(65)}}, "fields"),
    ],
)
def test_a_malformed_handoff_is_refused_by_field(said, field):
    with pytest.raises(ValueError, match=field):
        Handoff.of({"pdstore": said})


def test_what_a_client_says_is_one_plain_line():
    fields = {"dtype\n": "x\nWARNING forged", "long": "y" * 500}
    said = {"attempt": "0" * 32, "fields": fields, "last_save": "\n", "weights_files": "w\nx"}
    handoff = Handoff.of({"pdstore": said})
    assert handoff.fields == {"dtype?": "x?WARNING forged", "long": "y" * 80}
    assert (handoff.last_save, handoff.weights_files) == ("?", "w?x")


def test_a_null_is_as_if_absent():
    names = ("instance", "num_tokens", "namespace", "fields", "last_save", "weights_files")
    said = {"attempt": "0" * 32} | dict.fromkeys(names)
    bare = Handoff.of({"pdstore": {"attempt": "0" * 32}})
    assert Handoff.of({"pdstore": said}) == bare
    assert Handoff.of({"pdstore": {"attempt": "0" * 32, "fields": {"dtype": None}}}) == bare


@pytest.mark.parametrize("instance", ["cd" * 16, None])
def test_started_names_the_instance_that_put_it(instance):
    started = HandoffId("ab" * 16, instance).started_marker(NAMESPACE, 1, 200)
    assert (started.num_tokens, started.payload_bytes) == (200, 0)
    assert HandoffId("ab" * 16).instance_of(started) == instance


@pytest.fixture
def clock():
    return Clock(now=100.0)


@pytest.fixture
def pulse(clock):
    return Pulse(NAMESPACE, INSTANCE, timeout_s=BEAT_TIMEOUT_S, clock=clock)


def stored_after(number: int):
    """The beat keys that are stored after so many beats: the last two."""
    return {beat_key(NAMESPACE, INSTANCE, n) for n in range(max(0, number - 2), number)}


def ask(pulse, clock, stored, seconds=0.1):
    """Asks for so many seconds, ten times a second."""
    for _ in range(round(seconds * 10)):
        clock.now += 0.1
        pulse.update(stored, clock.now)


@pytest.mark.parametrize("missed", [2, 3])
def test_beats_that_nobody_asked_for_do_not_hide_the_next(pulse, clock, missed):
    ask(pulse, clock, stored_after(5), seconds=1.0)
    ask(pulse, clock, stored_after(5 + missed), seconds=1.0)
    assert not pulse.is_silent()


@pytest.mark.parametrize(
    "left",
    [
        pytest.param({4, 5, 6}, id="before the old one was removed"),
        pytest.param({0, 1, 2, 3}, id="every beat key"),
        pytest.param({3, 5}, id="after an error of the store"),
    ],
)
def test_what_a_dead_instance_has_left_is_no_beat(pulse, clock, left):
    """P is killed between two calls of the store; D asks again and again."""
    ask(pulse, clock, stored_after(6))
    stored = {beat_key(NAMESPACE, INSTANCE, n) for n in left}
    for _ in range(30):
        ask(pulse, clock, stored & set(pulse.beat_keys))
    assert pulse.is_silent()


@pytest.mark.parametrize("num_beats", [0, 1, 7])
def test_an_instance_that_stops_is_silent_soon_and_not_before(pulse, clock, num_beats):
    ask(pulse, clock, stored_after(num_beats))
    ask(pulse, clock, stored_after(num_beats), seconds=BEAT_TIMEOUT_S - 0.2)
    assert not pulse.is_silent()
    ask(pulse, clock, stored_after(num_beats), seconds=0.4)
    assert pulse.is_silent()


def test_time_in_which_nobody_asked_is_no_silence(pulse, clock):
    ask(pulse, clock, stored_after(3))
    clock.now += 60
    ask(pulse, clock, stored_after(3), seconds=BEAT_TIMEOUT_S - 0.2)
    assert not pulse.is_silent()
