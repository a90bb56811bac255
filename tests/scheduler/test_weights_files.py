"""The files behind an equal PDSTORE_WEIGHTS: compared as advice, and nobody waits for them."""

from __future__ import annotations

import contextlib
import threading

import pytest

from pdstore import PrefixCacheManager
from pdstore.errors import ConfigError
from tests.support.kv import Instance, eventually, settings_of


@pytest.fixture
def with_files(store):
    """Makes managers whose weights' files have a revision: `with_files(read, weights="w")`."""
    with contextlib.ExitStack() as stack:

        def make(weights_of, **changes):
            settings = settings_of(**changes)
            one = Instance(store, **changes)
            stack.callback(one.close)
            manager = PrefixCacheManager(
                settings, one.namespace, store=store, weights_of=weights_of
            )
            stack.callback(manager.close)
            return manager

        yield make


def answer_of(p):
    """Returns the parameters of P's answer, once they have what a thread finds out."""
    p.announce(p.keys(range(9)))
    return eventually(lambda: _with_files(p.announce(p.keys(range(9)))[1]))


def _with_files(params):
    return params if "weights_files" in params["pdstore"] else None


def test_equal_names_of_other_weights_are_one_warning_for_each_peer(with_files, caplog):
    ps = [with_files(lambda _: "sha256:" + "a" * 64, weights="prod") for _ in range(2)]
    d = with_files(lambda _: "sha256:" + "b" * 64, weights="prod")
    answers = [answer_of(p) for p in ps]
    answer_of(d)  # so that D knows its own

    def are_told():
        for params in answers * 3:
            d.lookup(d.keys(range(9)), params).cancel()
        return caplog.text.count("although PDSTORE_WEIGHTS is prod on both") == len(ps)

    eventually(are_told)
    assert "are sha256:aaaaaaaaaaaaaaaaa, those here are sha256:bbbbbbbbbbbbbbbbb" in caplog.text
    assert "Give each checkpoint a PDSTORE_WEIGHTS of its own, or unset it on both" in caplog.text


@pytest.mark.parametrize(
    ("theirs", "weights"),
    [("sha256:b", "prod"), ("commit:a", "prod"), ("sha256:a", None)],
)
def test_weights_that_cannot_be_said_to_differ_are_no_warning(with_files, caplog, theirs, weights):
    p, d = (with_files(lambda _, it=it: it, weights=weights) for it in (theirs, "sha256:b"))
    for one in (p, d) if weights else ():
        answer_of(one)
    d.lookup(d.keys(range(9)), p.announce(p.keys(range(9)))[1]).cancel()
    assert "PDSTORE_WEIGHTS" not in caplog.text
    assert ("weights_files" in p.announce(p.keys(range(9)))[1]["pdstore"]) is bool(weights)


def test_nobody_waits_for_the_digest_of_the_weights(with_files):
    may_end = threading.Event()

    def slow(settings):
        assert may_end.wait(10)
        return "sha256:a"

    p = with_files(slow, weights="prod")
    _, params = p.announce(p.keys(range(9)))
    assert "weights_files" not in params["pdstore"]
    may_end.set()
    assert answer_of(p)["pdstore"]["weights_files"] == "sha256:a"


def test_weights_without_files_are_not_compared(with_files, caplog):
    is_asked = threading.Event()

    def no_files(settings):
        assert settings.weights is None
        is_asked.set()
        raise ConfigError("no weight files")

    p = with_files(no_files, weights="prod")
    assert is_asked.wait(10)
    p.close()  # the thread has ended
    assert _with_files(p.announce(p.keys(range(9)))[1]) is None
    assert not caplog.records
