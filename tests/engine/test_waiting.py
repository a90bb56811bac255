"""A request waits in the engine's queue: what it found stays, and it sees what comes meanwhile."""

from __future__ import annotations

import threading
import time

import pytest

from pdstore import EngineRequest, HandoffId, JobEnd, Reason
from pdstore.errors import Direction
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import EvictsByUse
from pdstore.store.wrappers import WrapperStore
from tests.support.instances import instance as instance
from tests.support.instances import num_renewed as num_renewed
from tests.support.instances import store as store
from tests.support.kv import eventually, settings_of

LEASE_S = 1.5
BLOCK, PROMPT = 64, list(range(1, 301))
TABLE, ROOM = list(range(1, 21)), 320


class Gated(WrapperStore):
    """Counts the matches of each prompt's first block; one whose key is in `hangs` waits."""

    def __init__(self, wrapped):
        super().__init__(wrapped)
        self.num_matches: dict[str, int] = {}
        self.hangs: set[str] = set()
        self.gate = threading.Event()

    def match(self, keys):
        if keys:
            self.num_matches[keys[0]] = self.num_matches.get(keys[0], 0) + 1
            if keys[0] in self.hangs:
                self.gate.wait(20)
        return super().match(keys)


class MakingRoom(WrapperStore):
    """Also makes room for a save that is awaited, and so has an admission of saves."""

    passes = (EvictsByUse,)


@pytest.fixture
def tiny(instance):
    """A store with room for about two prompts, over which `instance` makes instances."""
    one = instance(over=(probe := MemoryStore()))
    save(one, PROMPT)
    num_bytes = probe.room().used_bytes
    store = Gated(MemoryStore(budget=int(2.2 * num_bytes), lease_s=LEASE_S))
    yield store
    store.gate.set()


def save(one, tokens):
    return one.pool.save(one.cache.keys(tokens), TABLE).wait(20)


def request_of(one, tokens=PROMPT, params=None, **settings):
    return EngineRequest(one.cache, settings_of(**settings), one.cache.keys(tokens), params)


def looked_up(request):
    eventually(request.poll)
    return request


def sample(one, name, **labels):
    return one.cache.metrics.registry.get_sample_value(f"pdstore_{name}", labels) or 0.0


def others(number):
    return list(range(10_000 * number, 10_000 * number + 300))


def found(request):
    return request.find(0, len(PROMPT))


def first_key_of(request):
    return request.keys.store_keys(request.keys.namespace.parts)[0]


def load(one, request):
    """Loads what the request finds now; returns what the load has brought."""
    plan = request.plan_load(found(request), ROOM)
    return one.pool.begin_load(plan, TABLE).wait(20)


def test_what_a_waiting_request_found_stays_until_it_is_served(instance, tiny):
    """Others save as much as the pool holds, each second, for three times the lease."""
    a, b = instance(over=tiny), instance(over=tiny)
    save(a, PROMPT)
    waiting = looked_up(request_of(a))
    ends, until = [], time.monotonic() + 3 * LEASE_S
    while time.monotonic() < until:
        ends.append(save(b, others(len(ends) + 1)).reason)
        time.sleep(0.2)
    assert None in ends, "the others' values come and go"
    assert load(a, waiting).num_tokens == len(PROMPT)


def test_what_is_not_waited_for_goes(instance, tiny):
    """The same without a request that waits: it is the renewals that keep the values."""
    a, b = instance(over=tiny), instance(over=tiny)
    save(a, PROMPT)
    looked_up(request_of(a)).end()
    time.sleep(1.2 * LEASE_S)
    for number in (1, 2):
        save(b, others(number))
    assert a.cache.match(a.cache.keys(PROMPT)).num_tokens == 0


def test_only_a_save_that_is_awaited_evicts_what_another_instances_requests_wait_for(
    instance, tiny
):
    store = MakingRoom(tiny.wrapped)
    a, b = instance(over=store), instance(over=store)
    for tokens in (PROMPT, others(1)):
        save(a, tokens)
    waiting = [looked_up(request_of(a, tokens)) for tokens in (PROMPT, others(1))]
    time.sleep(1.5 * LEASE_S)  # the leases of the lookups themselves are over
    assert save(b, others(2)).reason in (Reason.NOT_ADMITTED, Reason.STORE_FULL)
    assert [found(request) for request in waiting] == [300, 300]
    handed_off = b.pool.save(b.cache.keys(others(2)), TABLE, handoff=HandoffId.new())
    assert handed_off.wait(20).reason is None
    eventually(lambda: sum(map(found, waiting)) < 600)
    for request in waiting:
        assert load(a, request).reason is None, "no more was promised than is there"


def test_a_waiting_request_sees_what_others_save(instance, tiny):
    a, b = instance(over=tiny), instance(over=tiny)
    waiting = looked_up(request_of(a))
    assert (found(waiting), waiting.reason, waiting.num_saved) == (0, Reason.ABSENT, 0)
    save(b, PROMPT)
    eventually(lambda: found(waiting) == 300)
    assert (waiting.reason, waiting.num_saved) == (None, 300)
    assert sample(a, "tokens_total", verb="matched") == 0
    assert load(a, waiting).num_tokens == 300
    assert sample(a, "tokens_total", verb="matched") == 300
    assert sample(a, "tokens_total", verb="requested") == 300
    assert sample(a, "misses_total", reason="absent") == 0, "the answer that is served counts"


