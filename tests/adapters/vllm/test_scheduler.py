"""PDStoreConnectorScheduler on a real pool, with requests and blocks as vLLM hands them over."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest

from pdstore import Layout, open_store
from pdstore.adapters.vllm.messages import RankLayout, StepReport
from pdstore.adapters.vllm.scheduler import PDStoreConnectorScheduler
from pdstore.adapters.vllm.stats import StepMetrics
from pdstore.engine.request import JobEnd
from pdstore.errors import ConfigError
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.outcome import Direction, Reason
from tests.support.kv import LAYERS, Instance, eventually, settings_of

BLOCK, PROMPT = 64, list(range(1, 301))
IDLE = SimpleNamespace(num_scheduled_tokens={})
"""A step that computes nothing."""
TABLE = [10, 11, 12, 13, 14]


class Pool:
    """Stands for vLLM's BlockPool."""

    def __init__(self) -> None:
        self.blocks = list(range(64))

    def touch(self, blocks) -> None: ...
    def free_blocks(self, blocks) -> None: ...


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/pool"


def namespace_of(settings, weights="w"):
    layout = Layout.of(settings, dtype="float32", layers=LAYERS, engine_block_tokens=BLOCK, rope="")
    return layout.namespace(settings, weights=weights)


@pytest.fixture
def scheduler_of(url):
    """Makes schedulers that have begun: `scheduler_of(role="prefill")`."""
    made = []

    def make(*, metrics=None, **changes):
        options = ("may_follow", "patience_s", "longest_prompt", "weights_of")
        given = {name: changes.pop(name) for name in options if name in changes}
        settings = settings_of(**{"store": url, **changes})
        scheduler = PDStoreConnectorScheduler(settings, 1, metrics or StepMetrics(), **given)
        scheduler.saves.block_pool = Pool()
        scheduler.set_layouts([RankLayout(namespace_of(settings), BLOCK)])
        made.append(scheduler)
        return scheduler

    yield make
    for scheduler in made:
        scheduler.close()


@pytest.fixture
def saved(url):
    """The prompt, saved in the pool."""
    store = open_store(url, settings_of(store=url))
    instance = Instance(store, engine_block_tokens=BLOCK, weights="w")
    keys = instance.cache.keys(PROMPT)
    assert instance.pool.save(keys, TABLE).wait(20).num_tokens == len(PROMPT)
    instance.close()
    store.close()


def request(params=None, request_id="r"):
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        prompt_embeds=None,
        pooling_params=None,
        lora_request=None,
        cache_salt=None,
        kv_transfer_params=params,
        num_tokens=len(PROMPT),
        num_computed_tokens=0,
        num_prompt_tokens=len(PROMPT),
        num_output_tokens=0,
        all_token_ids=PROMPT,
    )


def loaded(request_id="r", num_tokens=300, reason=None):
    """The report of a load that has ended."""
    return StepReport(ended=[JobEnd(request_id, None, Direction.LOAD, num_tokens, reason, 0.01)])


def saved_with(save, reason):
    """The report of a save that has ended."""
    return StepReport(ended=[JobEnd(save.request_id, 0, Direction.SAVE, 0, reason)])


def step(scheduler, asked, num_tokens):
    """The metadata of a step that computes tokens of a request."""
    output = SimpleNamespace(
        num_scheduled_tokens={asked.request_id: num_tokens},
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda request_id: [TABLE]),
    )
    metadata = scheduler.build_metadata(output)
    asked.num_computed_tokens += num_tokens
    return metadata


def found(scheduler, asked, num_computed=0):
    """The answer to a lookup, once there is one."""

    def answer():
        num_tokens = scheduler.num_found(asked, num_computed)
        return None if num_tokens is None else [num_tokens]

    return eventually(answer)[0]


def test_before_the_layout_is_known_nothing_is_found_or_saved():
    scheduler = PDStoreConnectorScheduler(settings_of(), 1, StepMetrics())
    scheduler.saves.block_pool = Pool()
    assert scheduler.num_found(request(), 0) == 0
    assert step(scheduler, request(), 300).saves == []


def test_without_any_layout_it_does_not_begin():
    with pytest.raises(ConfigError, match="MultiConnector"):
        PDStoreConnectorScheduler(settings_of(), 1, StepMetrics()).set_layouts([])


def test_blocks_that_no_prompt_of_the_model_fills_are_told_at_the_start(scheduler_of, caplog):
    scheduler_of(longest_prompt=32)
    assert f"PDSTORE_BLOCK_TOKENS={settings_of().block_tokens}, and no prompt has over 32" in (
        caplog.text
    )


