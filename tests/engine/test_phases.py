"""The phases of EngineRequest: each call in each phase, and the orders in which engines call."""

from __future__ import annotations

import inspect
from functools import partial

import pytest

from pdstore import EngineRequest, HandoffId, IllegalCall, JobEnd, PromptTimes, Reason, RequestPhase
from pdstore.engine.phase import LEGAL
from pdstore.errors import Direction
from tests.support.instances import instance as instance
from tests.support.instances import store as store
from tests.support.kv import eventually, settings_of

PROMPT = list(range(1, 301))
ANSWERED = [*PROMPT, *range(1000, 1100)]
ROOM = 320

CALLS = {
    "poll": lambda request: request.poll(),
    "find": lambda request: request.find(0, len(PROMPT)),
    "plan_load": lambda request: request.plan_load(len(PROMPT), ROOM),
    "end_load": lambda request: request.end_load(),
    "begin_step": lambda request: request.begin_step(0, len(PROMPT)),
    "plan_save": lambda request: request.plan_save(0, len(PROMPT)),
    "end_prompt": lambda request: request.end_prompt(),
    "plan_answer_save": lambda request: request.plan_answer_save(400, ANSWERED),
    "leave_pool": lambda request: request.leave_pool(),
    "give_up": lambda request: request.give_up(),
    "end": lambda request: request.end(),
}

TABLE = """
                  LOOKUP FOUND LOADING LOADED PREFILLING PREFILLED ANSWERING ENDED
poll                yes   yes     -       -       yes        yes       yes     -
find                 -    yes     -       -       yes        yes       yes     -
plan_load            -    yes     -       -       yes        yes       yes     -
end_load             -    yes     -      yes      yes        yes       yes     -
begin_step           -    yes     -       -       yes        yes       yes     -
plan_save            -     -      -       -       yes        yes       yes     -
end_prompt           -    yes    yes     yes      yes        yes       yes     -
plan_answer_save     -     -     yes     yes       -         yes       yes     -
leave_pool          yes   yes    yes     yes      yes        yes       yes     -
give_up             yes   yes    yes     yes      yes        yes       yes    yes
end                 yes   yes    yes     yes      yes        yes       yes     -
"""


def rows():
    """Each call and phase of the table, and whether the call is legal."""
    head, *lines = (line.split() for line in TABLE.strip().splitlines())
    for call, *cells in lines:
        for phase, cell in zip(head, cells, strict=True):
            yield pytest.param(call, RequestPhase[phase], cell == "yes", id=f"{call}-{phase}")


@pytest.fixture
def cache(instance):
    """The cache of an instance whose pool has the prompt."""
    one = instance()
    one.pool.save(one.cache.keys(PROMPT), range(20)).wait(20)
    return one.cache


@pytest.fixture
def request_of(cache):
    def make(**more):
        return EngineRequest(cache, settings_of(), cache.keys(PROMPT), id="cmpl-7", **more)

    return make


def looked_up(request):
    eventually(request.poll)
    return request


def plan_load(request):
    request.plan_load(request.find(0, len(PROMPT)), ROOM)


def report_load(request, num_tokens=300, reason=None):
    request.ends.append(JobEnd(request.id, None, Direction.LOAD, num_tokens, reason))


def begin_step(request, stop=300):
    request.begin_step(0, stop)


WAYS = {
    RequestPhase.LOOKUP: [],
    RequestPhase.FOUND: [looked_up],
    RequestPhase.LOADING: [looked_up, plan_load],
    RequestPhase.LOADED: [looked_up, plan_load, report_load],
    RequestPhase.PREFILLING: [looked_up, partial(begin_step, stop=64)],
    RequestPhase.PREFILLED: [looked_up, begin_step],
    RequestPhase.ANSWERING: [looked_up, begin_step, EngineRequest.end_prompt],
    RequestPhase.ENDED: [looked_up, EngineRequest.end],
}


@pytest.fixture
def request_in(request_of):
    """Makes a request that stands in a phase."""

    def make(phase):
        request = request_of()
        for step in WAYS[phase]:
            step(request)
        assert request.phase is phase
        return request

    return make


