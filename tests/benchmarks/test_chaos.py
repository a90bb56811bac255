"""The chaos campaign: a seed repeats its faults, and an answer that is wrong, lost or late is told.

Each mode of the proxy between instances does to bytes what it says; none is lost or changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.chaos.asking import Answer
from benchmarks.chaos.disk import Disk
from benchmarks.chaos.engines import MINI
from benchmarks.chaos.round import Round
from benchmarks.chaos.stacks import ArenaOverFiles
from pdstore.store.optional import HasTiers
from pdstore.store.tiers.purges import PurgeNumbers, namespace_of, purge_key
from pdstore.testing.values import contents, fresh_keys, put

DEADLINE_S = 20
PROMPT, RIGHT = list(range(40)), Answer([5, 6], [-0.5, -0.25], 39)


@contextlib.contextmanager
def serving(status: int, ids: list[int], logprobs: list[float]):
    """An instance that answers everything in one way."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            choice = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
            usage = {"pdstore": {"loaded_tokens": 39}}
            body = json.dumps({"choices": [choice], "usage": usage}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Calm:
    """An injector without faults."""

    def __init__(self):
        self.leaving = asyncio.Event()

    def may_have_cost(self, began, ended):
        return False

    async def run(self, faults):
        pass


async def nothing_died():
    return []


def failures_of(url: str) -> set[str]:
    """Runs a short round; returns the kinds of failures that it reports."""

    async def run():
        options = types.SimpleNamespace(faulty="yes", engine=MINI)
        pool = types.SimpleNamespace(leave_below=lambda: False, purge_again=lambda: None)
        stage = types.SimpleNamespace(url=url, heal=nothing_died, options=options, pool=pool)
        one = Round(stage, Calm(), [PROMPT], [RIGHT], "1", join_s=0.2)
        await one.run([], 0.05)
        assert one.outcome.right or one.outcome.failures
        return {failure.partition(":")[0] for failure in one.outcome.failures}

    return asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def left_in(pool) -> list[str]:
    return asyncio.run(asyncio.wait_for(pool.leftovers(1), DEADLINE_S))


def test_numbers_of_purges_are_not_left_over(tmp_path):
    disk = Disk(tmp_path / "disk", is_small=False)
    disk.path.mkdir()
    pool = ArenaOverFiles(None, disk, "1")
    keys = fresh_keys(3)
    with contextlib.closing(pool.open_store()) as store:
        for tier in store.optional(HasTiers).tiers:
            put(tier, keys, contents(keys, 1000))
        assert len(left_in(pool)) == 4  # a line of the arena, and one for each file
        store.clear(namespace_of(keys[0]))
        assert left_in(pool) == []


def test_a_first_tier_that_has_lost_its_purge_numbers_is_purged(tmp_path):
    disk = Disk(tmp_path / "disk", is_small=False)
    disk.path.mkdir()
    pool = ArenaOverFiles(None, disk, "1")
    [key] = fresh_keys(1)
    with contextlib.closing(pool.open_store()) as store:
        store.clear(namespace_of(key))
        first, below = store.optional(HasTiers).tiers
        first.remove([purge_key(namespace_of(key), number) for number in (1, 2)])
        put(first, [key], contents([key], 1000))
        pool.purge_again()
        numbers = [PurgeNumbers(tier).last(namespace_of(key)) for tier in (first, below)]
    assert numbers == [2, 2]
    assert left_in(pool) == []


@pytest.mark.parametrize(
    ("status", "ids", "logprobs", "kinds"),
    [
        (200, RIGHT.ids, RIGHT.logprobs, set()),
        (200, RIGHT.ids, [-0.5, -0.2501], set()),
        (200, [5, 7], RIGHT.logprobs, {"wrong"}),
        (200, [5], [-0.5], {"wrong"}),
        (200, RIGHT.ids, [-0.5, -0.27], {"wrong"}),
        (500, RIGHT.ids, RIGHT.logprobs, {"lost"}),
    ],
)
def test_a_round_reports_what_is_not_right(status, ids, logprobs, kinds):
    with serving(status, ids, logprobs) as url:
        assert failures_of(url) == kinds