def test_an_answer_changes_only_when_the_engine_asks(instance, tiny):
    a, b = instance(over=tiny), instance(over=tiny)
    waiting = looked_up(request_of(a))
    first, first_key = waiting.found, first_key_of(waiting)
    save(b, PROMPT)
    before = tiny.num_matches[first_key]
    eventually(lambda: tiny.num_matches[first_key] > before + 1)
    assert waiting.found is first
    assert (waiting.reason, waiting.num_saved) == (Reason.ABSENT, 0)


def test_what_is_served_is_renewed_no_more(num_renewed, instance, tiny):
    a = instance(over=tiny)
    save(a, PROMPT)
    ways = {
        "loaded": lambda request: request.plan_load(found(request), ROOM),
        "computed": lambda request: request.begin_step(0, 64),
        "ended": EngineRequest.end,
        "gave up": EngineRequest.give_up,
        "left": EngineRequest.leave_pool,
    }
    for end in ways.values():
        waiting = looked_up(request_of(a))
        assert num_renewed() == 1
        end(waiting)
        eventually(lambda: not num_renewed())
    matched = sample(a, "tokens_total", verb="matched")
    assert matched == 300 * len(ways), "each counts once"


def test_a_preempted_request_looks_again(num_renewed, instance, tiny):
    a = instance(over=tiny)
    save(a, PROMPT)
    preempted = looked_up(request_of(a))
    preempted.plan_load(found(preempted), ROOM)
    preempted.ends.append(JobEnd("", None, Direction.LOAD, 300, None))
    preempted.end_load()
    preempted.begin_step(299, 300)
    assert a.cache.clear()
    eventually(preempted.poll)
    assert found(preempted) == 0
    save(a, PROMPT)
    eventually(lambda: found(preempted) == 300)
    preempted.begin_step(299, 300)
    eventually(lambda: not num_renewed())
    assert sample(a, "tokens_total", verb="requested") == 300, "it counts once"


def test_a_preempted_request_that_goes_on_before_the_answer_may_ask_again(instance, tiny):
    a = instance(over=tiny)
    save(a, PROMPT)
    preempted = looked_up(request_of(a))
    preempted.begin_step(0, 300)
    tiny.hangs.add(first_key_of(preempted))
    assert not preempted.poll()
    preempted.begin_step(299, 300)
    assert preempted.poll()
    preempted.end()


def test_a_renewal_that_hangs_costs_no_other_request_its_answer(instance, tiny):
    a = instance(over=tiny)
    for tokens in (PROMPT, others(1)):
        save(a, tokens)
    waiting = looked_up(request_of(a))
    first_key = first_key_of(waiting)
    before = tiny.num_matches[first_key]
    tiny.hangs.add(first_key)
    eventually(lambda: tiny.num_matches[first_key] > before)
    other = looked_up(request_of(a, others(1)))
    assert found(other) == 300
    time.sleep(1.2)  # beyond the timeout of a lookup
    assert found(looked_up(request_of(a, others(1)))) == 300
    assert found(waiting) == 300, "the last answer stays"
    began = time.monotonic()
    a.cache.close()
    assert time.monotonic() - began < 3


class TestOfAHandOffThatIsFollowed:
    """D waits in its queue while P saves, or fails."""

    @pytest.fixture
    def d(self, instance, tiny):
        return instance(over=tiny, role="both")

    @pytest.fixture
    def waiting(self, d):
        return self.waiting_for(d, HandoffId.new())

    def waiting_for(self, d, handoff, **said):
        self.handoff = handoff
        params = {"pdstore": {"attempt": handoff.hex, "num_tokens": 300, **said}}
        request = looked_up(request_of(d, params=params))
        assert request.found.follow is not None
        return request

    def test_it_gets_all_until_p_is_silent(self, d):
        instance = "a" * 32
        waiting = self.waiting_for(d, HandoffId.new(), instance=instance)
        d.pool.save(d.cache.keys(PROMPT[:128]), TABLE).wait(20)
        assert found(waiting) == 300
        eventually(lambda: found(waiting) == 128)
        assert waiting.reason is Reason.HANDOFF_DEAD

    def test_it_gets_all_until_p_has_failed(self, d, waiting):
        d.pool.save(d.cache.keys(PROMPT[:128]), TABLE).wait(20)
        time.sleep(0.5)
        assert (found(waiting), waiting.found.follow) == (300, self.handoff)
        d.pool.abort_handoff(self.handoff).wait(20)
        eventually(lambda: found(waiting) == 128)
        assert (waiting.reason, waiting.found.follow) == (Reason.HANDOFF_FAILED, None)
        time.sleep(LEASE_S)  # it is renewed meanwhile
        assert (found(waiting), waiting.reason) == (128, Reason.HANDOFF_FAILED)

    def test_it_need_not_follow_when_p_is_done(self, num_renewed, d, waiting):
        assert (
            d.pool.save(d.cache.keys(PROMPT), TABLE, handoff=self.handoff).wait(20).reason is None
        )
        eventually(lambda: found(waiting) == 300 and waiting.found.follow is None)
        assert waiting.reason is None
        waiting.plan_load(300, ROOM)
        eventually(lambda: not num_renewed())
