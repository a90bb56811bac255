"""The events by which a scheduler tells routers what the pool has."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from pdstore import open_store
from pdstore.adapters.vllm.events import MEDIUM, PoolEvents
from pdstore.adapters.vllm.messages import RankWeights, StepReport
from pdstore.engine.job_end import JobEnd
from pdstore.errors import Direction, Reason
from pdstore.format.keys import PromptKeys
from pdstore.testing.values import contents, put
from tests.adapters.vllm.scheduler_kit import BLOCK, PROMPT, STATES, found, step
from tests.adapters.vllm.scheduler_kit import scheduler_of as scheduler_of
from tests.adapters.vllm.scheduler_kit import url as url
from tests.adapters.vllm.standins import vllm_request
from tests.support.kv import eventually, settings_of

HASHES = [bytes([number]) * 32 for number in range(18)]
"""vLLM's hashes of the prompt, in blocks of 16 tokens: four of them are a block of the pool."""
SMALL = 16


@pytest.fixture
def store(url, closed_after):
    return closed_after(open_store(url, settings_of(store=url)))


@pytest.fixture
def telling(scheduler_of):
    """Makes schedulers whose vLLM publishes events: `telling(num_ranks=2)`."""

    def make(num_ranks=1, most_hashes=1 << 20, **changes):
        events = PoolEvents(num_ranks, is_on=True, most_hashes=most_hashes)
        return scheduler_of(num_ranks=num_ranks, events=events, small=SMALL, **changes)

    return make


def request(**changes):
    usual = {"block_hashes": HASHES, "lora_request": None}
    return vllm_request(PROMPT, **usual | changes)