def test_ranks_of_different_layouts_are_refused():
    settings = settings_of()
    ranks = [RankLayout(namespace_of(settings, weights), BLOCK) for weights in "ab"]
    with pytest.raises(ConfigError, match="differ in weights"):
        PDStoreConnectorScheduler(settings, 2, StepMetrics()).set_layouts(ranks)


@pytest.mark.usefixtures("saved")
def test_a_stored_prompt_is_found_and_its_load_is_queued_once(scheduler_of):
    scheduler, asked = scheduler_of(), request()
    assert found(scheduler, asked) == len(PROMPT)
    assert found(scheduler, asked, num_computed=2 * BLOCK) == len(PROMPT) - 2 * BLOCK
    scheduler.load(asked, [TABLE], len(PROMPT) - 2 * BLOCK)
    [spec] = scheduler.build_metadata(IDLE).loads
    plan = spec.plan
    assert (plan.first_token, plan.num_tokens, plan.follow) == (2 * BLOCK, len(PROMPT), None)
    assert list(spec.block_ids[0]) == TABLE
    assert scheduler.build_metadata(IDLE).loads == []


@pytest.mark.usefixtures("saved")
def test_the_first_answer_to_a_lookup_is_waited_for(scheduler_of):
    scheduler, asked = scheduler_of(patience_s=30.0), request()
    scheduler.add(asked)  # vLLM shows a request before it asks about it
    assert scheduler.num_found(asked, 0) == len(PROMPT)


def test_a_request_whose_load_failed_is_not_loaded_again(scheduler_of):
    scheduler, asked = scheduler_of(), request()
    found(scheduler, asked)
    scheduler.load(asked, [TABLE], len(PROMPT))
    scheduler.report(loaded(reason=Reason.LOST, num_tokens=64))
    assert scheduler.num_found(asked, 0) == 0


@pytest.mark.usefixtures("saved")
def test_what_was_loaded_is_not_saved_again(scheduler_of):
    scheduler, asked = scheduler_of(), request()
    found(scheduler, asked)
    scheduler.load(asked, [TABLE], len(PROMPT))
    scheduler.report(loaded())
    asked.num_computed_tokens = len(PROMPT) - 1
    assert step(scheduler, asked, 1).saves == []


def test_ps_answer_names_the_hand_off_that_its_last_chunk_publishes(scheduler_of):
    p, asked = scheduler_of(role="prefill"), request()
    p.add(asked)
    assert [save.plan.handoff for save in step(p, asked, 256).saves] == [None]
    metadata = step(p, asked, 44)
    said = Handoff.of(p.finish_request(asked))
    assert [save.plan.handoff for save in metadata.saves] == [said.id]
    assert said.num_tokens == len(PROMPT)
    assert metadata.saves[0].plan.starts == (), "nobody waits for the start of a relayed hand-off"


def test_a_hand_off_that_ends_before_it_is_published_is_aborted(scheduler_of):
    p, asked = scheduler_of(role="prefill"), request()
    tracker = p.add(asked)
    step(p, asked, 256)
    assert p.finish_request(asked) is None
    assert p.is_at_work
    assert p.build_metadata(IDLE).aborted_handoffs == [tracker.handoff]


def test_blocks_are_held_as_long_as_a_save_reads_them_and_not_until_it_has_ended(scheduler_of):
    """vLLM preempts nobody while it is told that blocks come back."""
    both, asked = scheduler_of(), request()
    both.add(asked)
    [save] = step(both, asked, 300).saves
    both.finish_request(asked)
    assert both.saves
    both.report(StepReport(released=Counter({save.number: 1})))
    assert not both.saves
    assert both.is_at_work, "the save's end comes with a step"


def test_d_follows_a_hand_off_from_ps_answer_on(scheduler_of):
    p, d, asked = scheduler_of(role="prefill"), scheduler_of(role="decode"), request()
    p.add(asked)
    step(p, asked, 300)
    params = p.finish_request(asked)
    theirs = request(params)
    assert found(d, theirs) == len(PROMPT)
    d.load(theirs, [TABLE], len(PROMPT))
    [spec] = d.build_metadata(IDLE).loads
    assert spec.plan.follow == Handoff.of(params).id


def test_where_a_short_load_would_fail_the_request_d_waits_until_p_is_done(scheduler_of):
    p, asked = scheduler_of(role="prefill"), request()
    p.add(asked)
    step(p, asked, 300)
    d = scheduler_of(role="decode", may_follow=False, handoff_wait_s=0.5)
    theirs = request(p.finish_request(asked))
    assert d.num_found(theirs, 0) is None
    assert found(d, theirs) == 0, "nothing was stored in time"


