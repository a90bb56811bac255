"""A router's index of the pool, made from what two instances of vLLM publish."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import zmq
from msgspec.msgpack import Decoder
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from examples.ports import free_port
from pdstore import open_store
from pdstore.format.keys import Kind, Namespace, Part, PromptKeys, kind_of
from pdstore.store.optional import ListsValues
from tests.adapters.vllm.asking import ask, at_once, new_prompt, post
from tests.adapters.vllm.conftest import CACHING, switched_on
from tests.support.command import run
from tests.support.kv import eventually, settings_of

BLOCK = 32
"""Tokens of a block of the pool and of vLLM, whose CPU backend packs each block as a page."""
MEDIUM = "EXTERNAL"
SETTLED_S = 30.0
FEWEST, WARM_S = 25, 180.0
"""Prompts that an instance is asked at least, and seconds that its first one may take."""


@dataclass
class Index:
    """What one instance has in the pool, as far as it has told.

    present: vLLM's hashes of it.
    known: for each hash that was ever told, the hash before it and the block's own tokens.
    seq: the number of the next batch. num_removed: how many removals it was told.
    """

    endpoint: str
    present: set[int] = field(default_factory=set)
    known: dict[int, tuple[int | None, list[int]]] = field(default_factory=dict)
    seq: int = 0
    num_removed: int = 0

    def __post_init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(self.endpoint)
        self._socket.subscribe(b"")
        self._decoder = Decoder(KVEventBatch)

    def read(self) -> None:
        """Takes all batches that have come; none may be missing."""
        while self._socket.poll(50):
            _, seq, payload = self._socket.recv_multipart()
            assert int.from_bytes(seq, "big") == self.seq
            self.seq += 1
            for event in self._decoder.decode(payload).events:
                if event.medium == MEDIUM:
                    self._apply(event)

    def blocks(self, namespace: Namespace) -> set[str]:
        """Returns the blocks of the pool, by the last part of their keys."""
        prompts = {tuple(self._tokens_to(name)) for name in self.present}
        all_keys = (PromptKeys(namespace).extend(tokens) for tokens in prompts)
        return {keys.hash_of(len(keys) - 1).hex() for keys in all_keys}

    def close(self) -> None:
        self._socket.close(linger=0)

    def _apply(self, event: BlockStored | BlockRemoved) -> None:
        if isinstance(event, BlockRemoved):
            self.num_removed += len(event.block_hashes)
            for name in event.block_hashes:
                self.present.remove(name)
            return
        assert event.block_size == BLOCK
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)
        before = event.parent_block_hash
        for number, name in enumerate(event.block_hashes):
            self.present.add(name)
            own = event.token_ids[number * BLOCK : (number + 1) * BLOCK]
            assert self.known.setdefault(name, (before, own)) == (before, own)
            before = name

    def _tokens_to(self, name: int) -> list[int]:
        """Returns a prompt's tokens up to the end of a block."""
        before, own = self.known[name]
        return own if before is None else self._tokens_to(before) + own


@dataclass
class Fleet:
    """Two instances that publish events, their pool, and an index of what each has told."""

    url: str
    servers: Sequence
    indexes: Sequence[Index]

    def namespace(self) -> Namespace:
        [digest] = {value.key.split(":")[1] for value in self._values()}
        return Namespace({}, (Part(0, 0),), BLOCK, digest=bytes.fromhex(digest))

    def stored(self) -> set[str]:
        """Returns the pool's blocks, by the last part of their keys."""
        return {value.key.rsplit(":", 1)[1] for value in self._values()}

    def told(self) -> list[set[str]]:
        """Returns what each instance has told of; first it makes a step, which takes its events."""
        for server, index in zip(self.servers, self.indexes, strict=True):
            post(server, [1], 1)
            index.read()
        namespace = self.namespace() if self.stored() else Namespace({}, (Part(0, 0),), BLOCK)
        return [index.blocks(namespace) for index in self.indexes]

    def agrees(self) -> bool:
        """Returns whether the instances together have told of the pool's blocks, and no others."""
        told, stored = self.told(), self.stored()
        return set().union(*told) == stored

    def _values(self):
        with contextlib.closing(open_store(self.url, settings_of(store=self.url))) as store:
            lists = store.optional(ListsValues)
            return [v for v in lists.stored_values() if kind_of(v.key) is Kind.BLOCK]


@pytest.fixture(params=["file", "shm"])
def fleet(request, launcher, checkpoints, tmp_path) -> Iterator[Fleet]:
    url = {
        "file": f"file://{tmp_path}/pool?budget=4MiB&lease=1",
        "shm": f"shm://pool?size=4MiB&dir={tmp_path}&lease=1",
    }[request.param]
    servers, indexes = [], []
    for name in ("a", "b"):
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        indexes.append(Index(endpoint))
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint.replace("127.0.0.1", "*"),
        }
        options = (*CACHING, f"--block-size={BLOCK}", f"--kv-events-config={json.dumps(events)}")
        env = switched_on(url) | {"PDSTORE_BLOCK_TOKENS": str(BLOCK)}
        servers.append(launcher.vllm(name, checkpoints("llama"), *options, env=env))
    for server in servers:
        post(server.wait_ready(), [1], 1, timeout_s=WARM_S)
    yield Fleet(url, servers, indexes)
    for server, index in zip(servers, indexes, strict=True):
        server.stop()
        index.close()


def churn(fleet: Fleet, seconds: float) -> None:
    """Asks both instances for prompts that share beginnings; the pool has room for some."""
    deadline = time.monotonic() + seconds
    chance = random.Random(5)
    known = [new_prompt(640) for _ in range(4)]

    def run_one(server, index, seed: int) -> None:
        chance = random.Random(seed)
        num_asked = 0
        while num_asked < FEWEST or time.monotonic() < deadline:
            num_asked += 1
            beginning = chance.choice(known)[: chance.randrange(0, 640, 32)]
            ask(server, [*beginning, *new_prompt(chance.randrange(60, 400))], 4)
            index.read()

    at_once(
        [
            partial(run_one, server, index, chance.randrange(1000))
            for server, index in zip(fleet.servers, fleet.indexes, strict=True)
        ]
    )


@pytest.mark.parametrize(
    "seconds",
    [0.0, pytest.param(300.0, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])],
)
def test_an_index_of_the_events_of_two_instances_equals_the_pool(fleet, seconds):
    churn(fleet, seconds / 2)
    assert all(index.num_removed for index in fleet.indexes)  # the pool was full
    eventually(fleet.agrees, SETTLED_S)
    assert fleet.stored()
    assert (
        run("purge", "--yes", "--namespace", fleet.namespace().hex, "--store", fleet.url).status
        == 0
    )
    assert not fleet.stored()
    eventually(lambda: not any(fleet.told()), SETTLED_S)
    churn(fleet, seconds / 2)
    eventually(fleet.agrees, SETTLED_S)
    assert len(fleet.stored()) > 20
