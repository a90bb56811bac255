"""PageWait: waits as long as pages appear, and no longer than its bounds."""

from __future__ import annotations

import contextlib
import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from pdstore.adapters.sglang.page_wait import PageWait
from pdstore.errors import StoreError
from pdstore.format.keys import Namespace, Part, PromptKeys
from pdstore.metrics import Metrics
from pdstore.store.connect import connect_store
from pdstore.store.optional import tiers_of
from pdstore.testing.values import put
from tests.support.clock import Clock
from tests.support.kv import eventually, settings_of
from tests.support.scripted_store import Scripted

NAMESPACE = Namespace({"n": 1}, (Part(0, 0),), block_tokens=64, num_shards=1)
KEYS = PromptKeys(NAMESPACE).extend(range(4 * 64))
OTHERS = PromptKeys(NAMESPACE).extend(range(1, 4 * 64 + 1))
NAMES = KEYS.store_keys(NAMESPACE.parts)
LONG_S = 30.0


class D:
    """A decode instance's wait over a store that this process puts pages into."""

    def __init__(self, store_url, *, page_timeout_s=LONG_S, total_s=LONG_S, **bounds) -> None:
        self.metrics = Metrics()
        settings = settings_of(store=store_url, handoff_wait_s=total_s)
        self.store = connect_store(settings, self.metrics)
        self.wait = PageWait(
            settings, self.store, self.metrics, page_timeout_s=page_timeout_s, **bounds
        )

    def store_pages(self, *numbers: int) -> None:
        put(self.store, [NAMES[n] for n in numbers], [b"page"] * len(numbers))

    def begin(self, threads: ThreadPoolExecutor, *, is_whole: bool = False) -> Future[bool]:
        """Waits on a thread; returns when the store has been looked at."""
        before = self.num_looks()
        waiting = threads.submit(self.wait.wait_for_pages, KEYS, is_whole=is_whole)
        eventually(lambda: self.num_looks() > before)
        return waiting

    def num_looks(self) -> float:
        labels = {"verb": "match", "outcome": "ok"}
        return self.metrics.registry.get_sample_value("pdstore_store_calls_total", labels) or 0.0

    def num_waits(self) -> float | None:
        name = "pdstore_handoff_wait_seconds_count"
        return self.metrics.registry.get_sample_value(name)

    def close(self) -> None:
        self.wait.close()
        self.store.close()


@pytest.fixture
def serve(tmp_path, closed_after):
    def serve(store_url=f"file://{tmp_path}/pool", **options) -> D:
        return closed_after(D(store_url, **options))

    return serve


def test_it_ends_with_the_first_page_that_comes_and_the_rest_is_followed(serve):
    d = serve()
    with ThreadPoolExecutor() as threads:
        waiting = d.begin(threads)
        d.store_pages(0)
        assert waiting.result(LONG_S / 2)
        page_counts = d.wait.page_counts(KEYS)
        assert next(page_counts) == 1
        for number in (1, 2, 3):
            coming = threads.submit(next, page_counts)
            d.store_pages(number)
            assert coming.result(LONG_S / 2) == number + 1
    assert next(page_counts, None) is None


@pytest.mark.parametrize(("is_whole", "followed"), [(True, [1, 2]), (False, [])])
def test_later_batches_of_a_whole_prompt_are_expected_as_well(serve, is_whole, followed):
    d = serve(batch_pages=2)
    second = PromptKeys.named(NAMESPACE, KEYS.hashes(2))
    with ThreadPoolExecutor() as threads:
        waiting = d.begin(threads, is_whole=is_whole)
        d.store_pages(0)
        assert waiting.result(LONG_S / 2)
    d.store_pages(2)
    counts = d.wait.page_counts(second) or iter(())
    assert list(itertools.islice(counts, 1)) == followed[:1]
    d.store_pages(1, 3)
    assert list(counts) == followed[1:]


@pytest.mark.parametrize("bounds", [{"page_timeout_s": 0.05}, {"total_s": 0.05}])
def test_pages_that_do_not_come_are_given_up_and_not_expected(serve, bounds):
    d = serve(**bounds)
    d.store_pages(0, 1)
    began = time.monotonic()
    assert not d.wait.wait_for_pages(KEYS)
    assert time.monotonic() - began < LONG_S / 2
    assert d.num_waits() == 1
    assert d.wait.page_counts(KEYS) is None


@pytest.mark.parametrize(
    ("script", "step", "load_s", "followed"),
    [
        ((0, 1, 1, 2, 2, 3, 3, 4), 1.0, 0.0, [1, 2, 3, 4]),
        ((1, *[2] * 100), 1.0, 0.0, [1, 2]),
        ((1, StoreError("away"), 4), 1.0, 0.0, [1]),
        ((1, 2, 4), 0.0, 16.0, [1, 2, 4]),
    ],
    ids=["each page gives the next its time", "a timeout ends", "an error ends", "loads count not"],
)
def test_a_load_follows_as_long_as_pages_come(script, step, load_s, followed):
    clock, settings = Clock(step=step), settings_of(handoff_wait_s=1000)
    wait = PageWait(settings, Scripted(0, 1, *script), Metrics(), page_timeout_s=8.0, clock=clock)
    with contextlib.closing(wait):
        assert wait.wait_for_pages(KEYS)
        found = []
        for number in wait.page_counts(KEYS):
            found.append(number)
            clock.now += load_s
    assert found == followed


@pytest.fixture
def tiers(tmp_path, closed_after):
    """D over two tiers, and the stores of these."""
    d = closed_after(D(f"memory://{tmp_path.name} file://{tmp_path}/below"))
    return d, *tiers_of(d.store)


def test_pages_that_come_are_looked_for_in_the_first_tier_alone(tiers):
    d, first, _ = tiers

    def num_looks_below():
        looks = ("match", "which_stored")
        name = "pdstore_tier_calls_total"
        each = ({"tier": "1 file", "verb": verb, "outcome": "ok"} for verb in looks)
        return sum(d.metrics.registry.get_sample_value(name, labels) or 0 for labels in each)

    with ThreadPoolExecutor() as threads:
        waiting = d.begin(threads)
        num_looks = d.num_looks()
        eventually(lambda: d.num_looks() > num_looks + 3)
        before, num_looks = num_looks_below(), d.num_looks()
        eventually(lambda: d.num_looks() > num_looks + 10)
        assert num_looks_below() == before > 0
        put(first, NAMES[:1], [b"page"])
        assert waiting.result(LONG_S)


def test_pages_below_count_while_others_come(tiers):
    d, first, below = tiers
    put(below, NAMES[:2], [b"page"] * 2)
    with ThreadPoolExecutor() as threads:
        waiting = d.begin(threads)
        put(first, NAMES[2:3], [b"page"])
        assert waiting.result(LONG_S)
    counts = d.wait.page_counts(KEYS)
    assert counts is not None
    assert next(counts) == 3