@pytest.mark.parametrize(("call", "phase", "is_legal"), list(rows()))
def test_a_call_is_legal_where_the_table_says_so_and_else_changes_nothing(
    request_in, call, phase, is_legal
):
    request = request_in(phase)
    if is_legal:
        CALLS[call](request)
        return
    before = dict(vars(request))
    with pytest.raises(
        IllegalCall, match=f"{call} .*'cmpl-7'.* {phase.name}.*legal now: "
    ) as error:
        CALLS[call](request)
    assert error.value.request_id == "cmpl-7"
    assert vars(request) == before


def test_the_table_has_every_method():
    methods = inspect.getmembers(EngineRequest, inspect.isfunction)
    public = {name for name, _ in methods if not name.startswith("_")}
    assert set(LEGAL) == set(CALLS) == public


def test_a_request_that_may_not_load_is_not_waited_for(request_of):
    assert request_of(may_load=False).phase is RequestPhase.FOUND


@pytest.mark.parametrize("phase", ["PREFILLING", "PREFILLED", "ANSWERING"])
def test_a_preempted_request_loads_again_and_comes_back_to_its_phase(request_in, phase):
    request = request_in(RequestPhase[phase])
    plan_load(request)
    assert request.phase is RequestPhase.LOADING
    report_load(request)
    assert request.phase is RequestPhase.LOADED
    assert request.end_load() == len(PROMPT)
    assert request.phase is RequestPhase[phase]


def test_a_first_token_that_comes_while_a_preempted_request_loads_is_seen(request_in):
    request = request_in(RequestPhase.PREFILLED)
    plan_load(request)
    request.end_prompt()
    report_load(request)
    request.end_load()
    assert request.phase is RequestPhase.ANSWERING


def test_a_load_ends_when_its_last_rank_has_told(request_of):
    request = looked_up(request_of(num_ranks=2))
    plan_load(request)
    report_load(request)
    with pytest.raises(IllegalCall, match="LOADING"):
        request.end_load()
    report_load(request, 64, Reason.LOST)
    assert request.end_load() == 64


def test_a_lookup_that_is_given_up_is_not_waited_for(request_of):
    request = request_of()
    request.give_up()
    assert request.poll()
    assert request.find(0, len(PROMPT)) == 0
    request.begin_step(0, len(PROMPT))
    assert request.plan_save(0, len(PROMPT)) is not None
    assert request.reason is Reason.FAULT


def test_the_late_end_of_a_load_that_was_given_up_changes_nothing(request_in):
    request = request_in(RequestPhase.LOADING)
    request.give_up()
    assert request.phase is RequestPhase.FOUND
    report_load(request)
    assert (request.phase, request.end_load()) == (RequestPhase.FOUND, 0)
    assert request.find(0, len(PROMPT)) == 0


def test_a_prompt_whose_steps_were_not_told_is_saved_when_its_answer_has_begun(request_in):
    """A fault in the step of another request may have hidden them."""
    request = request_in(RequestPhase.FOUND)
    request.num_saved, request.handoff = 0, HandoffId.new()
    request.end_prompt()
    request.begin_step(len(PROMPT), len(PROMPT) + 1)
    save = request.plan_save(len(PROMPT), len(PROMPT) + 1)
    assert (save.keys.num_tokens, save.handoff) == (len(PROMPT), request.handoff)


class Forgetting(PromptTimes):
    def __init__(self, *given):
        super().__init__(*given)
        self.forgotten = []

    def forget(self, name):
        self.forgotten.append(name)
        super().forget(name)


def test_the_prompt_of_an_answer_that_has_begun_before_is_not_waited_for(cache):
    """Weights were written while it was preempted, so it has new keys and a second state."""
    times = Forgetting("auto", 64)
    keys, settings = cache.keys(PROMPT), settings_of(load="auto")
    again = looked_up(EngineRequest(cache, settings, keys, prompt_times=times))
    again.find(len(PROMPT) - 64, len(ANSWERED))
    assert times.forgotten == []
    again.end_prompt()
    assert times.forgotten == [again]
