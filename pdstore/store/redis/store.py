"""RedisStore: keeps each value in a redis server, or in a node of a redis cluster."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import redis
from redis.exceptions import ResponseError

from pdstore.errors import StoreError, WrongLength
from pdstore.format.keys import BlockKey, Kind, kind_of, prefix_of
from pdstore.settings import Settings
from pdstore.store.base import Lifecycle, Slots, Store
from pdstore.store.optional import ALL_KEYS, Room, ServerDoubt, StoredValue
from pdstore.store.redis.cluster import Command
from pdstore.store.redis.connection import (
    Servers,
    error_of,
    named_errors,
    open_servers,
    refuses_writes,
)
from pdstore.store.redis.remedies import may_be_about_size, refused_value
from pdstore.store.redis.server import server_doubts
from pdstore.store.url import Place, StoreURL

_READ_BATCH = 2 << 20  # bytes; a read's stay in the CPU's cache
_WRITE_BATCH = 8 << 20  # bytes
_FIRST_WINDOW = 32  # keys that a match asks for first; each time after that, four times as many
_LAST_WINDOW = 512  # keys; the most at a time
_LEASE_MARGIN_S = 5.0
_SMALL = 64 << 10  # bytes; no server has a limit for values that is below it
_POLICY = "maxmemory-policy"
_GLOB = re.compile(r"[][*?\\]")
_REPLIES: dict[object, type | tuple[type, ...]] = {
    **dict.fromkeys(("EXISTS", "EXPIRE", "STRLEN"), int),
    "GET": (bytes, type(None)),
}
"""The type that the reply to a command must have, by the command's name."""
_OVER_TLS = {"redis": "rediss", "valkey": "valkeys"}
_WHY_TWO = (
    ". A name of this host itself (127.0.0.1, localhost) is one, and a Service with two servers"
    " behind it, which are two pools: name one server, or a cluster (redis+cluster://)"
)
_SCAN_KEYS = 1024  # one SCAN visits so many keys while all other clients wait


