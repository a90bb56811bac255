"""P and D explain themselves: a line for each request, a warning with a remedy, and /health."""

from __future__ import annotations

import itertools
import logging
import re

import pytest

from examples.mini_engine.request import Request
from pdstore.errors import Reason
from tests.support.kv import patience
from tests.support.mini_engine_kit import PULL, ask, pd_of, prompt_of, until

_numbers = itertools.count()


@pytest.fixture
def open_one(open_engine):
    url = f"memory://explained{next(_numbers)}"

    return lambda role, store=url: open_engine("llama", pd_of(role, store))


@pytest.fixture
def said(caplog):
    """Waits for a line of the log that matches."""
    caplog.set_level(logging.INFO)

    def said(pattern):
        until(lambda: re.search(pattern, caplog.text))
        return True

    return said


def prefilled(p, prompt, **options):
    asked = ask(p, prompt, max_tokens=1, kv_transfer_params=PULL, **options).wait()
    return asked.request.answer_params


def test_a_load_that_falls_short_is_a_warning_with_what_to_look_at(open_one, said, monkeypatch):
    p, d = open_one("prefill"), open_one("decode")
    prompt = prompt_of(100)
    params = prefilled(p, prompt)
    until(lambda: p.adapter.journal.last())
    begin = d.adapter.pool.begin_load

    def lose_then_load(plan, *arguments, **options):
        d.adapter.cache.clear()
        return begin(plan, *arguments, **options)

    monkeypatch.setattr(d.adapter.pool, "begin_load", lose_then_load)
    ask(d, prompt, kv_transfer_params=params).wait()
    assert said(r"a load fell short \(lost\).*Look at the line of the request")


@pytest.mark.misconfiguration("the switch is off on D")
def test_an_instance_with_the_switch_off_tells_of_a_handoff_that_it_ignores(
    open_one, open_engine, said
):
    p, off = open_one("prefill"), open_engine("llama")
    prompt = prompt_of(40)
    params = prefilled(p, prompt)
    off.check(ask(off, prompt, kv_transfer_params=params).wait().request)
    assert said("start this instance with PD_TRANSFER_VIA_STORAGE=1")


def test_a_store_that_fails_is_a_problem_until_it_answers(open_one, said, tmp_path):
    d = open_one("decode", store=f"file://{tmp_path}/pool")
    assert d.problem is None
    pool = tmp_path / "pool"
    pool.rename(tmp_path / "away")
    pool.write_text("no directory")
    until(lambda: ask(d, prompt_of(40)).wait() and d.problem)
    assert said(r"a lookup fell short \(store_\w+\).*[Ll]ook at")
    pool.unlink()
    (tmp_path / "away").rename(pool)
    until(lambda: ask(d, prompt_of(40)).wait() and d.problem is None)


def test_a_store_that_takes_no_writes_costs_d_one_wait(open_one, said, redis_server):
    master, server = redis_server(), redis_server()
    p, d = (open_one(role, store=server.url) for role in ("prefill", "decode"))
    until(lambda: p.adapter.cache.pool_id and d.adapter.cache.pool_id)

    def handed_over(seed):
        prompt = prompt_of(100, seed)
        params = prefilled(p, prompt)
        until(lambda: len(p.adapter.journal.last()) == seed)  # and its save has ended
        ask(d, prompt, kv_transfer_params=params).wait()
        until(lambda: len(d.adapter.journal.last()) == seed)
        record = d.adapter.journal.last()[-1]
        waited_s = sum(phase.end_s - phase.begin_s for phase in record.phases[:2])
        if last_save := params["pdstore"].get("last_save"):
            assert record.reason not in (Reason.HANDOFF_DEAD, Reason.HANDOFF_GONE)
            assert waited_s < 1.0 * patience(), "P's death is noticed after 1.35 s"
        return last_save, record.num_loaded

    def has_open_breaker(engine):
        found = engine.adapter.cache.metrics.registry.get_sample_value("pdstore_breaker_open")
        assert found is not None
        return found == 1

    with server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", master.port)
        assert handed_over(1) == (None, 0)
        assert handed_over(2) == ("store_down", 0)
        client.execute_command("REPLICAOF", "NO", "ONE")
    # under load a call that fails takes long, so that an open breaker makes none but its probes
    until(lambda: not any(map(has_open_breaker, (p, d))))
    assert handed_over(3) == ("store_down", 99)
    assert handed_over(4) == (None, 99)
    assert said("You can't write against a read only replica")


@pytest.mark.misconfiguration("D's `--max-model-len` is too small for a prompt that P took")
def test_a_context_that_is_too_small_names_the_instance_and_the_option(open_one):
    d = open_one("decode")
    d.model.max_model_len = 64
    request = Request(prompt_of(40), 25, sink=print)
    words = "over the context of 64 tokens of this decode instance: give P and D the same --max-mod"
    with pytest.raises(ValueError, match=words):
        d.check(request)
