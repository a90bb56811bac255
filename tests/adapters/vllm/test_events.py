"""PoolEvents: a subscriber of vLLM's KV events hears of what is durable in the pool, and when."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from vllm import SamplingParams
from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from pdstore.adapters.vllm.events import PoolEvents
from pdstore.adapters.vllm.messages import SaveSpec
from pdstore.engine.request import JobEnd, SavePlan
from pdstore.errors import Direction
from pdstore.format.handoff import HandoffId
from tests.adapters.vllm.asking import new_prompt, prefill
from tests.support.kv import eventually

ENGINE_BLOCK, BLOCK = 16, 64
WAIT_MS, HEARD_MS = 30_000, 1_000


@pytest.fixture(autouse=True, scope="module")
def _hash_seed():
    init_none_hash(sha256)


def request_of(num_tokens=200, name="r", **more):
    hasher = get_request_block_hasher(ENGINE_BLOCK, sha256)
    params = SamplingParams(max_tokens=1)
    return Request(name, list(range(num_tokens)), params, None, block_hasher=hasher, **more)


def save(number, first_token, name="r", handoff=None):
    keys = SimpleNamespace(block_tokens=BLOCK)
    return SaveSpec(number, name, SavePlan(keys, first_token, handoff), [])


def ended(number, num_tokens, name="r"):
    return JobEnd(name, number, Direction.SAVE, num_tokens, None)


@pytest.fixture
def events():
    return PoolEvents(1, ENGINE_BLOCK, BLOCK)


def published(hashes):
    """vLLM's hashes as it publishes them: as numbers by default."""
    return [maybe_convert_block_hash(each) for each in hashes]


def told(events):
    """The hashes of the blocks told since the last call."""
    return [each for event in events.pop() for each in event.block_hashes]


def decoded(payload):
    return msgspec.msgpack.Decoder(KVEventBatch).decode(payload).events


def test_a_subscriber_decodes_them_as_vllms_own(events, tmp_path):
    asked = request_of(cache_salt="tenant")
    events.add(asked)
    events.add_saves([save(1, 0)])
    events.end_jobs([ended(1, 200)])
    endpoint = f"ipc://{tmp_path}/events"
    publisher = ZmqEventPublisher(0, endpoint=endpoint)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    try:
        subscriber.subscribe(b"")
        subscriber.connect(endpoint)
        batch = KVEventBatch(ts=0.0, events=events.pop())
        end = time.monotonic() + WAIT_MS / 1000
        while not subscriber.poll(100):  # what is published before it has joined is not heard
            assert time.monotonic() < end
            publisher.publish(batch)
        _, _, payload = subscriber.recv_multipart()
    finally:
        context.destroy(linger=0)
        publisher.shutdown()
    [event] = decoded(payload)
    assert isinstance(event, BlockStored)
    assert event.block_hashes == published(asked.block_hashes[:12])
    assert (event.parent_block_hash, event.block_size, event.medium) == (None, 16, "STORAGE")
    assert event.token_ids == list(range(192))
    assert event.extra_keys[0] == ("tenant",)
    assert event.extra_keys[1:] == [None] * 11


def test_a_running_server_tells_a_subscriber_of_the_pool_by_vllms_names_of_its_blocks(pair):
    hashes = {"GPU": {}, "STORAGE": {}}

    def hear_of_a_prompt():
        prefill(pair.p, new_prompt(200))
        while pair.subscriber.poll(HEARD_MS):
            for event in decoded(pair.subscriber.recv_multipart()[-1]):
                if isinstance(event, BlockStored):
                    hashes[event.medium][tuple(event.token_ids)] = event.block_hashes
        return hashes["GPU"].keys() & hashes["STORAGE"].keys()

    pair.subscriber.subscribe(b"")
    try:  # a publisher drops its first events, until it knows of the subscriber
        for tokens in eventually(hear_of_a_prompt, WAIT_MS / 1000):
            assert len(tokens) == 3 * BLOCK
            assert len(hashes["STORAGE"][tokens]) == 3
            assert hashes["STORAGE"][tokens] == hashes["GPU"][tokens]
    finally:
        pair.subscriber.unsubscribe(b"")


@pytest.mark.parametrize(
    ("num_ranks", "first_tokens", "ends", "told_blocks"),
    [
        (1, [0, 64], [(1, 70), (2, 200)], [4, 12]),
        (1, [0, 64, 128], [(3, 192), (2, 128), (1, 64)], [0, 0, 12]),
        (1, [0, 128], [(1, 64), (2, 192)], [4, 4]),
        (2, [0], [(1, 200), (1, 128)], [0, 8]),
    ],
    ids=["whole blocks", "behind a gap", "not stored", "all ranks"],
)
def test_a_block_is_told_when_it_is_durable_with_all_before_it(
    num_ranks, first_tokens, ends, told_blocks
):
    events, asked = PoolEvents(num_ranks, ENGINE_BLOCK, BLOCK), request_of()
    events.add(asked)
    events.add_saves([save(number, first) for number, first in enumerate(first_tokens, 1)])
    heard = []
    for end, num_blocks in zip(ends, told_blocks, strict=True):
        events.end_jobs([ended(*end)])
        for event in events.pop():
            assert [event.parent_block_hash] == (heard[-1:] or [None])
            heard += event.block_hashes
        assert heard == published(asked.block_hashes[:num_blocks])


def test_a_hand_off_tells_the_whole_prompt_that_it_has_checked_if_vllm_names_it(events):
    asked = request_of()
    events.add(asked)
    events.add(Request("unnamed", list(range(200)), SamplingParams(max_tokens=1), None))
    events.add_saves([save(1, 128, handoff=HandoffId.new()), save(2, 0, "unnamed")])
    events.end_jobs([ended(2, 200, "unnamed")])
    assert told(events) == []
    events.end_jobs([ended(1, 200)])
    assert told(events) == published(asked.block_hashes[:12])
