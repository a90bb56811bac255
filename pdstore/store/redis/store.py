"""RedisStore: a value per block in a redis server, for tests and small clusters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import redis
from redis.client import Pipeline
from redis.exceptions import RedisError, ResponseError

from pdstore.errors import WrongLength
from pdstore.format.keys import BlockKey, Kind, kind_of
from pdstore.format.namespace import prefix_of
from pdstore.settings import Settings
from pdstore.store.base import Lifecycle, Slots, Store, check_call
from pdstore.store.optional import ALL_KEYS, Room, StoredValue
from pdstore.store.redis.connection import CHUNK, connection_pool, error_of
from pdstore.store.url import StoreURL

_READ_BATCH = 2 << 20  # what is read is copied while the processor still has it at hand
_WRITE_BATCH = 8 << 20
_FIRST_WINDOW, _LAST_WINDOW = 32, 512
_LEASE_MARGIN_S = 5.0
_GLOB = re.compile(r"[][*?\\]")
_SCAN_KEYS = 1024  # one command looks at, and all other clients wait for it


class RedisStore(Store):
    """`redis://[user:password@]host:port/db`, `rediss://` or `redis+unix:///socket?db=0`.

    Values expire: blocks `PDSTORE_BLOCK_TTL_S` after their last match, tails and markers after
    `PDSTORE_HANDOFF_TTL_S`, the pool's id never. A match is a lease only where the server does not
    evict (`maxmemory-policy noeviction`), which is asked at the first match. Elsewhere use a
    `volatile-` policy, so that the pool's id stays.

    The user needs GET, GETRANGE, SET, EXISTS, EXPIRE, UNLINK, PING, SCAN for `clear`, CONFIG GET
    for leases, and to look around MEMORY USAGE, OBJECT IDLETIME, STRLEN
    and INFO.
    """

    def __init__(self, label: str, pool: redis.ConnectionPool, settings: Settings) -> None:
        self.label = label
        self._lifecycle = Lifecycle(label)
        self._pool = pool
        self._client = redis.Redis(connection_pool=pool)
        self._ttl_s: Mapping[Kind, int | None] = {
            Kind.BLOCK: settings.block_ttl_s,
            Kind.TAIL: settings.handoff_ttl_s,
            Kind.HANDOFF: settings.handoff_ttl_s,
            Kind.POOL: None,
        }
        shortest = min(settings.block_ttl_s, settings.handoff_ttl_s)
        self._lease_without_eviction_s = max(0.0, shortest - _LEASE_MARGIN_S)
        self._lease_s: float | None = None

    @classmethod
    def open(cls, url: StoreURL, settings: Settings) -> RedisStore:
        return cls(url.label, connection_pool(url), settings)

    @property
    def lease_s(self) -> float:
        """Seconds of a lease; 0 until the first match has asked the server whether it evicts."""
        return self._lease_s or 0.0

    def match(self, keys: Sequence[BlockKey]) -> int:
        self._lifecycle.check()
        check_call(keys)
        n, window = 0, _FIRST_WINDOW
        while n < len(keys):
            part = range(n, min(n + window, len(keys)))
            pipe = self._client.pipeline(transaction=False)
            for i in part:
                ttl_s = self._ttl_s[kind_of(keys[i])]
                if ttl_s is None:
                    pipe.exists(keys[i])
                else:
                    pipe.expire(keys[i], ttl_s)  # says whether it is there, and renews it
            replies = self._run(pipe, keys, part)
            found = next((i for i, reply in enumerate(replies) if not reply), len(part))
            n += found
            if found < len(part):
                break
            window = min(4 * window, _LAST_WINDOW)
        if n and self._lease_s is None:
            self._lease_s = self._ask_lease_s()
        return n

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Asks for all keys by one command, and again for each only if some are stored."""
        self._lifecycle.check()
        check_call(keys)
        if not keys:
            return []
        pipe = self._client.pipeline(transaction=False)
        pipe.exists(*keys)
        if self._run(pipe, keys, [0]) == [0]:
            return [False] * len(keys)
        for key in keys:
            pipe.exists(key)
        return [reply == 1 for reply in self._run(pipe, keys, range(len(keys)))]

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.check()
        check_call(keys, slots)
        for part in _batches(slots.sizes, _READ_BATCH):
            n = self._get_part(keys, slots, part)
            if n < part.stop:
                return n
        return len(keys)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.check()
        check_call(keys, slots)
        for part in _batches(slots.sizes, _WRITE_BATCH):
            pipe = self._client.pipeline(transaction=False)
            for i in part:
                pipe.set(keys[i], slots.value(i), nx=True, ex=self._ttl_s[kind_of(keys[i])])
            self._run(pipe, keys, part)
        return len(keys)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._lifecycle.check()
        check_call(keys)
        if keys:
            pipe = self._client.pipeline(transaction=False)
            pipe.unlink(*keys)
            self._run(pipe, keys, range(1))

    def clear(self, namespace: str) -> None:
        """Forgets a namespace. Values that are stored meanwhile go if the scan still meets them."""
        self._lifecycle.check()
        prefix = prefix_of(namespace)
        for found in self._pages(prefix):
            pipe = self._client.pipeline(transaction=False)
            pipe.unlink(*found)
            self._run(pipe, [BlockKey(prefix)], [0])

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        """Lists values with the memory they take: asking for their length would count as a use."""
        self._lifecycle.check()
        seen: set[bytes] = set()
        for page in self._pages(prefix):
            new = [name for name in dict.fromkeys(page) if name not in seen]
            seen.update(new)
            pipe = self._client.pipeline(transaction=False)
            for name in new:
                pipe.memory_usage(name, samples=0)
                pipe.object("idletime", name)
            replies = iter(self._execute(pipe, BlockKey(prefix)))
            for name, size, idle_s in zip(new, replies, replies, strict=True):
                key = BlockKey(name.decode("ascii", "replace"))
                if isinstance(size, RedisError):
                    raise error_of(self.label, size, key, 0) from size
                if isinstance(size, int):  # else it is gone
                    # under an LFU policy there is no idle time, but an error
                    yield StoredValue(key, size, float(idle_s) if isinstance(idle_s, int) else None)

    def length_of(self, key: BlockKey) -> int | None:
        check_call([key])
        pipe = self._client.pipeline(transaction=False)
        pipe.strlen(key)
        [length] = self._run(pipe, [key], [0])
        return length if isinstance(length, int) and length else None  # no value is empty

    def room(self) -> Room:
        pipe = self._client.pipeline(transaction=False)
        for section in ("server", "memory", "stats"):
            pipe.info(section)
        server, memory, stats = self._run(pipe, [BlockKey("INFO")], [0] * 3)
        assert isinstance(server, dict)
        assert isinstance(memory, dict)
        assert isinstance(stats, dict)
        return Room(
            f"redis {server.get('redis_version', '?')}",
            memory.get("used_memory"),
            memory.get("maxmemory") or None,
            stats.get("evicted_keys"),
            memory.get("maxmemory_policy", ""),
        )

    def close(self) -> None:
        """Closes idle connections; calls that are under way close theirs when they end."""
        if self._lifecycle.end():
            self._pool.disconnect(inuse_connections=False)

    def _get_part(self, keys: Sequence[BlockKey], slots: Slots, part: range) -> int:
        """Fills some slots; returns the number of the first key that was not there."""
        pieces = [(i, at) for i in part for at in range(0, slots.sizes[i], CHUNK)]
        pipe = self._client.pipeline(transaction=False)
        for i, at in pieces:
            is_last = at + CHUNK >= slots.sizes[i]
            # at the value's end one byte more is asked for, so that a longer value shows
            pipe.getrange(keys[i], at, slots.sizes[i] if is_last else at + CHUNK - 1)
        replies = iter(self._run(pipe, keys, [i for i, _ in pieces]))
        for i in part:
            piece, done = slots.value(i), 0
            for at in range(0, len(piece), CHUNK):
                data = next(replies)
                assert isinstance(data, bytes)
                done += len(data)
                if done <= len(piece):
                    piece[at : at + len(data)] = data
            if done != len(piece) and not self._look_again(keys, i, piece, was_empty=not done):
                return i
        return part.stop

    def _pages(self, prefix: str) -> Iterator[list[bytes]]:
        """Yields the keys that begin with a prefix, some at a time, one perhaps twice."""
        cursor, is_first = 0, True
        while cursor or is_first:
            cursor, found = self._scan(cursor, prefix)
            is_first = False
            if found:
                yield found

    def _scan(self, cursor: int, prefix: str) -> tuple[int, list[bytes]]:
        """Looks at some keys. Returns the next cursor, 0 at the end, and the keys that fit."""
        pipe = self._client.pipeline(transaction=False)
        pipe.scan(cursor, match=_GLOB.sub(r"\\\g<0>", prefix) + "*", count=_SCAN_KEYS)
        [page] = self._run(pipe, [BlockKey(prefix)], [0])
        assert isinstance(page, tuple)
        return page

    def _look_again(
        self, keys: Sequence[BlockKey], i: int, piece: memoryview, *, was_empty: bool
    ) -> bool:
        """Reads a value whose pieces did not fit in one command; False if it is gone.

        The pieces may be from before and after a put or remove. GET tells a missing value from an
        empty one; GETRANGE reads no more of a wrong one than is needed. Raises WrongLength.
        """
        pipe = self._client.pipeline(transaction=False)
        if was_empty:
            pipe.get(keys[i])
        else:
            pipe.getrange(keys[i], 0, len(piece))
        [data] = self._run(pipe, keys, [i])
        if data is None or (not data and not was_empty):
            return False
        assert isinstance(data, bytes)
        if len(data) != len(piece):
            raise WrongLength(f"{self.label}: {keys[i]} has not {len(piece)} bytes", num_done=i)
        piece[:] = data
        return True

    def _run(self, pipe: Pipeline, keys: Sequence[BlockKey], part: Sequence[int]) -> list[object]:
        """Returns the replies to commands; the i-th is about `keys[part[i]]`. Raises StoreError."""
        replies = self._execute(pipe, keys[part[0]], part[0])
        for i, reply in zip(part, replies, strict=True):
            if isinstance(reply, RedisError):
                raise error_of(self.label, reply, keys[i], i) from reply
        return replies

    def _execute(self, pipe: Pipeline, key: BlockKey, num_done: int = 0) -> list[object]:
        """Returns the replies to commands, errors among them. Raises StoreError for no replies."""
        self._lifecycle.check(num_done)
        try:
            replies: list[object] = pipe.execute(raise_on_error=False)
        except RedisError as error:
            raise error_of(self.label, error, key, num_done) from error
        finally:
            if self._lifecycle.is_closed:
                self._pool.disconnect(inuse_connections=False)
        return replies

    def _ask_lease_s(self) -> float | None:
        """Returns the lease that a match gives; None if the server does not answer now."""
        try:
            policy = self._client.config_get("maxmemory-policy").get("maxmemory-policy")
        except ResponseError:  # hosted servers keep CONFIG for themselves
            return 0.0
        except RedisError:
            return None
        return self._lease_without_eviction_s if policy == "noeviction" else 0.0


def _batches(sizes: Sequence[int], most_bytes: int) -> Iterator[range]:
    """Yields ranges of neighbours of at most `most_bytes`, or of one value that is larger."""
    start, num_bytes = 0, 0
    for i, size in enumerate(sizes):
        if num_bytes and num_bytes + size > most_bytes:
            yield range(start, i)
            start, num_bytes = i, 0
        num_bytes += size
    if num_bytes:
        yield range(start, len(sizes))