def test_p_tells_a_d_that_was_asked_with_it_of_its_start_once(scheduler_of):
    handoff = HandoffId.new()
    p, asked = scheduler_of(role="prefill"), request(Handoff(handoff).params())
    p.add(asked)
    [(started, num_tokens)] = step(p, asked, 256).saves[0].plan.starts
    assert (started.hex, num_tokens) == (handoff.hex, len(PROMPT))
    assert step(p, asked, 44).saves[0].plan.starts == ()


def found_of(scheduler, asked):
    """Waits for the lookup; then the tokens that vLLM may load."""
    eventually(lambda: scheduler.num_found(asked, 0) is not None)
    return scheduler.num_found(asked, 0)


def test_never_computes_what_the_pool_has_and_the_answer_says_so(scheduler_of, saved):
    scheduler, asked = scheduler_of(role="decode", load="never"), request()
    scheduler.add(asked)
    assert found_of(scheduler, asked) == 0
    step(scheduler, asked, len(PROMPT))
    asked.num_output_tokens = 1
    told = scheduler.finish_request(asked)["pdstore_decision"]
    assert told["decision"] == "compute"
    assert told["took_s"] > 0


def test_auto_leaves_a_part_of_the_third_prompt_to_be_computed_to_learn_its_rate(
    scheduler_of, saved
):
    """The first load tells no rate."""
    scheduler = scheduler_of(role="decode", load="auto")
    for name in ("first", "second"):
        asked = request(request_id=name)
        scheduler.add(asked)
        assert found_of(scheduler, asked) == len(PROMPT)
        scheduler.load(asked, [TABLE], len(PROMPT))
        scheduler.report(loaded(name))
    third = request(request_id="third")
    scheduler.add(third)
    num_found = found_of(scheduler, third)
    assert 0 < num_found < len(PROMPT)
    assert num_found % BLOCK == 0


def test_a_hand_off_that_falls_short_is_a_load_that_fails_where_it_must_not_be_computed(
    scheduler_of,
):
    strict = {"role": "decode", "on_miss": "fail", "may_follow": False, "handoff_wait_s": 0.05}
    d, theirs = scheduler_of(**strict), request(Handoff(HandoffId.new()).params())
    num_found = found(d, theirs)
    assert num_found == len(PROMPT) - 1
    d.load(theirs, [TABLE], num_found)
    [spec] = d.build_metadata(IDLE).loads
    assert spec.plan is None
    assert found(scheduler_of(**strict), request()) == 0, "nobody handed that one over"


def test_a_load_after_a_preemption_is_no_wait_of_the_client(scheduler_of, saved):
    metrics, asked = StepMetrics(), request()
    both = scheduler_of(metrics=metrics)
    for asked.num_output_tokens in (0, 5):
        both.load(asked, [TABLE], found(both, asked))
        both.report(loaded())
        asked.num_computed_tokens = len(PROMPT) - 1
        step(both, asked, 1)
    assert metrics.registry.get_sample_value("pdstore_exposed_seconds_count") == 1


def test_a_malformed_handoff_is_none_and_is_told(scheduler_of, saved, caplog):
    asked = request({"pdstore": {"attempt": "zz"}})
    assert found(scheduler_of(role="decode"), asked) == len(PROMPT)
    assert "r is taken without a hand-off" in caplog.text


def test_p_says_in_its_answers_that_its_last_save_fell_short(scheduler_of):
    p, numbers = scheduler_of(role="prefill"), itertools.count()

    def told(reason):
        asked = request(request_id=f"r{next(numbers)}")
        p.add(asked)
        [save] = step(p, asked, len(PROMPT)).saves
        answer = p.finish_request(asked)["pdstore"]
        p.report(saved_with(save, reason))
        assert save.plan.handoff.is_doubtful == ("last_save" in answer)
        return answer.get("last_save")

    assert told(Reason.STORE_FULL) is None
    assert told(None) == "store_full"
    assert told(None) is None


def test_p_says_what_its_files_are_where_a_setting_names_the_weights(scheduler_of):
    def answer_of(p):
        p.add(request())
        step(p, request(), len(PROMPT))
        return p.finish_request(request())["pdstore"]

    p = scheduler_of(role="prefill", weights="prod", weights_of=lambda _: "sha256:1")
    assert eventually(lambda: answer_of(p).get("weights_files")) == "sha256:1"
    other = scheduler_of(role="prefill", weights_of=lambda _: "sha256:1")
    assert "weights_files" not in answer_of(other)
