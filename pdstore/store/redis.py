"""RedisStore: a value per block in a redis server, for tests and small clusters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.connection import PythonRespSerializer
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from pdstore.errors import (
    ConfigError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.format.keys import BlockKey, Kind, kind_of
from pdstore.format.namespace import prefix_of
from pdstore.settings import Settings
from pdstore.store.base import Lifecycle, Slots, Store, check_call
from pdstore.store.url import StoreURL

_CONNECT_S = 1.0
_TIMEOUT_S = 5.0
_CHUNK = 256 << 10  # redis answers pieces of this size faster than whole values
_READ_BATCH = 2 << 20  # what is read is copied while the processor still has it at hand
_WRITE_BATCH = 8 << 20
_FIRST_WINDOW, _LAST_WINDOW = 32, 512
_LEASE_MARGIN_S = 5.0
_SCAN_KEYS = 1024  # one command looks at, and all other clients wait for it

_ERRORS: tuple[tuple[type[RedisError], type[StoreError]], ...] = (
    (AuthenticationError, StoreDenied),  # of redis-py's, the special before the general
    (AuthorizationError, StoreDenied),
    (NoPermissionError, StoreDenied),
    (OutOfMemoryError, StoreFull),
    (redis.TimeoutError, StoreTimeout),
    (redis.ConnectionError, StoreUnavailable),
)


class RedisStore(Store):
    """`redis://[user:password@]host:port/db`, `rediss://` or `redis+unix:///socket?db=0`.

    Values expire: blocks `PDSTORE_BLOCK_TTL_S` after their last match, tails and markers after
    `PDSTORE_HANDOFF_TTL_S`, the pool's id never. A match is a lease only where the server does not
    evict (`maxmemory-policy noeviction`), which is asked at the first match. Elsewhere use a
    `volatile-` policy, so that the pool's id stays.

    The user needs GET, GETRANGE, SET, EXISTS, EXPIRE, UNLINK, PING, SCAN for `clear`, and
    CONFIG GET for leases.
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
        make = partial(
            redis.ConnectionPool,
            username=url.username,
            password=url.password,
            db=_database(url),
            socket_timeout=url.seconds("timeout", _TIMEOUT_S),
            socket_connect_timeout=_CONNECT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
            protocol=2,
            max_connections=4096,
            # hiredis, where it is installed, reads twice as fast, but copies what it sends
            command_packer=PythonRespSerializer(_CHUNK, _encode),
            **_without_client_info(),
        )
        if url.scheme == "redis+unix":
            if url.host or not url.path:
                raise ConfigError(f"{url.label}: write redis+unix:///path/redis.sock")
            pool = make(connection_class=redis.UnixDomainSocketConnection, path=url.path)
            url.finish("db, timeout")
        elif url.scheme == "rediss":
            pool = make(
                connection_class=redis.SSLConnection,
                host=url.host or "localhost",
                port=url.port or 6379,
                ssl_cert_reqs="required",
                ssl_check_hostname=True,
                ssl_ca_certs=url.options.pop("ca", None),
                ssl_certfile=url.options.pop("cert", None),
                ssl_keyfile=url.options.pop("key", None),
                redis_connect_func=_connect_and_ping,
            )
            url.finish("ca, cert, key, timeout")
        else:
            pool = make(host=url.host or "localhost", port=url.port or 6379)
            url.finish("timeout")
        return cls(url.label, pool, settings)

    @property
    def lease_s(self) -> float:
        """0 until the first match has asked the server whether it evicts."""
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
        """Also what was stored in between two of its scans, unless that is behind the cursor."""
        self._lifecycle.check()
        prefix = prefix_of(namespace)
        cursor, is_first = 0, True
        while cursor or is_first:
            cursor, found = self._scan(cursor, prefix)
            is_first = False
            if found:
                pipe = self._client.pipeline(transaction=False)
                pipe.unlink(*found)
                self._run(pipe, [BlockKey(prefix)], [0])

    def close(self) -> None:
        """Calls that are under way end by themselves, and close their connections then."""
        if self._lifecycle.end():
            self._pool.disconnect(inuse_connections=False)

    def _get_part(self, keys: Sequence[BlockKey], slots: Slots, part: range) -> int:
        """Fills some slots; returns the number of the first key that was not there."""
        pieces = [(i, at) for i in part for at in range(0, slots.sizes[i], _CHUNK)]
        pipe = self._client.pipeline(transaction=False)
        for i, at in pieces:
            is_last = at + _CHUNK >= slots.sizes[i]
            # at the value's end one byte more is asked for, so that a longer value shows
            pipe.getrange(keys[i], at, slots.sizes[i] if is_last else at + _CHUNK - 1)
        replies = iter(self._run(pipe, keys, [i for i, _ in pieces]))
        for i in part:
            piece, done = slots.value(i), 0
            for at in range(0, len(piece), _CHUNK):
                data = next(replies)
                assert isinstance(data, bytes)
                done += len(data)
                if done <= len(piece):
                    piece[at : at + len(data)] = data
            if done != len(piece) and not self._look_again(keys, i, piece, was_empty=not done):
                return i
        return part.stop

    def _scan(self, cursor: int, prefix: str) -> tuple[int, list[bytes]]:
        """Looks at some keys of the server: where to go on, 0 at the end, and those that fit."""
        pipe = self._client.pipeline(transaction=False)
        pipe.scan(cursor, match=f"{prefix}*", count=_SCAN_KEYS)
        [page] = self._run(pipe, [BlockKey(prefix)], [0])
        assert isinstance(page, tuple)
        return page

    def _look_again(
        self, keys: Sequence[BlockKey], i: int, piece: memoryview, *, was_empty: bool
    ) -> bool:
        """Reads a value in one command, since pieces may be from before and after a put or remove.

        False if it is gone. Raises WrongLength. GET knows a missing value from an empty one;
        GETRANGE reads no more of a wrong one than is needed.
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
        """The replies to commands about the keys of these numbers. Raises StoreError."""
        self._lifecycle.check(part[0])
        try:
            replies: list[object] = pipe.execute(raise_on_error=False)
        except RedisError as error:
            raise self._error(error, keys[part[0]], part[0]) from error
        finally:
            if self._lifecycle.is_closed:
                self._pool.disconnect(inuse_connections=False)
        for i, reply in zip(part, replies, strict=True):
            if isinstance(reply, RedisError):
                raise self._error(reply, keys[i], i) from reply
        return replies

    def _ask_lease_s(self) -> float | None:
        """None when the server does not answer: then the next match asks again."""
        try:
            policy = self._client.config_get("maxmemory-policy").get("maxmemory-policy")
        except ResponseError:  # hosted servers keep CONFIG for themselves
            return 0.0
        except RedisError:
            return None
        return self._lease_without_eviction_s if policy == "noeviction" else 0.0

    def _error(self, error: RedisError, key: BlockKey, num_done: int) -> StoreError:
        kinds = (ours for theirs, ours in _ERRORS if isinstance(error, theirs))
        return next(kinds, StoreError)(f"{self.label}: {error}: {key}", num_done=num_done)


def _batches(sizes: Sequence[int], most_bytes: int) -> Iterator[range]:
    """Ranges of neighbours of at most so many bytes, or of one value that is larger."""
    start, num_bytes = 0, 0
    for i, size in enumerate(sizes):
        if num_bytes and num_bytes + size > most_bytes:
            yield range(start, i)
            start, num_bytes = i, 0
        num_bytes += size
    if num_bytes:
        yield range(start, len(sizes))


def _database(url: StoreURL) -> int:
    text = url.options.pop("db", "0") if url.scheme == "redis+unix" else url.path.strip("/") or "0"
    if not text.isdecimal():
        raise ConfigError(f"{url.label}: {text!r} is no database number")
    return int(text)


def _encode(argument: str | int | bytes | memoryview) -> bytes | memoryview:
    return argument if isinstance(argument, bytes | memoryview) else str(argument).encode()


def _connect_and_ping(connection: redis.SSLConnection) -> None:
    """Reads the session tickets of TLS 1.3, which hiredis takes for a reply to nothing."""
    connection.on_connect()  # type: ignore[no-untyped-call]
    connection.send_command("PING")  # type: ignore[no-untyped-call]
    connection.read_response()


def _without_client_info() -> dict[str, None]:
    """Keeps redis-py from CLIENT SETINFO, which few users may call; releases differ in how."""
    if hasattr(redis, "DriverInfo"):
        return {"driver_info": None}
    return {"lib_name": None, "lib_version": None}