def keys_of(scheduler, first=0, stop=None):
    """The keys of the prompt's whole blocks in the pool."""
    namespace = scheduler.cache.namespace
    keys = PromptKeys(namespace).extend(PROMPT[: len(PROMPT) // BLOCK * BLOCK])
    return keys.store_keys(namespace.parts, first, stop)


def save(scheduler, store, asked, *, ends=((256, None),)):
    """Saves the prompt; each rank ends with so many leading tokens and a reason."""
    [planned] = step(scheduler, asked, 300).saves
    keys = keys_of(scheduler)
    put(store, keys, contents(keys, 100))
    for num_tokens, reason in ends:
        end = JobEnd(asked.request_id, planned.number, Direction.SAVE, num_tokens, reason)
        scheduler.report(StepReport(Counter({planned.number: 1}), [end]))


def admit(scheduler, asked):
    """Looks a request up, and tells of what it has found; returns how many tokens those are."""
    num_found = found(scheduler, asked)
    scheduler.tell_found(asked)
    return num_found


def published(first, stop):
    return [maybe_convert_block_hash(each) for each in HASHES[first:stop]]


def test_blocks_of_vllm_are_told_of_once_their_save_has_ended(telling, store):
    scheduler = telling()
    [planned] = step(scheduler, request(), 300).saves
    assert scheduler.events.take() == []
    keys = keys_of(scheduler)
    put(store, keys, contents(keys, 100))
    end = JobEnd("r", planned.number, Direction.SAVE, 256, None)
    scheduler.report(StepReport(Counter({planned.number: 1}), [end]))
    assert scheduler.is_at_work  # else vLLM would not ask for events before its next request
    [told] = scheduler.events.take()
    assert told == BlockStored(
        block_hashes=published(0, 16),
        parent_block_hash=None,
        token_ids=PROMPT[:256],
        block_size=SMALL,
        lora_id=None,
        medium=MEDIUM,
        lora_name=None,
        extra_keys=[None] * 16,
    )
    assert scheduler.events.take() == []
    assert not scheduler.is_at_work


def test_only_what_all_ranks_have_stored_is_told(telling, store):
    scheduler = telling(num_ranks=2)
    save(scheduler, store, request(), ends=[(256, None)])
    assert scheduler.events.take() == []
    scheduler.report(StepReport(ended=[JobEnd("r", 1, Direction.SAVE, 128, Reason.STORE_FULL)]))
    [told] = scheduler.events.take()
    assert told.block_hashes == published(0, 8)
    assert told.token_ids == PROMPT[:128]


def test_found_blocks_are_told_with_their_parent_and_not_twice(telling, store):
    scheduler = telling()
    keys = keys_of(scheduler)
    put(store, keys[: len(keys) // 2], contents(keys[: len(keys) // 2], 100))
    asked = request()
    assert found(scheduler, asked) == 128
    assert scheduler.events.take() == []  # vLLM may have no blocks for it yet
    scheduler.tell_found(asked)
    [told] = scheduler.events.take()
    assert told.block_hashes == published(0, 8)
    put(store, keys, contents(keys, 100))
    assert admit(scheduler, request(request_id="s")) == 256
    [told] = scheduler.events.take()
    assert told.block_hashes == published(8, 16)
    assert told.parent_block_hash == published(7, 8)[0]
    assert told.token_ids == PROMPT[128:256]


def test_an_adapter_is_told_with_its_id_its_name_and_the_extra_keys(telling, store):
    scheduler = telling()
    lora = SimpleNamespace(adapter_id=7, name="law", lora_name="law", lora_path="/law")
    asked = request(lora_request=lora, prompt_embeds_per_block_hashes=None)
    keys = scheduler.cache.keys(PROMPT[:256])
    put(store, names := keys.store_keys(keys.namespace.parts), contents(names, 100))
    match = scheduler.cache.match(keys)
    assert match.num_tokens == 256
    scheduler.events.found(asked, match)
    [told] = scheduler.events.take()
    assert (told.lora_id, told.lora_name) == (7, "law")
    assert [keys[0] for keys in told.extra_keys] == ["law"] * 16


def test_blocks_of_vllm_go_together_when_one_part_of_theirs_is_gone(telling, store):
    scheduler = telling()
    save(scheduler, store, request())
    scheduler.events.take()
    store.remove(keys_of(scheduler, 2, 3)[-1:])
    [told] = eventually(scheduler.events.take)
    assert told == BlockRemoved(block_hashes=published(8, 12), medium=MEDIUM)
    store.clear(scheduler.cache.namespace.hex)
    [told] = eventually(scheduler.events.take)
    assert sorted(told.block_hashes) == sorted([*published(0, 8), *published(12, 16)])


def test_what_two_blocks_of_the_pool_share_stays_until_both_are_gone(telling, store):
    scheduler = telling()
    save(scheduler, store, request())
    scheduler.events.take()
    prompt = [*PROMPT[:240], *PROMPT[:60]]  # it parts from the other within its fourth block
    keys = PromptKeys(scheduler.cache.namespace).extend(prompt[:256])
    own = keys.store_keys(keys.namespace.parts, 3)
    put(store, own, contents(own, 100))
    hashes = [*HASHES[:15], bytes([99]) * 32]
    other = request(request_id="s", block_hashes=hashes)
    other.prompt_token_ids = other.all_token_ids = prompt
    assert admit(scheduler, other) == 256
    [told] = scheduler.events.take()  # of what is new: routers may count how often a block is told
    assert told.block_hashes == [maybe_convert_block_hash(hashes[-1])]
    assert told.parent_block_hash == published(14, 15)[0]
    assert told.token_ids == prompt[240:256]
    store.remove(keys_of(scheduler, 3))
    [told] = eventually(scheduler.events.take)
    assert told.block_hashes == published(15, 16)
    store.remove(own)
    [told] = eventually(scheduler.events.take)
    assert told.block_hashes == [*published(12, 15), maybe_convert_block_hash(hashes[-1])]


def hashes_of(prompt):
    """Hashes of vLLM's blocks, each of all tokens up to its end."""
    ends = range(SMALL, len(prompt) + 1, SMALL)
    return [hashlib.sha256(repr(prompt[:end]).encode()).digest() for end in ends]


def test_a_router_that_counts_how_often_it_is_told_ends_with_what_the_pool_has(telling, store):
    scheduler, chance = telling(), random.Random(7)
    prompts, counts, blocks = [PROMPT], Counter(), {}

    def told():
        for event in scheduler.events.take():
            is_stored = isinstance(event, BlockStored)
            assert not is_stored or counts.keys() >= {event.parent_block_hash} - {None}
            counts.update({each: 1 if is_stored else -1 for each in event.block_hashes})
        return {each for each, count in counts.items() if count}

    for number in range(60):
        beginning = chance.choice(prompts)[: chance.randrange(300)]
        prompts.append(prompt := [*beginning, *PROMPT[: chance.randrange(64, 200)]])
        asked = request(request_id=str(number), block_hashes=hashes_of(prompt))
        asked.prompt_token_ids = asked.all_token_ids = prompt
        whole = scheduler.cache.keys(prompt[: len(prompt) // BLOCK * BLOCK])
        names = whole.store_keys(whole.namespace.parts)
        put(store, names, contents(names, 100))
        for block in range(len(whole)):
            end = (block + 1) * BLOCK
            own = map(maybe_convert_block_hash, hashes_of(prompt[:end])[-BLOCK // SMALL :])
            blocks[names[block * len(names) // len(whole)]] = {*own}
        scheduler.events.found(asked, scheduler.cache.match(whole))
        store.remove(chance.sample(sorted(blocks), chance.randrange(2)))
        told()
    gone = store.which_removed([*blocks])
    left = [own for own, is_gone in zip(blocks.values(), gone, strict=True) if not is_gone]
    eventually(lambda: told() == set().union(*left))
    assert set(counts.values()) == {0, 1}


def test_a_block_that_is_stored_again_is_told_again(telling, store):
    scheduler = telling()
    save(scheduler, store, request())
    store.remove(keys_of(scheduler))
    [_, removed] = eventually(lambda: len(scheduler.events) == 2 and scheduler.events.take())
    assert isinstance(removed, BlockRemoved)
    put(store, keys_of(scheduler), contents(keys_of(scheduler), 100))
    assert admit(scheduler, request(request_id="s")) == 256
    [told] = scheduler.events.take()
    assert told.block_hashes == published(0, 16)


def test_beyond_the_limit_the_blocks_used_longest_ago_are_told_to_be_gone(telling, store):
    scheduler = telling(most_hashes=8)
    save(scheduler, store, request())
    stored, removed = scheduler.events.take()
    assert stored.block_hashes == published(0, 16)
    # of a prompt its end goes first: nobody can use a block without those before it
    gone = [*published(12, 16), *published(8, 12)]
    assert removed == BlockRemoved(block_hashes=gone, medium=MEDIUM)


def test_after_a_reset_of_vllms_cache_blocks_are_told_anew(telling, store):
    pool = BlockPool(64, True, SMALL, enable_kv_cache_events=True)  # vLLM's own
    scheduler = telling(block_pool=pool)
    save(scheduler, store, request())
    scheduler.events.take()
    assert pool.reset_prefix_cache()
    assert pool.take_events() == [AllBlocksCleared()]  # by which routers forget the pool's, too
    [told] = scheduler.events.take()
    assert sorted(told.block_hashes) == published(0, 16)
    assert admit(scheduler, request(request_id="s")) == 256
    [told] = scheduler.events.take()
    assert told.block_hashes == published(0, 16)


def test_new_weights_end_all_blocks(telling, store):
    scheduler = telling()
    save(scheduler, store, request())
    scheduler.events.take()
    scheduler.report(StepReport(weights={0: RankWeights(1, b"", 0, 0)}))
    [told] = scheduler.events.take()
    assert sorted(told.block_hashes) == published(0, 16)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: PoolEvents(), id="vLLM publishes no events"),
        pytest.param(lambda: PoolEvents(is_on=True), id="the store tells no removals"),
    ],
)
def test_nothing_is_kept_while_no_events_can_be_told(scheduler_of, store, make, monkeypatch):
    from pdstore.scheduler.prefix_cache import PrefixCacheManager

    monkeypatch.setattr(PrefixCacheManager, "removals", None)
    scheduler = scheduler_of(events=make(), small=SMALL)
    save(scheduler, store, request())
    assert scheduler.events.take() == []
    assert not scheduler.is_at_work
    assert not any(vars(scheduler.events)[name] for name in ("_saves", "_blocks", "_thread"))


def test_of_layers_with_states_no_block_is_asked_for(telling):
    scheduler = telling(states=STATES)
    namespace = scheduler.cache.namespace
    whole = [part for part in namespace.parts if part.group not in namespace.continuation.needs]
    assert len(whole) < len(namespace.parts)
    assert list(vars(scheduler.events)["_watch"].heads) == [
        namespace.key_prefix(part) for part in whole
    ]
