"""Upstreams: an instance that is down comes last, one that is silent is tried by one request."""

from __future__ import annotations

from examples.router.upstreams import Rotation


def test_an_instance_that_was_down_comes_last_until_it_is_back() -> None:
    rotation = Rotation("prefill", ["http://a", "http://b"])
    first = rotation.upstreams[0]
    first.went_down()
    assert {rotation.in_turn()[-1].url for _ in range(4)} == {"http://a"}
    first.came_back()
    assert {rotation.in_turn()[-1].url for _ in range(4)} == {"http://a", "http://b"}


def test_a_silent_instance_is_spared_and_then_tried_by_one_request() -> None:
    upstream = Rotation("prefill", ["http://a"]).upstreams[0]
    assert not upstream.is_spared(60)
    upstream.fell_silent(60)
    assert upstream.is_spared(60)
    upstream.fell_silent(0)
    assert [upstream.is_spared(60) for _ in range(3)] == [False, True, True]


def test_to_be_reached_again_is_no_answer() -> None:
    upstream = Rotation("prefill", ["http://a"]).upstreams[0]
    upstream.fell_silent(60)
    upstream.came_back()
    assert upstream.is_spared(60)
    upstream.answered()
    assert not upstream.is_spared(60)
