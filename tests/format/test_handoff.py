"""Hand-off parameters: what one instance writes, another reads; a client's nonsense is named."""

from __future__ import annotations

import pytest

from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.namespace import Namespace, Part

NAMESPACE = Namespace({"format": 1}, (Part(0, 0),), 64)


def test_parameters_come_back_as_they_went():
    handoff = Handoff(
        HandoffId.new("ef" * 16), 1503, NAMESPACE.hex, "0" * 32, {"dtype": '"float32"'}
    )
    assert Handoff.of(handoff.params()) == handoff


def test_an_attempt_alone_is_enough():
    attempt = HandoffId.new()
    assert Handoff.of({"pdstore": {"attempt": attempt.hex}}) == Handoff(attempt)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {"pdstore": None}])
def test_others_parameters_are_no_handoff(params):
    assert Handoff.of(params) is None


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
        ({"attempt": "0" * 32, "fields": [1]}, "fields"),
        ({"attempt": "0" * 32, "fields": {str(i): "" for i in range(65)}}, "fields"),
    ],
)
def test_a_malformed_handoff_is_refused_by_field(said, field):
    with pytest.raises(ValueError, match=field):
        Handoff.of({"pdstore": said})


def test_attempts_are_never_equal():
    assert len({HandoffId.new() for _ in range(1000)}) == 1000


def test_what_a_client_says_is_one_plain_line():
    fields = {"dtype\n": "x\nWARNING forged", "long": "y" * 500}
    handoff = Handoff.of({"pdstore": {"attempt": "0" * 32, "fields": fields}})
    assert handoff.fields == {"dtype?": "x?WARNING forged", "long": "y" * 80}


def test_a_marker_is_one_attempts_shard_and_state():
    attempt = HandoffId("ab" * 16)
    assert attempt.done(NAMESPACE, 3) == f"pds1:{NAMESPACE.hex}:handoff:{'ab' * 16}:3:done"
    assert attempt.failed(NAMESPACE) == f"pds1:{NAMESPACE.hex}:handoff:{'ab' * 16}:0:failed"


@pytest.mark.parametrize("instance", ["cd" * 16, None])
def test_started_names_the_instance_that_put_it(instance):
    started = HandoffId("ab" * 16, instance).started_marker(NAMESPACE, 1, 200)
    assert (started.num_tokens, started.payload_bytes) == (200, 0)
    assert HandoffId("ab" * 16).instance_of(started) == instance
