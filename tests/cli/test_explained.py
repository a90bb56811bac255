"""`pdstore explain` on real pools: the run, its end, and the same prompt in another namespace."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from pdstore.cli.explained import cover_of, explain, how_gone
from pdstore.cli.listing import NamespaceUse
from pdstore.errors import ConfigError, Reason
from pdstore.format.keys import Part, PromptKeys
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import Room, StoredValue
from pdstore.telemetry.request_record import Loss, RequestRecord
from tests.cli.conftest import PROMPT
from tests.cli.test_peers import instance
from tests.support.command import namespace_of, run, run_json, save
from tests.support.kv import eventually

IDS = ",".join(map(str, PROMPT))


def test_a_prompt_that_is_there_is_status_0(filled, prompts):
    ran = run("explain", "--ids", IDS, "--store", filled)
    assert ran.status == 0
    assert ran.out.startswith("40 of 40 tokens")
    assert "→ all of it is there" in ran.out


def test_it_finds_the_block_size_and_where_the_run_ends(filled_file, prompts):
    store = open_store(filled_file, read_settings())
    keys = prompts[0]
    store.remove(keys.store_keys(keys.namespace.parts, 1, 2))
    store.close()
    name = keys.namespace.hex
    document = run_json("explain", "--ids", IDS, "--namespace", name[:6], "--store", filled_file)
    assert (document["namespace"], document["block_tokens"]) == (name, 16)
    assert (document["prompt_tokens"], document["found_tokens"]) == (40, 16)
    assert document["why"].startswith("block 1 is missing and later ones are there")
    assert [block["num_parts"] for block in document["blocks"]] == [1, 0, 1]
    assert document["other_namespaces"] == {prompts[1].namespace.hex: 40}


def test_a_prompt_of_a_tenant_is_found_with_its_salt_alone(file_url, prompts):
    keys = type(prompts[0])(prompts[0].namespace, cache_salt=b"tenant").extend(PROMPT)
    store = open_store(file_url, read_settings())
    save(store, keys)
    store.close()
    assert explain(file_url, ids=IDS).document["found_tokens"] == 0
    salted = explain(file_url, ids=IDS, cache_salt="tenant")
    assert (salted.status, salted.document["found_tokens"]) == (0, 40)


def test_an_empty_pool_and_other_tokens_are_status_1(filled_file, tmp_path):
    other = explain(filled_file, ids="7,8,9")
    assert other.status == 1
    (tmp_path / "other").mkdir()
    empty = explain(f"file://{tmp_path}/other", ids="7,8,9")
    assert empty.status == 1
    assert empty.document["why"].startswith("this pool is empty: PDSTORE_STORE or --store must be")


def test_a_peer_says_what_its_requests_lost_though_all_of_it_is_there_now(filled_file, tmp_path):
    loss = Loss(9000, 4000, Reason.LOST, 19.7, 10.0)
    whole = RequestRecord("whole", None, "decode", 1.0, 9000, 9000, 9000, 0, 0, None)
    records = [whole, replace(whole, request_id="cmpl-7", reason=Reason.LOST, loss=loss)]
    (tmp_path / "other").mkdir()
    with instance({"requests": [record.as_json() for record in records]}) as url:
        answer = explain(filled_file, ids=IDS, peers=[url])
        empty = explain(f"file://{tmp_path}/other", ids=IDS, peers=[url])
    said = f"request cmpl-7: {loss.words}"
    assert (answer.status, answer.document["losses"]) == (0, {url: [said]})
    assert answer.shown[-1] == empty.shown[-1] == f"→ {url}: {said}"


def test_a_peer_without_a_page_is_refused(filled_file):
    with pytest.raises(ConfigError, match="PDSTORE_STATUS_PORT"):
        explain(filled_file, ids=IDS, peers=["http://127.0.0.1:9"])


@pytest.mark.parametrize(
    "question",
    [
        *({}, {"prompt": "text"}, {"ids": "one"}, {"ids": "[]"}, {"ids": "1,,2"}),
        *({"ids": "1,2147483648"}, {"ids": "[[1]]"}, {"ids": "[" * 100_000}),
    ],
)
def test_what_is_no_prompt_is_refused(file_url, question):
    with pytest.raises(ConfigError, match="--ids"):
        explain(file_url, **question)


NAMESPACE = namespace_of("any", parts=(Part(0, 0), Part(0, 1)))
KEYS = PromptKeys(NAMESPACE).extend(range(70))  # four blocks of 16 and a tail of 6


def covered(*missing):
    """The cover of a prompt of which all but some (block, part) are stored, for block seconds."""
    names = KEYS.store_keys(NAMESPACE.parts)
    stored = {
        key: StoredValue(key, 1, float(i // 2))
        for i, key in enumerate(names)
        if divmod(i, 2) not in missing and (i // 2, None) not in missing
    }
    return cover_of(KEYS, stored, NamespaceUse(NAMESPACE.hex, youngest_s=7.0))


@pytest.mark.parametrize(
    ("missing", "num_tokens", "why"),
    [
        ([(2, 1)], 32, "block 2 has 1 of 2 parts"),
        ([(2, None)], 32, "block 2 is missing and later ones are there"),
        ([(4, None)], 64, "the tail of 6 tokens is missing"),
        ([(n, None) for n in (3, 4)], 48, "block 3 was never saved"),
        ([(n, None) for n in range(5)], 0, "not even the first block is there"),
    ],
)
def test_the_end_of_the_run_has_its_reason(missing, num_tokens, why):
    cover = covered(*missing)
    assert cover.num_tokens == num_tokens
    assert cover.why().startswith(why)
    assert "expired" not in cover.why(), "this store keeps no clock"


class Expiring(MemoryStore):
    """Its blocks have a time to live, and its keeper has evicted some values, or tells nothing."""

    expires_blocks = True

    def __init__(self, num_evicted):
        super().__init__()
        self.num_evicted = num_evicted

    def room(self):
        return Room("a server", 0, None, self.num_evicted, "volatile-lru")


def test_expiry_is_told_apart_from_eviction():
    assert how_gone(MemoryStore()) == "was evicted"
    never, often, unknown = (how_gone(Expiring(number)) for number in (0, 3, None))
    assert "PDSTORE_BLOCK_TTL_S" in never
    assert "was evicted" not in never
    assert "PDSTORE_BLOCK_TTL_S" in often
    assert often.endswith("or was evicted")
    assert unknown == often


@pytest.mark.redis
def test_a_block_that_expired_in_redis_is_not_called_evicted(redis_server, prompts):
    """The first block is used longest ago, so that it ends before those after it."""
    server, keys = redis_server(), prompts[0]
    with contextlib.closing(open_store(server.url, read_settings())) as store:
        save(store, keys)
    with server.client() as client:
        for name in keys.store_keys(keys.namespace.parts, 0, 1):
            client.pexpire(name, 1)
        eventually(lambda: not client.exists(name))
    document = run_json("explain", "--ids", IDS, "--store", server.url)
    assert document["found_tokens"] == 0
    assert "block 0 is missing and later ones are there: it has expired" in document["why"]
    assert "evicted nothing" in document["why"]
