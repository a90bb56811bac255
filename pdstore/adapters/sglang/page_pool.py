"""PagePool: finds, loads and saves pages by SGLang's names for them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdstore.adapters.sglang.host_pages import HostPages
from pdstore.adapters.sglang.page_wait import PageWait
from pdstore.format.keys import PromptKeys
from pdstore.format.namespace import HASH_BYTES
from pdstore.metrics import Metrics
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings
from pdstore.status.reporting import Reporting
from pdstore.store.connect import connect_store
from pdstore.worker.job import Job
from pdstore.worker.pool import KVPool

_LONGEST_S = 3600.0  # a lookup and a job end by themselves, at their own deadlines
_ROUTER_DUTY = "ask that instance for each prompt first"


class PagePool:
    """Both halves of pdstore over one store, for one rank's host pool. Any thread may call it.

    Every call blocks until its pages are there, are stored, or its deadline is over.

    status_url: the address of the page about this rank; None without PDSTORE_STATUS_PORT.
    weights: the weights' revision.
    rank: of this process among those that share one environment.
    Raises ConfigError, LayoutError or StoreError as `KVPool` does.
    """

    def __init__(
        self, settings: Settings, pages: HostPages, weights: str, metrics: Metrics, rank: int = 0
    ) -> None:
        namespace = pages.model.namespace(settings, weights=weights)
        # a rank asks for its own shard; SGLang takes the fewest pages that any of them found
        self.namespace = replace(namespace, parts=pages.copied.owned_parts)
        with contextlib.ExitStack() as undo:
            store = connect_store(settings, metrics)
            undo.callback(store.close)
            self._pool = KVPool(
                settings, pages.copied, pages.caches, self.namespace, metrics=metrics, store=store
            )
            undo.callback(self._pool.close)
            self._cache = PrefixCacheManager(
                settings, self.namespace, metrics=metrics, store=store, router_duty=_ROUTER_DUTY
            )
            undo.callback(self._cache.close)
            self._wait = PageWait(settings, store, metrics) if settings.role == "decode" else None
            if self._wait is not None:
                undo.callback(self._wait.close)
            reporting = Reporting(
                settings, self._cache, [metrics.registry], lambda: self._pool.problem, rank
            )
            undo.callback(reporting.close)
            self.status_url = reporting.url
            self._resources = undo.pop_all()

    def num_stored(self, hashes: Sequence[str]) -> int:
        """Returns how many of the first pages are stored.

        With PDSTORE_ROLE=decode it waits for those that P is still storing, as `PageWait` does, and
        counts those that are expected.
        """
        keys = self._keys(hashes)
        if self._wait is not None and hashes and self._wait.wait(keys):
            return len(keys)
        return len(self._cache.lookup(keys).wait(_LONGEST_S).keys)

    def load(self, hashes: Sequence[str], numbers: Sequence[int]) -> int:
        """Loads stored pages into the host pool; returns how many of the first are there.

        Pages that are expected are loaded as they come.
        """
        keys = self._keys(hashes)
        done = 0
        for stop in self._stored(keys):
            job = self._pool.load(self._keys(hashes[done:stop]), numbers[done:stop])
            done += self._num_pages(job)
            if done < stop:
                break
        return done

    def save(self, hashes: Sequence[str], numbers: Sequence[int]) -> int:
        """Stores pages of the host pool; returns how many of the first can be loaded now."""
        return self._num_pages(self._pool.save(self._keys(hashes), numbers))

    def clear(self) -> bool:
        """Forgets all that the store has of this namespace; False if the store errs."""
        return self._cache.clear()

    def close(self) -> None:
        """Ends running jobs and the connections. Twice is fine."""
        self._resources.close()

    def _stored(self, keys: PromptKeys) -> Iterator[int]:
        """Yields how many of the first pages can be loaded, each time that more can."""
        arrivals = self._wait.arrivals(keys) if self._wait is not None and len(keys) else None
        if arrivals is None:
            yield len(keys)
        else:
            yield from arrivals
            self._cache.lookup(keys)  # counts what came and what did not; nobody waits for it

    def _keys(self, hashes: Sequence[str]) -> PromptKeys:
        """Returns the names of pages, from SGLang's own hash of each page and all before it."""
        digest = self.namespace.digest
        names = [hashlib.sha256(digest + each.encode()).digest()[:HASH_BYTES] for each in hashes]
        return PromptKeys.named(self.namespace, names)

    def _num_pages(self, job: Job) -> int:
        return job.wait(_LONGEST_S).num_tokens // self.namespace.block_tokens