class RedisStore(Store):
    """`redis://user:password@host:port/db`, `rediss://`, a socket, a cluster, a sentinel's master.

    `valkey://` means the same. A cluster spreads a prompt's values over its nodes. A call sends all
    commands for one node together.

    Values expire: blocks `PDSTORE_BLOCK_TTL_S` after their last match, tails and markers after
    `PDSTORE_HANDOFF_TTL_S`, the pool's id and purge numbers never. A match gives a lease only if
    the server does not evict (`maxmemory-policy noeviction`); the first match asks the server for
    its policy. For a server that evicts, use a `volatile-` policy, so that the pool's id and purge
    numbers stay. docs/stores.md has the commands that the redis user must be allowed.
    """

    def __init__(self, label: str, servers: Servers, settings: Settings) -> None:
        self.label = label
        self._lifecycle = Lifecycle(label)
        self._servers = servers
        self._ttl_s: Mapping[Kind, int | None] = {
            **{Kind.BLOCK: settings.block_ttl_s, Kind.POOL: None, Kind.PURGE: None},
            **dict.fromkeys((Kind.TAIL, Kind.HANDOFF), settings.handoff_ttl_s),
        }
        shortest = min(settings.block_ttl_s, settings.handoff_ttl_s)
        self._lease_without_eviction_s = max(0.0, shortest - _LEASE_MARGIN_S)
        self._lease_s: float | None = None

    @classmethod
    def open(cls, url: StoreURL, settings: Settings) -> RedisStore:
        return cls(url.label, open_servers(url), settings)

    @classmethod
    def check(cls, url: StoreURL, settings: Settings) -> None:
        open_servers(url)  # without connecting

    @classmethod
    def place(cls, url: StoreURL, settings: Settings) -> Place:
        return Place(encrypted_scheme=_encrypted(url), why_two=_WHY_TWO)

    @property
    def lease_s(self) -> float:
        """Seconds of a lease; 0 until the first match has asked the server whether it evicts."""
        return self._lease_s or 0.0

    @property
    def expires_blocks(self) -> bool:
        return True

    def match(self, keys: Sequence[BlockKey]) -> int:
        self._lifecycle.enter(keys)
        n = 0
        window = _FIRST_WINDOW
        while n < len(keys):
            part = keys[n : n + window]
            found = self._num_renewed(part, n)
            n += found
            if found < len(part):
                break
            window = min(4 * window, _LAST_WINDOW)
        if n and self._lease_s is None:
            self._lease_s = self._ask_lease_s()
        return n

    def _num_renewed(self, keys: Sequence[BlockKey], num_done: int) -> int:
        """Returns how many leading keys are stored, and renews their time to live.

        A server that takes no writes now can still be read: then nothing is renewed.
        """
        renewals: list[Command] = [
            ("EXISTS", key) if ttl_s is None else ("EXPIRE", key, ttl_s)
            for key, ttl_s in ((key, self._ttl_s[kind_of(key)]) for key in keys)
        ]
        try:
            return _num_found(self._replies(renewals, num_done))
        except StoreError as error:
            if not refuses_writes(error.__cause__):
                raise
        return _num_found(self._replies([("EXISTS", key) for key in keys], num_done))

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Searches for all keys in one round trip; renews no lease."""
        self._lifecycle.enter(keys)
        return [reply == 1 for reply in self._replies([("EXISTS", key) for key in keys])]

    def which_removed(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [not is_there for is_there in self.which_stored(keys)]

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.enter(keys, slots)
        for part in _batches(slots.sizes, _READ_BATCH):
            commands: list[Command] = [("GET", keys[i]) for i in part]
            replies = self._moved(commands, slots.sizes, part.start)
            for i, data in enumerate(replies, part.start):
                if data is None:
                    return i
                size = slots.sizes[i]
                if len(data) != size:
                    raise WrongLength(f"{self.label}: {keys[i]} has not {size} bytes", num_done=i)
                slots.value(i)[:] = data
        return len(keys)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.enter(keys, slots)
        for part in _batches(slots.sizes, _WRITE_BATCH):
            commands: list[Command] = []
            for i in part:
                ttl_s = self._ttl_s[kind_of(keys[i])]
                life = () if ttl_s is None else ("EX", ttl_s)
                commands.append(("SET", keys[i], slots.value(i), *life, "NX"))
            list(self._moved(commands, slots.sizes, part.start))
        return len(keys)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._lifecycle.enter(keys)
        list(self._replies([("UNLINK", key) for key in keys]))

    def clear(self, namespace: str) -> None:
        """Forgets a namespace. A value put during the scan stays if the scan does not meet it."""
        for page in self._pages(prefix_of(namespace)):
            list(self._replies([("UNLINK", key) for key in page]))

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        """Lists values and their memory; not their lengths: STRLEN would count as a use of them."""
        seen: set[BlockKey] = set()
        for page in self._pages(prefix):
            new = [key for key in page if key not in seen]
            seen.update(new)
            sizes = self._replies([("MEMORY USAGE", key, "SAMPLES", 0) for key in new])
            ages_s = self._ask([("OBJECT IDLETIME", key) for key in new]) if new else []
            for key, size, age_s in zip(new, sizes, ages_s, strict=True):
                if isinstance(size, int):  # else the value is gone
                    # under an LFU policy the reply to OBJECT IDLETIME is an error
                    yield StoredValue(key, size, float(age_s) if isinstance(age_s, int) else None)

    def length_of(self, key: BlockKey) -> int | None:
        self._lifecycle.enter([key])
        [length] = self._replies([("STRLEN", key)])
        return length or None  # no value is empty

    def room(self) -> Room:
        """Adds up the room of all servers; the capacity is None unless each server has a limit."""
        self._lifecycle.check()
        with named_errors(self.label, "INFO"):
            infos = [client.info() for client in self._servers.masters()]
            sizes = [info.get("maxmemory") or 0 for info in infos]
            return Room(
                f"redis {infos[0].get('redis_version', '?')}",
                sum(info.get("used_memory", 0) for info in infos),
                sum(sizes) if all(sizes) else None,
                sum(info.get("evicted_keys", 0) for info in infos),
                ", ".join(dict.fromkeys(info.get("maxmemory_policy", "") for info in infos)),
                min(i.get("maxclients", 10_000) - i.get("connected_clients", 0) for i in infos),
            )

    def server_doubts(self) -> Iterator[ServerDoubt]:
        self._lifecycle.check()
        with named_errors(self.label, "INFO"):
            yield from server_doubts(self._servers.masters())

    def close(self) -> None:
        """Closes idle connections; running calls close their connections when they end."""
        if self._lifecycle.end():
            self._servers.disconnect()

    def _pages(self, prefix: str) -> Iterator[list[BlockKey]]:
        """Yields lists of the keys with a prefix; two lists may contain the same key."""
        self._lifecycle.check()
        pattern = _GLOB.sub(r"\\\g<0>", prefix) + "*"
        with named_errors(self.label, prefix):
            masters = self._servers.masters()
        for client in masters:
            cursor: int | None = None
            while cursor != 0:
                self._lifecycle.check()
                with named_errors(self.label, prefix):
                    cursor, found = client.scan(cursor or 0, match=pattern, count=_SCAN_KEYS)
                    names = [name for name in dict.fromkeys(found) if isinstance(name, bytes)]
                if names:
                    yield [BlockKey(name.decode("ascii", "replace")) for name in names]

    def _replies(self, commands: Sequence[Command], num_done: int = 0) -> Iterator[Any]:
        """Sends commands, one for each key; yields their replies. num_done: the first key's number.

        Raises the StoreError of a failed command when the caller asks for that command's reply. So
        a caller that stops at a missing key gets no error of a later key.
        """
        if not commands:
            return
        kind = _REPLIES.get(commands[0][0], object)  # all commands of one call have the same name
        for i, reply in enumerate(self._ask(commands, num_done)):
            cause = reply if isinstance(reply, Exception) else None
            if cause is not None or not isinstance(reply, kind):
                raise error_of(self.label, reply, commands[i][1], num_done + i) from cause
            yield reply

    def _moved(
        self, commands: Sequence[Command], sizes: Sequence[int], num_done: int
    ) -> Iterator[Any]:
        """Yields replies as `_replies` does, to commands that move large values.

        A server or a proxy ends the connection at a value that is longer than it allows. So if the
        connection ends, each value that is left is moved alone.

        sizes: the bytes of each value of the call; the first `num_done` values are moved already.
        """
        at = num_done
        try:
            for at, reply in enumerate(self._replies(commands, num_done), num_done):
                yield reply
                at += 1
        except StoreError as error:
            if max(sizes) < _SMALL or not may_be_about_size(error.__cause__):
                raise
            cut = error
        else:
            return
        for i in range(at, num_done + len(commands)):
            yield self._moved_alone(commands[i - num_done], sizes[i], i, cut)

    def _moved_alone(
        self, command: Command, num_bytes: int, number: int, cut: StoreError
    ) -> object:
        """Returns the reply to a command whose connection has ended before, maybe by its value.

        Raises ValueRefused if it ends again, and the server works before and after that; `cut` if
        the server does not answer now.
        """
        if not self._answers(command):
            raise cut
        try:
            return next(self._replies([command], number))
        except StoreError as error:
            is_of_value = num_bytes >= _SMALL and may_be_about_size(error.__cause__)
            if not (is_of_value and self._answers(command)):
                raise
            raise refused_value(self.label, command[1], num_bytes, number) from error

    def _answers(self, command: Command) -> bool:
        """Returns whether the server that a command goes to answers now."""
        with contextlib.suppress(StoreError):
            return isinstance(self._ask([("EXISTS", command[1])])[0], int)
        return False

    def _ask(self, commands: Sequence[Command], num_done: int = 0) -> list[object]:
        """Returns the servers' replies, some may be errors. Raises StoreError if none came."""
        self._lifecycle.check(num_done)
        try:
            with named_errors(self.label, commands[0][1], num_done):
                return self._servers.ask(commands)
        finally:
            if self._lifecycle.is_closed:
                self._servers.disconnect()

    def _ask_lease_s(self) -> float | None:
        """Returns the seconds of the lease that a match gives; None if a server does not answer.

        Hosted servers often refuse CONFIG; INFO tells the policy as well. If a server refuses both,
        it may evict.
        """
        try:
            with named_errors(self.label, "the server's policy"):
                policies = {_policy_of(client) for client in self._servers.masters()}
        except StoreError as error:
            return 0.0 if isinstance(error.__cause__, ResponseError) else None
        return self._lease_without_eviction_s if policies == {"noeviction"} else 0.0


def _encrypted(url: StoreURL) -> str | None:
    """Returns the scheme to write if this one goes to another host without encryption, or None."""
    name, _, kind = url.scheme.partition("+")
    host = url.host or "localhost"
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    if name not in _OVER_TLS or kind == "unix" or is_local:
        return None
    return url.scheme.replace(name, _OVER_TLS[name], 1) + "://"


def _policy_of(client: redis.Redis) -> object:
    """Returns the maxmemory-policy of a server. Raises redis-py's errors."""
    try:
        return client.config_get(_POLICY).get(_POLICY)
    except ResponseError:
        return client.info("memory").get("maxmemory_policy")


def _num_found(replies: Iterable[object]) -> int:
    """Returns after how many replies the first one says that its key is not stored."""
    return sum(1 for _ in itertools.takewhile(bool, replies))


def _batches(sizes: Sequence[int], most_bytes: int) -> Iterator[range]:
    """Yields ranges of values of at most `most_bytes`; a larger value has its own range."""
    start = 0
    num_bytes = 0
    for i, size in enumerate(sizes):
        if num_bytes and num_bytes + size > most_bytes:
            yield range(start, i)
            start = i
            num_bytes = 0
        num_bytes += size
    if num_bytes:
        yield range(start, len(sizes))
