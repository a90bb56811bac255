"""Stacks: pools of two tiers, each tier with all that can happen to it."""

from __future__ import annotations

import contextlib
import random
from typing import ClassVar

from benchmarks.chaos.disk import Disk
from benchmarks.chaos.pools import POOLS, ArenaPool, FilePool, Pool, RedisPool
from benchmarks.chaos.spawner import Spawner
from pdstore.errors import StoreError
from pdstore.format.keys import Kind, kind_of
from pdstore.store.optional import HasTiers, ListsValues
from pdstore.store.tiers.purges import PurgeNumbers, purged_namespaces

_QUIET = "error_rate=0&miss_rate=0&corrupt_rate=0"
_TIER_THREADS = 8
"""Threads of one more tier: breakers and probes of both stores of an instance, and its copies."""


class SmallArena(ArenaPool):
    """An arena that holds only a part of the prompts, so that the rest is found below."""

    size = "2MiB"


class StackPool(Pool):
    """Two tiers, of which the first is where P and D meet.

    Files hang on command, and in half of the stages an arena does; then blocks pass through
    staging, and else they are copied in place.
    """

    first_tier: ClassVar[type[Pool]]
    lower_tier: ClassVar[type[Pool]]

    def __init__(self, spawner: Spawner, disk: Disk, seed: str) -> None:
        super().__init__(spawner, disk, seed)
        self._first = self.first_tier(spawner, disk, f"{seed} first")
        self._below = self.lower_tier(spawner, disk, f"{seed} below")
        self._parts = (self._first, self._below)
        arena_hangs = random.Random(f"{seed} arena").random() < 0.5
        for part in self._parts:
            self.env |= part.env
            self.memory_servers += part.memory_servers
            if isinstance(part, FilePool) or (isinstance(part, ArenaPool) and arena_hangs):
                self.hold_files[part.kind] = disk.path.with_name(f"{disk.path.name}-{part.kind}")

    @property
    def url(self) -> str:
        return " ".join(part.url for part in self._parts)

    def url_for(self, role: str) -> str:
        return " ".join(self._hanging(part, part.url_for(role)) for part in self._parts)

    def _hanging(self, part: Pool, url: str) -> str:
        """Returns the URL of a tier that hangs on command, if it can."""
        file = self.hold_files.get(part.kind)
        return url if file is None else f"faulty+{url}&{_QUIET}&hold={file}"

    @property
    def has_disk(self) -> bool:
        return any(part.has_disk for part in self._parts)

    async def open(self) -> None:
        for part in self._parts:
            await part.open()
            self.servers |= part.servers
            self.links |= part.links

    def restart(self, name: str) -> None:
        part = next(part for part in self._parts if name in part.servers)
        part.restart(name)
        self.servers[name] = part.servers[name]

    def vanish(self) -> bool:
        return any(part.vanish() for part in self._parts)

    async def order(self, name: str, command: str) -> bool:
        part = next(part for part in self._parts if name in part.memory_servers)
        return await part.order(name, command)

    def leave_below(self) -> bool:
        with contextlib.closing(self._first.open_store()) as store:
            lists = store.optional(ListsValues)
            assert lists is not None
            keys = [value.key for value in lists.stored_values()]
            store.remove([key for key in keys if kind_of(key) is Kind.BLOCK])
        return True

    def purge_again(self) -> None:
        """Purges namespaces of which the first tier has lost the number with all its values."""
        with contextlib.closing(self.open_store()) as store:
            has_tiers = store.optional(HasTiers)
            assert has_tiers is not None
            first, below = map(PurgeNumbers, has_tiers.tiers)
            for namespace in purged_namespaces(store):
                with contextlib.suppress(StoreError):  # then nothing is loaded from below
                    if first.last(namespace) < below.last(namespace):
                        store.clear(namespace)

    async def leftovers(self, num_stores: int) -> list[str]:
        return [
            f"{part.kind}: {each}"
            for part in self._parts
            for each in await part.leftovers(num_stores)
        ]


class ArenaOverFiles(StackPool):
    """Memory of one host over its disk."""

    kind = "arena-file"
    first_tier, lower_tier = SmallArena, FilePool
    late_threads = 2 * FilePool.late_threads + _TIER_THREADS
    can_vanish = True


class ArenaOverRedis(StackPool):
    """Memory of one host over a server that other hosts use."""

    kind = "arena-redis"
    first_tier, lower_tier = SmallArena, RedisPool
    late_threads = ArenaPool.late_threads + _TIER_THREADS


class RedisOverFiles(StackPool):
    """A server for several hosts over a directory that they all mount."""

    kind = "redis-file"
    first_tier, lower_tier = RedisPool, FilePool
    late_threads = FilePool.late_threads + _TIER_THREADS
    can_vanish = True


STACKS: dict[str, type[Pool]] = {
    pool.kind: pool for pool in (ArenaOverFiles, ArenaOverRedis, RedisOverFiles)
}
ALL_POOLS: dict[str, type[Pool]] = {**POOLS, **STACKS}
